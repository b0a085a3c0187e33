"""Records the rollouts of a GRPO run of the demo's tiny model, as a trace for other benchmarks.

    python -m benchmarks.record_training --output benchmarks/data/tiny-grpo.jsonl.gz

The run is that of ``examples/minimal_grpo.py``, but on all tasks that the tiny model was trained for, so that lengths
vary, and with all problems in every training step. Every few steps, its rollouts are recorded, with the log-probability
of each token at temperature 1. The checkpoints that sampled them are kept in ``--checkpoints``.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.serving import run_job
from rollout_api import Rollout, RolloutClient, Sampling
from rollout_worker.runtime.model_cache import default_cache
from rollout_worker.tiny_model import ensure
from scripts.tiny_model.tasks import TASKS

ROOT = Path(__file__).parents[1]
MODEL = "das/tiny-qwen3/step-0270"
JOB = "record-training"


def load_grpo() -> ModuleType:
    """Return ``examples/minimal_grpo.py`` as a module."""
    spec = importlib.util.spec_from_file_location("minimal_grpo", ROOT / "examples/minimal_grpo.py")
    if spec is None or spec.loader is None:
        raise ImportError("examples/minimal_grpo.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules["minimal_grpo"] = module
    spec.loader.exec_module(module)
    return module


class MixedProblems:
    """Problems of all tasks of the tiny model: prompts as token ids, and the reward of a response."""

    def __init__(self, grpo: ModuleType, tokenizer: Any, count: int) -> None:
        shares = [count // len(TASKS) + (number < count % len(TASKS)) for number in range(len(TASKS))]
        parts = [
            grpo.Problems(tokenizer, task.name, task.config, share, seed=0)
            for task, share in zip(TASKS, shares, strict=True)
        ]
        self._problems = [(part, index) for part, share in zip(parts, shares, strict=True) for index in range(share)]
        self.prompts: list[list[int]] = [part.prompts[index] for part, index in self._problems]

    def reward(self, problem: int, token_ids: Sequence[int]) -> float:
        """Return 1 for a correct answer, else 0."""
        part, index = self._problems[problem]
        return float(part.reward(index, token_ids))


def manifest(weights: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the RolloutJob of the run."""
    return {
        "apiVersion": "das.rollout.dev/v1beta1",
        "kind": "RolloutJob",
        "metadata": {"name": JOB},
        "spec": {
            "source": {"trainer": {}},
            "model": {"uri": MODEL},
            "weights": {"allowedRoots": [str(weights)]},
            "engine": {"maxModelLen": 1024, "dtype": "float32", "maxNumSeqs": 64, "kvCacheMemory": "1Gi"},
            "sampling": {
                "rolloutsPerPrompt": options.group,
                "temperature": 1.0,
                "maxTokens": options.max_tokens,
                "logprobs": True,
            },
            "workers": {"replicas": 2, "gpusPerWorker": 0},
        },
    }


def encoded(values: Any, dtype: str) -> str:
    """Return an array as base64 of little-endian numbers."""
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def trace_lines(
    version: int,
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Rollout]],
    rewards: Sequence[Sequence[float]],
) -> Iterator[str]:
    """Yield the recorded rollouts of a training step as JSON."""
    for problem, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for sample, rollout in enumerate(group):
            yield json.dumps(
                {
                    "problem_id": f"p{problem:02d}",
                    "sample_index": sample,
                    "epoch_or_checkpoint": f"version_{version}",
                    "prompt_tokens": encoded(prompt, "<u2"),
                    "tokens": encoded(rollout.token_ids, "<u2"),
                    "logprobs": encoded(rollout.logprobs, "<f2"),
                    "score": rewards[problem][sample],
                }
            )


def record(client: RolloutClient, grpo: ModuleType, weights: Path, options: argparse.Namespace) -> None:
    """Train, and write the rollouts of every few training steps."""
    from transformers import AutoTokenizer

    torch.manual_seed(options.seed)
    model = default_cache() / MODEL
    problems = MixedProblems(grpo, AutoTokenizer.from_pretrained(model), options.problems)
    policy = grpo.Policy(model, weights, options.learning_rate)
    sampling = Sampling(n=options.group, temperature=1.0, max_tokens=options.max_tokens, logprobs=True)
    lines: list[str] = []
    for step in range(options.steps):
        version = step + 1
        directory = policy.save(version)
        client.publish_weights(version, directory)
        groups = client.generate(problems.prompts, step=step, sampling=sampling, weight_version=version)
        rewards = [
            [problems.reward(problem, rollout.token_ids) for rollout in group] for problem, group in enumerate(groups)
        ]
        rollouts = [rollout for group in groups for rollout in group]
        if step % options.interval == 0:
            lines += trace_lines(version, problems.prompts, groups, rewards)
            shutil.copytree(directory, options.checkpoints / f"version_{version}", dirs_exist_ok=True)
        repeated = [prompt for prompt, group in zip(problems.prompts, groups, strict=True) for _ in group]
        policy.update(repeated, rollouts, [one for group in rewards for one in grpo.advantages_of(group)])
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        mean_reward = sum(map(sum, rewards)) / len(rollouts)
        print(f"step {step}: reward {mean_reward:.3f}, {tokens / len(rollouts):.0f} tokens", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(options.output, "wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
    client.close_job()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="file for the trace, gzipped JSON lines")
    parser.add_argument("--checkpoints", type=Path, default=Path(".rollout/record_training"), help="[%(default)s]")
    parser.add_argument("--steps", type=int, default=29, help="training steps [%(default)s]")
    parser.add_argument("--interval", type=int, default=4, help="record every so many steps [%(default)s]")
    parser.add_argument("--problems", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--group", type=int, default=16, help="rollouts of each problem [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=640, help="[%(default)s]")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    options = parser.parse_args()
    ensure(default_cache() / "das" / "tiny-qwen3")
    grpo = load_grpo()
    work = options.checkpoints / "job"
    weights = (work / "weights").resolve()
    with run_job(manifest(weights, options), work) as url, RolloutClient.connect(url, JOB, name="recorder") as client:
        record(client, grpo, weights, options)


if __name__ == "__main__":
    main()
