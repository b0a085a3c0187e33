"""Costs of the suffix index, beside arctic-inference's suffix tree with the same data.

    python -m benchmarks.index --json FILE

Each drafter and each data set has a process of its own. Synthetic are problems of eight rollouts of 2,000 tokens, three
fifths of them from a template that they share, or worst cases; ``--trace`` adds recorded text, repeated under other
problems until there is enough. The peer is a tree of depth 64 for each problem, as ours are scoped by problem, too.
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
from typing import Any

import numpy as np
import psutil

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.suffix_drafters import PEER, signed, suffix_tree
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

Problem = list[Tokens]
"""Its rollouts."""


def words(rng: np.random.Generator, count: int) -> Tokens:
    """Token ids, few of them frequent, as in text."""
    return (float(VOCABULARY) ** rng.random(count) - 1).astype(np.uint32)


def templated(rng: np.random.Generator, rollouts: int = ROLLOUTS) -> Problem:
    """Rollouts that share stretches of a template."""
    template = words(rng, LENGTH)
    made = []
    for _ in range(rollouts):
        tokens, at = template.copy(), 0
        while at < LENGTH:
            end = min(LENGTH, at + int(rng.integers(1, 60)))
            if rng.random() > SHARED:
                tokens[at:end] = words(rng, end - at)
            at = end
        made.append(tokens)
    return made


WORST: dict[str, Callable[[np.random.Generator], Problem]] = {
    "a constant rollout": lambda rng: [np.full(ROLLOUTS * LENGTH, 7, np.uint32)],
    "eight identical rollouts": lambda rng: [words(rng, LENGTH)] * ROLLOUTS,
    "a short loop": lambda rng: [np.resize(words(rng, 7), ROLLOUTS * LENGTH)],
}


def synthetic(make: Callable[[np.random.Generator], Problem], tokens: int) -> Iterator[Problem]:
    """Problems until there are *tokens*."""
    rng = np.random.default_rng(0)
    while tokens > 0:
        problem = make(rng)
        tokens -= sum(map(len, problem))
        yield problem


def recorded(groups: list[Problem], tokens: int) -> Iterator[Problem]:
    """Problems of a trace, again and again, until there are *tokens*."""
    for problem in cycle(groups):
        if tokens <= 0:
            return
        tokens -= sum(map(len, problem))
        yield problem


@contextmanager
def repeated(work: Callable[[], None]) -> Iterator[None]:
    """Work that another thread does again and again meanwhile."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Ours:
    """A :class:`SuffixIndex`."""

    name = "ours"

    def __init__(self, threads: int = 1) -> None:
        self.index = SuffixIndex(depth=DEPTH, threads=threads)

    def build(self, problem: str, rollouts: Problem) -> None:
        """Add all at once."""
        self.index.add(problem, [(str(number), number, tokens) for number, tokens in enumerate(rollouts)])

    def settle(self) -> None:
        """Nothing is left to do in the background."""
        self.index.settle()

    def bytes(self) -> int:
        """By its own account."""
        return self.index.bytes()

    def open(self, problem: str, context: Tokens, *, live: bool = False) -> int:
        """A running rollout that has said *context*; if *live*, its siblings and itself are to draft from it."""
        handle = self.index.open(problem, sources=SOURCES if live else ("history",))
        self.index.extend(handle, context)
        return handle

    def draft(self, handle: int) -> None:
        """One draft."""
        self.index.draft(handle, BUDGET)

    def close(self, handle: int) -> None:
        """A running rollout has ended."""
        self.index.close(handle)

    def batch(self, handles: list[int]) -> None:
        """A draft for each, in one call."""
        self.index.draft_batch(handles, [BUDGET] * len(handles))

    def append(self, handles: list[int], tokens: list[Any]) -> None:
        """What running rollouts said in a step, in one call."""
        self.index.extend_batch(handles, tokens)

    def as_taken(self, tokens: Tokens) -> Any:
        """As `append` takes them: an engine has lists of what was sampled."""
        return tokens.tolist()

    @contextmanager
    def read_meanwhile(self, contexts: list[tuple[str, Tokens]]) -> Iterator[None]:
        """Draft for siblings in another thread."""
        handles = [self.open(*contexts[place % len(contexts)], live=True) for place in range(RUNNING)]
        with repeated(lambda: self.batch(handles)):
            yield

    def remove(self, problem: str) -> None:
        """Forget the oldest rollout."""
        self.index.drop_before(problem, 1)


