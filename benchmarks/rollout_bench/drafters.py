"""The drafters of the simulated engines: this project's, and those of other systems."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.replay import END_OF_TURN
from benchmarks.rollout_bench.accelerators import CAPTURED_SIZES
from benchmarks.rollout_bench.engine import Drafter, EngineText, FinishedTurn, Turn
from benchmarks.rollout_bench.policies import KNOWN_END_MARGIN, PolicySettings, WithKnownLengths
from benchmarks.suffix_drafters import PEERS_DIRECTORY, as_int32, suffix_tree
from rollout_store.arrays import Integers
from rollout_worker.drafting import SuffixIndex
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.drafting_loop import DraftingLoop, EngineArrays
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.predicted_lengths import LengthSource
from rollout_worker.policy.step_cost import H100_7B, StepCost

MIN_NGRAM, MAX_NGRAM = 2, 4
"""Lengths of the n-grams that are searched, in tokens; vLLM's documentation uses up to 4."""
_NO_LENGTH_LIMIT = 2**30


class TimeOnHost:
    """A drafter's time on the critical path, interpolated between measured batch sizes."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self._sizes, self._seconds = np.array(sizes, float), np.array(seconds)

    def __call__(self, requests: int) -> float:
        """Return the seconds for a batch of so many requests; proportional below the first size."""
        first = min(1.0, requests / float(self._sizes[0]))
        return float(np.interp(requests, self._sizes, self._seconds)) * first


class IndexDrafter:
    """This project's suffix index in the drafting loop of an engine, with any policy."""

    def __init__(
        self,
        text: EngineText,
        index: SuffixIndex,
        policy: PolicySettings,
        clock: Callable[[], float],
        lengths: LengthSource,
        *,
        sources: Sequence[str],
        max_tokens: int,
        expert_share: float,
        governed: bool,
    ) -> None:
        """Create a drafter.

        Args:
            text: the engine's arrays.
            index: the index, which other engines may share.
            policy: creates the draft policy.
            clock: the engine's clock, which never goes back.
            lengths: the lengths of earlier rollouts.
            sources: the sources of drafts.
            max_tokens: length at which responses are cut off.
            expert_share: share of the experts that one token uses; 0 in a dense model.
            governed: whether the governor limits the policy.
        """
        self._text, self._index = text, index
        self._policy = policy.make(lengths, len(text.token_ids))
        prior = H100_7B.with_experts(expert_share)
        controller = DraftController(self._policy, prior, graph_sizes=CAPTURED_SIZES, governed=governed)
        arrays = EngineArrays(text.token_ids, text.drafts, text.lengths)
        self._loop = DraftingLoop(index, controller, arrays, clock=clock)
        self._controller = controller
        self._requests: dict[int, str] = {}
        self._num_opened = 0
        self._sources, self._max_tokens = tuple(sources), max_tokens
        self._knows_lengths = isinstance(self._policy, WithKnownLengths)

    @property
    def cost(self) -> StepCost:
        """The fitted cost model."""
        return self._controller.fit.cost

    def set_generation(self, generation: int) -> None:
        """Tell the controller that a training step has begun."""
        self._controller.set_generation(generation)

    def open(self, place: int, turn: Turn) -> None:
        """See :class:`Drafter`."""
        self._num_opened += 1
        request_id = f"{turn.rollout}#{self._num_opened}"
        settings = DraftSettings(
            request_id,
            turn.problem,
            max_tokens=turn.length + KNOWN_END_MARGIN if self._knows_lengths else self._max_tokens,
            sources=self._sources,
            later_turn=len(turn.context) > 0,
            prefix_tokens=len(turn.generated),
        )
        prompt = np.concatenate([turn.prompt, turn.context, turn.generated])
        self._loop.add(request_id, settings, prompt, [END_OF_TURN])
        self._requests[place] = request_id

    def close(self, place: int) -> None:
        """See :class:`Drafter`."""
        request_id = self._requests.pop(place)
        self._loop.remove([request_id])
        self._loop.take_counts([request_id])

    def draft(self, places: Integers, verified: Integers) -> bool:
        """See :class:`Drafter`."""
        if self._loop.skip_step():
            self._text.lengths[places] = 0
            return False
        request_ids = [self._requests[place] for place in places.tolist()]
        self._index.wait_idle()  # so that drafts do not depend on how fast this machine is
        self._loop.draft(request_ids, self._text.num_tokens, places, verified, self._text.processed_tokens)
        self._loop.plan(request_ids)
        if self._loop.failures:
            raise RuntimeError(f"drafting has failed: {self._loop.last_failure}")
        return True

    def add(self, turn: FinishedTurn, *, is_own: bool) -> None:
        """See :class:`Drafter`."""
        self._index.add(turn.problem, [(turn.rollout, turn.step, turn.tokens, turn.context)])


