"""Compares the greedy tokens of an engine with drafts with those of an engine without.

    python -m benchmarks.greedy --json FILE

Both engines have the same random weights. Their greedy responses repeat themselves after some tokens, so that many
drafts from a response's own text are accepted. In float32, all responses must be equal. In bfloat16, a step with drafts
may round differently from one without, and a response that differs once differs from there on.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.figures import Figure, report
from benchmarks.random_model import MODELS, VOCABULARY, add_model_argument
from benchmarks.redis_server import redis_server
from benchmarks.rollout_runs import UNGOVERNED, Dtype, start_engines
from benchmarks.step_times import POSITIONS
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult

_TOKENS = 256
"""Number of tokens of each response."""
_PROMPT = 32
"""Number of tokens of each prompt."""
_WITHOUT_DRAFTS = "none"


async def _generate(engine: Engine, responses: int) -> list[GenerationResult]:
    rng = np.random.default_rng(0)
    requests = [
        RolloutRequest(
            job_uid="greedy",
            request_id=f"greedy-{number}",
            problem_id=f"problem-{number}",
            prompt_token_ids=rng.integers(0, VOCABULARY, _PROMPT).tolist(),
            sampling=Sampling(n=1, max_tokens=_TOKENS, temperature=0.0),
        )
        for number in range(responses)
    ]
    return await asyncio.gather(*(engine.generate(request, 0) for request in requests))


async def compare(model: Path, responses: int, dtype: Dtype) -> dict[str, float]:
    """Return the shares of equal responses, and of tokens that were accepted drafts.

    Args:
        model: the model's directory; without safetensors files, random weights are used.
        responses: number of responses that run at the same time.
        dtype: type of the weights.
    """
    modes = [_WITHOUT_DRAFTS, UNGOVERNED]
    with redis_server() as url:
        async with start_engines(modes, model, url, max_tokens=POSITIONS - 64, batch=responses, dtype=dtype) as engines:
            plain = await _generate(engines[_WITHOUT_DRAFTS], responses)
            drafted = await _generate(engines[UNGOVERNED], responses)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    tokens = sum(len(response.token_ids) for response in drafted)
    accepted = sum(response.num_accepted_tokens for response in drafted)
    return {"equal": equal / responses, "accepted": accepted / tokens}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_argument(parser)
    parser.add_argument("--responses", type=int, default=8, help="number of responses [%(default)s]")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32", help="type of the weights [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    shares = asyncio.run(compare(MODELS[options.model](positions=POSITIONS), options.responses, options.dtype))
    figures = [
        Figure("responses with the same greedy tokens", shares["equal"], "of all", "no drafts", ">=", 1.0),
        Figure("tokens that are accepted drafts", shares["accepted"], "of all", "", ">=", 0.05),
    ]
    report(options.json, figures, model=options.model, dtype=options.dtype, responses=options.responses)


if __name__ == "__main__":
    main()
