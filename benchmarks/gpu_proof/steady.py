"""The throughput of engines on which a new rollout starts whenever one ends.

The engines of all modes run the same rollouts in the same order, and take turns: all but one are paused, and keep their
running rollouts meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from benchmarks.figures import Figure
from benchmarks.gpu_proof.settings import Row, Settings, history_server, running
from benchmarks.rollout import MIN_PAIRS_FOR_BOUND, epochs_of_trace, lower_bound
from benchmarks.rollout_runs import (
    END,
    GROUP_SIZE,
    KV_CACHE_BYTES,
    MAX_DRAFT,
    RecordedGroup,
    RecordedRollout,
    engine_config,
    model_runner,
    store_history,
)
from benchmarks.suffix_drafters import PEERS_DIRECTORY
from benchmarks.traces import problems_of, read_trace
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest
from rollout_worker.engine.config import scheduled_tokens
from rollout_worker.engine.engine import Engine
from tests.support.engines import HISTORY_TIMEOUT_S
from tests.support.reference_model import LoopThread

MODES = ("none", "das", "ngram", "suffix", "none-v1-sync")
"""The most important first, because not all engines fit on every GPU."""
MAX_TOKENS = 4096
"""Maximum tokens of a prompt and its response together."""
LOOP_RATIO = 0.1
"""The second half of a rollout that is caught in a loop compresses to less than this."""
_ENGINE_BYTES = 16 * 10**9 + KV_CACHE_BYTES
"""Memory of an engine on a GPU: the weights of the 7B model, its graphs, and the KV cache."""
_OUTPUT_DELAY_S = 0.05
"""Time until the tokens of the last step before a pause are counted."""


def is_loop(tokens: Sequence[int]) -> bool:
    """Return whether the second half of a rollout consists of repetitions."""
    half = np.array(tokens[len(tokens) // 2 :], "<u4").tobytes()
    return len(zlib.compress(half)) < LOOP_RATIO * len(half)


def select(groups: dict[str, RecordedGroup], *, with_loops: bool) -> list[RecordedRollout]:
    """Return the rollouts in groups of :data:`GROUP_SIZE` of one problem, first one group of each problem."""
    kept = {
        name: [tokens for tokens in group.rollouts if with_loops or not is_loop(tokens)]
        for name, group in groups.items()
    }
    longest = max(map(len, kept.values()))
    return [
        RecordedRollout(name, groups[name], tokens)
        for first in range(0, longest, GROUP_SIZE)
        for name, rollouts in kept.items()
        for tokens in rollouts[first : first + GROUP_SIZE]
    ]


class Stream:
    """Rollouts of which one engine runs always the same number."""

    def __init__(self, engine: Engine, rollouts: Sequence[RecordedRollout]) -> None:
        """Prepare the requests."""
        self.engine, self.num_different = engine, 0
        self._rollouts = [(_request(number, rollout), rollout.tokens) for number, rollout in enumerate(rollouts)]
        self._rest = iter(self._rollouts)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, batch: int) -> None:
        """Let the paused engine begin with a number of rollouts."""
        recorded = {str(request.rollout_id(0)): tokens for request, tokens in self._rollouts}
        await self.engine.collective_rpc("bench_set_rollouts", recorded)
        self._tasks = [asyncio.create_task(self._run()) for _ in range(batch)]

    async def _run(self) -> None:
        for request, tokens in self._rest:
            response = await self.engine.generate(request, 0)
            self.num_different += response.token_ids != tokens

    async def turn(self, seconds: float) -> Row:
        """Let the engine decode for some time, and return what it has done.

        Raises:
            RuntimeError: if there are no rollouts left.
        """
        await self.engine.collective_rpc("das_interrupt_timing")
        tokens, accepted = self.engine.counters.tokens, self.engine.counters.accepted_tokens
        [times] = await self.engine.collective_rpc("bench_times")
        started = time.perf_counter()
        await self.engine.resume()
        await asyncio.sleep(seconds)
        running = self.engine.counters.running
        await self.engine.pause(finish_running=False)
        seconds = time.perf_counter() - started
        await asyncio.sleep(_OUTPUT_DELAY_S)
        [times_after] = await self.engine.collective_rpc("bench_times")
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("The trace has too few rollouts for turns of this length.")
        return {
            "seconds": seconds,
            "tokens": self.engine.counters.tokens - tokens,
            "accepted": self.engine.counters.accepted_tokens - accepted,
            "running": running,
            "different_responses": self.num_different,
            **{name: times_after[name] - times[name] for name in times},
        }

    async def stop(self) -> None:
        """Cancel the rollouts that run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _request(number: int, rollout: RecordedRollout) -> RolloutRequest:
    return RolloutRequest(
        job_uid="steady",
        request_id=f"{rollout.problem}-{number}",
        problem_id=rollout.problem,
        prompt_token_ids=rollout.group.prompt,
        sampling=Sampling(
            n=1, temperature=1.0, max_tokens=rollout.group.max_tokens, stop_token_ids=[END], logprobs=True
        ),
    )