class TreeDrafter:
    """arctic-inference's suffix trees, as vLLM's suffix decoding uses them.

    Running rollouts are in the shared tree as well. The draft of the tree with the higher score is used.
    """

    def __init__(
        self,
        text: EngineText,
        *,
        per_problem: bool,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        depth: int = 24,
        keeps_live_text: bool = True,
    ) -> None:
        """Create a drafter with empty trees; the defaults are vLLM's.

        Args:
            text: the engine's arrays.
            per_problem: whether each problem has a tree of its own.
            max_spec_factor: maximum draft tokens for each matched token.
            min_token_prob: probability below which a draft ends.
            depth: maximum number of matched tokens.
            keeps_live_text: whether the shared tree holds running rollouts.
        """
        self._text, self._per_problem, self._depth = text, per_problem, depth
        self._settings = (max_spec_factor, 0.0, min_token_prob, False)
        self._keeps_live_text = keeps_live_text
        self._trees: dict[str, Any] = {}
        self._open: dict[int, tuple[Any, Any, int]] = {}
        self._known: dict[int, int] = {}
        """Number of tokens of the text at each place that are in its trees."""
        self._num_sequences = 0

    def _tree(self, problem: str) -> Any:
        name = problem if self._per_problem else ""
        if name not in self._trees:
            self._trees[name] = suffix_tree(self._depth)
        return self._trees[name]

    def open(self, place: int, turn: Turn) -> None:
        """See :class:`Drafter`."""
        own = suffix_tree(self._depth)
        own.extend_ndarray(0, as_int32(np.concatenate([turn.prompt, turn.context, turn.generated])))
        self._num_sequences += 1
        self._open[place] = own, self._tree(turn.problem), self._num_sequences
        self._known[place] = len(turn.prompt) + len(turn.context) + len(turn.generated)

    def close(self, place: int) -> None:
        """See :class:`Drafter`."""
        self._extend(place)
        del self._open[place], self._known[place]

    def _extend(self, place: int) -> None:
        own, shared, sequence = self._open[place]
        length = int(self._text.num_tokens[place])
        new = self._text.token_ids[place, self._known[place] : length]
        if len(new):
            own.extend_ndarray(0, new)
            if self._keeps_live_text:
                shared.extend_ndarray(sequence, new)
            self._known[place] = length

    def draft(self, places: Integers, verified: Integers) -> bool:
        """See :class:`Drafter`."""
        for place in places.tolist():
            self._extend(place)
        width = self._text.drafts.shape[1]
        for place in places.tolist():
            own, shared, _ = self._open[place]
            length = int(self._text.num_tokens[place])
            suffix = self._text.token_ids[place, max(0, length - self._depth) : length]
            draft = own.speculate_ndarray(suffix, width, *self._settings)
            other = shared.speculate_ndarray(suffix, width, *self._settings)
            tokens = other.token_ids if other.score > draft.score else draft.token_ids
            if END_OF_TURN in tokens:
                tokens = tokens[: tokens.index(END_OF_TURN) + 1]
            self._text.drafts[place, : len(tokens)] = tokens
            self._text.lengths[place] = len(tokens)
        return True

    def add(self, turn: FinishedTurn, *, is_own: bool) -> None:
        """See :class:`Drafter`."""
        if is_own and self._keeps_live_text:
            return
        self._num_sequences += 1
        self._tree(turn.problem).extend_ndarray(self._num_sequences, as_int32(turn.tokens))


