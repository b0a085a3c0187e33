"""The simulation of a job: several training steps on several engines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.rollout_bench.accelerators import Accelerator
from benchmarks.rollout_bench.drafters import IndexDrafter
from benchmarks.rollout_bench.engine import (
    DEFAULT_NOISE,
    Drafter,
    EngineSettings,
    EngineText,
    FinishedTurn,
    HostTime,
    Noise,
    Rollout,
    SimulatedEngine,
    Totals,
    TurnEnd,
)
from benchmarks.rollout_bench.workload import Job, TrainingStep
from benchmarks.traces import Tokens
from rollout_api.length_stats import LengthStats
from rollout_head.coordinator.scheduler import EngineLoad, ProbeThenLongest, WaitingRequest
from rollout_store.history.remaining_length import remaining_quantiles
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS
from rollout_worker.policy.das.policies import LENGTH_QUANTILES

_FULL_ENGINE = EngineLoad("full", 1 << 30, 1 << 30, 0)
"""With it, the scheduler does not assign more rollouts to other engines than they can run."""


class DrafterInputs(NamedTuple):
    """What a drafter is created from."""

    text: EngineText
    clock: Callable[[], float]
    lengths: KnownLengths
    accelerator: Accelerator
    max_tokens: int
    shared_index: SuffixIndex | None
    """The index of all engines, if the method has one."""


@dataclass(frozen=True)
class Method:
    """A way to produce the rollouts of a training step."""

    make_drafter: Callable[[DrafterInputs], Drafter] | None = None
    """Creates the drafter of an engine; None: nothing is drafted."""
    max_draft: int = 0
    host_s: HostTime = lambda requests, reads_prompts: 0.0
    """See :class:`EngineSettings`."""
    piecewise: bool = False
    knows_acceptance: bool = False
    longest_first: bool = False
    """Whether rollouts start in the order of this project's jobs (a sample of each group, then the longest expected
    first) instead of in the order of arrival."""
    shares_history: bool = False
    """Whether engines draft from finished rollouts of other engines."""
    has_shared_index: bool = False
    """Whether all engines use one index, with the rollouts that are running."""
    forgets_history: bool = False
    """Whether the history ends with each training step."""
    uses_rollouts: bool = True
    """Whether finished rollouts become history; otherwise only those that are sampled ahead."""
    chunk_tokens: int = 0
    """Number of tokens after which a rollout may continue on any engine, at no cost; 0: never."""
    runs_ahead: bool = False
    """Whether engines without rollouts sample drafts for the next training step."""
    runs_copies: bool = False
    """Whether engines without rollouts run copies of others' rollouts, so that the faster one counts."""


class KnownLengths:
    """The lengths of all rollouts that have finished.

    Those of an engine (:mod:`rollout_store.history.known_lengths`) leave its window, and the statistics of all problems
    follow each rollout. Here they change at the end of a training step, as they did when the results were computed.
    """

    def __init__(self) -> None:
        self._lengths: defaultdict[str, list[tuple[int, int, bool]]] = defaultdict(list)
        self._stats: dict[str, LengthStats] = {}
        self._overall = LengthStats.from_lengths([])

    def of_problem(self, problem: str) -> LengthStats:
        """Return the statistics of one problem."""
        if problem not in self._stats:
            self._stats[problem] = LengthStats.from_lengths(self._lengths[problem])
        return self._stats[problem]

    def overall(self) -> LengthStats:
        """Return the statistics of all rollouts of earlier training steps."""
        return self._overall

    def expected(self, problem: str) -> float:
        """Return the expected length of a problem's rollouts; of all rollouts if it has none."""
        stats = self.of_problem(problem)
        return stats.mean if stats.count else self._overall.mean

    def add(self, problem: str, step: int, length: int) -> None:
        """Record a rollout that has finished."""
        self._lengths[problem].append((step, length, False))
        self._stats.pop(problem, None)

    def end_step(self) -> None:
        """Include the rollouts of a training step in the overall statistics."""
        self._overall = LengthStats.from_lengths(length for lengths in self._lengths.values() for length in lengths)


