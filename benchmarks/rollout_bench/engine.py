"""One simulated engine: a batch of recorded rollouts that is verified step by step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.replay import with_end_of_turn
from benchmarks.rollout_bench.accelerators import Accelerator
from benchmarks.traces import Tokens, Trajectory
from rollout_store.arrays import Integers

_NO_TOKENS: Tokens = np.empty(0, np.uint32)
_PADDING = -2
"""Follows the recorded tokens; no drafter drafts it."""


class Noise(NamedTuple):
    """How the durations of steps vary. The defaults are assumptions."""

    deviation: float = 0.03
    """Standard deviation of the logarithm of a forward pass's duration."""
    delayed_share: float = 0.005
    """Share of the steps that are delayed by something else."""
    delay_factor: float = 1.5
    """How much longer these take."""


DEFAULT_NOISE = Noise()


class Turn(NamedTuple):
    """What a drafter learns about a turn of the model when it begins."""

    rollout: str
    """Unique id of the rollout."""
    problem: str
    prompt: Tokens
    context: Tokens
    """Earlier turns of the model and of its environment."""
    generated: Tokens
    """Tokens of the turn that another engine has sampled."""
    length: int = 0
    """Number of tokens of the whole turn, which no drafter can know."""
    is_copy: bool = False
    """Whether another engine runs the same rollout."""


class FinishedTurn(NamedTuple):
    """A turn that becomes history."""

    rollout: str
    """Unique id of the rollout and its turn."""
    problem: str
    prompt: Tokens
    context: Tokens
    """Earlier turns of the model and of its environment."""
    tokens: Tokens
    step: int
    """Number of the training step."""


class EngineText:
    """The arrays that an engine shares with its drafter, with one row for each place of the batch."""

    def __init__(self, places: int, max_tokens: int, max_draft: int) -> None:
        self.token_ids = np.zeros((places, max_tokens + max_draft + 1), np.int32)
        """Prompts and responses so far, shape (places, maximum number of tokens)."""
        self.num_tokens = np.zeros(places, np.int32)
        """Number of tokens of prompt and response, shape (places,)."""
        self.drafts = np.full((places, max_draft), -1, np.int64)
        """The drafts to verify in the next step, written by the drafter, shape (places, maximum draft length)."""
        self.lengths = np.zeros(places, np.int32)
        """Their lengths, written by the drafter, shape (places,)."""
        self.processed_tokens = 0
        """Number of tokens that the last step processed, those of prompts included."""


class Drafter(Protocol):
    """Drafts for the requests of an engine."""

    def open(self, place: int, turn: Turn) -> None:
        """Begin a turn; its prompt and context are in the engine's arrays."""

    def close(self, place: int) -> None:
        """End a turn, whose tokens are complete, or stop drafting for it."""

    def draft(self, places: Integers, verified: Integers) -> bool:
        """Write the drafts of requests to the engine's arrays.

        Args:
            places: the requests, all with new tokens, shape (requests,).
            verified: how many draft tokens the last step verified for each, shape (requests,).

        Returns:
            Whether the next step waits for them; not if the drafter rests.
        """

    def add(self, turn: FinishedTurn, *, is_own: bool) -> None:
        """Add a finished turn to the history.

        Args:
            turn: the turn.
            is_own: whether this engine has sampled it, so that a drafter may know its tokens already.
        """


HostTime = Callable[[int, bool], float]
"""For how many seconds the GPUs wait for the host before a step with drafts, by its number of requests and whether it
reads prompts."""


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs."""

    places: int
    """Maximum number of rollouts that it decodes at once."""
    host_s: HostTime
    piecewise: bool = False
    """Whether steps with drafts of different lengths run attention outside of the CUDA graphs."""
    max_draft: int = 0
    knows_acceptance: bool = False
    """Whether only those draft tokens are verified that are accepted; no engine can know."""


@dataclass(eq=False)
class Rollout:
    """A recorded rollout that runs, or waits to continue."""

    id: str
    trajectory: Trajectory
    is_spare: bool = False
    """Whether it is sampled only to draft from."""
    is_copy: bool = False
    """Whether another engine runs the same rollout; both end when one has ended."""
    segment: int = 0
    """The current segment of the trajectory."""
    position: int = 0
    """Number of tokens of the current turn that were sampled."""
    context: Tokens = field(default_factory=lambda: _NO_TOKENS)
    """Earlier turns of the model and its environment."""
    turn: Tokens = field(default_factory=lambda: _NO_TOKENS)
    """All recorded tokens of the current turn."""
    generated: int = 0
    """Number of tokens of all turns that were sampled."""

    @property
    def problem(self) -> str:
        """The problem that it answers."""
        return self.trajectory.problem

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response so far."""
        return len(self.trajectory.prompt) + len(self.context) + self.position

    def copy(self) -> Rollout:
        """Return a copy that another engine can run at the same time."""
        return replace(self, is_copy=True)

    def start_turn(self) -> bool:
        """Advance to the next turn of the model, and return whether there is one."""
        segments = self.trajectory.segments
        if len(self.turn):
            self.context = np.concatenate([self.context, self.turn])
            self.segment += 1
        while self.segment < len(segments) and not segments[self.segment].generated:
            self.context = np.concatenate([self.context, segments[self.segment].tokens])
            self.segment += 1
        self.position = 0
        if self.segment == len(segments):
            self.turn = _NO_TOKENS
            return False
        self.turn = with_end_of_turn(segments[self.segment].tokens)
        return True


