"""The drafter behind vLLM's ``custom_class`` hook (V1 model runner, vLLM 0.26 to 0.32)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_worker.engine.compat import mend_draft_sampling
from rollout_worker.engine.sampling import DraftScope, draft_limits, end_tokens
from rollout_worker.policy.budgets import NOTHING_WAITS, Waiting
from rollout_worker.policy.controller import Outcomes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.drafting.drafter import DraftCounts, Drafter
    from rollout_worker.policy.controller import DraftController

_NOBODY = -1
_FOLLOWED = np.dtype(
    [
        ("prompt", np.int64),
        ("length", np.int64),  # of prompt and response, as far as the drafter has been told
        ("step", np.int64),  # in which it was last
        ("expected", np.float64),  # of its last draft, the tokens that are to be accepted by their probabilities
        ("undrafted", np.int64),
        ("min_tokens", np.int64),
        ("max_tokens", np.int64),
        ("most", np.int64),  # tokens of a draft
    ]
)
"""What is known of a request, in the row that its rollout has."""


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
        self.proposed = 0
        """Tokens of all drafts."""
        self._runner: Any = None
        self._drafter: Drafter | None = None
        self._controller: DraftController | None = None
        self._rows: dict[str, int] = {}
        """vLLM's name of a request → the row of its rollout."""
        self._keys: dict[int, str] = {}
        """Row → the rollout's key."""
        self._followed = np.zeros(0, _FOLLOWED)
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
        return len(self._rows) + len(self._finished)

    def take_counts(self, keys: list[str]) -> dict[str, DraftCounts]:
        """What was drafted for rollouts that have ended, by key; each is handed out once."""
        taken = set(keys)
        self._close([request_id for request_id, row in self._rows.items() if self._keys[row] in taken])
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
        if controller.sleeps():
            self.steps += 1
            self._last_call = started
            return drafts
        batch = self._runner.input_batch
        sampled = np.fromiter(map(len, sampled_token_ids), np.int64, len(drafts))
        for place in np.flatnonzero(sampled):
            if batch.req_ids[place] not in self._rows:
                self._follow(drafter, controller, batch.req_ids[place], token_ids_cpu[place])
        rows = np.fromiter((self._rows.get(request_id, _NOBODY) for request_id in batch.req_ids), np.int64, len(drafts))
        places = np.flatnonzero((sampled > 0) & (rows != _NOBODY))
        if len(places) < len(drafts):  # else all are as they were, mostly
            rows, sampled = rows[places], sampled[places]
            tokens = [sampled_token_ids[place] for place in places]
        else:
            tokens = sampled_token_ids
        # whether the step did nothing but decode a token, and verify drafts, of rollouts that were in the last one;
        # what is new, or was preempted, was read in it
        followed = self._followed
        timed = len(places) == len(drafts) and bool((followed["step"][rows] == self.steps).all())
        followed["step"][rows] = self.steps + 1
        lengths = num_tokens_no_spec[places].astype(np.int64)
        before = lengths - sampled
        for place in np.flatnonzero(before > followed["length"][rows]):
            self._catch_up(drafter, controller, int(rows[place]), token_ids_cpu[places[place]], int(before[place]))
        # a rollout that was preempted has lost its draft: nothing of it was verified in this step
        drafted = np.fromiter((len(batch.spec_token_ids[place]) for place in places), np.int64, len(places))
        drafter.advance(rows, tokens, drafted)
        expected = np.where(drafted > 0, followed["expected"][rows], 0.0)
        seconds = started - self._last_call if timed and self._last_call is not None else None
        controller.verified(Outcomes(rows, sampled, drafted, expected, before), seconds)
        followed["length"][rows] = lengths
        if len(self._rows) > len(batch.req_ids):
            # what vLLM has finished; a preempted request is still among its requests, and is kept
            self._close(self._rows.keys() - self._runner.requests.keys())
        if len(places):
            allowed = controller.allow(rows, self.waiting)
            limits = draft_limits(
                lengths - followed["prompt"][rows],
                undrafted=followed["undrafted"][rows],
                min_tokens=followed["min_tokens"][rows],
                max_tokens=followed["max_tokens"][rows],
                most=followed["most"][rows],
            )
            found = drafter.draft(rows, np.minimum(allowed.budgets, limits), allowed.min_survivals)
            proposed = np.fromiter(map(len, found), np.int64, len(found))
            expected = np.fromiter((draft.expected for draft in found), np.float64, len(found))
            followed["expected"][rows] = expected
            for place in controller.keep(rows, proposed, expected).tolist():
                drafts[places[place]] = found[place].tokens
                self.proposed += int(proposed[place])
        self.steps += 1
        self._last_call = started
        self.seconds += time.perf_counter() - started
        return drafts

    def _follow(
        self, drafter: Drafter, controller: DraftController, request_id: str, tokens: NDArray[np.int32]
    ) -> None:
        """Begin to follow a request, if it is one of ours, from vLLM's own record of it."""
        request = self._runner.requests[request_id]
        scope = DraftScope.from_extra_args(request.sampling_params.extra_args)
        if scope is None:
            return
        # what the response goes on from is the response's own, though vLLM takes it for prompt
        prompt = len(request.prompt_token_ids) - scope.prefix
        row = controller.open(scope.problem, prompt=prompt, said=0, most=scope.max_tokens)
        drafter.open(
            row,
            scope.problem,
            tokens[:prompt].astype(np.uint32),
            scope.sources,
            later_turn=scope.later_turn,
            ends=end_tokens(request.sampling_params),
        )
        if row >= len(self._followed):
            more = np.zeros(max(16, 2 * row) - len(self._followed), _FOLLOWED)
            self._followed = np.concatenate([self._followed, more])
        most = self.max_draft_tokens if scope.budget is None else min(scope.budget, self.max_draft_tokens)
        bounds = (scope.undrafted, scope.min_tokens, scope.max_tokens, most)
        self._followed[row] = (prompt, prompt, _NOBODY, 0.0, *bounds)
        self._rows[request_id], self._keys[row] = row, scope.key

    def _catch_up(
        self, drafter: Drafter, controller: DraftController, row: int, tokens: NDArray[np.int32], until: int
    ) -> None:
        """Tokens were sampled before this proposer saw the request."""
        missed = tokens[int(self._followed["length"][row]) : until].tolist()
        drafter.advance(np.array([row]), [missed], np.zeros(1, np.int64))
        controller.miss(row, len(missed))

    def _close(self, request_ids: Iterable[str]) -> None:
        drafter, controller = self._drafter, self._controller
        if drafter is None or controller is None:
            return
        for request_id in request_ids:
            row = self._rows.pop(request_id)
            controller.close(row)
            self._finished[self._keys.pop(row)] = drafter.close(row)
