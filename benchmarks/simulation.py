"""Simulation of one training step: recorded rollouts, the real drafters and draft policies, and a cost model.

Each engine decodes its batch in verification steps as in :mod:`benchmarks.replay`; a :class:`StepCost` gives the
duration of each. Tokens of prompts and environments are processed in the next step at the cost of one verified token
each. An engine holds a limited number of tokens in its KV cache. When the limit is exceeded, the rollout that started
last is preempted, and its whole context is processed again later, as in vLLM.

Not simulated: the drafter's own time, the fitting of the cost model, the governor and the idle backoff. The policies
are given the exact cost model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from benchmarks.problems import Problem
from benchmarks.replay import (
    Draft,
    ReplayDrafter,
    ReplayedRollout,
    count_accepted,
    start_next_turn,
    truncate_at_end_of_turn,
)
from benchmarks.suffix_drafters import SuffixIndexDrafter
from benchmarks.traces import Trajectory
from rollout_api.length_stats import LengthStats
from rollout_worker.job.coordinator.scheduler import EngineLoad, ProbeThenLongest, WaitingGroup
from rollout_worker.policy.draft_policy import DraftPolicy, QueueState
from rollout_worker.policy.rebalance import HANDOVER_S, PlacedRollout, plan_rebalancing
from rollout_worker.policy.remaining_length import remaining_quantiles
from rollout_worker.policy.rollout_table import LENGTH_QUANTILES
from rollout_worker.policy.step_cost import StepCost

MIGRATION_INTERVAL_S = 2.0
"""Simulated seconds between two decisions about migrations."""


class Hardware(NamedTuple):
    """The simulated engines' cost model and cache size."""

    cost: StepCost
    kv_tokens: int
    """Capacity of an engine's KV cache, in tokens."""


class KnownLengths:
    """The lengths of history rollouts and of the rollouts of this step that have finished."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._lengths = {
            problem.name: [(0, total_tokens(rollout), False) for rollout in problem.history] for problem in problems
        }
        self._stats: dict[str, LengthStats] = {}
        self._overall: LengthStats | None = None

    def of_problem(self, problem: str) -> LengthStats:
        """Return the statistics of one problem."""
        if problem not in self._stats:
            self._stats[problem] = LengthStats.from_lengths(self._lengths[problem])
        return self._stats[problem]

    def overall(self) -> LengthStats:
        """Return the statistics of all rollouts that were known when this was first called."""
        if self._overall is None:
            self._overall = LengthStats.from_lengths(length for lengths in self._lengths.values() for length in lengths)
        return self._overall

    def reveal(self, name: str, length: int) -> None:
        """Make the true length of one rollout available under *name*, as if the rollout were a problem."""
        self._stats[name] = LengthStats.from_lengths([(0, length, False)])

    def add(self, problem: str, length: int) -> None:
        """Record a rollout of this step that has finished."""
        self._lengths[problem].append((1, length, False))
        self._stats.pop(problem, None)


def total_tokens(trajectory: Trajectory) -> int:
    """Return the tokens that an engine samples for a trajectory, including one end-of-turn token per turn."""
    return trajectory.generated + sum(segment.generated for segment in trajectory.segments)


@dataclass(frozen=True)
class Mode:
    """A way to produce the rollouts of a training step."""

    drafter: Callable[[], ReplayDrafter] | None
    """Creates the drafter of one engine; None: nothing is drafted."""
    policy: Callable[[KnownLengths], DraftPolicy] | None = None
    """Creates the draft policy of one engine, which needs a :class:`SuffixIndexDrafter`; None: the drafter decides,
    within *budget*."""
    budget: int = 0
    """Maximum tokens of a draft without a policy."""
    longest_first: bool = True
    """Whether rollouts start in the order of a job (a probe of each group, then the longest expected first) instead of
    in the order of arrival."""
    knows_lengths: bool = False
    """Whether scheduler and policy know the true length of every rollout."""
    knows_acceptance: bool = False
    """Whether only those draft tokens are verified that will be accepted."""
    migrates: bool = False
    """Whether rollouts migrate between engines at the end of the step."""


@dataclass
class SimulatedStep:
    """The result of one simulated training step."""

    seconds: float = 0.0
    """The makespan."""
    tokens: int = 0
    """Sampled tokens."""
    verifications: int = 0
    """Verification steps of all engines."""
    rollout_steps: int = 0
    """Verification steps, counted once per running rollout."""
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    migrated: int = 0
    survivals: list[float] = field(default_factory=list)
    """The predicted survival of each draft token; recorded only if the mode knows the lengths."""
    survived: list[bool] = field(default_factory=list)
    """For each of :attr:`survivals`, whether the token was reached and accepted."""
    ends: list[float] = field(default_factory=list)
    """The time at which each rollout finished, in simulated seconds."""

    @property
    def accepted_per_step(self) -> float:
        """Accepted draft tokens per verification step of a rollout."""
        return self.accepted / max(self.rollout_steps, 1)

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens per verification step of a rollout."""
        return self.drafted / max(self.rollout_steps, 1)


