"""Agents with tools as a load: each turn goes to the engine that holds its context's keys and values.

    python -m benchmarks.multi_turn --trace FILE --tokenizer FILE --json FILE

Replayed are a trace's lengths and what its environment said: the model (random, two CPU engines) samples as many tokens
as the recorded one did, and then meets the recorded answer. All trajectories run at once, and each speaks as soon as
its environment has. Compared with the same requests without ``trajectory_id``, which go wherever there is room.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.random_model import VOCABULARY, random_model
from benchmarks.serving import served
from benchmarks.traces import Tokens, Trajectory, load_tokenizer, read_trace
from rollout_api import AsyncRolloutClient, Prompt
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore

CONTEXT = 8192


@dataclass(frozen=True)
class Recorded:
    """One trajectory of a trace, in tokens."""

    problem: str
    prompt: list[int]
    turns: list[tuple[int, list[int]]]
    """How long the model spoke, and what the environment answered."""

    @property
    def length(self) -> int:
        """Tokens of the whole context at the end."""
        return len(self.prompt) + sum(said + len(answer) for said, answer in self.turns)


@dataclass
class Played:
    """What a run measured."""

    seconds: float
    tokens: int
    """Sampled."""
    context: int
    """Tokens of all turns' contexts behind the first turn."""
    cached: int
    """Of those, whose keys and values were there."""
    waits: list[float]
    """Seconds of each turn."""

    @property
    def cached_share(self) -> float:
        """Share of the contexts that was not computed again."""
        return self.cached / max(1, self.context)


def that_fit(trajectories: Sequence[Trajectory], count: int) -> list[Recorded]:
    """The first *count* trajectories that fit into the context.

    Raises:
        ValueError: if there is none.
    """
    recorded = [one for one in map(_recorded, trajectories) if one.turns and one.length < CONTEXT]
    if not recorded:
        raise ValueError(f"the trace has no trajectory that fits into {CONTEXT} tokens")
    return recorded[:count]


def _recorded(trajectory: Trajectory) -> Recorded:
    context, turns = known(trajectory.prompt), []
    said = 0
    for segment in trajectory.segments:
        if segment.generated:
            said += len(segment.tokens)
        elif said:
            turns.append((said, known(segment.tokens)))
            said = 0
        else:
            context += known(segment.tokens)
    if said:
        turns.append((said, []))
    return Recorded(trajectory.problem, context, turns)


def known(tokens: Tokens) -> list[int]:
    """As tokens of the random model's vocabulary."""
    return [int(token) for token in tokens % VOCABULARY]


async def play(client: AsyncRolloutClient, run: int, trace: list[Recorded], *, holding: bool) -> Played:
    """All trajectories at once, by ``trajectory_id`` (*holding*) or as unrelated requests."""
    waits: list[float] = []
    context = cached = sampled = 0
    nonce = random.Random(run).sample(range(VOCABULARY), 8)  # so that no run finds the keys of another

    async def one(step: Any, number: int, recorded: Recorded) -> None:
        nonlocal context, cached, sampled
        prompt, problem = nonce + recorded.prompt, f"{recorded.problem}-{run}"
        chat = step.trajectory(prompt, problem_id=problem)
        for turn, (length, answer) in enumerate(recorded.turns):
            began = time.perf_counter()
            sampling = {"n": 1, "max_tokens": length}
            if holding:
                (said,) = await step.turn([chat], sampling=sampling)
            else:
                asked = [Prompt(chat.context, problem, sampling=sampling)]
                async with client.step((run * 1000 + number) * 1000 + turn, asked) as alone:
                    (said,) = [rollout async for rollout in alone]
                chat.append(said)
            waits.append(time.perf_counter() - began)
            sampled += len(said.token_ids)
            if turn:
                context += len(chat.context) - len(said.token_ids)
                cached += said.cached_tokens
            chat.observe(answer)

    started = time.perf_counter()
    async with client.step(run) as step:
        await asyncio.gather(*(one(step, number, recorded) for number, recorded in enumerate(trace)))
    return Played(time.perf_counter() - started, sampled, context, cached, waits)


