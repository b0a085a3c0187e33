"""vLLM's suffix speculator for its V2 model runner, reimplemented from its description.

vLLM's repository has it since after version 0.33.0; no released package contains it yet. It keeps the last 2^20 tokens
of finished responses, each with three tokens of its prompt before it, and finds the text before the next token by its
last four and its last two tokens: in each case, the newest occurrence in each of the eight newest responses. Each
occurrence is extended backwards to its longest match. For each match length L, the occurrences that match at least L
tokens vote token by token; the chain with the largest sum of probabilities wins. The longest match in the request's own
text is used instead if it is longer.

How many draft tokens are verified follows from vLLM's adaptive verification: the number that maximizes the expected
tokens per second, most probable tokens first. A token's probability is the observed acceptance by source, match length
and position, with Laplace smoothing; counts are halved every 1,024 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks.replay import END_OF_TURN
from benchmarks.rollout_bench.engine import EngineText, FinishedTurn, Turn
from rollout_store.arrays import Integers

_Array = npt.NDArray[Any]

CORPUS_TOKENS = 1 << 20
_PROMPT_TOKENS = 3
_BUCKETS, _NEWEST = 1 << 20, 8
_MATCH_LENGTHS = np.array([0, 4, 6, 8, 12, 16, 24])
"""Lower limits of the ranges of match lengths; acceptance is counted by range. An assumption."""
_HALVING_STEPS = 1024
_OWN, _CORPUS = 0, 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _bucket(text: _Array, end: int, length: int) -> Any:
    key = np.uint64(0)
    for i in range(end - length, end):
        key = (key ^ np.uint64(text[i])) * np.uint64(0x9E3779B97F4A7C15)
        key = key ^ (key >> np.uint64(32))
    return np.int64(key % np.uint64(_BUCKETS))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _add(corpus: _Array, documents: _Array, table: _Array, text: _Array, head: int, document: int) -> int:
    """Append a document to the ring; return the number of tokens that were ever appended."""
    start = head
    for i in range(len(text)):
        corpus[head % CORPUS_TOKENS] = text[i]
        documents[head % CORPUS_TOKENS] = document
        head += 1
        for kind in range(2):
            length = 2 if kind == 0 else 4
            if head - start < length:
                continue
            bucket = _bucket(text, i + 1, length)
            entries = table[kind, bucket]
            last = entries[0]
            if last > 0 and last > head - CORPUS_TOKENS and documents[(last - 1) % CORPUS_TOKENS] == document:
                entries[0] = head
                continue
            for j in range(_NEWEST - 1, 0, -1):
                entries[j] = entries[j - 1]
            entries[0] = head
    return head


@njit(cache=True)  # type: ignore[untyped-decorator]
def _matched(corpus: _Array, documents: _Array, position: int, head: int, text: _Array, size: int, depth: int) -> int:
    """Return how many tokens before a position of the corpus agree with the end of the text."""
    document = documents[(position - 1) % CORPUS_TOKENS]
    length = 0
    while length < depth and length < size:
        place = position - 1 - length
        if place < 0 or place < head - CORPUS_TOKENS or documents[place % CORPUS_TOKENS] != document:
            break
        if corpus[place % CORPUS_TOKENS] != text[size - 1 - length]:
            break
        length += 1
    return length


@njit(cache=True)  # type: ignore[untyped-decorator]
def _vote(
    corpus: _Array,
    documents: _Array,
    positions: _Array,
    lengths: _Array,
    count: int,
    head: int,
    minimum: int,
    draft: _Array,
) -> tuple[int, float]:
    """Let the occurrences vote; return the length of the chain and the sum of its probabilities."""
    alive = np.zeros(count, np.bool_)
    for i in range(count):
        alive[i] = lengths[i] >= minimum
    probability, score, size = 1.0, 0.0, 0
    while size < len(draft):
        best, best_votes, voters = -1, 0, 0
        for i in range(count):
            if not alive[i]:
                continue
            place = positions[i] + size
            if place >= head or documents[place % CORPUS_TOKENS] != documents[(positions[i] - 1) % CORPUS_TOKENS]:
                alive[i] = False
                continue
            voters += 1
            token = corpus[place % CORPUS_TOKENS]
            votes = 0
            for j in range(count):
                other = positions[j] + size
                if alive[j] and other < head and corpus[other % CORPUS_TOKENS] == token:
                    votes += 1
            if votes > best_votes:
                best, best_votes = token, votes
        if voters == 0:
            break
        probability *= min(1.0, best_votes / voters)
        score += probability
        draft[size] = best
        size += 1
        for i in range(count):
            if alive[i] and corpus[(positions[i] + size - 1) % CORPUS_TOKENS] != best:
                alive[i] = False
        if best == END_OF_TURN:
            break
    return size, score


@njit(cache=True)  # type: ignore[untyped-decorator]
def _propose(
    corpus: _Array,
    documents: _Array,
    table: _Array,
    head: int,
    text: _Array,
    size: int,
    depth: int,
    draft: _Array,
) -> tuple[int, int, int]:
    """Write a draft; return its length, its source and the length of the match."""
    positions = np.zeros(2 * _NEWEST, np.int64)
    lengths = np.zeros(2 * _NEWEST, np.int64)
    count, longest = 0, 0
    for kind in range(1, -1, -1):
        length = 2 if kind == 0 else 4
        if size < length:
            continue
        entries = table[kind, _bucket(text, size, length)]
        for j in range(_NEWEST):
            position = entries[j]
            if position == 0 or position <= head - CORPUS_TOKENS:
                continue
            known = False
            for i in range(count):
                known = known or positions[i] == position
            matched = _matched(corpus, documents, position, head, text, size, depth)
            if known or matched < length:
                continue
            positions[count], lengths[count] = position, matched
            longest = max(longest, matched)
            count += 1
    own_length, own_end = 0, 0
    for end in range(size - 1, 0, -1):
        matched = 0
        while matched < depth and matched < end and text[end - 1 - matched] == text[size - 1 - matched]:
            matched += 1
        if matched > own_length:
            own_length, own_end = matched, end
            if own_length == depth:
                break
    if own_length >= 2 and own_length > longest:
        drafted = 0
        while drafted < len(draft) and own_end + drafted < size:
            draft[drafted] = text[own_end + drafted]
            drafted += 1
        return drafted, _OWN, own_length
    best = np.zeros(len(draft), np.int64)
    best_size, best_score, best_minimum = 0, 0.0, 0
    for i in range(count):
        drafted, score = _vote(corpus, documents, positions, lengths, count, head, lengths[i], best)
        if score > best_score:
            best_size, best_score, best_minimum = drafted, score, lengths[i]
            draft[:drafted] = best[:drafted]
    return best_size, _CORPUS, best_minimum


class VllmSuffixDrafter:
    """The speculator with its adaptive verification, on the GPU of the simulated engine."""

    def __init__(
        self,
        text: EngineText,
        step_s: Callable[[int], float],
        *,
        depth: int = 24,
        max_draft: int,
    ) -> None:
        """Create a speculator with an empty corpus.

        Args:
            text: the engine's arrays.
            step_s: returns the duration of a step by its number of verified tokens, as vLLM measures at its start.
            depth: maximum length of a match.
            max_draft: maximum number of tokens of a draft.
        """
        self._text, self._depth, self._max_draft = text, depth, max_draft
        self._corpus = np.zeros(CORPUS_TOKENS, np.int32)
        self._documents = np.zeros(CORPUS_TOKENS, np.int32)
        self._table = np.zeros((2, _BUCKETS, _NEWEST), np.int64)
        self._head, self._num_documents, self._steps = 0, 0, 0
        self._step_s = np.array([step_s(tokens) for tokens in range(len(text.lengths) * (max_draft + 1) + 1)])
        shape = (2, len(_MATCH_LENGTHS), max_draft)
        self._reached, self._accepted = np.zeros(shape), np.zeros(shape)
        places = len(text.lengths)
        self._source, self._range = np.zeros(places, np.int64), np.zeros(places, np.int64)
        self._prompt_ends: dict[int, int] = {}
        self._last_lengths = np.zeros(places, np.int64)
        self._last_num_tokens = np.zeros(places, np.int64)

    def open(self, place: int, turn: Turn) -> None:
        """See :class:`Drafter`."""
        self._last_lengths[place] = 0
        self._last_num_tokens[place] = self._text.num_tokens[place]

    def close(self, place: int) -> None:
        """See :class:`Drafter`."""

    def draft(self, places: Integers, verified: Integers) -> bool:
        """See :class:`Drafter`."""
        self._observe(places, verified)
        text = self._text
        sizes = np.zeros(len(places), np.int64)
        draft = np.zeros(self._max_draft, np.int64)
        for i, place in enumerate(places.tolist()):
            known = text.token_ids[place]
            size, source, matched = _propose(
                self._corpus,
                self._documents,
                self._table,
                self._head,
                known,
                int(text.num_tokens[place]),
                self._depth,
                draft,
            )
            text.drafts[place, :size] = draft[:size]
            self._source[place] = source
            self._range[place] = np.searchsorted(_MATCH_LENGTHS, matched, side="right") - 1
            sizes[i] = size
        text.lengths[places] = self._select(places, sizes)
        self._last_lengths[places] = text.lengths[places]
        return True

    def _select(self, places: Integers, sizes: Integers) -> Integers:
        """Return how many tokens of each draft are verified, shape (requests,)."""
        survival = np.cumprod(self._confidences(places), axis=1)
        survival[np.arange(self._max_draft) >= sizes[:, None]] = -1.0
        ordered = np.sort(survival[survival >= 0])[::-1]
        expected = len(places) + np.concatenate([[0.0], np.cumsum(ordered)])
        costs = self._step_s[len(places) : len(places) + len(ordered) + 1]
        budget = int(np.argmax(expected / costs))
        if budget == 0:
            return np.zeros(len(places), np.int64)
        # Ties are resolved in favour of earlier requests, as long as the budget lasts.
        flat = np.argsort(-survival, axis=None, kind="stable")[:budget]
        return np.bincount(flat // self._max_draft, minlength=len(places))

    def _confidences(self, places: Integers) -> npt.NDArray[np.float64]:
        source, match = self._source[places], self._range[places]
        return np.asarray((self._accepted[source, match] + 1.0) / (self._reached[source, match] + 2.0))

    def _observe(self, places: Integers, verified: Integers) -> None:
        generated = self._text.num_tokens[places] - self._last_num_tokens[places]
        self._last_num_tokens[places] = self._text.num_tokens[places]
        accepted = np.minimum(np.maximum(generated - 1, 0), verified)
        columns = np.arange(self._max_draft)
        reached = (columns <= accepted[:, None]) & (columns < verified[:, None])
        np.add.at(self._reached, (self._source[places], self._range[places]), reached)
        np.add.at(self._accepted, (self._source[places], self._range[places]), columns < accepted[:, None])
        self._steps += 1
        if self._steps % _HALVING_STEPS == 0:
            self._reached *= 0.5
            self._accepted *= 0.5

    def add(self, turn: FinishedTurn, *, is_own: bool) -> None:
        """Append a finished response to the corpus."""
        self._num_documents += 1
        before = np.concatenate([turn.prompt, turn.context])[-_PROMPT_TOKENS:]
        document = np.concatenate([before, turn.tokens]).astype(np.int32)
        self._head = _add(self._corpus, self._documents, self._table, document, self._head, self._num_documents)
