"""Replay of recorded rollouts under speculative decoding.

In each verification step of a recorded rollout, a drafter proposes tokens. The draft tokens that agree with the
recording are accepted, up to the first that differs, and the rollout advances by one more token of the recording, as in
a lossless engine. The rollouts of a problem take turns, one verification step each, and the drafter may use everything
that was sampled so far. Each turn of the model ends with :data:`END_OF_TURN`; tokens of the environment need no step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.traces import Tokens, Trajectory

END_OF_TURN = 2**20
"""A token id that the tokenizers of traces do not use."""


class Draft(NamedTuple):
    """Draft tokens, each with the probability that it is accepted if all tokens before it are."""

    tokens: Sequence[int]
    probabilities: Sequence[float]


class ReplayDrafter(Protocol):
    """A drafter that takes part in a replay; keys identify its open rollouts."""

    def open(self, key: int, problem: str, prompt: Tokens) -> None:
        """Begin a rollout."""

    def add_environment_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the environment's answer to a rollout; it is never drafted."""

    def add_sampled_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the tokens that the model sampled in one verification step."""

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """Return one draft per key, of at most as many tokens as its budget."""

    def close(self, key: int) -> None:
        """End a rollout; running siblings may draft from it."""

    def release_problem(self, problem: str) -> None:
        """Free what is stored for a problem that needs no more drafts."""


class HistoryDrafter(ReplayDrafter, Protocol):
    """A drafter that accepts finished rollouts before a replay."""

    def add_history(self, trajectory: Trajectory) -> None:
        """Add a finished rollout to the history."""


@dataclass
class Outcome:
    """Totals of a replay."""

    steps: int = 0
    """Verification steps, counted per rollout."""
    drafted: int = 0
    accepted: int = 0
    probabilities: list[float] = field(default_factory=list)
    """The predicted probability of each draft token before which all tokens were accepted."""
    hits: list[bool] = field(default_factory=list)
    """For each of :attr:`probabilities`, whether the token was accepted."""

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens per verification step."""
        return self.drafted / self.steps

    @property
    def accepted_per_step(self) -> float:
        """Accepted draft tokens per verification step; a rollout advances by one more."""
        return self.accepted / self.steps

    def calibration(self) -> Calibration:
        """Compare the predicted probabilities with what was accepted."""
        return calibration(np.array(self.probabilities), np.array(self.hits, dtype=bool))


class Decile(NamedTuple):
    """Draft tokens whose predicted probabilities lie in the same tenth of the interval [0, 1]."""

    count: int
    predicted: float
    """Mean predicted probability."""
    observed: float
    """Share of the tokens that was accepted."""


@dataclass(frozen=True)
class Calibration:
    """How well predicted probabilities agree with acceptance."""

    brier: float
    """Brier score: the mean squared error of the predicted probabilities."""
    base_brier: float
    """Brier score of the constant prediction that equals the overall acceptance rate."""
    deciles: tuple[Decile, ...]
    """Non-empty deciles of the predicted probability, ascending."""

    @property
    def brier_skill(self) -> float:
        """Brier skill score: 1 - brier / base_brier."""
        return 1 - self.brier / self.base_brier if self.base_brier else 0.0

    def max_decile_error(self, min_count: int) -> float:
        """Return the largest difference between predicted and observed in a decile of at least *min_count* tokens."""
        return max(
            (abs(decile.predicted - decile.observed) for decile in self.deciles if decile.count >= min_count),
            default=0.0,
        )


def calibration(predicted: np.ndarray, observed: np.ndarray) -> Calibration:
    """Compare predicted probabilities, shape (n,), with outcomes, shape (n,) and dtype bool."""
    if not len(predicted):
        return Calibration(0.0, 0.0, ())
    rate = float(observed.mean())
    bins = np.minimum((predicted * 10).astype(int), 9)
    deciles = tuple(
        Decile(int(members.sum()), float(predicted[members].mean()), float(observed[members].mean()))
        for members in (bins == number for number in range(10))
        if members.any()
    )
    return Calibration(float(np.mean((predicted - observed) ** 2)), rate * (1 - rate), deciles)