class AsInEngines(Ours):
    """With a foreign pool, from which all requests draft, too, as well as from what is being said."""

    name = "ours, as engines have it"

    def __init__(self) -> None:
        self.index = SuffixIndex(depth=DEPTH, threads=2, pool_tokens=POOL_TOKENS)

    def open(self, problem: str, context: Tokens, *, live: bool = False) -> int:
        """A running rollout that has said *context*."""
        return super().open(problem, context, live=True)

    def batch(self, handles: list[int]) -> None:
        """A draft for each, in one call, and two tokens that were sampled."""
        drafts = self.index.draft_batch(handles, [BUDGET] * len(handles))
        self.index.extend_batch(handles, [[*draft.tokens[:1], 0] for draft in drafts])


class Peer:
    """A tree for each problem."""

    name = PEER

    def __init__(self) -> None:
        self._trees: dict[str, Any] = {}
        self._open: list[tuple[Any, Any]] = []

    def build(self, problem: str, rollouts: Problem) -> None:
        """Add one after the other."""
        tree = self._trees[problem] = suffix_tree(DEPTH)
        for number, tokens in enumerate(rollouts):
            tree.extend_ndarray(number, signed(tokens))

    def settle(self) -> None:
        """Nothing is left to do in the background."""

    def bytes(self) -> int:
        """By its own account."""
        return sum(tree.estimate_memory() for tree in self._trees.values())

    def open(self, problem: str, context: Tokens, *, live: bool = False) -> int:
        """A running rollout that has said *context*."""
        self._open.append((self._trees[problem], signed(context)[-DEPTH:]))
        return len(self._open) - 1

    def draft(self, handle: int) -> None:
        """One draft."""
        tree, context = self._open[handle]
        tree.speculate_ndarray(context, BUDGET, 4.0, 0.0, 0.1, False)

    def close(self, _: int) -> None:
        """A running rollout has ended; it keeps nothing of it but what it said."""

    def batch(self, handles: list[int]) -> None:
        """A draft for each; it has no call for many."""
        for handle in handles:
            self.draft(handle)

    def append(self, handles: list[int], tokens: list[Any]) -> None:
        """What running rollouts said in a step; it has no call for many."""
        for handle, said in zip(handles, tokens, strict=True):
            self._open[handle][0].extend_ndarray(ROLLOUTS + handle, said)

    def as_taken(self, tokens: Tokens) -> Any:
        """As `append` takes them."""
        return signed(tokens)

    @contextmanager
    def read_meanwhile(self, contexts: list[tuple[str, Tokens]]) -> Iterator[None]:
        """Draft from trees of its own in another thread: those that are appended to are for one thread."""
        apart = Peer()
        for name, context in contexts[:RUNNING]:
            apart.build(name, [context])
        handles = [apart.open(*contexts[place % len(apart._trees)]) for place in range(RUNNING)]
        with repeated(lambda: apart.batch(handles)):
            yield

    def remove(self, problem: str) -> None:
        """Forget the oldest rollout."""
        self._trees[problem].remove(0)


@dataclass
class Costs:
    """What one drafter needed for one data set."""

    build: float
    """Tokens a second of CPU time."""
    bytes: float
    """A token, by its own account."""
    resident: float
    """A token, of the process' memory."""
    drafts: list[float]
    """Seconds of each."""
    append: float
    """Seconds a token."""
    live_bytes: float
    """A token of running rollouts, by its own account."""
    removals: list[float]
    batches: dict[int, float]
    """Median seconds, by size."""