async def measure(url: str, trace: list[Recorded], pairs: int) -> dict[str, list[Played]]:
    """Interleaved pairs of runs; closes the job."""
    runs: dict[str, list[Played]] = {"holding": [], "anywhere": []}
    async with AsyncRolloutClient.connect(url, "default/multi-turn", timeout=600) as client:
        await play(client, 1, trace[:2], holding=True)  # warms up
        for pair in range(pairs):
            for way in ("holding", "anywhere") if pair % 2 else ("anywhere", "holding"):
                run = 2 + 2 * pair + (way == "holding")
                runs[way].append(await play(client, run, trace, holding=way == "holding"))
            holding, anywhere = runs["holding"][-1], runs["anywhere"][-1]
            print(
                f"pair {pair + 1}: {holding.seconds:.1f} s, {holding.cached_share:.0%} cached; anywhere "
                f"{anywhere.seconds:.1f} s, {anywhere.cached_share:.0%} cached",
                flush=True,
            )
        outbox, redis = MessageKeys(client.job.uid).outbox, connect(url)
        while redis.xlen(outbox):  # until all is in the history
            await asyncio.sleep(0.1)
        await client.close_job()
    return runs


def foreign_tokens(url: str, trace: list[Recorded], runs: int) -> int:
    """Tokens in the history beyond those that the model sampled in all runs: the environment's must not be there."""
    store = HistoryStore(connect(url), HistoryKeys("default", "multi-turn"), window=16)
    kept = 0
    for run in range(2, 2 + runs):
        problems = {f"{recorded.problem}-{run}": "-" for recorded in trace}
        kept += sum(
            len(record.tokens) for found in store.read(problems, count=100_000).values() for record in found.records
        )
    return kept - runs * sum(said for recorded in trace for said, _ in recorded.turns)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, gzip or not")
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace = that_fit(read_trace(options.trace, load_tokenizer(options.tokenizer)), options.trajectories)
    model = random_model(hidden=256, layers=4, positions=CONTEXT + 64)
    manifest = {
        "apiVersion": "das.rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "multi-turn"},
        "spec": {
            "model": {"uri": str(model)},
            "source": {"trainer": {}},
            "engine": {"maxModelLen": CONTEXT, "maxNumSeqs": 16, "kvCacheMemory": "1Gi", "enforceEager": True},
            "workers": {"gpusPerWorker": 0, "replicas": 2},
        },
    }
    with (
        tempfile.TemporaryDirectory(prefix="multi-turn-") as directory,
        served(manifest, Path(directory) / "job") as url,
    ):
        runs = asyncio.run(measure(url, trace, options.pairs))
        foreign = foreign_tokens(url, trace, 2 * options.pairs)
    ratios = [one.seconds / other.seconds for one, other in zip(runs["holding"], runs["anywhere"], strict=True)]
    shares = {way: [one.cached_share for one in played] for way, played in runs.items()}
    peer = "the same requests without trajectory ids"
    waits = [wait for one in runs["holding"] for wait in one.waits]
    figures = [
        Figure("context of later turns found cached", 100 * statistics.median(shares["holding"]), "%", "", ">=", None),
        Figure("the same, wherever there is room", 100 * statistics.median(shares["anywhere"]), "%", "", ">=", None),
        Figure("wall time", statistics.median(ratios), "of the peer's", peer, "<=", None),
        Figure("tokens in the history that the model did not sample", foreign, "tokens", "", "<=", 0),
        Figure("a turn, median", quantile(waits, 0.5), "s", "", "<=", None),
        Figure("a turn, p99", quantile(waits, 0.99), "s", "", "<=", None),
    ]
    report(
        options.json,
        figures,
        trajectories=len(trace),
        turns=sum(len(recorded.turns) for recorded in trace),
        tokens=runs["holding"][0].tokens,
        ratio=spread(ratios),
        seconds={way: [one.seconds for one in played] for way, played in runs.items()},
        cached=shares,
    )


if __name__ == "__main__":
    main()
