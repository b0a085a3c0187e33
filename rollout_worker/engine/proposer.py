"""The drafter behind vLLM's ``custom_class`` hook (V1 model runner, vLLM 0.26 to 0.32)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_worker.engine.compat import mend_draft_sampling
from rollout_worker.engine.sampling import DraftScope, end_tokens
from rollout_worker.policy.budgets import NOTHING_WAITS, Waiting
from rollout_worker.policy.controller import Outcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.drafting.drafter import DraftCounts, Drafter
    from rollout_worker.policy.controller import DraftController


class HistoryProposer:
    """Proposes drafts for every request that carries a :class:`DraftScope`.

    vLLM makes one in each worker process. Until :meth:`bind` has given it what it needs, and for good on ranks whose
    drafts are not used, it proposes nothing.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.max_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.waiting: Waiting = NOTHING_WAITS
        """What waits for a place in the batch, as the job knows it."""
        self.steps = 0
        """Calls of :meth:`propose`, one for each step of the engine."""
        self.seconds = 0.0
        """Time spent in :meth:`propose`."""
        self._runner: Any = None
        self._drafter: Drafter | None = None
        self._controller: DraftController | None = None
        self._followed: dict[str, _Followed] = {}
        """By vLLM's name of the request."""
        self._finished: dict[str, DraftCounts] = {}
        self._last_call: float | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no draft model; vLLM calls this in the worker once its kernels are in place."""
        self.sampling_mended = mend_draft_sampling()

    def bind(self, runner: Any, drafter: Drafter, controller: DraftController) -> None:
        """Draft with *drafter*, as *controller* allows, for the requests in the batch of *runner*."""
        self._runner, self._drafter, self._controller = runner, drafter, controller

    def interrupt(self) -> None:
        """The engine does something else than steps now: how long that takes says nothing of what a step costs."""
        self._last_call = None

    @property
    def following(self) -> int:
        """Rollouts that are drafted for, or whose counts have not been taken."""
        return len(self._followed) + len(self._finished)

    def take_counts(self, keys: list[str]) -> dict[str, DraftCounts]:
        """What was drafted for rollouts that have ended, by key; each is handed out once."""
        taken = set(keys)
        self._close([request_id for request_id, one in self._followed.items() if one.scope.key in taken])
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
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        drafter, controller = self._drafter, self._controller
        if drafter is None or controller is None:
            return drafts
        started = time.perf_counter()
        batch = self._runner.input_batch
        request_ids, verified = batch.req_ids, batch.spec_token_ids
        rows: list[int] = []
        running: list[_Followed] = []
        outcomes: list[Outcome] = []
        # whether the step did nothing but decode one token, and verify drafts, of rollouts that were in the last one
        timed = self._last_call is not None
        for row, sampled in enumerate(sampled_token_ids):
            one = self._followed.get(request_ids[row]) if sampled else None
            if sampled and one is None:
                one = self._follow(drafter, controller, request_ids[row], token_ids_cpu[row])
            if one is None:
                timed = False
                continue
            # what was not followed yet, or has just been read anew: a rollout that was preempted has lost its draft
            timed = timed and one.step == self.steps
            one.step = self.steps + 1
            length, new = int(num_tokens_no_spec[row]), len(sampled)
            tokens = token_ids_cpu[row, one.length : length].tolist()
            if missed := length - new - one.length:  # sampled before this proposer saw the request
                drafter.advance(one.scope.key, tokens[:missed])
                controller.missed(one.scope.key, missed)
                tokens = tokens[missed:]
            drafted = len(verified[row])
            drafter.advance(one.scope.key, tokens, drafted=drafted)
            outcomes.append(Outcome(one.scope.key, new, drafted, one.expected if drafted else 0.0, one.length))
            one.length = length
            rows.append(row)
            running.append(one)
        controller.verified(outcomes, started - self._last_call if timed and self._last_call is not None else None)
        if len(self._followed) > len(request_ids):
            # what vLLM has finished; a preempted request is still among its requests, and is kept
            self._close(self._followed.keys() - self._runner.requests.keys())
        if running:
            keys = [one.scope.key for one in running]
            allowed = controller.allow(keys, self.waiting)
            budgets = [
                min(budget, one.scope.limit(one.length - one.prompt, self.max_draft_tokens))
                for one, budget in zip(running, allowed.budgets, strict=True)
            ]
            for row, one, draft in zip(rows, running, drafter.draft(keys, budgets, allowed.min_survivals), strict=True):
                drafts[row] = draft.tokens
                one.expected = sum(accumulate(draft.probabilities, mul))
        self.steps += 1
        self._last_call = started
        self.seconds += time.perf_counter() - started
        return drafts

    def _follow(
        self, drafter: Drafter, controller: DraftController, request_id: str, tokens: NDArray[np.int32]
    ) -> _Followed | None:
        """Begin to follow a request, from vLLM's own record of it; None if it is none of ours."""
        request = self._runner.requests[request_id]
        scope = DraftScope.from_extra_args(request.sampling_params.extra_args)
        if scope is None:
            return None
        # what the response goes on from is the response's own, though vLLM takes it for prompt
        prompt = len(request.prompt_token_ids) - scope.prefix
        drafter.open(
            scope.key,
            scope.problem,
            tokens[:prompt].astype(np.uint32),
            scope.sources,
            later_turn=scope.later_turn,
            ends=end_tokens(request.sampling_params),
        )
        controller.open(scope.key, scope.problem, prompt=prompt, said=0, most=scope.max_tokens)
        self._followed[request_id] = followed = _Followed(scope, prompt)
        return followed

    def _close(self, request_ids: Iterable[str]) -> None:
        drafter, controller = self._drafter, self._controller
        if drafter is None or controller is None:
            return
        for request_id in request_ids:
            key = self._followed.pop(request_id).scope.key
            controller.close(key)
            self._finished[key] = drafter.close(key)


class _Followed:
    """A request of vLLM's that is drafted for."""

    __slots__ = ("expected", "length", "prompt", "scope", "step")

    def __init__(self, scope: DraftScope, prompt: int) -> None:
        self.scope = scope
        self.prompt = prompt
        """Its tokens."""
        self.length = prompt
        """Tokens of prompt and response that are known of it."""
        self.expected = 0.0
        """Of its last draft, the tokens that are to be accepted by their probabilities."""
        self.step = -1
        """In which it was last."""
