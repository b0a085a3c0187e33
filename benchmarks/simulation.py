"""One training step's rollouts on simulated engines: recorded rollouts, real drafters and policies, a cost model.

Each engine decodes a batch in verification steps, as :mod:`benchmarks.replay` takes them; what a step costs comes from
a :class:`StepCost`. Prompts, and what the environment answers, cost ``c_tok`` a token in the step in which they are
read. An engine holds so many tokens of keys and values; beyond that the rollout that came last leaves the batch and is
read anew later, as vLLM preempts.
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
from benchmarks.replay import Draft, Drafter, Replayed, next_turn, passing, until_end
from benchmarks.suffix_drafters import Ours
from benchmarks.traces import Trajectory
from rollout_api.length_stats import LengthStats
from rollout_worker.job.scheduler import EngineLoad, Group, ProbeThenLongest
from rollout_worker.policy.budgets import BudgetPolicy, Waiting
from rollout_worker.policy.rebalance import HANDOVER_S, Running, rebalance
from rollout_worker.policy.remaining_length import remaining
from rollout_worker.policy.rollouts import POINTS
from rollout_worker.policy.step_cost import StepCost

LOOK_FOR_MOVES_S = 2.0


class Hardware(NamedTuple):
    """What the engines run on."""

    cost: StepCost
    kv_tokens: int
    """Tokens of keys and values that an engine holds."""


class Lengths:
    """What is known of how long rollouts are: those of the history, and of this step those that have ended."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._known = {problem.name: [(0, total_tokens(one), False) for one in problem.history] for problem in problems}
        self._stats: dict[str, LengthStats] = {}
        self._all: LengthStats | None = None

    def of(self, problem: str) -> LengthStats:
        """Of a problem's rollouts."""
        if problem not in self._stats:
            self._stats[problem] = LengthStats.of(self._known[problem])
        return self._stats[problem]

    def of_all(self) -> LengthStats:
        """Of all rollouts that the step began with."""
        if self._all is None:
            self._all = LengthStats.of(one for known in self._known.values() for one in known)
        return self._all

    def foretell(self, name: str, length: int) -> None:
        """A rollout, asked for as if it were a problem of its own, will be so long."""
        self._stats[name] = LengthStats.of([(0, length, False)])

    def add(self, problem: str, length: int) -> None:
        """A rollout of this step ended."""
        self._known[problem].append((1, length, False))
        self._stats.pop(problem, None)


def total_tokens(trajectory: Trajectory) -> int:
    """Tokens that an engine samples for a rollout: those of the model's turns, and the end of each."""
    return trajectory.generated + sum(segment.generated for segment in trajectory.segments)


@dataclass(frozen=True)
class Mode:
    """How a step's rollouts are made."""

    drafter: Callable[[], Drafter] | None
    """For each engine; None: nothing is drafted."""
    policy: Callable[[Lengths], BudgetPolicy] | None = None
    """For each engine, whose drafter is ours; None: the drafter decides, within *budget*."""
    budget: int = 0
    longest_first: bool = True
    """As a job schedules; else in the order in which they come, as vLLM does."""
    foresees: bool = False
    """What would not pass is not drafted."""
    true_lengths: bool = False
    """Policy and scheduler know how long each rollout will be."""
    moves: bool = False
    """At the end of a step rollouts of busy engines go on on idle ones, as a job lets them."""


