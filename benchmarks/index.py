"""Measures time and memory of the suffix index, compared with arctic-inference's suffix tree on the same data.

    python -m benchmarks.index --json FILE

Each structure and each data set is measured in a process of its own. The synthetic data are problems of eight rollouts
of 2,000 tokens, with three fifths from a template that the rollouts share, and worst cases. ``--trace`` adds
recorded text, repeated under other problem names until there is enough. The peer has one tree of depth 64 for each
problem, because the index is scoped by problem as well.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.suffix_drafters import PEER, as_int32, suffix_tree
from benchmarks.traces import Tokens, by_problem, load_tokenizer, read_trace
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS, SOURCES

DEPTH = 64
ROLLOUTS, LENGTH, SHARED = 8, 2000, 0.6
VOCABULARY = 32_000
BUDGET = 8
DRAFTS = 4000
REMOVALS = 100
BATCHES = (1, 8, 64, 256)
RUNNING = 256
THREADED = "suffix index, 2 threads"

Problem = list[Tokens]
"""The rollouts of a problem."""


def zipf_tokens(rng: np.random.Generator, count: int) -> Tokens:
    """Return random token ids with a heavy-tailed distribution, as in text."""
    return (float(VOCABULARY) ** rng.random(count) - 1).astype(np.uint32)


def templated(rng: np.random.Generator, rollouts: int = ROLLOUTS) -> Problem:
    """Return rollouts that share parts of a template."""
    template = zipf_tokens(rng, LENGTH)
    problem = []
    for _ in range(rollouts):
        tokens, begin = template.copy(), 0
        while begin < LENGTH:
            end = min(LENGTH, begin + int(rng.integers(1, 60)))
            if rng.random() > SHARED:
                tokens[begin:end] = zipf_tokens(rng, end - begin)
            begin = end
        problem.append(tokens)
    return problem


WORST_CASES: dict[str, Callable[[np.random.Generator], Problem]] = {
    "a constant rollout": lambda rng: [np.full(ROLLOUTS * LENGTH, 7, np.uint32)],
    "eight identical rollouts": lambda rng: [zipf_tokens(rng, LENGTH)] * ROLLOUTS,
    "a short loop": lambda rng: [np.resize(zipf_tokens(rng, 7), ROLLOUTS * LENGTH)],
}


def synthetic(make: Callable[[np.random.Generator], Problem], tokens: int) -> Iterator[Problem]:
    """Yield problems until they have *tokens* tokens in total."""
    rng = np.random.default_rng(0)
    while tokens > 0:
        problem = make(rng)
        tokens -= sum(map(len, problem))
        yield problem


def recorded(groups: list[Problem], tokens: int) -> Iterator[Problem]:
    """Yield the problems of a trace repeatedly, until they have *tokens* tokens in total."""
    for problem in cycle(groups):
        if tokens <= 0:
            return
        tokens -= sum(map(len, problem))
        yield problem


@contextmanager
def running_in_background(work: Callable[[], None]) -> Iterator[None]:
    """Repeat *work* in another thread until the block ends."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


class MeasuredIndex:
    """The suffix index."""

    name = "suffix index"

    def __init__(self, threads: int = 1) -> None:
        self.index = SuffixIndex(depth=DEPTH, threads=threads)

    def build(self, problem: str, rollouts: Problem) -> None:
        """Add all rollouts of a problem in one call."""
        self.index.add(problem, [(str(number), number, tokens) for number, tokens in enumerate(rollouts)])

    def wait_idle(self) -> None:
        """Wait until the background thread is idle."""
        self.index.wait_idle()

    def bytes(self) -> int:
        """Return the memory in use as the structure itself reports it."""
        return self.index.bytes()

    def open(self, problem: str, context: Tokens, *, live: bool = False) -> int:
        """Open a rollout that ends with *context*; if *live*, it and its siblings draft from its text."""
        handle = self.index.open(problem, sources=SOURCES if live else ("history",))
        self.index.extend(handle, context)
        return handle

    def draft(self, handle: int) -> None:
        """Draft for one rollout."""
        self.index.draft(handle, BUDGET)

    def close(self, handle: int) -> None:
        """Close a rollout."""
        self.index.close(handle)

    def batch(self, handles: list[int]) -> None:
        """Draft for all in one call."""
        self.index.draft_batch(handles, [BUDGET] * len(handles))

    def append(self, handles: list[int], tokens: list[Any]) -> None:
        """Extend all rollouts by the tokens of a step in one call."""
        self.index.extend_batch(handles, tokens)

    def as_argument(self, tokens: Tokens) -> Any:
        """Convert tokens for `append`. Engines pass lists."""
        return tokens.tolist()

    @contextmanager
    def drafting_in_background(self, contexts: list[tuple[str, Tokens]]) -> Iterator[None]:
        """Draft for siblings in another thread until the block ends."""
        handles = [self.open(*contexts[number % len(contexts)], live=True) for number in range(RUNNING)]
        with running_in_background(lambda: self.batch(handles)):
            yield

    def remove(self, problem: str) -> None:
        """Remove the oldest rollout of a problem."""
        self.index.drop_before(problem, 1)


