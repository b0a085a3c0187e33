"""Compute the examples of docs/sizing.md from the formulas of that page: ``python -m scripts.sizing_docs``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scripts.performance_docs import figures
from scripts.repository import ROOT, with_blocks

PAGE = ROOT / "docs" / "sizing.md"

BYTES_PER_WEIGHT = 2
"""bfloat16."""
BYTES_PER_TOKEN_ID = 4
BYTES_PER_LOGPROB = 4
OTHER_MEMORY_BYTES = 6e9
"""Memory per GPU for activations, CUDA graphs and libraries; an assumption that vLLM's log replaces."""
HISTORY_BYTES_PER_TOKEN = 0.6
"""Bytes in Redis per token of compressed rollouts, as in docs/history.md."""
LEDGER_BYTES = {1: 278, 4: 107, 16: 69}
"""Rollouts in a request → bytes in Redis per answered rollout: the growth of ``used_memory`` in Redis 7.0.15, without
all keys but the ledgers. ``tests/job/test_job_store.py`` measures it again."""
GPU_UTILIZATION = 0.92
"""Default of vLLM 0.32."""


@dataclass(frozen=True)
class Model:
    """What the configuration of a dense model says."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Plan:
    """A model, its GPUs, and the load."""

    model: Model
    gpus: int
    gpus_per_engine: int
    gpu_bytes: float
    prompt_tokens: int
    response_tokens: int
    """Mean length of a response."""
    problems: int
    """Problems in a training step."""
    dataset_problems: int
    """Problems in the dataset, whose rollouts the history keeps."""
    rollouts_per_problem: int
    generations: int
    """Generations of a problem that the history keeps; without further settings, one for each epoch, at most 16."""
    tokens_per_second: float
    """Response tokens per second of one engine; a measurement, or an assumption."""


def weight_bytes(model: Model) -> float:
    """Return the size of a model's weights."""
    return BYTES_PER_WEIGHT * model.parameters


def kv_bytes_per_token(model: Model, bytes_per_number: int = 2) -> int:
    """Return the size of the keys and values of one token, over all GPUs of an engine."""
    return 2 * model.layers * model.kv_heads * model.head_size * bytes_per_number


def kv_cache_tokens(plan: Plan) -> float:
    """Return for how many tokens an engine has keys and values."""
    per_gpu = GPU_UTILIZATION * plan.gpu_bytes - weight_bytes(plan.model) / plan.gpus_per_engine - OTHER_MEMORY_BYTES
    return per_gpu * plan.gpus_per_engine / kv_bytes_per_token(plan.model)


def running_rollouts(plan: Plan) -> float:
    """Return how many rollouts fit into the KV cache, if each is on average halfway through its response."""
    return kv_cache_tokens(plan) / (plan.prompt_tokens + plan.response_tokens / 2)


def engines(plan: Plan) -> int:
    """Return the number of engines."""
    return plan.gpus // plan.gpus_per_engine


def rollouts_per_second(plan: Plan) -> float:
    """Return how many rollouts all engines finish per second."""
    return engines(plan) * plan.tokens_per_second / plan.response_tokens


def history_tokens(plan: Plan) -> float:
    """Return the number of tokens in the history."""
    return plan.dataset_problems * plan.rollouts_per_problem * plan.generations * plan.response_tokens


def history_bytes(plan: Plan) -> float:
    """Return the size of the history in Redis."""
    return HISTORY_BYTES_PER_TOKEN * history_tokens(plan)


def message_bytes(plan: Plan) -> float:
    """Return the size of the messages of one training step in Redis, if no result has been released yet.

    A rollout is kept with its log-probabilities, and is in the outbox until the relay has moved it.
    """
    rollouts = plan.problems * plan.rollouts_per_problem
    per_rollout = plan.response_tokens * (2 * BYTES_PER_TOKEN_ID + BYTES_PER_LOGPROB)
    return rollouts * per_rollout + plan.problems * plan.prompt_tokens * BYTES_PER_TOKEN_ID


def ledger_bytes(rollouts_per_second: float, days: float, rollouts_per_request: int = 16) -> float:
    """Return the size in Redis of what is remembered of answered requests."""
    return rollouts_per_second * days * 24 * 3600 * LEDGER_BYTES[rollouts_per_request]


def cpu_ms_per_rollout(kind: str) -> float:
    """Return the measured CPU time per rollout of a kind of process, with 2,500 trajectories (``load.json``)."""
    return figures("load")[f"CPU time per rollout, {kind}, 2500 trajectories"]


def head_cores(plan: Plan) -> float:
    """Return the CPU cores that the coordinator and the relay need."""
    return rollouts_per_second(plan) * (cpu_ms_per_rollout("coordinator") + cpu_ms_per_rollout("relay")) / 1000


def redis_cores(plan: Plan) -> float:
    """Return the share of one CPU core that Redis needs."""
    return rollouts_per_second(plan) * cpu_ms_per_rollout("Redis") / 1000


