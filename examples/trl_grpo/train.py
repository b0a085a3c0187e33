"""TRL's GRPOTrainer with rollouts from a das-rollout job; see README.md in this folder."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import reasoning_gym
from datasets import Dataset
from reasoning_gym.utils import extract_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout_api import Rollout, RolloutClient
from rollout_api.integrations.trl import JobRollouts

CACHE = Path(os.environ.get("ROLLOUT_MODEL_CACHE", "~/.cache/das-rollout/models")).expanduser()
PROBLEMS = reasoning_gym.create_dataset("count_bits", size=64, seed=0, min_n=1, max_n=255)


def answer_rewards(completions: list[list[dict[str, str]]], problem: list[int], **_: Any) -> list[float]:
    """Return 1 for each correct answer between ``<answer>`` tags, else 0."""
    answers = [extract_answer(completion[0]["content"]) for completion in completions]
    return [
        float(PROBLEMS.score_answer(answer, PROBLEMS[index]) == 1.0)
        for answer, index in zip(answers, problem, strict=True)
    ]


class JsonLinesLog(TrainerCallback):
    """Writes the trainer's log, and the rollouts of each process, as JSON lines."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = (directory / "log.jsonl").open("a", buffering=1)
        self._rollouts = (directory / f"rank-{rank}.jsonl").open("a", buffering=1)
        self._rank = rank

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write the log of a training step; only in the main process."""
        if state.is_world_process_zero:
            self._log.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")

    def on_rollouts(self, step: int, rollouts: list[Rollout]) -> None:
        """Write the rollouts that this process trains on."""
        for rollout in rollouts:
            line = {
                "step": step,
                "rank": self._rank,
                "problem": rollout.problem_id,
                "engine": rollout.engine,
                "versions": sorted({span.weight_version for span in rollout.weight_spans}),
                "tokens": len(rollout.token_ids),
                "accepted": rollout.num_accepted_tokens,
            }
            self._rollouts.write(json.dumps(line) + "\n")


def main() -> None:
    """Train with the given job, then close it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", required=True, help="Redis URL of the job")
    parser.add_argument("--job", default="default/trl-grpo", help="namespace/name of the job")
    parser.add_argument("--model", type=Path, default=CACHE / "das/tiny-qwen3/step-0270")
    parser.add_argument(
        "--weights", type=Path, help="directory shared with the job, for weights that cannot be sent from memory"
    )
    parser.add_argument("--sleep", action="store_true", help="let the engines sleep between generations")
    parser.add_argument("--output", type=Path, default=Path("trl-grpo"), help="directory for logs, as JSON lines")
    parser.add_argument("--steps", type=int, default=40, help="number of training steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rows = [
        {"prompt": [{"role": "user", "content": entry["question"]}], "problem": index}
        for index, entry in enumerate(PROBLEMS)
    ]
    config = GRPOConfig(
        output_dir=str(args.output / "trainer"),
        max_steps=args.steps,
        vllm_enable_sleep_mode=args.sleep,
        per_device_train_batch_size=72 // processes,  # 9 problems per step; a group may be divided among processes
        num_generations=8,
        max_completion_length=160,
        learning_rate=2e-4,
        adam_beta2=0.95,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,  # Adam's first steps have full size even if the gradient is noisy
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    with RolloutClient.connect(args.redis, args.job, name=f"rank-{rank}") as client:
        log = JsonLinesLog(args.output, rank)
        rollouts = JobRollouts(client, args.weights)

        def reward(rollout: list[Rollout], trainer_state: Any, **columns: Any) -> list[float]:
            log.on_rollouts(trainer_state.global_step, rollout)
            return answer_rewards(**columns)

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype="float32", attn_implementation="eager"),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            train_dataset=Dataset.from_list(rows),
            reward_funcs=rollouts.wrap_reward(reward),
            rollout_func=rollouts,
            args=config,
            callbacks=[log],
        )
        trainer.train()
        if rank == 0:
            client.close_job()


if __name__ == "__main__":
    main()
