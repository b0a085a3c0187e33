"""Measures multi-turn trajectories whose turns run on the engine that has their context cached.

    python -m benchmarks.multi_turn --trace FILE --tokenizer FILE --json FILE

The benchmark replays the lengths of a trace and the answers of its environment: a model with random weights on two CPU
engines samples as many tokens per turn as were recorded, and then receives the recorded answer. All trajectories run
concurrently. The peer is the same load without ``trajectory_id``, whose requests run on any engine that has room.
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
from benchmarks.serving import run_job
from benchmarks.traces import Tokens, Trajectory, load_tokenizer, read_trace
from rollout_api import AsyncRolloutClient, Prompt
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_worker.history.store import HistoryStore

CONTEXT = 8192
"""Maximum tokens of a trajectory."""
OUTBOX_POLL_S = 0.1
JOB_NAME = "multi-turn"


@dataclass(frozen=True)
class RecordedTrajectory:
    """One trajectory of a trace, in the vocabulary of the random model."""

    problem: str
    prompt: list[int]
    turns: list[tuple[int, list[int]]]
    """For each turn: the number of tokens that the model sampled, and the environment's answer."""

    @property
    def length(self) -> int:
        """Tokens of the whole trajectory."""
        return len(self.prompt) + sum(sampled + len(answer) for sampled, answer in self.turns)


@dataclass
class LoadResult:
    """The measurements of one run of the whole load."""

    seconds: float
    """The makespan."""
    sampled: int
    """Sampled tokens."""
    context: int
    """Context tokens of all turns after the first of each trajectory."""
    cached: int
    """Those of the context tokens whose keys and values were cached."""
    turn_seconds: list[float]
    """Duration of each turn."""

    @property
    def cached_share(self) -> float:
        """Share of the context tokens that did not have to be computed again."""
        return self.cached / max(1, self.context)


def fitting_trajectories(trajectories: Sequence[Trajectory], count: int) -> list[RecordedTrajectory]:
    """Return the first *count* trajectories that fit into the context.

    Raises:
        ValueError: if there is none.
    """
    fitting = [recorded for recorded in map(_record_of, trajectories) if recorded.turns and recorded.length < CONTEXT]
    if not fitting:
        raise ValueError(f"the trace has no trajectory that fits into {CONTEXT} tokens")
    return fitting[:count]


def _record_of(trajectory: Trajectory) -> RecordedTrajectory:
    prompt, turns = map_to_vocabulary(trajectory.prompt), []
    sampled = 0
    for segment in trajectory.segments:
        if segment.generated:
            sampled += len(segment.tokens)
        elif sampled:
            turns.append((sampled, map_to_vocabulary(segment.tokens)))
            sampled = 0
        else:
            prompt += map_to_vocabulary(segment.tokens)
    if sampled:
        turns.append((sampled, []))
    return RecordedTrajectory(trajectory.problem, prompt, turns)


def map_to_vocabulary(tokens: Tokens) -> list[int]:
    """Map token ids to the vocabulary of the random model."""
    return [int(token) for token in tokens % VOCABULARY]


async def run_load(
    client: AsyncRolloutClient, number: int, trace: list[RecordedTrajectory], *, with_trajectory_ids: bool
) -> LoadResult:
    """Run all trajectories concurrently once, with ``trajectory_id`` or as unrelated requests."""
    turn_seconds: list[float] = []
    context = cached = sampled = 0
    # A prefix of its own keeps a load from finding the cached keys and values of another one.
    prefix = random.Random(number).sample(range(VOCABULARY), 8)

    async def run_trajectory(step: Any, index: int, recorded: RecordedTrajectory) -> None:
        nonlocal context, cached, sampled
        prompt, problem = prefix + recorded.prompt, f"{recorded.problem}-{number}"
        trajectory = step.trajectory(prompt, problem_id=problem)
        for turn, (length, answer) in enumerate(recorded.turns):
            started = time.perf_counter()
            sampling = {"n": 1, "max_tokens": length}
            if with_trajectory_ids:
                (rollout,) = await step.turn([trajectory], sampling=sampling)
            else:
                prompts = [Prompt(trajectory.context, problem, sampling=sampling)]
                async with client.step((number * 1000 + index) * 1000 + turn, prompts) as unrelated:
                    (rollout,) = [rollout async for rollout in unrelated]
                trajectory.append(rollout)
            turn_seconds.append(time.perf_counter() - started)
            sampled += len(rollout.token_ids)
            if turn:
                context += len(trajectory.context) - len(rollout.token_ids)
                cached += rollout.num_cached_tokens
            trajectory.observe(answer)

    started = time.perf_counter()
    async with client.step(number) as step:
        await asyncio.gather(*(run_trajectory(step, index, recorded) for index, recorded in enumerate(trace)))
    return LoadResult(time.perf_counter() - started, sampled, context, cached, turn_seconds)