def measure(settings: Settings) -> Iterator[Row]:
    """Measure all modes at each batch size, without and with loops."""
    sys.path.append(PEERS_DIRECTORY)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), PEERS_DIRECTORY)))
    max_tokens = MAX_TOKENS if not settings.is_dry else 1024
    problems = problems_of(read_trace(settings.trace, None), None, None, None)
    groups = epochs_of_trace(problems, max_tokens).epochs[0]
    batch, modes = max(settings.steady_batches), MODES
    if torch.cuda.is_available():
        modes = modes[: int(torch.cuda.mem_get_info()[0] // _ENGINE_BYTES)]
    yield {"modes": modes, "left_out": MODES[len(modes) :]}
    batched_tokens = settings.batched_tokens or scheduled_tokens(batch, MAX_DRAFT)
    with history_server() as (url, store, loop), ExitStack() as stack:
        engines = {}
        for mode in modes:
            config = engine_config(
                mode, settings.model(), url, max_tokens=max_tokens, batch=batch, eager=settings.is_dry
            )
            with model_runner(mode):
                harness = stack.enter_context(running(loop, store, config, max_num_batched_tokens=batched_tokens))
            engines[mode] = harness.engine
            loop.run(harness.engine.collective_rpc("bench_install"))
            loop.run(harness.engine.pause(finish_running=False))
        for with_loops in (False, True):
            for size in settings.steady_batches:
                # Engines keep no history of an earlier measurement, and load none again.
                named = {f"{size}-{with_loops}/{name}": group for name, group in groups.items()}
                store_history(store, named)
                for row in _measure_batch(settings, engines, loop, size, named, select(named, with_loops=with_loops)):
                    yield {"batch": size, "with_loops": with_loops, **row}


def _measure_batch(
    settings: Settings,
    engines: dict[str, Engine],
    loop: LoopThread,
    batch: int,
    groups: dict[str, RecordedGroup],
    rollouts: Sequence[RecordedRollout],
) -> Iterator[Row]:
    streams = {mode: Stream(engine, rollouts) for mode, engine in engines.items()}
    history = [(group.prompt, group.history) for group in groups.values()]
    for mode, stream in streams.items():
        loop.run(stream.engine.collective_rpc("bench_set_history", history))
        if not loop.run(stream.engine.announce(list(groups), 1, timeout_s=HISTORY_TIMEOUT_S)):
            raise RuntimeError(f"{mode}: the history was not loaded in {HISTORY_TIMEOUT_S} s")
        loop.run(stream.start(batch))
        loop.run(stream.turn(settings.warm_up_s))
    order, rng = list(streams), random.Random(batch)
    for turn in range(settings.steady_pairs):
        rng.shuffle(order)
        for mode in order:
            yield {"mode": mode, "turn": turn, **loop.run(streams[mode].turn(settings.turn_s))}
    for stream in streams.values():
        loop.run(stream.stop())


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """Return the throughput of each mode, and the ratios to that of plain vLLM in the same turns."""
    speeds: dict[tuple[int, bool, str], dict[int, float]] = {}
    for row in rows:
        if "turn" in row:
            key = row["batch"], row["with_loops"], row["mode"]
            speeds.setdefault(key, {})[row["turn"]] = row["tokens"] / row["seconds"]
    figures = []
    for (batch, with_loops, mode), by_turn in speeds.items():
        setting = f"{mode}, batch {batch}, {'with' if with_loops else 'without'} loops"
        throughput = float(np.median(list(by_turn.values())))
        figures.append(Figure(f"throughput, {setting}", throughput, "tokens/s", "", ">=", None))
        plain = speeds.get((batch, with_loops, "none"), {})
        ratios = [by_turn[turn] / plain[turn] for turn in by_turn.keys() & plain.keys() if plain[turn]]
        if mode == "none" or not ratios:
            continue
        figures.append(Figure(f"speed of {setting}", float(np.median(ratios)), "x", "none", ">=", None))
        if len(ratios) >= MIN_PAIRS_FOR_BOUND:
            figures.append(Figure(f"speed of {setting}, lower bound", lower_bound(ratios), "x", "none", ">=", None))
    return figures
