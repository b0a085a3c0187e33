"""Suffix drafters in a replay: the project's suffix index and arctic-inference's suffix tree."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.replay import END_OF_TURN, Draft, with_end_of_turn
from benchmarks.traces import Tokens, Trajectory
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS, SOURCES

Scope = Literal["problem", "cross_problem", "all", "self"]
"""The sources of drafts besides a rollout's own text: rollouts of its problem, of other problems, of all, or none."""

_SOURCES: dict[Scope, Collection[str]] = {
    "problem": ("history", "self", "siblings"),
    "cross_problem": ("self", "cross_problem"),
    "all": SOURCES,
    "self": ("self",),
}
PEER = "arctic-inference"
PEERS_DIRECTORY = str(Path(sys.prefix) / "peers")
"""The packages that benchmarks compare with, as ``make env`` installs them."""
_NO_TOKENS: Tokens = np.empty(0, np.uint32)


class SuffixIndexDrafter:
    """Drafts with the project's :class:`SuffixIndex`."""

    def __init__(self, scope: Scope, *, min_survival: float = 0.0) -> None:
        """Create a drafter with an empty index.

        Args:
            scope: the sources of drafts besides a rollout's own text.
            min_survival: a draft ends before the first token whose survival is lower.
        """
        self._scope, self._min_survival = scope, min_survival
        self._index = SuffixIndex(pool_tokens=POOL_TOKENS if scope in ("cross_problem", "all") else 0)
        self._open: dict[int, _OpenRollout] = {}
        self._last_rollout_id = 0

    def add_history(self, trajectory: Trajectory) -> None:
        """Add the turns of a finished trajectory to the history, each with the text before it as its context."""
        if self._scope == "self":
            return
        rollouts, context = [], _NO_TOKENS
        for segment in trajectory.segments:
            tokens = with_end_of_turn(segment.tokens) if segment.generated else segment.tokens
            if segment.generated:
                rollouts.append((self._next_rollout_id(), 0, tokens, context))
            context = np.concatenate([context, tokens])
        self._index.add(trajectory.problem, rollouts)

    def _next_rollout_id(self) -> str:
        self._last_rollout_id += 1
        return str(self._last_rollout_id)

    def open(self, key: int, problem: str, prompt: Tokens) -> None:
        """Begin a rollout."""
        self._open[key] = _OpenRollout(problem, prompt)
        self._open_turn(key)

    def _open_turn(self, key: int) -> None:
        rollout = self._open[key]
        rollout.handle = self._index.open(
            rollout.problem,
            np.concatenate([rollout.prompt, rollout.context]),
            _SOURCES[self._scope],
            context_length=len(rollout.context),
            stop_tokens=[END_OF_TURN],
        )

    def add_environment_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the environment's answer and begin the next turn."""
        rollout = self._open[key]
        self._close_turn(rollout)
        rollout.context = np.concatenate([rollout.context, tokens])
        self._open_turn(key)

    def _close_turn(self, rollout: _OpenRollout) -> None:
        """Close a turn and add it to the history."""
        self._index.close(rollout.handle)
        if not rollout.sampled:
            return
        sampled = np.concatenate(rollout.sampled)
        if self._scope != "self":
            self._index.add(rollout.problem, [(self._next_rollout_id(), 1, sampled, rollout.context)])
        rollout.context, rollout.sampled = np.concatenate([rollout.context, sampled]), []

    def add_sampled_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the tokens that the model sampled in one verification step."""
        rollout = self._open[key]
        self._index.extend(rollout.handle, tokens)
        rollout.sampled.append(tokens)

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """Return one draft per key."""
        handles = [self._open[key].handle for key in keys]
        drafts = self._index.draft_batch(handles, list(budgets), self._min_survival)
        return [Draft(draft.tokens, draft.probabilities) for draft in drafts]

    def close(self, key: int) -> None:
        """End a rollout and add its last turn to the history."""
        self._close_turn(self._open.pop(key))

    def release_problem(self, problem: str) -> None:
        """Drop the problem's rollouts if no other problem can draft from them."""
        if self._scope == "problem":
            self._index.drop_problem(problem)


class _OpenRollout:
    def __init__(self, problem: str, prompt: Tokens) -> None:
        self.problem, self.prompt, self.context = problem, prompt, _NO_TOKENS
        self.handle = -1
        self.sampled: list[Tokens] = []
        """Tokens of the current turn."""