async def measure(url: str, trace: list[RecordedTrajectory], pairs: int) -> tuple[list[LoadResult], list[LoadResult]]:
    """Run interleaved pairs of loads, and close the job.

    Returns:
        The results with and without trajectory ids, in the order of the pairs.
    """
    results: dict[bool, list[LoadResult]] = {True: [], False: []}
    async with AsyncRolloutClient.connect(url, f"default/{JOB_NAME}", timeout=600) as client:
        await run_load(client, 1, trace[:2], with_trajectory_ids=True)  # Warm up.
        for pair in range(pairs):
            for with_ids in (True, False) if pair % 2 else (False, True):
                number = 2 + 2 * pair + with_ids
                results[with_ids].append(await run_load(client, number, trace, with_trajectory_ids=with_ids))
            ours, peer = results[True][-1], results[False][-1]
            print(
                f"pair {pair + 1}: with trajectory ids {ours.seconds:.1f} s, {ours.cached_share:.0%} cached; "
                f"without {peer.seconds:.1f} s, {peer.cached_share:.0%} cached",
                flush=True,
            )
        outbox, redis = MessageKeys(client.job.uid).outbox, connect(url)
        while redis.xlen(outbox):  # Wait until the relay has appended everything to the history.
            await asyncio.sleep(OUTBOX_POLL_S)
        await client.close_job()
    return results[True], results[False]


def unsampled_tokens_in_history(url: str, trace: list[RecordedTrajectory], loads: int) -> int:
    """Return how many tokens the history holds beyond those that the model sampled; expected is 0."""
    store = HistoryStore(connect(url), HistoryKeys("default", JOB_NAME), window=16)
    stored = 0
    for number in range(2, 2 + loads):
        problems = {f"{recorded.problem}-{number}": "-" for recorded in trace}
        stored += sum(
            len(record.tokens) for batch in store.read(problems, count=100_000).values() for record in batch.records
        )
    return stored - loads * sum(sampled for recorded in trace for sampled, _ in recorded.turns)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="trace file with multi-turn trajectories")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, optionally gzipped")
    parser.add_argument("--trajectories", type=int, default=16, help="number of trajectories [%(default)s]")
    parser.add_argument("--pairs", type=int, default=3, help="measured pairs [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    trace = fitting_trajectories(read_trace(options.trace, load_tokenizer(options.tokenizer)), options.trajectories)
    model = random_model(hidden=256, layers=4, positions=CONTEXT + 64)
    manifest = {
        "apiVersion": "das.rollout.dev/v1beta1",
        "kind": "RolloutJob",
        "metadata": {"name": JOB_NAME},
        "spec": {
            "model": {"uri": str(model)},
            "source": {"trainer": {}},
            "engine": {"maxModelLen": CONTEXT, "maxNumSeqs": 16, "kvCacheMemory": "1Gi", "enforceEager": True},
            "workers": {"gpusPerWorker": 0, "replicas": 2},
        },
    }
    with (
        tempfile.TemporaryDirectory(prefix="multi-turn-") as directory,
        run_job(manifest, Path(directory) / "job") as url,
    ):
        with_ids, without_ids = asyncio.run(measure(url, trace, options.pairs))
        unsampled = unsampled_tokens_in_history(url, trace, 2 * options.pairs)
    ratios = [result.seconds / peer_result.seconds for result, peer_result in zip(with_ids, without_ids, strict=True)]
    cached = [statistics.median(result.cached_share for result in results) for results in (with_ids, without_ids)]
    turn_seconds = [seconds for result in with_ids for seconds in result.turn_seconds]
    peer = "the same requests without trajectory ids"
    figures = [
        Figure("cached context of later turns", 100 * cached[0], "%", "", ">=", None),
        Figure("cached context of later turns, without trajectory ids", 100 * cached[1], "%", "", ">=", None),
        Figure("makespan", statistics.median(ratios), "of the peer's", peer, "<=", None),
        Figure("tokens in the history that the model did not sample", unsampled, "tokens", "", "<=", 0),
        Figure("duration of a turn, median", quantile(turn_seconds, 0.5), "s", "", "<=", None),
        Figure("duration of a turn, p99", quantile(turn_seconds, 0.99), "s", "", "<=", None),
    ]
    report(
        options.json,
        figures,
        trajectories=len(trace),
        turns=sum(len(recorded.turns) for recorded in trace),
        tokens=with_ids[0].sampled,
        ratio=spread(ratios),
        loads={
            "seconds": [result.seconds for result in with_ids],
            "cached_share": [result.cached_share for result in with_ids],
            "seconds_without_ids": [result.seconds for result in without_ids],
            "cached_share_without_ids": [result.cached_share for result in without_ids],
        },
    )


if __name__ == "__main__":
    main()