@dataclass
class ReplayedRollout:
    """The position of a replay within one trajectory."""

    trajectory: Trajectory
    next_segment: int = 0
    position: int = 0
    """Number of tokens of the current turn that were sampled."""
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.uint32))
    """The current turn, including :data:`END_OF_TURN`."""

    @property
    def finished(self) -> bool:
        """Whether :func:`start_next_turn` found no further turn."""
        return self.next_segment > len(self.trajectory.segments)


def with_end_of_turn(tokens: Tokens) -> Tokens:
    """Append :data:`END_OF_TURN` to a turn of the model."""
    return np.append(tokens, np.uint32(END_OF_TURN))


def replay(drafter: ReplayDrafter, problem: str, group: Iterable[Trajectory], budget: int, outcome: Outcome) -> None:
    """Replay the rollouts of one problem with drafts of at most *budget* tokens, and add the totals to *outcome*."""
    running = {key: ReplayedRollout(trajectory) for key, trajectory in enumerate(group)}
    for key, rollout in running.items():
        drafter.open(key, problem, rollout.trajectory.prompt)
        start_next_turn(drafter, key, rollout)
    while running:
        for key in [key for key, rollout in running.items() if rollout.finished]:
            drafter.close(key)
            del running[key]
        keys = list(running)
        drafts = drafter.draft(keys, [budget] * len(keys)) if keys else ()
        for key, draft in zip(keys, drafts, strict=True):
            rollout = running[key]
            draft = truncate_at_end_of_turn(draft)
            accepted = _verify(draft, rollout, outcome)
            outcome.steps += 1
            outcome.drafted += len(draft.tokens)
            outcome.accepted += accepted
            drafter.add_sampled_tokens(key, rollout.tokens[rollout.position : rollout.position + accepted + 1])
            rollout.position += accepted + 1
            if rollout.position >= len(rollout.tokens):
                start_next_turn(drafter, key, rollout)
    drafter.release_problem(problem)


def truncate_at_end_of_turn(draft: Draft) -> Draft:
    """Drop the draft tokens after an end of turn, which no engine has to verify."""
    tokens = list(draft.tokens)
    length = tokens.index(END_OF_TURN) + 1 if END_OF_TURN in tokens else len(tokens)
    return Draft(tokens[:length], list(draft.probabilities)[:length])


def count_accepted(draft: Draft, rollout: ReplayedRollout) -> int:
    """Return how many draft tokens agree with the recording, up to the first that differs or the end of the turn."""
    recorded = rollout.tokens[rollout.position : rollout.position + len(draft.tokens)]
    accepted = 0
    for drafted_token, recorded_token in zip(draft.tokens, recorded.tolist(), strict=False):
        if drafted_token != recorded_token:
            break
        accepted += 1
    return accepted


def _verify(draft: Draft, rollout: ReplayedRollout, outcome: Outcome) -> int:
    accepted = count_accepted(draft, rollout)
    # The first rejected token counts for calibration as well, unless the turn ended before it.
    verified = accepted + (accepted < len(draft.tokens) and rollout.position + accepted < len(rollout.tokens))
    outcome.probabilities += draft.probabilities[:verified]
    outcome.hits += [True] * accepted + [False] * (verified - accepted)
    return accepted


def start_next_turn(drafter: ReplayDrafter | None, key: int, rollout: ReplayedRollout) -> int:
    """Advance a rollout to the model's next turn, or past the last segment.

    Returns:
        The number of environment tokens that were passed over; they were added to the drafter.
    """
    segments = rollout.trajectory.segments
    environment_tokens = 0
    while rollout.next_segment < len(segments) and not segments[rollout.next_segment].generated:
        tokens = segments[rollout.next_segment].tokens
        if drafter is not None:
            drafter.add_environment_tokens(key, tokens)
        environment_tokens += len(tokens)
        rollout.next_segment += 1
    if rollout.next_segment < len(segments):
        rollout.tokens, rollout.position = with_end_of_turn(segments[rollout.next_segment].tokens), 0
    rollout.next_segment += 1
    return environment_tokens
