"""Recorded rollouts under speculative decoding, as a lossless engine would take them.

At each verification step of a recorded rollout a drafter proposes tokens; those up to the first that the recording does
not have are accepted, and one more token of the recording comes with the step. The rollouts of a problem run at once,
one step each in turn, and a drafter may learn from all that was said up to then. A turn of the model ends with
:data:`END_OF_TURN`, as chat models end theirs; what the environment answers costs no step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.traces import Tokens, Trajectory

END_OF_TURN = 2**20
"""A token id that no tokenizer of a trace has."""


class Draft(NamedTuple):
    """Tokens that may follow, each with its probability of being accepted if those before it are."""

    tokens: Sequence[int]
    probabilities: Sequence[float]


class Drafter(Protocol):
    """What is compared. Keys name running rollouts."""

    def learn(self, trajectory: Trajectory) -> None:
        """An earlier rollout."""

    def begin(self, key: int, problem: str, prompt: Tokens) -> None:
        """A rollout begins."""

    def observe(self, key: int, tokens: Tokens) -> None:
        """The environment's answer, which is not drafted."""

    def accept(self, key: int, tokens: Tokens) -> None:
        """What the model sampled in a verification step."""

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """What may follow."""

    def end(self, key: int) -> None:
        """A rollout is over; those of its problem that still run may learn from it."""

    def leave(self, problem: str) -> None:
        """Nobody asks for drafts of the problem any more."""


@dataclass
class Outcome:
    """What became of drafts."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    probabilities: list[float] = field(default_factory=list)
    """Of each draft token before which all were accepted."""
    hits: list[bool] = field(default_factory=list)
    """Whether that token was accepted, too."""

    @property
    def drafted_per_step(self) -> float:
        """Tokens."""
        return self.drafted / self.steps

    @property
    def accepted_per_step(self) -> float:
        """Tokens; as many and one are produced."""
        return self.accepted / self.steps

    def calibration(self) -> Calibration:
        """How well the probabilities are."""
        return calibration(np.array(self.probabilities), np.array(self.hits, dtype=bool))


class Decile(NamedTuple):
    """Draft tokens of similar probability."""

    count: int
    said: float
    """Mean probability."""
    seen: float
    """Share that was accepted."""


@dataclass(frozen=True)
class Calibration:
    """How well probabilities tell what is accepted."""

    brier: float
    base_brier: float
    """Of always saying the share that is accepted overall."""
    deciles: tuple[Decile, ...]
    """By probability, equally wide; without empty ones."""

    @property
    def gain(self) -> float:
        """By how much the Brier score is under the base rate's."""
        return 1 - self.brier / self.base_brier if self.base_brier else 0.0

    def worst(self, least: int) -> float:
        """Largest difference between said and seen in a decile of at least *least* tokens."""
        return max((abs(one.said - one.seen) for one in self.deciles if one.count >= least), default=0.0)


def calibration(said: np.ndarray, seen: np.ndarray) -> Calibration:
    """Compare probabilities, shape (n,), with what happened, shape (n,) of bool."""
    if not len(said):
        return Calibration(0.0, 0.0, ())
    rate = float(seen.mean())
    places = np.minimum((said * 10).astype(int), 9)
    deciles = tuple(
        Decile(int(chosen.sum()), float(said[chosen].mean()), float(seen[chosen].mean()))
        for chosen in (places == place for place in range(10))
        if chosen.any()
    )
    return Calibration(float(np.mean((said - seen) ** 2)), rate * (1 - rate), deciles)


@dataclass
class Replayed:
    """A recorded rollout on its way."""

    trajectory: Trajectory
    turn: int = 0
    at: int = 0
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.uint32))
    """Of this turn, with its end."""

    @property
    def over(self) -> bool:
        """Whether it has said all, once :func:`next_turn` was asked for what comes next."""
        return self.turn > len(self.trajectory.segments)


def turn_tokens(tokens: Tokens) -> Tokens:
    """A turn of the model with its end."""
    return np.append(tokens, np.uint32(END_OF_TURN))


def replay(drafter: Drafter, problem: str, group: Iterable[Trajectory], budget: int, outcome: Outcome) -> None:
    """Run the rollouts of one problem, with drafts of at most *budget* tokens; adds to *outcome*."""
    running = {key: Replayed(trajectory) for key, trajectory in enumerate(group)}
    for key, one in running.items():
        drafter.begin(key, problem, one.trajectory.prompt)
        next_turn(drafter, key, one)
    while running:
        for key in [key for key, one in running.items() if one.over]:
            drafter.end(key)
            del running[key]
        keys = list(running)
        drafts = drafter.draft(keys, [budget] * len(keys)) if keys else ()
        for key, draft in zip(keys, drafts, strict=True):
            one = running[key]
            draft = until_end(draft)
            accepted = _accepted(draft, one, outcome)
            outcome.steps += 1
            outcome.drafted += len(draft.tokens)
            outcome.accepted += accepted
            drafter.accept(key, one.tokens[one.at : one.at + accepted + 1])
            one.at += accepted + 1
            if one.at >= len(one.tokens):
                next_turn(drafter, key, one)
    drafter.leave(problem)


def until_end(draft: Draft) -> Draft:
    """The draft without what no engine needs to verify, as it is behind the end of a turn."""
    tokens = list(draft.tokens)
    length = tokens.index(END_OF_TURN) + 1 if END_OF_TURN in tokens else len(tokens)
    return Draft(tokens[:length], list(draft.probabilities)[:length])


def passing(draft: Draft, one: Replayed) -> int:
    """How many tokens pass; the last token of a turn may be one of them, and whatever is behind it is not."""
    rest = one.tokens[one.at : one.at + len(draft.tokens)]
    passed = 0
    for token, said in zip(draft.tokens, rest.tolist(), strict=False):
        if token != said:
            break
        passed += 1
    return passed


def _accepted(draft: Draft, one: Replayed, outcome: Outcome) -> int:
    accepted = passing(draft, one)
    # and the first that did not pass, unless the turn was over
    seen = accepted + (accepted < len(draft.tokens) and one.at + accepted < len(one.tokens))
    outcome.probabilities += draft.probabilities[:seen]
    outcome.hits += [True] * accepted + [False] * (seen - accepted)
    return accepted


def next_turn(drafter: Drafter | None, key: int, one: Replayed) -> int:
    """Pass over what the environment says to where the model speaks, or beyond the last segment; how much it said."""
    segments = one.trajectory.segments
    heard = 0
    while one.turn < len(segments) and not segments[one.turn].generated:
        if drafter is not None:
            drafter.observe(key, segments[one.turn].tokens)
        heard += len(segments[one.turn].tokens)
        one.turn += 1
    if one.turn < len(segments):
        one.tokens, one.at = turn_tokens(segments[one.turn].tokens), 0
    one.turn += 1
    return heard
