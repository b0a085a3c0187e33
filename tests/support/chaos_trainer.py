"""A trainer that may be killed at any moment. When it is restarted, it repeats the step that it was in.

With ``--url``, it uses the job through its HTTP server, with OpenAI's client and the same idempotency keys.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_api import Prompt, RolloutClient
from rollout_api.protocol.messages import digest_of, pack_tokens

if TYPE_CHECKING:
    from openai import AsyncOpenAI

GROUPS, SAMPLES, TOKENS = 8, 4, 260
_RETRIES = 10_000
"""Attempts of OpenAI's client. There is no server for many seconds after one was killed."""


def prompts(rank: int, step: int) -> list[Prompt]:
    """Return the prompts of a step, which are the same whenever the step is repeated."""
    tokens = [[(rank + 3 * step + 5 * group + place) % 23 for place in range(6)] for group in range(GROUPS)]
    return [Prompt(one, f"p{group}") for group, one in enumerate(tokens)]


def reward_of(digest: str) -> float:
    """Return the reward of a rollout, which depends on its tokens alone."""
    return float(int(digest, 16) % 4096)


class Journal:
    """The steps that the trainer has made: for each one, the id and the digest of each rollout, and times.

    Times are those of the system's monotonic clock, which all processes share.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.step = len(file.read_text().splitlines()) if file.exists() else 0
        """The next step."""

    def add(self, rollouts: Sequence[tuple[str, str]], **times: float) -> None:
        """Record the next step."""
        with self._file.open("a") as file:
            step = {"step": self.step, "rollouts": rollouts, **times, "finished": time.monotonic()}
            file.write(json.dumps(step) + "\n")
        self.step += 1


def train(options: argparse.Namespace, journal: Journal) -> None:
    """Make steps with the client for Redis."""
    with RolloutClient.connect(options.redis, uid=options.uid, name=f"rank-{options.rank}", timeout=600) as client:
        while not options.stop.exists():
            opened = time.monotonic()
            with client.step(journal.step, prompts(options.rank, journal.step)) as running:
                received = [(rollout.rollout_id, rollout.digest) for rollout in running]
                reported = time.monotonic()
                client.report_rewards({rollout_id: reward_of(digest) for rollout_id, digest in received})
                # A step in the journal is complete even if its results are not released, which a later step then does.
                journal.add(received, opened=opened, reported=reported)
            time.sleep(options.update)


async def sample_step(client: AsyncOpenAI, rank: int, step: int) -> list[tuple[str, str]]:
    """Return the id and the digest of each rollout of a step."""

    async def sample(group: int, tokens: list[int]) -> list[tuple[str, str]]:
        response = await client.completions.with_raw_response.create(
            model="chaos",
            prompt=tokens,
            n=SAMPLES,
            max_tokens=TOKENS,
            extra_headers={"Idempotency-Key": f"rank-{rank}-{step}-{group}", "X-Rollout-Problem": f"http-p{group}"},
            extra_body={"return_token_ids": True},
        )
        [request] = response.headers["X-Rollout-Request-Ids"].split(",")
        return [
            (f"{request}/{choice.index}/0", digest_of(pack_tokens(choice.model_extra["token_ids"])))
            for choice in response.parse().choices
        ]

    groups = [sample(group, prompt.token_ids) for group, prompt in enumerate(prompts(rank, step))]
    return [rollout for group in await asyncio.gather(*groups) for rollout in group]


async def train_over_http(options: argparse.Namespace, journal: Journal) -> None:
    """Make steps with OpenAI's client."""
    from openai import AsyncOpenAI  # other trainers start without it in half of the time

    async with AsyncOpenAI(base_url=options.url, api_key="none", max_retries=_RETRIES, timeout=120) as client:
        while not options.stop.exists():
            rollouts = await sample_step(client, options.rank, journal.step)
            assert GROUPS * SAMPLES == len(rollouts)
            journal.add(rollouts)
            time.sleep(options.update)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis")
    parser.add_argument("--uid")
    parser.add_argument("--url", help="URL of the HTTP server, in place of Redis and the uid")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--update", type=float, default=0.5, help="seconds of a policy update, without open requests")
    parser.add_argument("--stop", type=Path, help="End after the step during which this file is created.")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    journal = Journal(options.journal)
    if options.url:
        asyncio.run(train_over_http(options, journal))
    else:
        train(options, journal)


if __name__ == "__main__":
    main()