class EngineIndex(MeasuredIndex):
    """The suffix index as engines use it: with a cross-problem pool, and with drafts from all sources."""

    name = "suffix index as in engines"

    def __init__(self) -> None:
        self.index = SuffixIndex(depth=DEPTH, threads=2, pool_tokens=POOL_TOKENS)

    def open(self, problem: str, context: Tokens, *, live: bool = False) -> int:
        """Open a rollout that ends with *context*."""
        return super().open(problem, context, live=True)

    def batch(self, handles: list[int]) -> None:
        """Draft for all in one call, then extend all by two tokens in one call."""
        drafts = self.index.draft_batch(handles, [BUDGET] * len(handles))
        self.index.extend_batch(handles, [[*draft.tokens[:1], 0] for draft in drafts])


class MeasuredTree:
    """The peer: a suffix tree for each problem."""

    name = PEER

    def __init__(self) -> None:
        self._trees: dict[str, Any] = {}
        self._open: list[tuple[Any, Any]] = []

    def build(self, problem: str, rollouts: Problem) -> None:
        """Add the rollouts of a problem one by one."""
        tree = self._trees[problem] = suffix_tree(DEPTH)
        for number, tokens in enumerate(rollouts):
            tree.extend_ndarray(number, as_int32(tokens))

    def wait_idle(self) -> None:
        """Return at once: the tree has no background thread."""

    def bytes(self) -> int:
        """Return the memory in use as the structure itself reports it."""
        return sum(tree.estimate_memory() for tree in self._trees.values())

    def open(self, problem: str, context: Tokens, *, live: bool = False) -> int:
        """Open a rollout that ends with *context*."""
        self._open.append((self._trees[problem], as_int32(context)[-DEPTH:]))
        return len(self._open) - 1

    def draft(self, handle: int) -> None:
        """Draft for one rollout."""
        tree, context = self._open[handle]
        tree.speculate_ndarray(context, BUDGET, 4.0, 0.0, 0.1, False)

    def close(self, _: int) -> None:
        """Do nothing: the tree has no state of open rollouts."""

    def batch(self, handles: list[int]) -> None:
        """Draft for all, one by one, since the tree has no call for a batch."""
        for handle in handles:
            self.draft(handle)

    def append(self, handles: list[int], tokens: list[Any]) -> None:
        """Extend all rollouts by the tokens of a step, one by one."""
        for handle, sampled in zip(handles, tokens, strict=True):
            self._open[handle][0].extend_ndarray(ROLLOUTS + handle, sampled)

    def as_argument(self, tokens: Tokens) -> Any:
        """Convert tokens for `append`."""
        return as_int32(tokens)

    @contextmanager
    def drafting_in_background(self, contexts: list[tuple[str, Tokens]]) -> Iterator[None]:
        """Draft from other trees in another thread until the block ends; a tree must be used by one thread only."""
        other = MeasuredTree()
        for name, context in contexts[:RUNNING]:
            other.build(name, [context])
        handles = [other.open(*contexts[number % len(other._trees)]) for number in range(RUNNING)]
        with running_in_background(lambda: other.batch(handles)):
            yield

    def remove(self, problem: str) -> None:
        """Remove the oldest rollout of a problem."""
        self._trees[problem].remove(0)


@dataclass
class Costs:
    """Costs of one structure for one data set."""

    build: float
    """Tokens per second of CPU time."""
    bytes: float
    """Bytes per token, as the structure itself reports them."""
    resident: float
    """Growth of the process's resident memory, in bytes per token."""
    drafts: list[float]
    """Seconds of each draft."""
    append: float
    """Seconds of CPU time per token."""
    live_bytes: float
    """Bytes per token of running rollouts, as the structure itself reports them."""
    removals: list[float]
    """Seconds of each removal of a rollout."""
    batches: dict[int, float]
    """Median seconds of a batch, by its size."""


CostsByStructure = dict[str, list[Costs]]
"""The costs of each structure, by name, one for each round."""


