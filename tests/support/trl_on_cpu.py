"""Lets TRL's GRPOTrainer train on CPUs, unmodified, with vLLM in its own process or with ``vllm serve``.

As a program, it trains the tiny model and prints what was sampled and how it was drafted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "TORCHDYNAMO_DISABLE": "1",  # TRL cannot pass enforce_eager, and compiling takes longer than a short training
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; TRL cannot pass it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of the trainer's process, with which vLLM starts on CPUs."""
PER_STEP = 16
"""Rollouts of a step of :func:`train`."""


@dataclass
class Training:
    """What a training has sampled."""

    log: list[dict[str, Any]]
    """TRL's log, one entry per step."""
    sampled: list[list[int]]
    """Tokens of the responses."""
    stats: dict[str, Any]
    """The drafter's statistics; empty without one."""


def train(output: Path, variables: Mapping[str, str], **settings: Any) -> Training:
    """Run TRL's GRPOTrainer in a process of its own, over the same four prompts in each step.

    Args:
        output: directory that is created.
        variables: environment variables.
        **settings: of ``GRPOConfig``; ``max_steps`` is required.
    """
    output.mkdir()
    command = [sys.executable, "-m", "tests.support.trl_on_cpu", "--output", str(output)]
    command += ["--settings", json.dumps(settings)]
    with (output / "log").open("w") as log:
        code = subprocess.run(command, env={**os.environ, **variables}, stdout=log, stderr=log).returncode
    assert 0 == code, (output / "log").read_text()[-4000:]
    training = Training(**json.loads((output / "training.json").read_text()))
    assert settings["max_steps"] * PER_STEP == len(training.sampled)
    return training


def install() -> None:
    """Let vLLM do on CPUs what TRL expects of it on GPUs, in this process.

    TRL writes new weights to vLLM's parameters (``model.load_weights``), which on CPUs are empty, because vLLM packs
    them for its kernels when the model is loaded. They stay as they are here. TRL passes no data type, and vLLM would
    choose bfloat16 for a model in float32, in which drafts can change greedy responses by rounding errors.
    """
    import torch
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_weight
    CpuPlatform.supported_dtypes = property(lambda _: [torch.float32])  # type: ignore[assignment,method-assign]


def install_sender() -> None:
    """Let TRL send weights to a vLLM server from the CPU: with gloo in place of NCCL, for which it demands a GPU."""
    from trl.generation.vllm_client import VLLMClient

    from tests.support import vllm_sender_on_cpu

    vllm_sender_on_cpu.install()
    init_communicator = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda self, device: init_communicator(self, "cuda")


def make_trainer(
    model: Path, prompts: Sequence[str], reward: Callable[..., list[float]], output: Path, **settings: Any
) -> Any:
    """Return a GRPOTrainer, after :func:`install`; by default, with a vLLM engine in this process.

    Args:
        model: directory of the model.
        prompts: the users' messages, one for each row of the dataset.
        reward: a reward function of TRL.
        output: the trainer's directory.
        **settings: of ``GRPOConfig``, beside those that a CPU needs.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    defaults = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(output), **defaults | settings),
    )


def main() -> None:
    """Train for some epochs over four problems, one epoch in each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the trainer's directory")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of GRPOConfig, as JSON")
    args = parser.parse_args()
    os.environ.update(VARIABLES)

    import reasoning_gym

    from rollout_store.models.model_source import default_cache
    from rollout_tools.tiny_model import ensure

    install()
    if args.settings.get("vllm_mode") == "server":
        install_sender()
    problems = reasoning_gym.create_dataset("count_bits", size=4, seed=0, min_n=1, max_n=255)
    sampled: list[list[int]] = []

    def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.extend(completion_ids)
        return [float(len(completion)) for completion in completion_ids]

    trainer = make_trainer(
        ensure(default_cache() / "das" / "tiny-qwen3")[-1],
        [problem["question"] for problem in problems],
        length_reward,
        args.output,
        **{
            "per_device_train_batch_size": PER_STEP,
            "num_generations": 4,
            "max_completion_length": 100,
            **args.settings,
        },
    )
    trainer.train()
    (stats,) = trainer.vllm_generation.llm.collective_rpc("das_stats") if "DAS_DRAFTING" in os.environ else [{}]
    log = [line for line in trainer.state.log_history if "reward" in line]
    (args.output / "training.json").write_text(json.dumps({"log": log, "sampled": sampled, "stats": stats}))


if __name__ == "__main__":
    main()
