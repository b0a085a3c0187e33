"""Measures the cost of verification steps on this machine and fits a cost model to it.

    python -m benchmarks.step_times --json FILE

A real engine with random weights verifies drafts of different lengths for batches of different sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.figures import Figure, report
from benchmarks.random_model import MODELS, VOCABULARY, add_model_argument
from benchmarks.redis_server import redis_server
from benchmarks.rollout_runs import KV_CACHE_BYTES, UNGOVERNED, set_rollouts, start_engines
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest
from rollout_worker.engine.engine import Engine

BATCHES = (1, 4, 16)
_BUDGETS = (0, 2, 6, 16)
_PROMPTS = (32, 1024)
"""Prompt lengths in tokens."""
_STEPS = 40
"""Verification steps per combination."""
POSITIONS = 2048
_PERIOD = 7
"""Tokens after which forced rollouts repeat, so that drafts always reach their budget."""


async def decode(engine: Engine, batch: int, budget: int, prompt: int, *, name: str) -> None:
    """Decode rollouts that the drafter predicts exactly.

    Args:
        engine: an engine of :func:`start_engines`.
        batch: number of rollouts.
        budget: number of draft tokens of each rollout in each step; 0: none are drafted.
        prompt: number of tokens of each prompt.
        name: distinguishes the rollouts from those of other calls.
    """
    length = _response_length(prompt, budget)
    requests = [
        RolloutRequest(
            job_uid="step-times",
            request_id=f"{name}-{number}",
            problem_id=name,
            prompt_token_ids=[(position * 31 + number) % VOCABULARY for position in range(prompt)],
            sampling=Sampling(n=1, max_tokens=length),
            draft_budget=budget,
        )
        for number in range(batch)
    ]
    tokens = [(position % _PERIOD) * 17 + 5 for position in range(length)]
    await set_rollouts(engine, {str(request.rollout_id(0)): tokens for request in requests})
    await asyncio.gather(*(engine.generate(request, 0) for request in requests))


def _response_length(prompt: int, budget: int) -> int:
    return min(POSITIONS - prompt, _STEPS * (budget + 1))


def _kv_bytes_per_token(model: Path) -> int:
    """Return the size of one token's keys and values in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


async def fit_cost_model(name: str = "267m", batches: Sequence[int] = BATCHES) -> dict[str, float]:
    """Measure verification steps and return the fitted cost model of an engine on this machine.

    Args:
        name: a key of :data:`MODELS`.
        batches: numbers of rollouts. Combinations with a context that exceeds the KV cache are left out.

    Returns:
        The fields of :class:`StepCost`, the capacity ``kv_tokens`` of the KV cache, and ``error``, the median relative
        error of the fit.
    """
    model = MODELS[name](positions=POSITIONS)
    kv_tokens = KV_CACHE_BYTES // _kv_bytes_per_token(model)
    with redis_server() as url:
        async with start_engines([UNGOVERNED], model, url, max_tokens=POSITIONS - 64, batch=max(batches)) as engines:
            engine = engines[UNGOVERNED]
            for prompt, batch, budget in product(_PROMPTS, batches, _BUDGETS):
                if batch * (prompt + _response_length(prompt, budget)) <= kv_tokens:
                    await decode(engine, batch, budget, prompt, name=f"{batch}-{budget}-{prompt}")
            stats = await engine.stats()
    return {
        "base_s": stats["cost_base_seconds"],
        "per_token_s": stats["cost_token_seconds"],
        "per_context_token_s": stats["cost_context_token_seconds"],
        "drafting_s": stats["cost_drafting_seconds"],
        "kv_tokens": kv_tokens,
        "error": stats["cost_error_ratio"],
    }


def figures_of(cost: dict[str, float]) -> list[Figure]:
    """Return the figures of a fitted cost model."""
    return [
        Figure("c_base", 1e3 * cost["base_s"], "ms", "", "<=", None),
        Figure("c_tok", 1e3 * cost["per_token_s"], "ms/token", "", "<=", None),
        Figure("c_kv", 1e9 * cost["per_context_token_s"], "ns/token", "", "<=", None),
        Figure("c_draft", 1e3 * cost["drafting_s"], "ms", "", "<=", None),
        Figure("c_base / c_tok", cost["base_s"] / cost["per_token_s"], "tokens", "", ">=", None),
        Figure("median relative error of the fit", cost["error"], "", "", "<=", None),
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_argument(parser)
    default = ",".join(map(str, BATCHES))
    parser.add_argument("--batch", default=default, help="comma-separated numbers of rollouts [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")]
    cost = asyncio.run(fit_cost_model(options.model, batches))
    report(options.json, figures_of(cost), model=options.model, batches=batches, **cost)


if __name__ == "__main__":
    main()
