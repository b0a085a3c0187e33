"""The layout of V2's steps with drafts of different lengths, of which the host decides each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from rollout_store.arrays import Integers
from rollout_worker.engine.stream_gate import StreamGate

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)
FILLER = 0
"""A token that takes the place of drafts; it must be in the vocabulary."""
_PATIENCE_S, _OTHER_RANKS_PATIENCE_S = 1.0, 4.0
"""Seconds after which the device goes on without drafts, on the drafting rank and on others.

The others have more, because the drafting rank tells them whether its own device has gone on."""

Release = Callable[[Integers, "NDArray[np.int64]"], bool]
"""Passes the number of draft tokens of each request, shape (requests,), and the draft tokens, shape (requests,
num_speculative_tokens), to the device. Returns whether that was in time. If not, the device verifies as many tokens for
each request, none of which belongs to a draft."""


class DeferredStep(NamedTuple):
    """A step that is launched before its drafts are made."""

    budget: int
    """Number of draft tokens."""
    rows: Integers
    """Row of each request in the runner's state, in the order of the step, shape (requests,)."""
    capacities: Integers
    """The largest number of draft tokens of each request, shape (requests,)."""
    make_drafts: Callable[[DeferredStep, Release], None]
    """Makes the drafts, and calls the function that it is passed; the numbers of tokens sum up to the budget."""


class ExactVerification:
    """Stands in for V2's ``AdaptiveVerificationManager``, which enables CUDA graphs for drafts of different lengths.

    vLLM's manager selects draft positions on the device, so that the host knows only their number and upper bounds.
    Here, the host selects them: before the step is prepared, so that the layout that the host has prepared is exact
    (:func:`~rollout_worker.engine.speculator.reduce_to_drafts`), or after it was launched (:meth:`defer`). In the
    second case, the device copies layout and drafts from pinned memory when the host has written them, and waits for
    that at a :class:`StreamGate`. Without one, as on CPUs, the drafts are made while the step is prepared.
    """

    _ADMITTED = (None,) if "copy_admitted_drafts_to_host" in signature(AdaptiveVerificationManager).parameters else ()
    """Says to vLLM 0.33 that the host's numbers of drafts are exact; vLLM 0.32 expects nothing."""

    def __init__(self, req_states: Any, query_start_loc: torch.Tensor, max_logits: int, *, drafts: bool) -> None:
        """Prepare for steps with at most *max_logits* logits, if their drafts are deferred.

        *drafts* is whether drafts are made on this rank.
        """
        self.max_logits = max_logits
        self._draft_tokens, self._query_start_loc = req_states.draft_tokens, query_start_loc
        self._gate: StreamGate | None = None
        is_cuda = query_start_loc.device.type == "cuda"
        if is_cuda:
            try:
                self._gate = StreamGate.for_cuda(_PATIENCE_S if drafts else _OTHER_RANKS_PATIENCE_S)
            except (OSError, RuntimeError) as error:
                logger.warning("Steps wait for their drafts before they are launched: %s", error)
        self._cu_num_logits = torch.empty_like(query_start_loc)
        self._layout: tuple[np.ndarray[Any, Any], int] | None = None
        # The device may still copy from the memory of a step while the next one is prepared.
        self._staged = [
            _Staged(
                torch.full(self._draft_tokens.shape, FILLER, dtype=torch.int64, pin_memory=is_cuda),
                torch.zeros(query_start_loc.shape, dtype=torch.int32, pin_memory=is_cuda),
            )
            for _ in "ab"
        ]
        self._deferred: Callable[[list[str]], DeferredStep] | None = None
        self._budget = 0
        self._incomplete: Callable[[], None] | None = None

    @property
    def times_expired(self) -> int:
        """How often the device has gone on without drafts, because they were late."""
        return 0 if self._gate is None else self._gate.times_expired

    def defer(self, budget: int, prepare: Callable[[list[str]], DeferredStep]) -> None:
        """Make the drafts of the next step, *budget* tokens, in :meth:`complete`, after its launch.

        *prepare* takes the requests of the step in order.
        """
        self._budget, self._deferred = budget, prepare

    def complete(self) -> None:
        """Make the drafts of a step that was deferred, and let the device verify them; without one, do nothing."""
        self._deferred, incomplete, self._incomplete = None, self._incomplete, None
        if incomplete is not None:
            incomplete()

    def add_request(self, req_idx: int) -> None:
        """Do nothing; there are no confidences."""

    def record_confidences(self, confidence_probs: object, input_batch: object) -> None:
        """Do nothing; there are no confidences."""

    def batches_to_profile(self, capture_sizes: list[int]) -> tuple[()]:
        """Return nothing, because the costs of steps are measured while they run."""
        return ()

    def set_initial_cost_curves(self, samples: object) -> None:
        """Do nothing; see :meth:`batches_to_profile`."""

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Return the number of tokens of the step."""
        if self._deferred is not None:
            return len(num_tokens_per_req) + self._budget
        return sum(num_tokens_per_req.values())

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray[Any, Any],
        num_scheduled_tokens: np.ndarray[Any, Any],
        cu_num_logits_np: np.ndarray[Any, Any],
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the number of tokens of each request, which are any if the drafts are deferred, and the logits."""
        if self._deferred is not None:
            lengths = fill(num_draft_tokens_per_req.astype(np.int64), self._budget)
            self._layout = cu_num_logits_np, self._budget
            return (lengths + 1).astype(num_scheduled_tokens.dtype), cu_num_logits_np
        self._layout = cu_num_logits_np, int(num_draft_tokens_per_req.sum())
        return num_scheduled_tokens, cu_num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Return the boundaries of logits and queries on the device, and the number of draft tokens."""
        from vllm.utils.torch_utils import async_tensor_h2d

        if self._layout is None:
            raise RuntimeError("vLLM has prepared no layout for this step")
        (cu_num_logits_np, drafts), self._layout = self._layout, None
        cu_num_logits = self._cu_num_logits[: len(cu_num_logits_np)]
        if self._deferred is None:
            async_tensor_h2d(cu_num_logits_np, out=cu_num_logits)
        else:
            self._launch_copies(self._deferred(req_ids))
        return cu_num_logits, self._query_start_loc, drafts, *self._ADMITTED

    def _launch_copies(self, step: DeferredStep) -> None:
        """Let the device wait for the drafts, and then copy them and their layout."""
        staged = self._staged.pop(0)
        self._staged.append(staged)
        # The device must find a valid step, even if nothing else is written.
        staged.write(step.rows, fill(step.capacities, step.budget), None)
        self._incomplete = lambda: self._finish(step, staged)
        if self._gate is None:
            self.complete()
        else:
            self._gate.close()
        self._draft_tokens.copy_(staged.drafts, non_blocking=True)
        # Logits and queries end at the same places: each request has one token beside its draft, and a logit for each.
        self._cu_num_logits.copy_(staged.ends, non_blocking=True)
        self._query_start_loc.copy_(staged.ends, non_blocking=True)

    def _finish(self, step: DeferredStep, staged: _Staged) -> None:
        """Make the drafts of a step, and let the device go on in any case."""

        def release(lengths: Integers, tokens: NDArray[np.int64]) -> bool:
            def write() -> None:
                staged.write(step.rows, lengths, tokens)

            if self._gate is not None:
                return self._gate.open(write)
            write()
            return True

        try:
            step.make_drafts(step, release)
        finally:
            if self._gate is not None:
                self._gate.open()


class _Staged(NamedTuple):
    """Memory of the host that the device copies drafts and layout of a step from."""

    drafts: torch.Tensor
    """By row of the runner's state, shape (max_num_reqs, num_speculative_tokens)."""
    ends: torch.Tensor
    """Where the tokens of each request begin, and the last ones end, shape (max_num_reqs + 1,)."""

    def write(self, rows: Integers, lengths: Integers, tokens: NDArray[np.int64] | None) -> None:
        """Write the number of draft tokens and, if there are any, the draft tokens of the requests with these rows."""
        self.drafts.numpy()[rows] = FILLER if tokens is None else tokens
        ends = self.ends.numpy()
        ends[1 : len(rows) + 1] = np.cumsum(lengths + 1)
        ends[len(rows) + 1 :] = ends[len(rows)]