class SuffixTreeDrafter:
    """Drafts with arctic-inference's suffix trees, as vLLM's suffix decoding does.

    One tree holds a rollout's own text, another the rollouts of its problem or of all problems; the draft with the
    higher score is used.
    """

    def __init__(
        self, scope: Scope, *, depth: int = 64, max_spec_factor: float = 1.0, min_token_prob: float = 0.1
    ) -> None:
        """Create a drafter with empty trees; all defaults are vLLM's except *depth*, which is 24 in vLLM."""
        self._scope, self._depth = scope, depth
        self._settings = (max_spec_factor, 0.0, min_token_prob, False)
        self._shared_trees: dict[str, Any] = {}
        self._last_sequence = 0
        self._open: dict[int, _OpenTreeRollout] = {}
        self._texts: dict[str, dict[int, list[Tokens]]] = defaultdict(dict)
        """By problem and sequence: the text of each rollout. Used only by the scope ``cross_problem``."""
        self._removed: set[int] = set()
        """Sequences that are removed from the shared tree while their own problem is replayed."""

    def _shared_tree(self, problem: str) -> Any:
        name = problem if self._scope == "problem" else ""
        if name not in self._shared_trees:
            self._shared_trees[name] = suffix_tree(self._depth)
        return self._shared_trees[name]

    def add_history(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory to the shared tree."""
        if self._scope == "self":
            return
        tree, sequence = self._shared_tree(trajectory.problem), self._next_sequence()
        segments = [
            with_end_of_turn(segment.tokens) if segment.generated else segment.tokens for segment in trajectory.segments
        ]
        text = np.concatenate(segments)
        tree.extend_ndarray(sequence, as_int32(text))
        if self._scope == "cross_problem":
            self._texts[trajectory.problem][sequence] = [text]

    def _next_sequence(self) -> int:
        self._last_sequence += 1
        return self._last_sequence

    def open(self, key: int, problem: str, prompt: Tokens) -> None:
        """Begin a rollout."""
        own_tree = suffix_tree(self._depth)
        own_tree.extend_ndarray(0, as_int32(prompt))
        shared_tree = None if self._scope == "self" else self._shared_tree(problem)
        suffix = as_int32(prompt)[-self._depth :]
        rollout = _OpenTreeRollout(own_tree, shared_tree, self._next_sequence(), suffix)
        self._open[key] = rollout
        if self._scope == "cross_problem":
            for sequence in self._texts[problem].keys() - self._removed:
                rollout.shared_tree.remove(sequence)
                self._removed.add(sequence)
            self._texts[problem][rollout.sequence] = rollout.sampled
            self._removed.add(rollout.sequence)

    def add_environment_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the environment's answer."""
        self.add_sampled_tokens(key, tokens)

    def add_sampled_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the tokens that the model sampled in one verification step."""
        rollout, new = self._open[key], as_int32(tokens)
        rollout.own_tree.extend_ndarray(0, new)
        if self._scope == "cross_problem":
            rollout.sampled.append(tokens)
        elif rollout.shared_tree is not None:
            rollout.shared_tree.extend_ndarray(rollout.sequence, new)
        rollout.suffix = np.concatenate([rollout.suffix, new])[-self._depth :]

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """Return one draft per key."""
        return [self._draft(self._open[key], budget) for key, budget in zip(keys, budgets, strict=True)]

    def _draft(self, rollout: _OpenTreeRollout, budget: int) -> Draft:
        draft = rollout.own_tree.speculate_ndarray(rollout.suffix, budget, *self._settings)
        if rollout.shared_tree is not None:
            shared = rollout.shared_tree.speculate_ndarray(rollout.suffix, budget, *self._settings)
            if shared.score > draft.score:
                draft = shared
        # The tree returns cumulative probabilities; a draft has one conditional probability per token.
        previous = 1.0
        probabilities = []
        for cumulative in draft.probs:
            probabilities.append(cumulative / previous)
            previous = cumulative
        return Draft(draft.token_ids, probabilities)

    def close(self, key: int) -> None:
        """End a rollout; its text stays in the shared tree."""
        del self._open[key]

    def release_problem(self, problem: str) -> None:
        """Delete the problem's tree, or add its rollouts to the shared tree again for other problems."""
        if self._scope == "problem":
            self._shared_trees.pop(problem, None)
        if self._scope == "cross_problem":
            for sequence, text in self._texts[problem].items():
                self._shared_tree(problem).extend_ndarray(sequence, as_int32(np.concatenate(text)))
            self._removed.clear()


class _OpenTreeRollout:
    def __init__(self, own_tree: Any, shared_tree: Any, sequence: int, suffix: Any) -> None:
        self.own_tree, self.shared_tree, self.sequence = own_tree, shared_tree, sequence
        self.suffix = suffix
        """The last tokens of the text, at most as many as the tree is deep."""
        self.sampled: list[Tokens] = []


def suffix_tree(depth: int) -> Any:
    """Return an empty suffix tree of arctic-inference.

    Raises:
        ImportError: if arctic-inference is not installed; the message explains how to install it.
    """
    if PEERS_DIRECTORY not in sys.path:
        sys.path.append(PEERS_DIRECTORY)
    try:
        from arctic_inference.suffix_decoding._C import SuffixTree
    except ImportError as error:
        raise ImportError(
            f"{PEER} is not installed in {PEERS_DIRECTORY} ({error}); 'make env' installs it from "
            "requirements/peers.txt, which needs a C++ compiler. Delete .venv/.ready, run 'make env' again and read "
            "its output for the cause"
        ) from error

    return SuffixTree(depth)


def as_int32(tokens: Tokens) -> Any:
    """Return token ids as the contiguous int32 array that arctic-inference takes."""
    return np.ascontiguousarray(tokens, dtype=np.int32)
