"""GRPO in one file, with rollouts from a das-rollout job. Start your own training loop from this one.

    rollout tiny-model
    rollout run -f examples/minimal_grpo.yaml --redis URL
    python examples/minimal_grpo.py --redis URL

A training step publishes the policy's weights, requests a group of responses for each problem of a batch, computes
their rewards, and takes one AdamW step on the clipped GRPO loss (Shao et al. 2024, arXiv 2402.03300) with token-level
averaging (DAPO, arXiv 2503.14476). The job returns the behavior log-probability of each token, which is the denominator
of the importance ratio. The trainer therefore does not compute it again, and a difference between engine and trainer
becomes visible.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import reasoning_gym
import torch
from reasoning_gym.utils import extract_answer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rollout_api import Rollout, RolloutClient, Sampling, step_metrics

CACHE = Path(os.environ.get("ROLLOUT_MODEL_CACHE", "~/.cache/das-rollout/models")).expanduser()
CLIP = 0.2
WARMUP_STEPS = 4
NUM_KEPT_VERSIONS = 2
MICROBATCH_TOKENS = 4096

log = logging.getLogger("grpo")


class Problems:
    """Problems of one reasoning-gym task: prompts as token ids, and the reward of a response."""

    def __init__(self, tokenizer: Any, task: str, config: dict[str, Any], size: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
        self._entries = list(self._dataset)
        chats = [[{"role": "user", "content": entry["question"]}] for entry in self._entries]
        rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        self.prompts: list[list[int]] = tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def reward(self, problem: int, token_ids: Sequence[int]) -> float:
        """Return 1 for the correct answer between ``<answer>`` tags, else 0."""
        answer = extract_answer(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        return float(self._dataset.score_answer(answer, self._entries[problem]) == 1.0)


class Policy:
    """The model that is trained, and its saved versions."""

    def __init__(self, model: Path, weights: Path, learning_rate: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._weights = weights
        # Training takes only tens of steps, so there is no weight decay, and beta2 is smaller than its default.
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        # AdamW's first steps have full size even if the gradient is noisy, and some runs never recover from that.
        self._warmup = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS - 1
        )

    def save(self, version: int) -> Path:
        """Save the weights as safetensors and delete older versions."""
        directory = self._weights / f"version-{version:05d}"
        self.model.save_pretrained(directory)
        shutil.rmtree(self._weights / f"version-{version - NUM_KEPT_VERSIONS:05d}", ignore_errors=True)
        return directory

    def update(self, prompts: list[list[int]], rollouts: list[Rollout], advantages: list[float]) -> dict[str, float]:
        """Take one optimizer step on rollouts; ``prompts[i]`` and ``advantages[i]`` belong to ``rollouts[i]``.

        Returns:
            The norm of the gradient before clipping, and the mean distance of the importance ratios from 1. Because the
            rollouts were sampled with the current weights, this is the difference between engine and trainer.
        """
        rows = [
            ([*prompt, *rollout.token_ids], len(prompt), rollout.logprobs or [], advantage)
            for prompt, rollout, advantage in zip(prompts, rollouts, advantages, strict=True)
            if advantage and rollout.token_ids  # a group with equal rewards has no gradient
        ]
        total = sum(len(rollout.token_ids) for rollout in rollouts)
        ratio_distance = 0.0
        for batch in _microbatches(sorted(rows, key=lambda row: len(row[0]))):
            length = max(len(ids) for ids, *_ in batch)
            # All padding follows the tokens with a loss, so causal attention needs no mask.
            tokens = torch.zeros(len(batch), length, dtype=torch.int64)
            behavior, mask = torch.zeros(len(batch), length), torch.zeros(len(batch), length)
            for row, (ids, start, logprobs, _) in enumerate(batch):
                tokens[row, : len(ids)] = torch.tensor(ids)
                behavior[row, start : len(ids)] = torch.tensor(logprobs)
                mask[row, start : len(ids)] = 1.0
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            ratio = ((logprobs - behavior[:, 1:]) * mask[:, 1:]).exp()
            advantage = torch.tensor([row[3] for row in batch])[:, None]
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (-(gain * mask[:, 1:]).sum() / total).backward()
            ratio_distance += ((ratio - 1).abs() * mask[:, 1:]).sum().item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self._optimizer.step()
        self._warmup.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "gradient_norm": norm,
            "ratio_distance": ratio_distance / max(1, sum(len(logprobs) for _, _, logprobs, _ in rows)),
        }


def _microbatches(rows: list[Any]) -> Iterator[list[Any]]:
    """Yield batches of rows that fit into a padded batch. *rows* are sorted by length."""
    batch: list[Any] = []
    for row in rows:
        if batch and len(row[0]) * (len(batch) + 1) > MICROBATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def advantages_of(rewards: Sequence[float]) -> list[float]:
    """Return each reward's distance from the mean of its group, in standard deviations of the group."""
    group = torch.tensor(rewards)
    return ((group - group.mean()) / (group.std() + 1e-4)).tolist()