def fill(capacities: Integers, budget: int) -> Integers:
    """Return numbers of draft tokens that sum up to a *budget*; see :func:`fit_lengths`."""
    return fit_lengths(capacities, capacities, budget)[0]


def fit_lengths(lengths: Integers, capacities: Integers, budget: int) -> tuple[Integers, Integers]:
    """Return how many draft tokens each request gets of a *budget*, and how many of them are its own drafts'.

    If the drafts are too long together, the longest are shortened. If they are too short, further places are given to
    the first requests that can have more.

    Args:
        lengths: number of tokens of each draft, at most its capacity, shape (requests,).
        capacities: the largest number of draft tokens of each request, shape (requests,).
        budget: number of draft tokens of all requests, at most the sum of the capacities.
    """
    excess = int(lengths.sum()) - budget
    if excess > 0:
        limits = np.arange(int(lengths.max()) + 1)
        totals = np.minimum(lengths[:, None], limits).sum(axis=0)
        limit = int(np.searchsorted(totals, budget, side="right")) - 1
        own = np.minimum(lengths, limit)
        longer = np.flatnonzero(lengths > limit)
        own[longer[: budget - int(totals[limit])]] += 1
        return own, own
    room = capacities - lengths
    further = np.clip(-excess - (np.cumsum(room) - room), 0, room)
    return lengths + further, lengths