class RolloutQueue:
    """The rollouts of a training step that have not started."""

    def __init__(self, step: TrainingStep, number: int, lengths: KnownLengths, *, longest_first: bool) -> None:
        self._scheduler = ProbeThenLongest()
        self._rollouts: dict[tuple[str, int], Rollout] = {}
        self._lengths, self._longest_first = lengths, longest_first
        self._problems: dict[str, str] = {}
        self._arrivals: dict[str, int] = {}
        self._names: dict[str, tuple[str, int]] = {}
        for group in step.groups:
            rollouts = [Rollout(f"{number}/{group.problem}/{i}", one) for i, one in enumerate(group.rollouts)]
            # Rollouts that start in the order of arrival are scheduled separately.
            parts = [rollouts] if longest_first else [[rollout] for rollout in rollouts]
            for part in parts:
                request = f"{group.problem}#{len(self._problems)}"
                self._problems[request] = group.problem
                self._arrivals[request] = len(self._arrivals)
                for sample, rollout in enumerate(part):
                    rollout.start_turn()
                    self._rollouts[request, sample] = rollout
                    self._names[rollout.id] = request, sample
                self._add(request, list(range(len(part))), probed=not longest_first)

    def _add(self, request: str, samples: list[int], *, probed: bool) -> None:
        waiting = WaitingRequest(request, "client", samples, self._arrivals[request], probed=probed)
        if self._longest_first:
            waiting.predicted_length = self._lengths.expected(self._problems[request])
        self._scheduler.add(waiting)

    def __len__(self) -> int:
        return self._scheduler.waiting()

    def update_prediction(self, problem: str) -> None:
        """Predict the lengths of a problem's waiting rollouts again."""
        if self._longest_first:
            for waiting in list(self._scheduler.requests()):
                if self._problems[waiting.request_id] == problem:
                    self._scheduler.predict(waiting.group, self._lengths.expected(problem))

    def take(self, engine: str, running: Collection[Rollout]) -> Rollout:
        """Remove and return the next rollout for an engine, given those that it runs."""
        requests = Counter(self._names[rollout.id][0] for rollout in running if rollout.id in self._names)
        load = EngineLoad(engine, len(running) + 1, len(running), 0, siblings=requests)
        [placed] = self._scheduler.place([load, _FULL_ENGINE], frozenset(), frozenset(), newest_version=0)
        return self._rollouts.pop((placed.request_id, placed.sample))

    def put_back(self, rollout: Rollout) -> None:
        """Return a rollout that has begun."""
        request, sample = self._names[rollout.id]
        self._rollouts[request, sample] = rollout
        self._add(request, [sample], probed=True)


@dataclass
class StepResult:
    """The result of one simulated training step."""

    epoch: int
    block: int
    seconds: float
    """The makespan."""
    ends: list[float] = field(default_factory=list)
    """When each rollout ended, in simulated seconds, ascending."""
    tokens: int = 0
    engine_steps: int = 0
    rollout_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    run_ahead_tokens: int = 0