@dataclass
class Totals:
    """What an engine has done."""

    tokens: int = 0
    steps: int = 0
    rollout_steps: int = 0
    """Verification steps, counted once per running rollout."""
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0


class TurnEnd(NamedTuple):
    """A turn of the model that has ended."""

    rollout: Rollout
    tokens: Tokens
    context: Tokens
    """The text between prompt and turn."""
    is_last: bool


class SimulatedEngine:
    """Decodes a batch, with a clock that advances by the simulated duration of each step."""

    def __init__(
        self,
        settings: EngineSettings,
        accelerator: Accelerator,
        make_drafter: Callable[[EngineText, SimulatedEngine], Drafter] | None,
        *,
        max_tokens: int,
        noise: Noise,
        seed: int,
    ) -> None:
        """Create an idle engine.

        Args:
            settings: how it runs.
            accelerator: how long its forward passes take.
            make_drafter: creates its drafter; None: nothing is drafted.
            max_tokens: largest number of tokens of prompt and response.
            noise: how the durations of steps vary.
            seed: of the noise.
        """
        self.clock = 0.0
        """Simulated seconds since the start of the training step."""
        self.total_s = 0.0
        """Simulated seconds of all steps, which unlike :attr:`clock` is never reset."""
        self.totals = Totals()
        self._settings, self._accelerator = settings, accelerator
        self.text = EngineText(settings.places, max_tokens, settings.max_draft)
        self._rollouts: dict[int, Rollout] = {}
        """By place, in the order of their starts."""
        self._active = np.zeros(0, np.int64)
        self._recorded = np.full((settings.places, max_tokens + settings.max_draft + 2), _PADDING, np.int64)
        self._position, self._length = np.zeros(settings.places, np.int64), np.zeros(settings.places, np.int64)
        self._unprocessed = np.zeros(settings.places, np.int64)
        """Tokens to process in the next step; nothing is drafted in that step."""
        self._waits_for_drafts = False
        self._columns = np.arange(settings.max_draft + 1)
        self._preempted: deque[Rollout] = deque()
        self._cached_prompts: set[str] = set()
        self._noise, self._random = noise, np.random.default_rng(seed)
        self.drafter = make_drafter(self.text, self) if make_drafter is not None else None

    @property
    def running(self) -> list[Rollout]:
        """The rollouts in the batch, in the order of their starts."""
        return list(self._rollouts.values())

    @property
    def num_assigned(self) -> int:
        """Number of rollouts in the batch, or preempted."""
        return len(self._rollouts) + len(self._preempted)

    @property
    def num_free(self) -> int:
        """Number of rollouts that can start."""
        return self._settings.places - self.num_assigned

    @property
    def is_busy(self) -> bool:
        """Whether rollouts are running."""
        return bool(self._rollouts)

    def start(self, rollout: Rollout, *, has_cached_context: bool = False) -> None:
        """Start a rollout, or continue one that another engine has begun.

        Args:
            rollout: the rollout, which has started a turn.
            has_cached_context: whether the keys and values of all but its last token are available.
        """
        place = next(place for place in range(self._settings.places) if place not in self._rollouts)
        self._rollouts[place] = rollout
        prompt = rollout.trajectory.prompt
        unprocessed = rollout.num_tokens
        if has_cached_context:
            unprocessed = 1
        elif rollout.problem in self._cached_prompts:
            unprocessed = max(1, unprocessed - len(prompt))
        self._cached_prompts.add(rollout.problem)
        self._open(place, unprocessed)
        self._active = np.array(list(self._rollouts), np.int64)

    def _open(self, place: int, unprocessed: int) -> None:
        """Begin or continue the turn of the rollout at a place."""
        rollout = self._rollouts[place]
        prompt, generated = rollout.trajectory.prompt, rollout.turn[: rollout.position]
        text = np.concatenate([prompt, rollout.context, generated]).astype(np.int32)
        self.text.token_ids[place, : len(text)] = text
        self.text.num_tokens[place] = len(text)
        self.text.lengths[place] = 0
        self._recorded[place] = _PADDING
        self._recorded[place, : len(rollout.turn)] = rollout.turn
        self._position[place], self._length[place] = rollout.position, len(rollout.turn)
        self._unprocessed[place] = unprocessed
        if self.drafter is not None:
            length = len(rollout.turn)
            turn = Turn(rollout.id, rollout.problem, prompt, rollout.context, generated, length, rollout.is_copy)
            self.drafter.open(place, turn)

    def remove(self, rollout: Rollout) -> None:
        """Stop a rollout, which may continue on another engine."""
        if rollout in self._preempted:
            self._preempted.remove(rollout)
            return
        self._free(next(place for place, other in self._rollouts.items() if other is rollout))

    def _free(self, place: int) -> None:
        del self._rollouts[place]
        self._active = np.array(list(self._rollouts), np.int64)
        self.text.lengths[place] = 0
        if self.drafter is not None:
            self.drafter.close(place)

    def step(self) -> list[TurnEnd]:
        """Verify the drafts of all running rollouts once, and draft for the next step.

        Returns:
            The turns that have ended. Rollouts with a further turn go on; the others have left the batch.
        """
        self._apply_cache_limit()
        active = self._active
        lengths = np.where(self._unprocessed[active] > 0, 0, self.text.lengths[active]).astype(np.int64)
        recorded = np.take_along_axis(self._recorded[active], self._position[active][:, None] + self._columns, axis=1)
        is_accepted = (recorded[:, :-1] == self.text.drafts[active]) & (self._columns[:-1] < lengths[:, None])
        accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
        if self._settings.knows_acceptance:
            lengths = accepted
        self._advance_clock(active, lengths)
        sampled = np.minimum(accepted + 1, self._length[active] - self._position[active])
        for column in range(int(sampled.max())):
            rows = np.flatnonzero(sampled > column)
            written = active[rows]
            self.text.token_ids[written, self.text.num_tokens[written] + column] = recorded[rows, column]
        self.text.num_tokens[active] += sampled.astype(np.int32)
        self._position[active] += sampled
        self._unprocessed[active] = 0
        totals = self.totals
        totals.tokens += int(sampled.sum())
        totals.steps += 1
        totals.rollout_steps += len(active)
        totals.drafted += int(lengths.sum())
        totals.accepted += int(accepted.sum())
        for place, count in zip(active.tolist(), sampled.tolist(), strict=True):
            rollout = self._rollouts[place]
            rollout.position += count
            rollout.generated += count
        has_ended = self._position[active] >= self._length[active]
        ends = [self._end_turn(place) for place in active[has_ended].tolist()]
        self._draft(active[~has_ended], lengths[~has_ended])
        self._resume_preempted()
        return ends

    def _advance_clock(self, active: Integers, lengths: Integers) -> None:
        if self._waits_for_drafts:
            self.wait(self._settings.host_s(len(active), bool(self._unprocessed[active].any())))
        tokens = int(np.where(self._unprocessed[active] > 0, self._unprocessed[active], lengths + 1).sum())
        self.text.processed_tokens = tokens
        piecewise = self._settings.piecewise and bool((lengths != lengths[0]).any())
        forward_s = self._accelerator.forward_s(tokens, int(self.text.num_tokens[active].sum()), piecewise=piecewise)
        forward_s *= math.exp(self._noise.deviation * self._random.standard_normal())
        forward_s *= self._noise.delay_factor if self._random.random() < self._noise.delayed_share else 1.0
        self.wait(forward_s)

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock += seconds
        self.total_s += seconds

    def _draft(self, places: Integers, verified: Integers) -> None:
        self._waits_for_drafts = self.drafter is not None and len(places) > 0 and self.drafter.draft(places, verified)

    def _end_turn(self, place: int) -> TurnEnd:
        rollout = self._rollouts[place]
        tokens, context = rollout.turn, rollout.context
        known = rollout.num_tokens
        has_next = rollout.start_turn()
        if has_next:
            if self.drafter is not None:
                self.drafter.close(place)
            self._open(place, max(1, rollout.num_tokens - known + 1))
        else:
            self._free(place)
        return TurnEnd(rollout, tokens, context, not has_next)

    def _apply_cache_limit(self) -> None:
        """Preempt the rollouts that started last while the KV cache is too small; one always runs."""
        while len(self._rollouts) > 1 and int(self.text.num_tokens[self._active].sum()) > self._accelerator.kv_tokens:
            place = next(reversed(self._rollouts))
            rollout = self._rollouts[place]
            self._free(place)
            self._preempted.appendleft(rollout)
            self.totals.preempted += 1

    def _resume_preempted(self) -> None:
        while self._preempted and len(self._rollouts) < self._settings.places:
            used = int(self.text.num_tokens[self._active].sum()) if len(self._active) else 0
            if self._rollouts and used + self._preempted[0].num_tokens > self._accelerator.kv_tokens:
                return
            self.start(self._preempted.popleft())
