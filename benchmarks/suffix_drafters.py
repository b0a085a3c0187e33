"""Suffix drafters as :mod:`benchmarks.replay` compares them: ours, and arctic-inference's suffix tree."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.replay import END_OF_TURN, Draft, turn_tokens
from benchmarks.traces import Tokens, Trajectory
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS, SOURCES

Scope = Literal["problem", "foreign", "all", "self"]
"""What is drafted from besides a rollout's own text: rollouts of its problem, of other problems, of all, or nothing."""

_SOURCES: dict[Scope, Collection[str]] = {
    "problem": ("history", "self", "siblings"),
    "foreign": ("self", "foreign"),
    "all": SOURCES,
    "self": ("self",),
}
PEER = "arctic-inference"
PEERS = str(Path(sys.prefix) / "peers")
NOTHING: Tokens = np.empty(0, np.uint32)


class Ours:
    """A :class:`SuffixIndex`."""

    def __init__(self, scope: Scope, *, min_survival: float = 0.0) -> None:
        """Draft from *scope*.

        Args:
            scope: beside a rollout's own text.
            min_survival: a draft ends before the token whose probability of being reached and accepted is less, unless
                it is told another for a draft.
        """
        self._scope, self._min_survival = scope, min_survival
        self.others: Sequence[Ours] = ()
        """Indexes of other engines, into whose history comes what is said here."""
        self._index = SuffixIndex(pool_tokens=POOL_TOKENS if scope in ("foreign", "all") else 0)
        self._open: dict[int, _OpenTurn] = {}
        self._added = 0

    def learn(self, trajectory: Trajectory) -> None:
        """Put an earlier rollout into the history."""
        if self._scope == "self":
            return
        rollouts, before = [], NOTHING
        for one in trajectory.segments:
            tokens = turn_tokens(one.tokens) if one.generated else one.tokens
            if one.generated:
                rollouts.append((self._new_id(), 0, tokens, before))
            before = np.concatenate([before, tokens])
        self._index.add(trajectory.problem, rollouts)

    def _new_id(self) -> str:
        self._added += 1
        return str(self._added)

    def begin(self, key: int, problem: str, prompt: Tokens) -> None:
        """Open a rollout."""
        self._open[key] = _OpenTurn(problem, prompt)
        self._speak(key)

    def _speak(self, key: int) -> None:
        one = self._open[key]
        whole = np.concatenate([one.prompt, one.before])
        one.handle = self._index.open(
            one.problem, whole, _SOURCES[self._scope], context=len(one.before), ends=[END_OF_TURN]
        )

    def observe(self, key: int, tokens: Tokens) -> None:
        """Go on behind the environment's answer."""
        one = self._open[key]
        self._hear(one)
        one.before = np.concatenate([one.before, tokens])
        self._speak(key)

    def _hear(self, one: _OpenTurn) -> None:
        """A turn is over: its rollout belongs to the history."""
        self._index.close(one.handle)
        if not one.said:
            return
        said = np.concatenate(one.said)
        if self._scope != "self":
            for drafter in (self, *self.others):
                drafter._index.add(one.problem, [(drafter._new_id(), 1, said, one.before)])
        one.before, one.said = np.concatenate([one.before, said]), []

    def accept(self, key: int, tokens: Tokens) -> None:
        """Take what the model sampled."""
        one = self._open[key]
        self._index.extend(one.handle, tokens)
        one.said.append(tokens)

    def draft(
        self, keys: Sequence[int], budgets: Sequence[int], min_survivals: Sequence[float] | None = None
    ) -> Sequence[Draft]:
        """Ask for drafts."""
        handles = [self._open[key].handle for key in keys]
        least = self._min_survival if min_survivals is None else list(min_survivals)
        drafts = self._index.draft_batch(handles, list(budgets), least)
        return [Draft(draft.tokens, draft.probabilities) for draft in drafts]

    def end(self, key: int) -> None:
        """Close a rollout."""
        self._hear(self._open.pop(key))

    def hand_over(self, key: int) -> None:
        """A rollout goes on elsewhere; nothing of it stays."""
        self._index.close(self._open.pop(key).handle)

    def leave(self, problem: str) -> None:
        """Forget what is of the problem alone."""
        if self._scope == "problem":
            self._index.drop_problem(problem)


class _OpenTurn:
    def __init__(self, problem: str, prompt: Tokens) -> None:
        self.problem, self.prompt, self.before = problem, prompt, NOTHING
        self.handle = -1
        self.said: list[Tokens] = []