@dataclass
class Step:
    """What became of a step."""

    seconds: float = 0.0
    """Until its last rollout ended."""
    tokens: int = 0
    verifications: int = 0
    """Verification steps of engines."""
    rollout_steps: int = 0
    """The same, counted for each rollout."""
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    moved: int = 0
    """Rollouts that went on on another engine."""
    survivals: list[float] = field(default_factory=list)
    """Of each draft token, the probability that was said of its being reached and accepted."""
    passed: list[bool] = field(default_factory=list)
    """Whether it was."""
    ends: list[float] = field(default_factory=list)
    """When rollouts ended, in seconds, in order."""

    @property
    def accepted_per_step(self) -> float:
        """Draft tokens accepted in a verification step of a rollout."""
        return self.accepted / max(self.rollout_steps, 1)

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens in a verification step of a rollout."""
        return self.drafted / max(self.rollout_steps, 1)


class Truth:
    """What tokens of which so much was said really had accepted, of a step that is known as a whole."""

    def __init__(self, step: Step) -> None:
        said, order = np.unique(np.array(step.survivals), return_inverse=True)
        counts = np.bincount(order)
        seen = np.bincount(order, weights=np.array(step.passed, dtype=np.float64)) / counts
        self._said = said
        self._seen = isotonic_regression(seen, weights=counts).x

    def thresholds(self, min_survivals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The least that must be said, for so much to be true."""
        at = np.searchsorted(self._seen, min_survivals)
        return np.where(at < len(self._said), self._said[np.minimum(at, len(self._said) - 1)], 1.0)


class _Rollout(Replayed):
    """A recorded rollout on its way, with what it costs."""

    key = 0
    problem = ""
    """As the policy knows it."""
    row = 0
    """The policy's."""
    context = 0
    """Tokens of which keys and values are held."""
    unread = 0
    """Tokens that are read in the next step, in which nothing is drafted."""


@dataclass
class _Engine:
    drafter: Drafter | None
    policy: BudgetPolicy | None
    clock: float = 0.0
    running: list[_Rollout] = field(default_factory=list)
    """In the order in which they came."""
    preempted: deque[_Rollout] = field(default_factory=deque)


class _Queue:
    """The rollouts that have not begun."""

    def __init__(self, problems: Sequence[Problem], mode: Mode, lengths: Lengths) -> None:
        self._scheduler = ProbeThenLongest()
        self._rollouts: dict[tuple[str, int], Trajectory] = {}
        self._lengths, self._mode = lengths, mode
        self._tokens: float | None = None
        arrival = 0
        for problem in problems:
            # whoever knows each rollout's length can order each for itself
            alone = mode.true_lengths or not mode.longest_first
            parts = [[one] for one in problem.running] if alone else [list(problem.running)]
            for part in parts:
                request = f"{problem.name}/{arrival}"
                for sample, one in enumerate(part):
                    self._rollouts[request, sample] = one
                group = Group(request, "client", list(range(len(part))), arrival, probed=alone)
                if mode.longest_first:
                    group.predicted = total_tokens(part[0]) if mode.true_lengths else lengths.of(problem.name).mean
                self._scheduler.add(group)
                arrival += 1

    def __len__(self) -> int:
        return self._scheduler.waiting()

    def tokens(self) -> float:
        """That the waiting ones are expected to say."""
        if self._tokens is None:
            true = self._mode.true_lengths
            self._tokens = float(
                sum(
                    (group.predicted if true else self._lengths.of(_problem_of(group.request_id)).mean)
                    * len(group.samples)
                    for group in self._scheduler.groups()
                )
            )
        return self._tokens

    def learned(self, problem: str) -> None:
        """A rollout of the problem ended."""
        self._tokens = None
        if self._mode.longest_first and not self._mode.true_lengths:
            for group in list(self._scheduler.groups()):
                if _problem_of(group.request_id) == problem:
                    self._scheduler.predict(group.request_id, self._lengths.of(problem).mean)

    def take(self, engine: int, slots: int, assigned: int) -> list[Trajectory]:
        """What an engine starts now."""
        loads = [EngineLoad(str(engine), slots, assigned, 0)]
        found: list[Trajectory] = []
        self._tokens = None
        while len(found) + assigned < slots and len(self):
            placed = self._scheduler.place(loads, frozenset(), frozenset())
            if not placed:
                break
            found += [self._rollouts.pop((one.request_id, one.sample)) for one in placed]
            loads = [EngineLoad(str(engine), slots, assigned + len(found), 0)]
        return found


def _problem_of(request: str) -> str:
    return request.rpartition("/")[0]