def measure(drafter: MeasuredIndex | MeasuredTree, problems: Iterator[Problem], *, build_only: bool) -> Costs:
    """Measure building and, unless *build_only*, drafting, appending and removing."""
    rng = np.random.default_rng(1)
    process, seconds, tokens, resident = psutil.Process(), 0.0, 0, 0
    contexts: list[tuple[str, Tokens]] = []
    for number, rollouts in enumerate(problems):
        gc.collect(0)
        before = process.memory_info().rss
        started = time.process_time()
        drafter.build(str(number), rollouts)
        drafter.wait_idle()
        seconds += time.process_time() - started
        resident += process.memory_info().rss - before
        tokens += sum(map(len, rollouts))
        rollout = rollouts[int(rng.integers(len(rollouts)))]
        end = int(rng.integers(1, len(rollout)))
        contexts.append((str(number), rollout[max(0, end - DEPTH) : end].copy()))
    reported = drafter.bytes() / tokens
    costs = Costs(tokens / seconds, reported, resident / tokens, [], 0.0, 0.0, [], {})
    if build_only:
        return costs
    for number in rng.integers(len(contexts), size=DRAFTS):  # mostly different problems, so that caches are cold
        handle = drafter.open(*contexts[number])
        started = time.perf_counter()
        drafter.draft(handle)
        costs.drafts.append(time.perf_counter() - started)
        drafter.close(handle)
    handles = [drafter.open(*contexts[number % len(contexts)]) for number in range(RUNNING)]
    for size in BATCHES:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            drafter.batch(handles[:size])
            times.append(time.perf_counter() - started)
        costs.batches[size] = quantile(times, 0.5)
    sampled = [drafter.as_argument(zipf_tokens(rng, 2)) for _ in range(64)]
    handles = [drafter.open(*contexts[number % len(contexts)], live=True) for number in range(RUNNING)]
    steps = [rng.permutation(len(sampled)).repeat(RUNNING // len(sampled)) for _ in range(LENGTH // 2)]
    batches = [[sampled[number] for number in step] for step in steps]
    with drafter.drafting_in_background(contexts):
        before = drafter.bytes()
        started = time.thread_time()
        for batch in batches:
            drafter.append(handles, batch)
        costs.append = (time.thread_time() - started) / (2 * RUNNING * len(batches))
        costs.live_bytes = (drafter.bytes() - before) / (2 * RUNNING * len(batches))
    for number in range(min(REMOVALS, len(contexts))):
        started = time.perf_counter()
        drafter.remove(str(number))
        costs.removals.append(time.perf_counter() - started)
    return costs


def in_own_process(work: Callable[[], Costs]) -> Costs:
    """Run a measurement in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run(end: Connection) -> None:
        end.send(work())

    process = context.Process(target=run, args=(sender,))
    process.start()
    sender.close()
    try:
        costs: Costs = receiver.recv()
    except EOFError:
        raise RuntimeError("the process of a measurement ended without a result; see its output above") from None
    finally:
        process.join()
    return costs


def compare(problems: Callable[[], Iterator[Problem]], *, build_only: bool, rounds: int) -> CostsByStructure:
    """Measure all structures alternately, in several rounds; return the costs by name."""
    structures: dict[str, Callable[[], MeasuredIndex | MeasuredTree]] = {
        MeasuredIndex.name: MeasuredIndex,
        MeasuredTree.name: MeasuredTree,
    }
    if not build_only:
        structures[THREADED] = partial(MeasuredIndex, threads=2)
        structures[EngineIndex.name] = EngineIndex
    costs: CostsByStructure = {name: [] for name in structures}
    for number in range(rounds):
        for name in list(structures)[:: 1 if number % 2 else -1]:
            costs[name].append(
                in_own_process(lambda create=structures[name]: measure(create(), problems(), build_only=build_only))
            )
    return costs


class Results:
    """The figures of this benchmark, and the details for the JSON file."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.ratios: dict[str, dict[str, Any]] = {}
        self.batches_ms: dict[str, list[float]] = {}
        """Median milliseconds of a batch, of the index and of the peer."""

    def add(self, name: str, value: float, unit: str, op: Literal[">=", "<="], target: float | None = None) -> None:
        """Add a figure of the index alone."""
        self.figures.append(Figure(name, value, unit, "", op, target))

    def add_ratio(
        self,
        name: str,
        costs_by_structure: CostsByStructure,
        cost: Callable[[Costs], float],
        op: Literal[">=", "<="],
        target: float | None,
    ) -> None:
        """Add the ratio of a cost of the index to that of the peer, with its spread over the rounds."""
        values = {
            kind: [cost(costs) for costs in costs_by_structure[kind]]
            for kind in (MeasuredIndex.name, MeasuredTree.name)
        }
        ratios = spread([index / peer for index, peer in zip(*values.values(), strict=True)])
        self.figures.append(Figure(name, ratios["median"], "times the peer", PEER, op, target))
        self.ratios[name] = {**ratios, **values}

    def add_all(self, costs_by_structure: CostsByStructure, data_name: str, *, has_targets: bool) -> None:
        """Add all figures of one data set, described by *data_name*."""

        def target(value: float) -> float | None:
            return value if has_targets else None

        index = costs_by_structure[MeasuredIndex.name][-1]
        self.add_ratio(f"bulk build, {data_name}", costs_by_structure, lambda costs: costs.build, ">=", target(12))
        self.add(f"bytes per token, {data_name}", index.bytes, "B", "<=", target(10))
        self.add(f"resident bytes per token, {data_name}", index.resident, "B", "<=")
        self.add_ratio(f"bytes, {data_name}", costs_by_structure, lambda costs: costs.bytes, "<=", None)
        for share, limit in ((0.5, 1 / 4), (0.99, 1 / 10)):
            name = f"draft of {BUDGET}, p{share * 100:g}, {data_name}"
            self.add_ratio(
                name, costs_by_structure, lambda costs, share=share: quantile(costs.drafts, share), "<=", target(limit)
            )
        self.add_ratio(f"append, {data_name}", costs_by_structure, lambda costs: costs.append, "<=", target(1 / 10))
        live_bytes = median(costs_by_structure[MeasuredIndex.name], lambda costs: costs.live_bytes)
        self.add(f"bytes per token of running rollouts, {data_name}", live_bytes, "B", "<=")
        name = f"removing the oldest rollout, p50, {data_name}"
        self.add_ratio(name, costs_by_structure, lambda costs: quantile(costs.removals, 0.5), "<=", None)
        self._add_batches(costs_by_structure, data_name, target(0.5))
        self._add_engine_figures(costs_by_structure[EngineIndex.name], data_name)
        drop_ms = 1000 * quantile(
            [seconds for costs in costs_by_structure[MeasuredIndex.name] for seconds in costs.removals], 0.99
        )
        self.add(f"dropping a generation of a problem, p99, {data_name}", drop_ms, "ms", "<=", target(1))

    def _add_batches(self, costs_by_structure: CostsByStructure, data_name: str, target: float | None) -> None:
        for structure, threads in ((MeasuredIndex.name, 1), (THREADED, 2)):
            for size in BATCHES:
                index_ms = 1000 * median(costs_by_structure[structure], lambda costs, size=size: costs.batches[size])
                peer_ms = 1000 * median(
                    costs_by_structure[MeasuredTree.name], lambda costs, size=size: costs.batches[size]
                )
                self.batches_ms[f"{size}, {threads} threads, {data_name}"] = [index_ms, peer_ms]
            name = f"batch of {BATCHES[-1]}, {threads} thread{'s' * (threads > 1)}, {data_name}"
            self.add(name, index_ms, "ms", "<=", target if threads == 2 else None)

    def _add_engine_figures(self, costs: list[Costs], data_name: str) -> None:
        removals = [seconds for round_costs in costs for seconds in round_costs.removals]
        build = median(costs, lambda round_costs: round_costs.build) / 1e6
        batch_ms = 1000 * median(costs, lambda round_costs: round_costs.batches[BATCHES[-1]])
        drop_ms = 1000 * quantile(removals, 0.99)
        self.add(f"as in engines: bulk build, {data_name}", build, "M tokens/s", ">=")
        self.add(f"as in engines: batch and append of {BATCHES[-1]}, {data_name}", batch_ms, "ms", "<=")
        self.add(f"as in engines: bytes per token, {data_name}", costs[-1].bytes, "B", "<=")
        self.add(f"as in engines: dropping a generation of a problem, p99, {data_name}", drop_ms, "ms", "<=")


def median(costs: list[Costs], cost: Callable[[Costs], float]) -> float:
    """Return the median of a cost over the rounds."""
    return spread([cost(round_costs) for round_costs in costs])["median"]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--tokens", default="1000000,10000000", help="sizes of the data sets; targets apply to the last one"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each structure")
    parser.add_argument("--trace", type=Path, help="recorded rollouts to measure in addition")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, possibly compressed with gzip")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.tokens.split(",")]
    data: dict[str, Callable[[int], Iterator[Problem]]] = {"synthetic": lambda size: synthetic(templated, size)}
    if options.trace is not None:
        trajectories = read_trace(options.trace, load_tokenizer(options.tokenizer))
        groups = [
            [segment.tokens for trajectory in group for segment in trajectory.segments if segment.generated]
            for group in by_problem(trajectories).values()
        ]
        data["recorded"] = lambda size: recorded(groups, size)
    results = Results()
    for size in sizes:
        for name, problems in data.items():
            costs = compare(
                lambda problems=problems, size=size: problems(size), build_only=False, rounds=options.rounds
            )
            results.add_all(costs, f"{name}, {size / 1e6:g}M tokens", has_targets=size == sizes[-1])
    for name, make in WORST_CASES.items():
        costs = compare(lambda make=make: synthetic(make, sizes[0]), build_only=True, rounds=options.rounds)
        results.add_ratio(f"bulk build, {name}", costs, lambda round_costs: round_costs.build, ">=", 5)
    report(options.json, results.figures, ratios=results.ratios, batches_ms=results.batches_ms)


if __name__ == "__main__":
    main()