class Peer:
    """arctic-inference's trees: one for a rollout's own text, one for those of its problem or of all."""

    def __init__(
        self, scope: Scope, *, depth: int = 64, max_spec_factor: float = 1.0, min_token_prob: float = 0.1
    ) -> None:
        """The defaults are vLLM's, but for the depth, which is 24 there."""
        self._scope, self._depth = scope, depth
        self._settings = (max_spec_factor, 0.0, min_token_prob, False)
        self._shared: dict[str, Any] = {}
        self._sequences = 0
        self._open: dict[int, _PeersRollout] = {}
        self._of: dict[str, dict[int, list[Tokens]]] = defaultdict(dict)
        """What each problem's rollouts said, by sequence; for a tree that must not have those of the problem itself."""
        self._hidden: set[int] = set()
        """Sequences that are not in the tree for the time being."""

    def _tree(self, problem: str) -> Any:
        name = problem if self._scope == "problem" else ""
        if name not in self._shared:
            self._shared[name] = suffix_tree(self._depth)
        return self._shared[name]

    def learn(self, trajectory: Trajectory) -> None:
        """Put an earlier rollout into the history."""
        if self._scope == "self":
            return
        tree, sequence = self._tree(trajectory.problem), self._new_sequence()
        texts = [turn_tokens(one.tokens) if one.generated else one.tokens for one in trajectory.segments]
        tree.extend_ndarray(sequence, signed(np.concatenate(texts)))
        if self._scope == "foreign":
            self._of[trajectory.problem][sequence] = [np.concatenate(texts)]

    def _new_sequence(self) -> int:
        self._sequences += 1
        return self._sequences

    def begin(self, key: int, problem: str, prompt: Tokens) -> None:
        """Open a rollout."""
        own = suffix_tree(self._depth)
        own.extend_ndarray(0, signed(prompt))
        shared = None if self._scope == "self" else self._tree(problem)
        one = _PeersRollout(own, shared, self._new_sequence(), signed(prompt)[-self._depth :])
        self._open[key] = one
        if self._scope == "foreign":
            for sequence in self._of[problem].keys() - self._hidden:
                one.shared.remove(sequence)
                self._hidden.add(sequence)
            self._of[problem][one.sequence] = one.said
            self._hidden.add(one.sequence)

    def observe(self, key: int, tokens: Tokens) -> None:
        """Go on behind the environment's answer."""
        self.accept(key, tokens)

    def accept(self, key: int, tokens: Tokens) -> None:
        """Take what the model sampled."""
        one, new = self._open[key], signed(tokens)
        one.own.extend_ndarray(0, new)
        if self._scope == "foreign":
            one.said.append(tokens)
        elif one.shared is not None:
            one.shared.extend_ndarray(one.sequence, new)
        one.context = np.concatenate([one.context, new])[-self._depth :]

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """Ask for drafts."""
        return [self._draft(self._open[key], budget) for key, budget in zip(keys, budgets, strict=True)]

    def _draft(self, one: _PeersRollout, budget: int) -> Draft:
        draft = one.own.speculate_ndarray(one.context, budget, *self._settings)
        if one.shared is not None:
            shared = one.shared.speculate_ndarray(one.context, budget, *self._settings)
            if shared.score > draft.score:
                draft = shared
        reached = 1.0
        probabilities = []
        for probability in draft.probs:  # of a token and all before it
            probabilities.append(probability / reached)
            reached = probability
        return Draft(draft.token_ids, probabilities)

    def end(self, key: int) -> None:
        """Close a rollout."""
        del self._open[key]

    def leave(self, problem: str) -> None:
        """Forget what is of the problem alone."""
        if self._scope == "problem":
            self._shared.pop(problem, None)
        if self._scope == "foreign":
            for sequence, said in self._of[problem].items():
                self._tree(problem).extend_ndarray(sequence, signed(np.concatenate(said)))
            self._hidden.clear()


class _PeersRollout:
    def __init__(self, own: Any, shared: Any, sequence: int, context: Any) -> None:
        self.own, self.shared, self.sequence, self.context = own, shared, sequence, context
        self.said: list[Tokens] = []


def suffix_tree(depth: int) -> Any:
    """An empty tree of arctic-inference.

    Raises:
        ImportError: if it is not installed; says what to do.
    """
    if PEERS not in sys.path:
        sys.path.append(PEERS)
    try:
        from arctic_inference.suffix_decoding._C import SuffixTree
    except ImportError as error:
        raise ImportError(
            f"{PEER} is not in {PEERS} ({error}); 'make env' installs it from requirements/peers.txt, which needs a "
            "compiler: remove .venv/.ready, run it again and read why it does not"
        ) from error

    return SuffixTree(depth)


def signed(tokens: Tokens) -> Any:
    """As arctic-inference takes them: int32, contiguous."""
    return np.ascontiguousarray(tokens, dtype=np.int32)
