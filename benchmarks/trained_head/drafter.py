"""Several drafters in a replay: the suffix index and a trained head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.replay import END_OF_TURN, Draft
from benchmarks.traces import Segment, Tokens, Trajectory
from benchmarks.trained_head.arbiter import Arbiter, Choice
from benchmarks.trained_head.head import Chains
from rollout_worker.drafting import SuffixIndex

MODEL_END = 2
"""The token with which the tiny model ends a response."""
_MIN_SURVIVAL = 0.01
"""Of the index's own drafts; the arbiter ends them earlier."""


_NEWEST = 2**31
"""Generation of the rollouts that are replayed; the history's is lower."""


def without_end(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without the token that ends its response, because replays append END_OF_TURN."""
    [segment] = trajectory.segments
    tokens = segment.tokens[:-1] if segment.tokens[-1] == MODEL_END else segment.tokens
    return replace(trajectory, segments=(Segment(segment.generated, tokens),))


@dataclass
class _OpenRollout:
    problem: str
    handle: int
    """The index's; -1 without it."""
    chains: Chains | None
    sampled: list[Tokens] = field(default_factory=list)
    position: int = 0
    """Number of sampled tokens."""
    choice: Choice | None = None
    """What was considered for the last draft."""


class ArbitratedDrafter:
    """Drafts with the index, the head or both."""

    def __init__(
        self,
        index: SuffixIndex | None,
        arbiter: Arbiter,
        threshold: float,
        chains: Sequence[Chains],
        head_steps: int,
    ) -> None:
        """Create a drafter for the rollouts of one problem.

        Args:
            index: the index with the history; None: it does not draft.
            arbiter: chooses among the drafters, and learns.
            threshold: survival below which nothing is drafted.
            chains: what the head drafts for each rollout, by key; empty: it does not draft.
            head_steps: number of tokens that the head drafts.
        """
        self._index, self._arbiter, self._threshold = index, arbiter, threshold
        self._chains, self._head_steps = chains, head_steps
        self._open: dict[int, _OpenRollout] = {}

    def open(self, key: int, problem: str, prompt: Tokens) -> None:
        """Begin a rollout."""
        handle = -1 if self._index is None else self._index.open(problem, prompt, stop_tokens=[END_OF_TURN])
        self._open[key] = _OpenRollout(problem, handle, self._chains[key] if self._chains else None)

    def add_environment_tokens(self, key: int, tokens: Tokens) -> None:
        """Raise ValueError, because the head was trained on rollouts of one turn only."""
        raise ValueError(
            f"a rollout of problem {self._open[key].problem} has several turns; replay rollouts of one turn"
        )

    def add_sampled_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the tokens of one verification step, and learn from them."""
        rollout = self._open[key]
        if rollout.choice is not None:
            self._arbiter.learn(rollout.choice, tokens.tolist())
        if self._index is not None:
            self._index.extend(rollout.handle, tokens)
        rollout.sampled.append(tokens)
        rollout.position += len(tokens)

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """Return one draft per key."""
        rollouts = [self._open[key] for key in keys]
        drafts = [[self._head_draft(rollout)] for rollout in rollouts]
        if self._index is not None:
            handles = [rollout.handle for rollout in rollouts]
            found = self._index.draft_batch(handles, list(budgets), _MIN_SURVIVAL)
            for chains, draft in zip(drafts, found, strict=True):
                chains.append(Draft(draft.tokens, draft.probabilities))
        for rollout, chains in zip(rollouts, drafts, strict=True):
            rollout.choice = self._arbiter.choose(chains, self._threshold)
        return [rollout.choice.draft for rollout in rollouts if rollout.choice is not None]

    def _head_draft(self, rollout: _OpenRollout) -> Draft:
        # The head needs a sampled token and the hidden state before it.
        if rollout.chains is None or not rollout.position:
            return Draft((), ())
        tokens = rollout.chains.tokens[rollout.position, : self._head_steps]
        length = int(np.argmax(tokens == MODEL_END)) + 1 if (tokens == MODEL_END).any() else len(tokens)
        drafted = np.where(tokens == MODEL_END, END_OF_TURN, tokens)[:length]
        return Draft(drafted.tolist(), rollout.chains.probabilities[rollout.position, :length].tolist())

    def close(self, key: int) -> None:
        """End a rollout, which siblings may draft from."""
        rollout = self._open.pop(key)
        if self._index is not None:
            self._index.close(rollout.handle)
            text = np.concatenate(rollout.sampled)
            self._index.add(rollout.problem, [(f"{rollout.problem}/{key}", _NEWEST, text)])

    def release_problem(self, problem: str) -> None:
        """Keep the problem's rollouts, for drafts from other problems."""