class JobSimulation:
    """Simulates a job with one method."""

    def __init__(
        self,
        job: Job,
        method: Method,
        accelerator: Accelerator,
        *,
        engines: int,
        batch: int,
        noise: Noise = DEFAULT_NOISE,
        seed: int = 1,
    ) -> None:
        """Prepare the simulation.

        Args:
            job: the training steps.
            method: how rollouts are drafted for and scheduled.
            accelerator: the GPUs of each engine.
            engines: number of engines.
            batch: maximum number of rollouts that run at a time on all engines together, spread evenly.
            noise: how the durations of steps vary.
            seed: of the noise.
        """
        self._job, self._method, self._accelerator = job, method, accelerator
        self._lengths = KnownLengths()
        self._shared_index = SuffixIndex(pool_tokens=POOL_TOKENS) if method.has_shared_index else None
        make_drafter = None if method.make_drafter is None else partial(self._make_drafter, method.make_drafter)
        self._engines = [
            SimulatedEngine(
                EngineSettings(
                    batch // engines + (number < batch % engines),
                    method.host_s,
                    method.piecewise,
                    method.max_draft,
                    method.knows_acceptance,
                ),
                accelerator,
                make_drafter,
                max_tokens=job.longest_context,
                noise=noise,
                seed=seed + number,
            )
            for number in range(engines)
        ]
        self._run_ahead: defaultdict[str, int] = defaultdict(int)
        """Number of rollouts that were sampled ahead, by problem."""

    def _make_drafter(
        self, make: Callable[[DrafterInputs], Drafter], text: EngineText, engine: SimulatedEngine
    ) -> Drafter:
        return make(
            DrafterInputs(
                text,
                lambda: engine.total_s,
                self._lengths,
                self._accelerator,
                self._job.max_tokens,
                self._shared_index,
            )
        )

    def run(self) -> Iterator[StepResult]:
        """Simulate the training steps one after the other."""
        for number in range(len(self._job.steps)):
            yield self._run_step(number)

    def _run_step(self, number: int) -> StepResult:
        step, method = self._job.steps[number], self._method
        queue = RolloutQueue(step, number, self._lengths, longest_first=method.longest_first)
        result = StepResult(step.epoch, step.block, 0.0)
        for engine in self._engines:
            engine.clock, engine.totals = 0.0, Totals()
            if isinstance(engine.drafter, IndexDrafter):
                engine.drafter.set_generation(number)
        left = step.num_rollouts
        chunk_starts: dict[str, int] = {}
        while left:
            self._start_rollouts(queue, chunk_starts)
            if method.runs_ahead and not len(queue):
                self._start_spares(number)
            if method.runs_copies and not len(queue):
                self._start_copies()
            busy = [engine for engine in self._engines if engine.is_busy]
            engine = min(busy, key=lambda one: one.clock)
            for end in engine.step():
                left -= self._end_turn(end, engine, number, queue, result)
            if method.chunk_tokens:
                self._divide(engine, queue, chunk_starts)
        self._end_step(number)
        result.seconds = max(result.ends)
        result.ends.sort()
        for engine in self._engines:
            result.tokens += engine.totals.tokens
            result.engine_steps += engine.totals.steps
            result.rollout_steps += engine.totals.rollout_steps
            result.drafted += engine.totals.drafted
            result.accepted += engine.totals.accepted
            result.preempted += engine.totals.preempted
        return result

    def _start_rollouts(self, queue: RolloutQueue, chunk_starts: dict[str, int]) -> None:
        while len(queue):
            free = [engine for engine in self._engines if engine.num_free]
            if not free:
                return
            earliest = min((engine.clock for engine in self._engines if engine.is_busy), default=0.0)
            # An engine whose clock is ahead of the others takes what they leave.
            engine = min(free, key=lambda one: (max(one.clock, earliest), one.num_assigned))
            if engine.is_busy and engine.clock > earliest:
                return
            engine.clock = max(engine.clock, earliest) if not engine.is_busy else engine.clock
            rollout = queue.take(str(self._engines.index(engine)), engine.running)
            has_begun = rollout.id in chunk_starts
            chunk_starts[rollout.id] = rollout.generated
            engine.start(rollout, has_cached_context=has_begun)

    def _end_turn(
        self, end: TurnEnd, engine: SimulatedEngine, number: int, queue: RolloutQueue, result: StepResult
    ) -> int:
        """Make a turn history, and return the number of rollouts of the training step that have ended."""
        rollout = end.rollout
        self._add_to_history(rollout, end.tokens, end.context, engine, number)
        if rollout.is_spare:
            result.run_ahead_tokens += len(end.tokens)
            return 0
        if not end.is_last:
            return 0
        self._stop_twin(rollout)
        self._lengths.add(rollout.problem, number, rollout.generated)
        queue.update_prediction(rollout.problem)
        result.ends.append(engine.clock)
        return 1

    def _add_to_history(
        self, rollout: Rollout, tokens: Tokens, context: Tokens, engine: SimulatedEngine, number: int
    ) -> None:
        if not self._method.uses_rollouts and not rollout.is_spare:
            return
        turn = FinishedTurn(
            f"{rollout.id}@{len(context)}", rollout.problem, rollout.trajectory.prompt, context, tokens, number
        )
        if self._shared_index is not None:
            self._shared_index.add(turn.problem, [(turn.rollout, turn.step, turn.tokens, turn.context)])
            return
        for other in self._engines:
            if other.drafter is not None and (other is engine or self._method.shares_history):
                other.drafter.add(turn, is_own=other is engine)

    def _start_spares(self, number: int) -> None:
        """Sample drafts for the next training step on engines that have nothing else to do."""
        if number + 1 == len(self._job.steps):
            return
        epoch = self._job.steps[number].epoch
        problems = [group.problem for group in self._job.steps[number + 1].groups]
        now = min((engine.clock for engine in self._engines if engine.is_busy), default=0.0)
        for engine in self._engines:
            if any(not rollout.is_spare for rollout in engine.running):
                continue
            while engine.num_free:
                problem = min(problems, key=lambda name: self._run_ahead[f"{number}/{name}"])
                sample = self._run_ahead[f"{number}/{problem}"]
                spares = self._job.spares.get((problem, epoch), ())
                if sample >= len(spares):
                    break
                self._run_ahead[f"{number}/{problem}"] += 1
                rollout = Rollout(f"{number}/{problem}/spare {sample}", spares[sample], is_spare=True)
                rollout.start_turn()
                if not engine.is_busy:
                    engine.clock = max(engine.clock, now)
                engine.start(rollout)

    def _start_copies(self) -> None:
        """Let each engine without rollouts run a copy of the rollout that is expected to run longest."""
        running = [rollout for engine in self._engines for rollout in engine.running]
        copied = {rollout.id for rollout in running if rollout.is_copy}
        now = min((engine.clock for engine in self._engines if engine.is_busy), default=0.0)
        for engine in self._engines:
            candidates = [one for one in running if one.id not in copied and not one.is_copy]
            if engine.is_busy or not candidates:
                continue
            rollout = max(candidates, key=self._expected_remaining)
            copied.add(rollout.id)
            engine.clock = max(engine.clock, now)
            engine.start(rollout.copy())

    def _stop_twin(self, rollout: Rollout) -> None:
        """Stop the copy of a rollout that has ended, or the original of a copy that has."""
        for engine in self._engines:
            for other in engine.running:
                if other.id == rollout.id:
                    engine.remove(other)

    def _stop_spares(self, engine: SimulatedEngine, number: int) -> None:
        """Stop what an engine samples ahead, and keep its tokens so far."""
        for rollout in engine.running:
            if rollout.is_spare:
                tokens = rollout.turn[: rollout.position]
                engine.remove(rollout)
                if len(tokens):
                    self._add_to_history(rollout, tokens, rollout.context, engine, number)

    def _divide(self, engine: SimulatedEngine, queue: RolloutQueue, chunk_starts: dict[str, int]) -> None:
        """Let rollouts that have completed a chunk continue where there is room."""
        for rollout in engine.running:
            if rollout.generated - chunk_starts[rollout.id] < self._method.chunk_tokens:
                continue
            if len(queue):
                engine.remove(rollout)
                queue.put_back(rollout)
                continue
            target = min(self._engines, key=lambda one: one.num_assigned)
            chunk_starts[rollout.id] = rollout.generated
            if engine.num_assigned - target.num_assigned >= 2:
                engine.remove(rollout)
                target.clock = max(target.clock, engine.clock)
                target.start(rollout, has_cached_context=True)

    def _expected_remaining(self, rollout: Rollout) -> float:
        stats = self._lengths.of_problem(rollout.problem)
        max_tokens = max(self._job.max_tokens, rollout.generated + 1)
        quantiles = remaining_quantiles(
            stats, generated=rollout.generated, max_tokens=max_tokens, count=LENGTH_QUANTILES
        )
        return float(np.mean(quantiles))

    def _end_step(self, number: int) -> None:
        for engine in self._engines:
            self._stop_spares(engine, number)
        self._lengths.end_step()
        if self._shared_index is not None and self._method.forgets_history:
            for problem in self._shared_index.problems():
                self._shared_index.drop_problem(problem)