class MeasuredSurvival:
    """Maps predicted survival to the survival that was measured in an earlier simulation of the same step."""

    def __init__(self, step: SimulatedStep) -> None:
        predicted, inverse = np.unique(np.array(step.survivals), return_inverse=True)
        counts = np.bincount(inverse)
        measured = np.bincount(inverse, weights=np.array(step.survived, dtype=np.float64)) / counts
        self._predicted = predicted
        self._measured = isotonic_regression(measured, weights=counts).x

    def thresholds(self, min_survivals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the lowest predicted survival whose measured survival is at least *min_survivals*; 1 if none is."""
        index = np.searchsorted(self._measured, min_survivals)
        last = len(self._predicted) - 1
        return np.where(index <= last, self._predicted[np.minimum(index, last)], 1.0)


class _Rollout(ReplayedRollout):
    """A replayed rollout with its state on an engine."""

    key = 0
    problem = ""
    """The name under which the policy finds its length statistics."""
    row = 0
    """The policy's handle."""
    context = 0
    """Tokens in the KV cache, including those that are processed in the next step."""
    unprocessed = 0
    """Tokens to process in the next step; nothing is drafted in that step."""


@dataclass
class _Engine:
    drafter: ReplayDrafter | None
    policy: DraftPolicy | None
    clock: float = 0.0
    """Simulated seconds since the start of the training step."""
    running: list[_Rollout] = field(default_factory=list)
    """In the order in which they started."""
    preempted: deque[_Rollout] = field(default_factory=deque)


class _Queue:
    """The rollouts that have not started."""

    def __init__(self, problems: Sequence[Problem], mode: Mode, lengths: KnownLengths) -> None:
        self._scheduler = ProbeThenLongest()
        self._rollouts: dict[tuple[str, int], Trajectory] = {}
        self._lengths, self._mode = lengths, mode
        self._expected_tokens: float | None = None
        arrival = 0
        # Rollouts are scheduled separately if their lengths are known, or if they start in the order of arrival.
        separate = mode.knows_lengths or not mode.longest_first
        for problem in problems:
            groups = [[rollout] for rollout in problem.evaluated] if separate else [list(problem.evaluated)]
            for rollouts in groups:
                request = f"{problem.name}/{arrival}"
                for sample, rollout in enumerate(rollouts):
                    self._rollouts[request, sample] = rollout
                group = WaitingGroup(request, "client", list(range(len(rollouts))), arrival, probed=separate)
                if mode.longest_first:
                    group.predicted = (
                        total_tokens(rollouts[0]) if mode.knows_lengths else lengths.of_problem(problem.name).mean
                    )
                self._scheduler.add(group)
                arrival += 1

    def __len__(self) -> int:
        return self._scheduler.waiting()

    def expected_tokens(self) -> float:
        """Return the expected total length of all waiting rollouts."""
        if self._expected_tokens is None:
            self._expected_tokens = float(
                sum(self._expected_length(group) * len(group.samples) for group in self._scheduler.groups())
            )
        return self._expected_tokens

    def _expected_length(self, group: WaitingGroup) -> float:
        if self._mode.knows_lengths:
            return group.predicted
        return self._lengths.of_problem(_problem_of(group.request_id)).mean

    def update_prediction(self, problem: str) -> None:
        """Predict the lengths of a problem's waiting rollouts again, after one of its rollouts has finished."""
        self._expected_tokens = None
        if self._mode.longest_first and not self._mode.knows_lengths:
            for group in list(self._scheduler.groups()):
                if _problem_of(group.request_id) == problem:
                    self._scheduler.predict(group.request_id, self._lengths.of_problem(problem).mean)

    def take(self, engine: int, max_running: int, assigned: int) -> list[Trajectory]:
        """Remove and return the rollouts that an engine which runs *assigned* of at most *max_running* starts now."""
        loads = [EngineLoad(str(engine), max_running, assigned, 0)]
        taken: list[Trajectory] = []
        self._expected_tokens = None
        while len(taken) + assigned < max_running and len(self):
            placed = self._scheduler.place(loads, frozenset(), frozenset())
            if not placed:
                break
            taken += [self._rollouts.pop((placement.request_id, placement.sample)) for placement in placed]
            loads = [EngineLoad(str(engine), max_running, assigned + len(taken), 0)]
        return taken


def _problem_of(request: str) -> str:
    return request.rpartition("/")[0]


class Simulation:
    """The simulation of one training step in one mode."""

    def __init__(
        self,
        problems: Sequence[Problem],
        mode: Mode,
        hardware: Hardware,
        *,
        engines: int,
        batch: int,
        measured: MeasuredSurvival | None = None,
    ) -> None:
        """Prepare the simulation of all evaluated rollouts of *problems*.

        Args:
            problems: the problems of the step, with their history.
            mode: drafter, policy and scheduling.
            hardware: the cost model and cache size of each engine.
            engines: number of engines.
            batch: maximum number of rollouts that run at a time on all engines together, spread evenly.
            measured: if given, the policy's survival thresholds refer to measured instead of predicted survival.
        """
        self._mode, self._hardware, self._measured = mode, hardware, measured
        self._next_migration_s = 0.0
        self._max_running = [batch // engines + (number < batch % engines) for number in range(engines)]
        self._lengths = KnownLengths(problems)
        # Jobs set maxTokens; no recorded rollout is longer than this.
        self._max_tokens = max(
            total_tokens(rollout) for problem in problems for rollout in (*problem.history, *problem.evaluated)
        )
        self._engines = [
            _Engine(
                mode.drafter() if mode.drafter is not None else None,
                mode.policy(self._lengths) if mode.policy is not None else None,
            )
            for _ in range(engines)
        ]
        for engine in self._engines:
            if engine.drafter is not None:
                for problem in problems:
                    for rollout in problem.history:
                        engine.drafter.add_history(rollout)
        drafters = [engine.drafter for engine in self._engines if isinstance(engine.drafter, SuffixIndexDrafter)]
        for drafter in drafters:
            drafter.other_engines = [other for other in drafters if other is not drafter]
        self._queue = _Queue(problems, mode, self._lengths)
        self._started = 0
        self._step = SimulatedStep()

    def run(self) -> SimulatedStep:
        """Simulate until all rollouts have finished."""
        while True:
            for number, engine in enumerate(self._engines):
                self._start_rollouts(number, engine)
            busy = [engine for engine in self._engines if engine.running]
            if not busy:
                return self._step
            self._verify(min(busy, key=lambda engine: engine.clock))
            now = min(engine.clock for engine in busy)
            if self._mode.migrates and not len(self._queue) and self._next_migration_s <= now:
                self._next_migration_s = now + MIGRATION_INTERVAL_S
                self._migrate(now)

    def _start_rollouts(self, number: int, engine: _Engine) -> None:
        max_running = self._max_running[number]
        while (
            engine.preempted and len(engine.running) < max_running and self._fits(engine, engine.preempted[0].context)
        ):
            rollout = engine.preempted.popleft()
            rollout.unprocessed += rollout.context
            engine.running.append(rollout)
        if len(engine.running) >= max_running or not len(self._queue):
            return
        earliest = min((other.clock for other in self._engines if other.running), default=engine.clock)
        if engine.running and engine.clock > earliest:
            return  # Engines whose clocks are behind take rollouts first.
        for trajectory in self._queue.take(number, max_running, len(engine.running)):
            rollout = _Rollout(trajectory)
            rollout.key, self._started = self._started, self._started + 1
            rollout.problem = trajectory.problem
            rollout.unprocessed = rollout.context = len(trajectory.prompt)
            if engine.drafter is not None:
                engine.drafter.open(rollout.key, trajectory.problem, trajectory.prompt)
            self._start_turn(engine, rollout)
            if engine.policy is not None:
                if self._mode.knows_lengths:
                    rollout.problem = f"rollout {rollout.key}"
                    self._lengths.reveal(rollout.problem, total_tokens(trajectory))
                rollout.row = self._open_in_policy(engine.policy, rollout, 0)
            engine.running.append(rollout)

    def _open_in_policy(self, policy: DraftPolicy, rollout: _Rollout, generated: int) -> int:
        prompt = len(rollout.trajectory.prompt)
        return policy.open(rollout.problem, prompt_tokens=prompt, generated=generated, max_tokens=self._max_tokens)

    def _migrate(self, now: float) -> None:
        """Migrate single-turn rollouts from busy to idle engines where that shortens the makespan."""
        tokens_per_step = 1 + self._step.accepted_per_step
        running = {
            str(number): [
                PlacedRollout(
                    (str(rollout.key), 0), rollout.context, self._expected_remaining(rollout) / tokens_per_step
                )
                for rollout in engine.running
            ]
            for number, engine in enumerate(self._engines)
        }
        rollouts = {str(rollout.key): rollout for engine in self._engines for rollout in engine.running}
        movable = {(key, 0) for key, rollout in rollouts.items() if len(rollout.trajectory.segments) == 1}
        for migration in plan_rebalancing(running, self._hardware.cost, movable=movable):
            rollout = rollouts[migration.key[0]]
            source, target = (self._engines[int(number)] for number in (migration.source, migration.target))
            source.running.remove(rollout)
            target.running.append(rollout)
            target.clock = max(target.clock, now + HANDOVER_S)
            rollout.unprocessed = rollout.context
            if isinstance(source.drafter, SuffixIndexDrafter) and isinstance(target.drafter, SuffixIndexDrafter):
                source.drafter.discard(rollout.key)
                target.drafter.open(rollout.key, rollout.trajectory.problem, rollout.trajectory.prompt)
                target.drafter.add_sampled_tokens(rollout.key, rollout.tokens[: rollout.position])
            if source.policy is not None and target.policy is not None:
                source.policy.close(rollout.row)
                rollout.row = self._open_in_policy(target.policy, rollout, rollout.position)
            self._step.migrated += 1

    def _expected_remaining(self, rollout: _Rollout) -> float:
        generated = rollout.context - len(rollout.trajectory.prompt)
        stats = self._lengths.of_problem(rollout.problem)
        max_tokens = max(self._max_tokens, generated + 1)
        return float(
            remaining_quantiles(stats, generated=generated, max_tokens=max_tokens, count=LENGTH_QUANTILES).mean()
        )

    def _fits(self, engine: _Engine, additional: int = 0) -> bool:
        """Return whether *additional* tokens fit into the KV cache; an engine always runs at least one rollout."""
        used = sum(rollout.context for rollout in engine.running)
        return used + additional <= self._hardware.kv_tokens or not engine.running

    def _start_turn(self, engine: _Engine, rollout: _Rollout) -> None:
        environment_tokens = start_next_turn(engine.drafter, rollout.key, rollout)
        rollout.unprocessed += environment_tokens
        rollout.context += environment_tokens

    def _verify(self, engine: _Engine) -> None:
        """Simulate one verification step of an engine."""
        while not self._fits(engine):
            engine.preempted.appendleft(engine.running.pop())
            self._step.preempted += 1
        drafts = self._drafts(engine)
        tokens = sum(rollout.unprocessed or 1 + len(drafts.get(rollout.key, ())) for rollout in engine.running)
        context = sum(rollout.context for rollout in engine.running)
        engine.clock += self._hardware.cost.step_time(tokens, context, has_drafts=any(map(len, drafts.values())))
        self._step.verifications += 1
        self._step.rollout_steps += len(engine.running)
        for rollout in list(engine.running):
            draft = drafts.get(rollout.key, ())
            accepted = count_accepted(Draft(draft, ()), rollout)
            self._step.drafted += len(draft)
            self._step.accepted += accepted
            self._sample(engine, rollout, accepted, len(draft))

    def _drafts(self, engine: _Engine) -> Mapping[int, Sequence[int]]:
        """Return draft tokens by key; rollouts that still have tokens to process get none."""
        drafting = [rollout for rollout in engine.running if not rollout.unprocessed]
        if engine.drafter is None or not drafting:
            return {}
        keys = [rollout.key for rollout in drafting]
        if engine.policy is None:
            drafts = engine.drafter.draft(keys, [self._mode.budget] * len(keys))
        else:
            drafts = self._drafts_by_policy(engine, engine.policy, drafting)
        tokens = {}
        for rollout, draft in zip(drafting, drafts, strict=True):
            draft = truncate_at_end_of_turn(draft)
            accepted = count_accepted(draft, rollout)
            if self._mode.knows_lengths and not self._mode.knows_acceptance and self._measured is None:
                self._step.survivals += accumulate(draft.probabilities, mul)
                self._step.survived += [position < accepted for position in range(len(draft.tokens))]
            tokens[rollout.key] = draft.tokens[:accepted] if self._mode.knows_acceptance else draft.tokens
        return tokens

    def _drafts_by_policy(self, engine: _Engine, policy: DraftPolicy, drafting: Sequence[_Rollout]) -> Sequence[Draft]:
        if not isinstance(engine.drafter, SuffixIndexDrafter):
            raise TypeError(f"{type(engine.drafter).__name__} takes no survival thresholds and cannot have a policy")
        queue = QueueState(0, 0.0)
        if len(self._queue):
            share = len(engine.running) / sum(len(other.running) for other in self._engines)
            queue = QueueState(max(1, round(len(self._queue) * share)), self._queue.expected_tokens() * share)
        rows = np.array([rollout.row for rollout in drafting])
        budgets = policy.compute_budgets(rows, self._hardware.cost, queue)
        survivals = budgets.min_survivals
        if self._measured is not None:
            survivals = self._measured.thresholds(survivals)
        keys = [rollout.key for rollout in drafting]
        return engine.drafter.draft(keys, budgets.tokens.tolist(), survivals.tolist())

    def _sample(self, engine: _Engine, rollout: _Rollout, accepted: int, drafted: int) -> None:
        """Advance a rollout by its accepted draft tokens and one more token."""
        sampled = rollout.tokens[rollout.position : rollout.position + accepted + 1]
        rollout.unprocessed = 0
        rollout.position += len(sampled)
        rollout.context += len(sampled)
        self._step.tokens += len(sampled)
        if engine.drafter is not None:
            engine.drafter.add_sampled_tokens(rollout.key, sampled)
        if engine.policy is not None:
            engine.policy.advance(np.array([rollout.row]), np.array([len(sampled)]), np.array([drafted]))
        if rollout.position >= len(rollout.tokens):
            self._start_turn(engine, rollout)
        if rollout.finished:
            self._finish(engine, rollout)

    def _finish(self, engine: _Engine, rollout: _Rollout) -> None:
        engine.running.remove(rollout)
        if engine.drafter is not None:
            engine.drafter.close(rollout.key)
        if engine.policy is not None:
            engine.policy.close(rollout.row)
        self._lengths.add(rollout.trajectory.problem, total_tokens(rollout.trajectory))
        self._queue.update_prediction(rollout.trajectory.problem)
        self._step.ends.append(engine.clock)
        self._step.seconds = max(self._step.seconds, engine.clock)