def measure(drafter: Ours | Peer, problems: Iterator[Problem], *, whole: bool) -> Costs:
    """Build, then if *whole* use it."""
    rng = np.random.default_rng(1)
    process, seconds, tokens, resident = psutil.Process(), 0.0, 0, 0
    contexts: list[tuple[str, Tokens]] = []
    for number, rollouts in enumerate(problems):
        gc.collect(0)
        before = process.memory_info().rss
        started = time.process_time()
        drafter.build(str(number), rollouts)
        drafter.settle()
        seconds += time.process_time() - started
        resident += process.memory_info().rss - before
        tokens += sum(map(len, rollouts))
        one = rollouts[int(rng.integers(len(rollouts)))]
        at = int(rng.integers(1, len(one)))
        contexts.append((str(number), one[max(0, at - DEPTH) : at].copy()))
    held = drafter.bytes() / tokens
    costs = Costs(tokens / seconds, held, resident / tokens, [], 0.0, 0.0, [], {})
    if not whole:
        return costs
    for place in rng.integers(len(contexts), size=DRAFTS):  # of another problem each: nothing is in the caches
        handle = drafter.open(*contexts[place])
        started = time.perf_counter()
        drafter.draft(handle)
        costs.drafts.append(time.perf_counter() - started)
        drafter.close(handle)
    handles = [drafter.open(*contexts[place % len(contexts)]) for place in range(RUNNING)]
    for size in BATCHES:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            drafter.batch(handles[:size])
            times.append(time.perf_counter() - started)
        costs.batches[size] = quantile(times, 0.5)
    said = [drafter.as_taken(words(rng, 2)) for _ in range(64)]
    handles = [drafter.open(*contexts[place % len(contexts)], live=True) for place in range(RUNNING)]
    steps = [rng.permutation(len(said)).repeat(RUNNING // len(said)) for _ in range(LENGTH // 2)]
    batches = [[said[place] for place in step] for step in steps]
    with drafter.read_meanwhile(contexts):
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


def apart(work: Callable[[], Costs]) -> Costs:
    """Measured in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run(end: Connection) -> None:
        end.send(work())

    process = context.Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    try:
        costs: Costs = ours.recv()
    except EOFError:
        raise RuntimeError("a measurement ended without a result; see above") from None
    finally:
        process.join()
    return costs


def compared(problems: Callable[[], Iterator[Problem]], *, whole: bool, rounds: int) -> dict[str, list[Costs]]:
    """Both, in turn."""
    kinds: dict[str, Callable[[], Ours | Peer]] = {Ours.name: Ours, Peer.name: Peer}
    if whole:
        kinds[THREADED] = partial(Ours, threads=2)
        kinds[AsInEngines.name] = AsInEngines
    found: dict[str, list[Costs]] = {name: [] for name in kinds}
    for turn in range(rounds):
        for name in list(kinds)[:: 1 if turn % 2 else -1]:
            found[name].append(apart(lambda kind=kinds[name]: measure(kind(), problems(), whole=whole)))
    return found


THREADED = "ours, 2 threads"


def ratio(found: dict[str, list[Costs]], of: Callable[[Costs], float]) -> dict[str, float]:
    """Ours by the peer's, with its spread."""
    return spread([of(ours) / of(peer) for ours, peer in zip(found[Ours.name], found[Peer.name], strict=True)])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", default="1000000,10000000", help="of data; the last size counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, gzip or not")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(one) for one in options.tokens.split(",")]
    data: dict[str, Callable[[int], Iterator[Problem]]] = {"synthetic": lambda size: synthetic(templated, size)}
    if options.trace is not None:
        trajectories = read_trace(options.trace, load_tokenizer(options.tokenizer))
        groups = [
            [segment.tokens for one in group for segment in one.segments if segment.generated]
            for group in by_problem(trajectories).values()
        ]
        data["recorded"] = lambda size: recorded(groups, size)
    figures: list[Figure] = []
    details: dict[str, Any] = {}

    def show(name: str, found: dict[str, list[Costs]], of: Callable[[Costs], float], op: Any, target: Any) -> None:
        values = ratio(found, of)
        figures.append(Figure(name, values["median"], "times the peer's", PEER, op, target))
        details.setdefault("ratios", {})[name] = {
            **values,
            **{kind: [of(costs) for costs in found[kind]] for kind in (Ours.name, Peer.name)},
        }

    for size in sizes:
        for name, problems in data.items():
            found = compared(lambda problems=problems, size=size: problems(size), whole=True, rounds=options.rounds)
            about = f"{name}, {size / 1e6:g}M tokens"
            last = size == sizes[-1]
            show(f"bulk build, {about}", found, lambda one: one.build, ">=", 12 if last else None)
            ours = found[Ours.name][-1]
            figures.append(Figure(f"bytes a token, {about}", ours.bytes, "B", "", "<=", 10 if last else None))
            figures.append(Figure(f"resident bytes a token, {about}", ours.resident, "B", "", "<=", None))
            show(f"bytes, {about}", found, lambda one: one.bytes, "<=", None)
            for share, target in ((0.5, 1 / 4), (0.99, 1 / 10)):
                show(
                    f"draft of {BUDGET}, p{share * 100:g}, {about}",
                    found,
                    lambda one, share=share: quantile(one.drafts, share),
                    "<=",
                    target if last else None,
                )
            show(f"append, {about}", found, lambda one: one.append, "<=", 1 / 10 if last else None)
            live = spread([one.live_bytes for one in found[Ours.name]])["median"]
            figures.append(Figure(f"bytes a token that is being said, {about}", live, "B", "", "<=", None))
            show(
                f"removing the oldest rollout, p50, {about}", found, lambda one: quantile(one.removals, 0.5), "<=", None
            )
            for kind, threads in ((Ours.name, 1), (THREADED, 2)):
                for batch in BATCHES:
                    value = 1000 * spread([one.batches[batch] for one in found[kind]])["median"]
                    peer = 1000 * spread([one.batches[batch] for one in found[Peer.name]])["median"]
                    details.setdefault("batches_ms", {})[f"{batch}, {threads} threads, {about}"] = [value, peer]
                    if batch == BATCHES[-1]:
                        target = 0.5 if last and threads == 2 else None
                        name_ = f"batch of {batch}, {threads} thread{'s' * (threads > 1)}, {about}"
                        figures.append(Figure(name_, value, "ms", "", "<=", target))
            engines = found[AsInEngines.name]
            batch = spread([one.batches[BATCHES[-1]] for one in engines])["median"]
            drops = [one for costs in engines for one in costs.removals]
            for name_, value, unit, better in (
                ("bulk build", spread([one.build for one in engines])["median"] / 1e6, "M tokens/s", ">="),
                ("batch and append of 256", 1000 * batch, "ms", "<="),
                ("bytes a token", engines[-1].bytes, "B", "<="),
                ("dropping a generation of a problem, p99", 1000 * quantile(drops, 0.99), "ms", "<="),
            ):
                figures.append(Figure(f"as engines have it: {name_}, {about}", value, unit, "", better, None))
            removal = 1000 * quantile([one for costs in found[Ours.name] for one in costs.removals], 0.99)
            figures.append(
                Figure(
                    f"dropping a generation of a problem, p99, {about}", removal, "ms", "", "<=", 1 if last else None
                )
            )
    for name, make in WORST.items():
        found = compared(lambda make=make: synthetic(make, sizes[0]), whole=False, rounds=options.rounds)
        show(f"bulk build, {name}", found, lambda one: one.build, ">=", 5)
    report(options.json, figures, **details)


if __name__ == "__main__":
    main()