class Stopwatch(dict[str, float]):
    """Durations of the phases of one training step, in seconds."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of a ``with`` block to a phase."""
        started = time.perf_counter()
        yield
        self[phase] = self.get(phase, 0.0) + time.perf_counter() - started


def train(client: RolloutClient, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train, and yield the measurements of each training step."""
    torch.manual_seed(args.seed)
    problems = Problems(
        AutoTokenizer.from_pretrained(args.model), args.task, args.task_config, args.problems, seed=args.problem_seed
    )
    policy = Policy(args.model, args.weights, args.learning_rate)
    sampling = Sampling(n=args.group, temperature=1.0, max_tokens=args.max_tokens, logprobs=True)
    order: list[int] = []
    shuffler = Random(args.seed)
    for step in range(args.steps):
        seconds = Stopwatch()
        with seconds("publish"):
            version = step + 1  # version 0 is the job's initial model
            client.publish_weights(version, policy.save(version))
        if len(order) < args.batch:
            order += shuffler.sample(range(args.problems), args.problems)  # start another epoch
        chosen, order = order[: args.batch], order[args.batch :]
        prompts = [problems.prompts[problem] for problem in chosen]
        with seconds("rollouts"):
            groups = client.generate(prompts, step=step, sampling=sampling, weight_version=version)
        with seconds("rewards"):
            rewards = [
                [problems.reward(problem, rollout.token_ids) for rollout in group]
                for problem, group in zip(chosen, groups, strict=True)
            ]
            rollouts = [rollout for group in groups for rollout in group]
            flat = [reward for group in rewards for reward in group]
            reward_of = {rollout.rollout_id: reward for rollout, reward in zip(rollouts, flat, strict=True)}
            client.report_rewards(reward_of)
        with seconds("update"):
            repeated = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
            update = policy.update(repeated, rollouts, [a for group in rewards for a in advantages_of(group)])
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        accepted = sum(rollout.num_accepted_tokens for rollout in rollouts)
        yield {
            "step": step,
            "reward": sum(flat) / len(flat),
            "length": tokens / len(rollouts),
            "tokens_per_step": tokens / max(1, tokens - accepted),
            "accepted": accepted,
            "drafted": sum(rollout.num_draft_tokens for rollout in rollouts),
            "versions": sorted({span.weight_version for rollout in rollouts for span in rollout.weight_spans}),
            "engines": sorted({rollout.engine for rollout in rollouts}),
            "seconds": {phase: round(spent, 3) for phase, spent in seconds.items()},
            **update,
            "metrics": step_metrics(rollouts, reward_of, newest_version=version),
        }


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The defaults train in minutes on two CPU cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--redis", required=True, help="Redis URL of the job")
    parser.add_argument("--job", default="default/minimal-grpo", help="namespace/name of the job")
    parser.add_argument("--model", type=Path, default=CACHE / "das/tiny-qwen3/step-0270")
    parser.add_argument(
        "--weights", type=Path, default=CACHE / "das/minimal-grpo", help="directory for published weights"
    )
    parser.add_argument("--output", type=Path, help="file for the measurements of each training step, as JSON lines")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of problems")
    parser.add_argument("--steps", type=int, default=40, help="number of training steps")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--group", type=int, default=8, help="responses per problem")
    parser.add_argument("--batch", type=int, default=8, help="problems per training step")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--task", default="count_bits", help="reasoning-gym dataset")
    parser.add_argument(
        "--task-config", type=json.loads, default={"min_n": 1, "max_n": 255}, help="settings of the task, as JSON"
    )
    parser.add_argument("--problems", type=int, default=64, help="number of problems")
    parser.add_argument("--problem-seed", type=int, default=0, help="seed of the problems")
    return parser


def main() -> None:
    """Train with the given job, then close it."""
    args = argument_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    disable_progress_bar()
    with RolloutClient.connect(args.redis, args.job, name="grpo") as client:
        for line in train(client, args):
            log.info("step %(step)3d  reward %(reward).3f  length %(length)5.1f  %(seconds)s", line)
            if args.output is not None:
                with args.output.open("a") as output:
                    output.write(json.dumps(line) + "\n")
        client.close_job()


if __name__ == "__main__":
    main()
