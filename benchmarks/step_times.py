"""What verification steps cost on this machine: a real engine with random weights, drafts of different lengths.

python -m benchmarks.step_times --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from benchmarks.random_model import VOCABULARY, random_model, shape_of_7b
from benchmarks.rollout_runs import KV_CACHE_BYTES, engines_of, redis_server
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest
from rollout_worker.engine.host import Engine

_BATCHES = (1, 4, 16)
_BUDGETS = (0, 2, 6, 16)
_PROMPTS = (32, 1024)
_STEPS = 40
_POSITIONS = 2048
_LOOP = 7
"""Tokens after which rollouts repeat themselves, so that drafts are as long as they may be."""
_MODELS = {"267m": random_model, "7b": shape_of_7b}


async def _decode(engine: Engine, batch: int, budget: int, prompt: int) -> None:
    name = f"{batch}-{budget}-{prompt}"
    length = min(_POSITIONS - prompt, _STEPS * (budget + 1))
    requests = [
        RolloutRequest(
            job_uid="step-times",
            request_id=f"{name}-{number}",
            problem_id=name,
            prompt_token_ids=[(place * 31 + number) % VOCABULARY for place in range(prompt)],
            sampling=Sampling(n=1, max_tokens=length),
            draft_budget=budget,
        )
        for number in range(batch)
    ]
    said = [(place % _LOOP) * 17 + 5 for place in range(length)]
    await engine._rpc("bench_record", {str(one.rollout_id(0)): said for one in requests})
    await asyncio.gather(*(engine.generate(one, 0) for one in requests))


def _bytes_a_token(model: Path) -> int:
    """Of keys and values, in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


async def fitted(name: str = "267m") -> dict[str, float]:
    """The cost model of an engine on this machine, as :mod:`benchmarks.makespan` takes it, with the fit's error."""
    model = _MODELS[name](positions=_POSITIONS)
    with redis_server() as url:
        most = {"most": _POSITIONS - 64, "batch": max(_BATCHES)}
        async with engines_of(["das-ungoverned"], model, url, **most) as engines:
            (engine,) = engines.values()
            for prompt in _PROMPTS:
                for batch in _BATCHES:
                    for budget in _BUDGETS:
                        await _decode(engine, batch, budget, prompt)
            stats = await engine.stats()
    return {
        "base": stats["cost_base_seconds"],
        "per_token": stats["cost_token_seconds"],
        "per_context": stats["cost_context_token_seconds"],
        "drafting": stats["cost_drafting_seconds"],
        "kv_tokens": KV_CACHE_BYTES // _bytes_a_token(model),
        "error": stats["cost_error_ratio"],
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=_MODELS, default="267m", help="random weights [%(default)s]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = json.dumps(asyncio.run(fitted(options.model)), indent=1)
    print(found)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(found + "\n")


if __name__ == "__main__":
    main()
