"""The drafter behind vLLM's ``custom_class`` hook (V1 model runner, vLLM 0.26 to 0.32)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_worker.engine.compat import mend_draft_sampling
from rollout_worker.engine.sampling import DraftScope, end_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.drafting.drafter import DraftCounts, Drafter


class HistoryProposer:
    """Proposes drafts for every request that carries a :class:`DraftScope`.

    vLLM makes one in each worker process. Until :meth:`bind` has given it the model runner and a drafter, and for
    good on ranks whose drafts are not used, it proposes nothing.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.max_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.steps = 0
        """Calls of :meth:`propose`, one for each step of the engine."""
        self.seconds = 0.0
        """Time spent in :meth:`propose`."""
        self._runner: Any = None
        self._drafter: Drafter | None = None
        self._length: dict[str, int] = {}
        self._finished: dict[str, DraftCounts] = {}

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no draft model; vLLM calls this in the worker once its kernels are in place."""
        self.sampling_mended = mend_draft_sampling()

    def bind(self, runner: Any, drafter: Drafter) -> None:
        """Draft with *drafter* for the requests in the batch of *runner*."""
        self._runner = runner
        self._drafter = drafter

    @property
    def following(self) -> int:
        """Rollouts that are drafted for, or whose counts have not been taken."""
        return len(self._length) + len(self._finished)

    def take_counts(self, keys: list[str]) -> dict[str, DraftCounts]:
        """What was drafted for rollouts that have ended, by key; each is handed out once."""
        if self._drafter is not None:
            for key in self._length.keys() & set(keys):
                self._close(self._drafter, key)
        return {key: self._finished.pop(key) for key in keys if key in self._finished}

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for the batch of this step.

        Args:
            sampled_token_ids: for each row of the batch what was just sampled: accepted draft tokens and one more;
                empty while a prompt is still being read.
            num_tokens_no_spec: shape (rows,): tokens of the row so far, those just sampled included.
            token_ids_cpu: shape (rows, max_model_len): prompt and response of each row.
            slot_mappings: not needed.

        Returns:
            For each row at most ``num_speculative_tokens`` tokens.
        """
        drafter = self._drafter
        if drafter is None:
            return [[] for _ in sampled_token_ids]
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows: list[int] = []
        keys: list[str] = []
        budgets: list[int] = []
        batch = self._runner.input_batch
        request_ids = batch.req_ids
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:
                continue
            request = self._runner.requests[request_ids[row]]
            scope = DraftScope.from_extra_args(request.sampling_params.extra_args)
            if scope is None:
                continue
            # what the response goes on from is the response's own, though vLLM takes it for prompt
            prompt_length = len(request.prompt_token_ids) - scope.prefix
            length = int(num_tokens_no_spec[row])
            # a rollout that was preempted has lost its draft: nothing of it was verified in this step
            verified = bool(batch.spec_token_ids[row])
            self._follow(
                drafter,
                scope,
                request.sampling_params,
                token_ids_cpu[row],
                prompt_length,
                length,
                len(sampled),
                verified,
            )
            if (budget := scope.limit(length - prompt_length, self.max_draft_tokens)) > 0:
                rows.append(row)
                keys.append(scope.key)
                budgets.append(budget)
        for row, draft in zip(rows, drafter.draft(keys, budgets), strict=True):
            drafts[row] = draft
        if len(self._length) > len(request_ids):
            self._close_absent(drafter)
        self.steps += 1
        self.seconds += time.perf_counter() - started
        return drafts

    def _follow(
        self,
        drafter: Drafter,
        scope: DraftScope,
        sampling: Any,
        tokens: NDArray[np.int32],
        prompt_length: int,
        length: int,
        new: int,
        verified: bool,
    ) -> None:
        """Bring the drafter's state of a rollout up to *length* tokens, from vLLM's own record of them."""
        known = self._length.get(scope.key)
        if known is None:
            drafter.open(
                scope.key,
                scope.problem,
                tokens[:prompt_length].astype(np.uint32),
                scope.sources,
                later_turn=scope.later_turn,
                ends=end_tokens(sampling),
            )
            known = prompt_length
        if length - new > known:  # sampled before this proposer saw the request
            drafter.advance(scope.key, tokens[known : length - new].tolist(), new_step=False)
            known = length - new
        drafter.advance(scope.key, tokens[known:length].tolist(), new_step=verified)
        self._length[scope.key] = length

    def _close_absent(self, drafter: Drafter) -> None:
        """Close what vLLM has finished; a preempted request is still among its requests, and is kept."""
        alive = set()
        for request in self._runner.requests.values():
            scope = DraftScope.from_extra_args(request.sampling_params.extra_args)
            if scope is not None:
                alive.add(scope.key)
        for key in self._length.keys() - alive:
            self._close(drafter, key)

    def _close(self, drafter: Drafter, key: str) -> None:
        del self._length[key]
        self._finished[key] = drafter.close(key)
