"""TRL's AsyncGRPOTrainer, whose vLLM server is a das-rollout job; see README.md in this folder.

Nothing in this file is specific to das-rollout. The same program trains with ``vllm serve --enable-lora``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import reasoning_gym
from datasets import Dataset
from peft import LoraConfig
from reasoning_gym.utils import extract_answer
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

CACHE = Path(os.environ.get("ROLLOUT_MODEL_CACHE", "~/.cache/das-rollout/models")).expanduser()
PROBLEMS = reasoning_gym.create_dataset("count_bits", size=64, seed=0, min_n=1, max_n=255)


def answer_rewards(completions: list[list[dict[str, str]]], problem: list[int], **_: Any) -> list[float]:
    """Return 1 for each correct answer between ``<answer>`` tags, else 0."""
    answers = [extract_answer(completion[0]["content"]) for completion in completions]
    return [
        float(PROBLEMS.score_answer(answer, PROBLEMS[index]) == 1.0)
        for answer, index in zip(answers, problem, strict=True)
    ]


def main() -> None:
    """Train a LoRA adapter, or all weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the vLLM server")
    parser.add_argument("--model", type=Path, default=CACHE / "das/tiny-qwen3/step-0270")
    parser.add_argument("--output", type=Path, default=CACHE / "das/trl-async-grpo", help="directory for adapters")
    parser.add_argument("--full", action="store_true", help="train all weights, and send them over NCCL")
    parser.add_argument("--steps", type=int, default=40, help="number of training steps")
    parser.add_argument("--cpu", action="store_true", help="train without a GPU")
    args = parser.parse_args()

    rows = [
        {"prompt": [{"role": "user", "content": entry["question"]}], "problem": index}
        for index, entry in enumerate(PROBLEMS)
    ]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # TRL recognises the chat templates of well-known models. That of the tiny model is a part of Qwen3's.
    tokenizer.response_template = qwen3_template
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = AsyncGRPOTrainer(
        model=str(args.model),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=answer_rewards,
        peft_config=None if args.full else adapter,
        args=AsyncGRPOConfig(
            output_dir=str(args.output),
            vllm_server_base_url=args.url,
            max_steps=args.steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=160,
            token_budget=2048,
            max_staleness=2,
            learning_rate=1e-5 if args.full else 2e-3,
            use_cpu=args.cpu,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    trainer.save_model(str(args.output))
    trainer.state.save_to_json(str(args.output / "trainer_state.json"))


if __name__ == "__main__":
    main()