class NgramDrafter:
    """vLLM's n-grams: what followed the longest match of a request's last tokens in its own text."""

    def __init__(self, text: EngineText, *, min_ngram: int = MIN_NGRAM, max_ngram: int = MAX_NGRAM) -> None:
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

        self._propose: Any = _find_longest_matched_ngram_and_propose_tokens
        self._text, self._min_ngram, self._max_ngram = text, min_ngram, max_ngram

    def open(self, place: int, turn: Turn) -> None:
        """See :class:`Drafter`."""

    def close(self, place: int) -> None:
        """See :class:`Drafter`."""

    def draft(self, places: Integers, verified: Integers) -> bool:
        """See :class:`Drafter`."""
        width = self._text.drafts.shape[1]
        for place in places.tolist():
            known = self._text.token_ids[place, : self._text.num_tokens[place]]
            tokens = self._propose(known, self._min_ngram, self._max_ngram, _NO_LENGTH_LIMIT, width)
            self._text.drafts[place, : len(tokens)] = tokens
            self._text.lengths[place] = len(tokens)
        return True

    def add(self, turn: FinishedTurn, *, is_own: bool) -> None:
        """Do nothing: n-grams use no history."""


class TwoDrafters:
    """Drafts with one drafter for rollouts and with another one for copies of them (SpecActor, arXiv 2511.16193)."""

    def __init__(self, text: EngineText, rollouts: Drafter, copies: Drafter) -> None:
        """Combine two drafters of the same engine."""
        self._text, self._rollouts, self._copies = text, rollouts, copies
        self._by_place: dict[int, Drafter] = {}

    def open(self, place: int, turn: Turn) -> None:
        """See :class:`Drafter`."""
        self._by_place[place] = self._copies if turn.is_copy else self._rollouts
        self._by_place[place].open(place, turn)

    def close(self, place: int) -> None:
        """See :class:`Drafter`."""
        self._by_place.pop(place).close(place)

    def draft(self, places: Integers, verified: Integers) -> bool:
        """See :class:`Drafter`."""
        for drafter in (self._rollouts, self._copies):
            chosen = np.array([self._by_place[place] is drafter for place in places.tolist()])
            if chosen.any():
                drafter.draft(places[chosen], verified[chosen])
        return True

    def add(self, turn: FinishedTurn, *, is_own: bool) -> None:
        """See :class:`Drafter`."""
        self._rollouts.add(turn, is_own=is_own)
        self._copies.add(turn, is_own=is_own)


class SuffixGpuDrafter:
    """suffix-gpu's drafter, which runs PyTorch code on the CPU, in a simulated step that takes no time."""

    def __init__(self, text: EngineText, *, min_token_prob: float = 0.1, max_spec_factor: float | None = 1.0) -> None:
        if PEERS_DIRECTORY not in sys.path:
            sys.path.append(PEERS_DIRECTORY)
        import torch
        from suffix_gpu.proposer import SuffixGPUDrafter

        self._torch: Any = torch
        self._text = text
        self._drafter: Any = SuffixGPUDrafter(
            text.drafts.shape[1],
            enable_global=True,
            max_spec_factor=max_spec_factor,
            min_token_prob=min_token_prob,
            coordinated_rebuild=False,
        )

    def open(self, place: int, turn: Turn) -> None:
        """See :class:`Drafter`."""

    def close(self, place: int) -> None:
        """See :class:`Drafter`."""

    def draft(self, places: Integers, verified: Integers) -> bool:
        """See :class:`Drafter`."""
        num_tokens = self._text.num_tokens[places]
        token_ids = np.ascontiguousarray(self._text.token_ids[places, : int(num_tokens.max()) + 1])
        drafts, lengths = self._drafter.propose(self._torch.from_numpy(num_tokens), self._torch.from_numpy(token_ids))
        drafts, lengths = drafts.numpy(), lengths.numpy()
        for place, tokens, length in zip(places.tolist(), drafts, lengths.tolist(), strict=True):
            ends = np.flatnonzero(tokens[:length] == END_OF_TURN)
            length = int(ends[0]) + 1 if len(ends) else length
            self._text.drafts[place, :length] = tokens[:length]
            self._text.lengths[place] = length
        self._drafter.poll()
        return True

    def add(self, turn: FinishedTurn, *, is_own: bool) -> None:
        """See :class:`Drafter`."""
        self._drafter.harvest_rows([self._torch.from_numpy(as_int32(turn.tokens))], [len(turn.tokens)])