class Simulation:
    """One step of a mode."""

    def __init__(
        self,
        problems: Sequence[Problem],
        mode: Mode,
        hardware: Hardware,
        *,
        engines: int,
        batch: int,
        truth: Truth | None = None,
    ) -> None:
        """Make all rollouts of *problems*, at most *batch* at a time, spread evenly over *engines*.

        With *truth* the policy knows what is accepted of drafts on average.
        """
        self._mode, self._hardware, self._truth = mode, hardware, truth
        self._look_again = 0.0
        self._slots = [batch // engines + (number < batch % engines) for number in range(engines)]
        self._lengths = Lengths(problems)
        # what jobs set as maxTokens: no recorded rollout is longer
        self._most = max(total_tokens(one) for problem in problems for one in (*problem.history, *problem.running))
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
                    for one in problem.history:
                        engine.drafter.learn(one)
        ours = [engine.drafter for engine in self._engines if isinstance(engine.drafter, Ours)]
        for drafter in ours:
            drafter.others = [other for other in ours if other is not drafter]
        self._queue = _Queue(problems, mode, self._lengths)
        self._begun = 0
        self._step = Step()

    def run(self) -> Step:
        """What became of it."""
        while True:
            for number, engine in enumerate(self._engines):
                self._admit(number, engine)
            busy = [engine for engine in self._engines if engine.running]
            if not busy:
                return self._step
            self._advance(min(busy, key=lambda engine: engine.clock))
            if (
                self._mode.moves
                and not len(self._queue)
                and self._look_again <= (now := min(engine.clock for engine in busy))
            ):
                self._look_again = now + LOOK_FOR_MOVES_S
                self._move(now)

    def _admit(self, number: int, engine: _Engine) -> None:
        slots = self._slots[number]
        while engine.preempted and len(engine.running) < slots and self._holds(engine, engine.preempted[0].context):
            one = engine.preempted.popleft()
            one.unread += one.context
            engine.running.append(one)
        if len(engine.running) >= slots or not len(self._queue):
            return
        earliest = min((other.clock for other in self._engines if other.running), default=engine.clock)
        if engine.running and engine.clock > earliest:
            return  # others that are behind in time choose first
        for trajectory in self._queue.take(number, slots, len(engine.running)):
            one = _Rollout(trajectory)
            one.key, self._begun = self._begun, self._begun + 1
            one.problem = trajectory.problem
            one.unread = one.context = len(trajectory.prompt)
            if engine.drafter is not None:
                engine.drafter.begin(one.key, trajectory.problem, trajectory.prompt)
            self._listen(engine, one)
            if engine.policy is not None:
                if self._mode.true_lengths:
                    one.problem = f"rollout {one.key}"
                    self._lengths.foretell(one.problem, total_tokens(trajectory))
                prompt = len(trajectory.prompt)
                one.row = engine.policy.open(one.problem, prompt=prompt, said=0, most=self._most)
            engine.running.append(one)

    def _move(self, now: float) -> None:
        """Let some rollouts go on elsewhere; in the middle of a trajectory of several turns they stay."""
        a_step = 1 + self._step.accepted_per_step
        everywhere = {
            str(number): [Running((str(one.key), 0), one.context, self._left(one) / a_step) for one in engine.running]
            for number, engine in enumerate(self._engines)
        }
        rollouts = {str(one.key): one for engine in self._engines for one in engine.running}
        movable = {(key, 0) for key, one in rollouts.items() if len(one.trajectory.segments) == 1}
        for move in rebalance(everywhere, self._hardware.cost, movable=movable):
            one = rollouts[move.rollout[0]]
            source, target = (self._engines[int(number)] for number in (move.source, move.target))
            source.running.remove(one)
            target.running.append(one)
            target.clock = max(target.clock, now + HANDOVER_S)
            one.unread = one.context
            if isinstance(source.drafter, Ours) and isinstance(target.drafter, Ours):
                source.drafter.hand_over(one.key)
                target.drafter.begin(one.key, one.trajectory.problem, one.trajectory.prompt)
                target.drafter.accept(one.key, one.tokens[: one.at])
            if source.policy is not None and target.policy is not None:
                source.policy.close(one.row)
                prompt = len(one.trajectory.prompt)
                one.row = target.policy.open(one.problem, prompt=prompt, said=one.at, most=self._most)
            self._step.moved += 1

    def _left(self, one: _Rollout) -> float:
        said = one.context - len(one.trajectory.prompt)
        stats = self._lengths.of(one.problem)
        return float(remaining(stats, so_far=said, most=max(self._most, said + 1), points=POINTS).mean())

    def _holds(self, engine: _Engine, more: int = 0) -> bool:
        return sum(one.context for one in engine.running) + more <= self._hardware.kv_tokens or not engine.running

    def _listen(self, engine: _Engine, one: _Rollout) -> None:
        heard = next_turn(engine.drafter, one.key, one)
        one.unread += heard
        one.context += heard

    def _advance(self, engine: _Engine) -> None:
        while not self._holds(engine):
            engine.preempted.appendleft(engine.running.pop())
            self._step.preempted += 1
        drafts = self._drafts(engine)
        tokens = sum(one.unread or 1 + len(drafts.get(one.key, ())) for one in engine.running)
        context = sum(one.context for one in engine.running)
        engine.clock += self._hardware.cost.time(tokens, context, drafts=any(map(len, drafts.values())))
        self._step.verifications += 1
        self._step.rollout_steps += len(engine.running)
        for one in list(engine.running):
            draft = drafts.get(one.key, ())
            passed = passing(Draft(draft, ()), one)
            self._step.drafted += len(draft)
            self._step.accepted += passed
            self._say(engine, one, passed, len(draft))

    def _drafts(self, engine: _Engine) -> Mapping[int, Sequence[int]]:
        """By key; of rollouts that read something in this step there is none."""
        speaking = [one for one in engine.running if not one.unread]
        if engine.drafter is None or not speaking:
            return {}
        keys = [one.key for one in speaking]
        if engine.policy is None:
            drafts = engine.drafter.draft(keys, [self._mode.budget] * len(keys))
        else:
            waiting = Waiting(0, 0.0)
            if len(self._queue):
                share = len(engine.running) / sum(len(one.running) for one in self._engines)
                waiting = Waiting(max(1, round(len(self._queue) * share)), self._queue.tokens() * share)
            rows = np.array([one.row for one in speaking])
            allowed = engine.policy.allow(rows, self._hardware.cost, waiting)
            if not isinstance(engine.drafter, Ours):
                raise TypeError(
                    f"{type(engine.drafter).__name__} cannot be told where to end a draft: give it no policy"
                )
            survivals = allowed.min_survivals
            if self._truth is not None:
                survivals = self._truth.thresholds(survivals)
            drafts = engine.drafter.draft(keys, allowed.budgets.tolist(), survivals.tolist())
        found = {}
        for one, draft in zip(speaking, drafts, strict=True):
            draft = until_end(draft)
            if self._mode.true_lengths and not self._mode.foresees and self._truth is None:
                self._step.survivals += accumulate(draft.probabilities, mul)
                passed = passing(draft, one)
                self._step.passed += [place < passed for place in range(len(draft.tokens))]
            found[one.key] = draft.tokens[: passing(draft, one)] if self._mode.foresees else draft.tokens
        return found

    def _say(self, engine: _Engine, one: _Rollout, passed: int, drafted: int) -> None:
        said = one.tokens[one.at : one.at + passed + 1]
        one.unread = 0
        one.at += len(said)
        one.context += len(said)
        self._step.tokens += len(said)
        if engine.drafter is not None:
            engine.drafter.accept(one.key, said)
        if engine.policy is not None:
            engine.policy.advance(np.array([one.row]), np.array([len(said)]), np.array([drafted]))
        if one.at >= len(one.tokens):
            self._listen(engine, one)
        if one.over:
            engine.running.remove(one)
            if engine.drafter is not None:
                engine.drafter.end(one.key)
            if engine.policy is not None:
                engine.policy.close(one.row)
            self._lengths.add(one.trajectory.problem, total_tokens(one.trajectory))
            self._queue.learned(one.trajectory.problem)
            self._step.ends.append(engine.clock)
            self._step.seconds = max(self._step.seconds, engine.clock)
