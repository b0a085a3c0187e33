"""A trainer that uses a job through its HTTP server, with OpenAI's client, and may be killed at any moment.

When it is restarted, it repeats the step that it was in, with the same idempotency keys.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from openai import AsyncOpenAI

from tests.support.chaos_trainer import GROUPS, SAMPLES, TOKENS, UPDATE_S, prompts

_RETRIES = 10_000
"""Attempts of OpenAI's client. There is no server for many seconds after one was killed."""


async def sample_step(client: AsyncOpenAI, rank: int, step: int) -> dict[str, list[object]]:
    """Return the length of each rollout of a step, by rollout id, with a note in place of the engine."""

    async def sample(group: int, tokens: list[int]) -> dict[str, list[object]]:
        response = await client.completions.with_raw_response.create(
            model="chaos",
            prompt=tokens,
            n=SAMPLES,
            max_tokens=TOKENS,
            extra_headers={"Idempotency-Key": f"rank-{rank}-{step}-{group}", "X-Rollout-Problem": f"http-p{group}"},
            extra_body={"return_token_ids": True},
        )
        [request] = response.headers["X-Rollout-Request-Ids"].split(",")
        choices = response.parse().choices
        return {f"{request}/{choice.index}/0": [len(choice.model_extra["token_ids"]), "http"] for choice in choices}

    groups = [sample(group, prompt.token_ids) for group, prompt in enumerate(prompts(rank, step))]
    return {key: value for group in await asyncio.gather(*groups) for key, value in group.items()}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--stop", type=Path, help="End after the step during which this file is created.")
    options = parser.parse_args()
    step = len(options.journal.read_text().splitlines()) if options.journal.exists() else 0
    async with AsyncOpenAI(base_url=options.url, api_key="none", max_retries=_RETRIES, timeout=120) as client:
        while not options.stop.exists():
            done = await sample_step(client, options.rank, step)
            assert GROUPS * SAMPLES == len(done)
            with options.journal.open("a") as journal:
                journal.write(json.dumps({"step": step, "rollouts": done}) + "\n")
            step += 1
            time.sleep(UPDATE_S)


if __name__ == "__main__":
    asyncio.run(main())