def transfer_seconds(plan: Plan, bytes_per_second: float) -> float:
    """Return how long the weights take over a link, once."""
    return weight_bytes(plan.model) / bytes_per_second


H100_BYTES = 80e9
QWEN_7B = Model("Qwen2.5-7B", 7.62e9, layers=28, kv_heads=4, head_size=128)
QWEN_32B = Model("Qwen2.5-32B", 32.8e9, layers=64, kv_heads=8, head_size=128)
LLAMA_70B = Model("Llama-3.1-70B", 70.6e9, layers=80, kv_heads=8, head_size=128)


def example(model: Model, gpus: int, gpus_per_engine: int, response_tokens: int, problems: int, speed: float) -> Plan:
    """Return a plan with the settings that all examples share."""
    return Plan(
        model,
        gpus,
        gpus_per_engine,
        H100_BYTES,
        prompt_tokens=512,
        response_tokens=response_tokens,
        problems=problems,
        dataset_problems=20_000,
        rollouts_per_problem=16,
        generations=4,
        tokens_per_second=speed,
    )


EXAMPLES = {
    "7B on 8 H100s": example(QWEN_7B, 8, 1, response_tokens=4000, problems=512, speed=8000),
    "32B on 8 H100s, TP 4": example(QWEN_32B, 8, 4, response_tokens=8000, problems=128, speed=4000),
    "70B on 64 H100s, TP 8": example(LLAMA_70B, 64, 8, response_tokens=8000, problems=512, speed=4000),
}


def gigabytes(number: float) -> str:
    """Return a number of bytes in GB."""
    return f"{number / 1e9:,.1f} GB" if number < 1e11 else f"{number / 1e9:,.0f} GB"


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each quantity of an example."""
    yield "model", plan.model.name
    yield "engines", f"{engines(plan)}, of {plan.gpus_per_engine} GPU{'s' if plan.gpus_per_engine > 1 else ''}"
    yield "mean tokens of prompts and responses", f"{plan.prompt_tokens:,} and {plan.response_tokens:,}"
    yield "problems × rollouts in a training step", f"{plan.problems:,} × {plan.rollouts_per_problem}"
    yield "problems in the dataset, generations kept", f"{plan.dataset_problems:,}, {plan.generations}"
    yield "tokens per second and engine (assumed)", f"{plan.tokens_per_second:,.0f}"
    yield "weights", gigabytes(weight_bytes(plan.model))
    yield "weights per GPU", gigabytes(weight_bytes(plan.model) / plan.gpus_per_engine)
    yield "KV cache per token", f"{kv_bytes_per_token(plan.model) / 1024:,.0f} KiB"
    yield "KV cache per engine", f"{round(kv_cache_tokens(plan), -3):,.0f} tokens"
    yield "rollouts that fit into it at once", f"{running_rollouts(plan):,.0f}"
    yield "rollouts per second, all engines", f"{rollouts_per_second(plan):,.1f}"
    step = plan.problems * plan.rollouts_per_problem / rollouts_per_second(plan)
    yield "duration of a training step's rollouts, without tail", f"{step / 60:,.0f} min"
    yield "Redis: history", gigabytes(history_bytes(plan))
    yield "Redis: messages of a training step", gigabytes(message_bytes(plan))
    yield "Redis: answered requests of a week", gigabytes(ledger_bytes(rollouts_per_second(plan), 7))
    yield "CPU: coordinator and relay", f"{100 * head_cores(plan):.2f} % of a core"
    yield "CPU: Redis", f"{100 * redis_cores(plan):.2f} % of a core"
    yield "weights over a link of 50 GB/s (400 Gbit/s), once", f"{transfer_seconds(plan, 50e9):.1f} s"
    yield "weights over a link of 3 GB/s (25 Gbit/s), once", f"{transfer_seconds(plan, 3e9):.0f} s"


def table() -> str:
    """Return the table of all examples."""
    columns = [dict(rows(plan)) for plan in EXAMPLES.values()]
    lines = [f"| | {' | '.join(EXAMPLES)} |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | {' | '.join(column[name] for column in columns)} |" for name in columns[0]]
    return "\n".join(lines)


def ledger_table() -> str:
    """Return the table of what answered requests take at the highest rate that was measured."""
    lines = ["| Rollouts in a request | Bytes per rollout | 500 per second for a day | 500 per second for a week |"]
    lines.append("|---|---|---|---|")
    for rollouts, size in LEDGER_BYTES.items():
        day, week = (gigabytes(ledger_bytes(500, days, rollouts)) for days in (1, 7))
        lines.append(f"| {rollouts} | {size} | {day} | {week} |")
    return "\n".join(lines)


def document(page: str) -> str:
    """Return the page with its examples computed anew."""
    return with_blocks(page, "scripts/sizing_docs.py", {"ledgers": ledger_table(), "examples": table()})


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
