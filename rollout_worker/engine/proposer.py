"""Connects the drafter to vLLM's ``custom_class`` proposer (V1 model runner, vLLM 0.26 to 0.32)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_worker.arrays import Integers, with_row
from rollout_worker.engine.compat import patch_draft_sampling
from rollout_worker.engine.draft_settings import DraftSettings, max_draft_lengths
from rollout_worker.engine.sampling_params import end_token_ids
from rollout_worker.policy.controller import StepOutcome
from rollout_worker.policy.draft_policy import EMPTY_QUEUE, QueueState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.drafting.drafter import DraftCounts, Drafter
    from rollout_worker.policy.controller import DraftController

_UNTRACKED = -1
_NEVER = -1
_TRACKED_REQUEST = np.dtype(
    [
        ("prompt_tokens", np.int64),
        ("num_tokens", np.int64),  # prompt and response tokens that the drafter knows
        ("last_step", np.int64),  # number of the step after which it was last in the batch
        ("expected", np.float64),  # tokens of its last draft that are expected to be accepted
        ("undrafted_tokens", np.int64),
        ("min_tokens", np.int64),
        ("max_tokens", np.int64),
        ("max_draft_tokens", np.int64),
    ]
)
"""The state of a request, in the row of its rollout."""


class HistoryProposer:
    """Proposes drafts for every request that has :class:`DraftSettings`.

    vLLM creates a proposer in each worker process. It proposes nothing until :meth:`start`, which is only called on the
    rank whose drafts are used.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.max_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.queue: QueueState = EMPTY_QUEUE
        """The rollouts that wait for a place in the batch, as the job reports them."""
        self.steps = 0
        """Number of calls of :meth:`propose`, one for each step of the engine."""
        self.seconds = 0.0
        """Seconds spent in :meth:`propose`."""
        self.proposed_tokens = 0
        """Number of tokens of all drafts."""
        self.sampling_patched = False
        """Whether vLLM's sampling of draft positions was defective and is patched."""
        self._runner: Any = None
        self._drafter: Drafter | None = None
        self._controller: DraftController | None = None
        self._rows: dict[str, int] = {}
        """vLLM's request id → row of the rollout."""
        self._keys: dict[int, str] = {}
        """Row → key of the response."""
        self._tracked = np.zeros(0, _TRACKED_REQUEST)
        self._finished: dict[str, DraftCounts] = {}
        self._last_call: float | None = None
        """``time.perf_counter()`` at the last call of :meth:`propose`; None if the step since then is not timed."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Patch vLLM's sampling. vLLM calls this in the worker process after its kernels were loaded."""
        self.sampling_patched = patch_draft_sampling()

    def start(self, runner: Any, drafter: Drafter, controller: DraftController) -> None:
        """Start to propose drafts of *drafter* for the batch of *runner*, within the budgets of *controller*."""
        self._runner, self._drafter, self._controller = runner, drafter, controller

    def interrupt_timing(self) -> None:
        """Do not measure the current step, because the engine does something else before the next one."""
        self._last_call = None

    @property
    def num_tracked(self) -> int:
        """Number of responses that are drafted for, or whose counts were not taken yet."""
        return len(self._rows) + len(self._finished)

    def take_counts(self, keys: list[str]) -> dict[str, DraftCounts]:
        """Return the counts of responses that have ended, by key; each is returned once."""
        ended = set(keys)
        self._close([request_id for request_id, row in self._rows.items() if self._keys[row] in ended])
        return {key: self._finished.pop(key) for key in keys if key in self._finished}

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return drafts for the batch of this step.

        Args:
            sampled_token_ids: the tokens that were just sampled for each request in the batch: accepted draft tokens
                and one more; empty while its prompt is still being read.
            num_tokens_no_spec: number of tokens of each request, including the sampled ones, shape (requests,).
            token_ids_cpu: prompt and response of each request, shape (requests, max_model_len).
            slot_mappings: ignored.

        Returns:
            At most ``num_speculative_tokens`` tokens for each request.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        drafter, controller = self._drafter, self._controller
        if drafter is None or controller is None:
            return drafts
        started = time.perf_counter()
        if controller.skip_step():
            self.steps += 1
            self._last_call = started
            return drafts
        request_ids = self._runner.input_batch.req_ids
        num_sampled = np.fromiter(map(len, sampled_token_ids), np.int64, len(drafts))
        for batch_index in np.flatnonzero(num_sampled):
            if request_ids[batch_index] not in self._rows:
                self._track(drafter, controller, request_ids[batch_index], token_ids_cpu[batch_index])
        rows = np.fromiter(
            (self._rows.get(request_id, _UNTRACKED) for request_id in request_ids), np.int64, len(drafts)
        )
        batch_indices = np.flatnonzero((num_sampled > 0) & (rows != _UNTRACKED))
        if len(batch_indices) < len(drafts):
            rows, num_sampled = rows[batch_indices], num_sampled[batch_indices]
            sampled_token_ids = [sampled_token_ids[batch_index] for batch_index in batch_indices]
        num_tokens = num_tokens_no_spec[batch_indices].astype(np.int64)
        self._catch_up(drafter, controller, rows, num_tokens - num_sampled, token_ids_cpu, batch_indices)
        seconds = self._step_seconds(rows, started, is_complete=len(batch_indices) == len(drafts))
        self._observe_step(
            drafter, controller, rows, batch_indices, sampled_token_ids, num_sampled, num_tokens, seconds
        )
        if len(self._rows) > len(request_ids):
            # Close what vLLM has finished. A preempted request is still among its requests and stays tracked.
            self._close(self._rows.keys() - self._runner.requests.keys())
        if len(batch_indices):
            for index, tokens in self._draft(drafter, controller, rows, num_tokens):
                drafts[batch_indices[index]] = tokens
        self.steps += 1
        self._last_call = started
        self.seconds += time.perf_counter() - started
        return drafts

    def _step_seconds(self, rows: Integers, started: float, *, is_complete: bool) -> float | None:
        """Return the duration of the step; None if it did more than decode the same requests as the step before.

        A request that is new, or was preempted, had its prompt read in the step.
        """
        last_steps = self._tracked["last_step"]
        is_timed = is_complete and bool((last_steps[rows] == self.steps).all())
        last_steps[rows] = self.steps + 1
        return started - self._last_call if is_timed and self._last_call is not None else None

    def _observe_step(
        self,
        drafter: Drafter,
        controller: DraftController,
        rows: Integers,
        batch_indices: Integers,
        sampled_token_ids: list[list[int]],
        num_sampled: Integers,
        num_tokens: Integers,
        seconds: float | None,
    ) -> None:
        # A request that was preempted has lost its draft, so that this step has verified nothing of it.
        spec_token_ids = self._runner.input_batch.spec_token_ids
        drafted = np.fromiter((len(spec_token_ids[index]) for index in batch_indices), np.int64, len(batch_indices))
        drafter.advance(rows, sampled_token_ids, drafted)
        expected = np.where(drafted > 0, self._tracked["expected"][rows], 0.0)
        outcome = StepOutcome(rows, num_sampled, drafted, expected, num_tokens - num_sampled)
        controller.observe_step(outcome, seconds)
        self._tracked["num_tokens"][rows] = num_tokens

    def _draft(
        self, drafter: Drafter, controller: DraftController, rows: Integers, num_tokens: Integers
    ) -> list[tuple[int, list[int]]]:
        """Return the drafts to verify, each with its index in *rows*."""
        budgets = controller.compute_budgets(rows, self.queue)
        state = self._tracked[rows]
        limits = max_draft_lengths(
            num_tokens - state["prompt_tokens"],
            undrafted_tokens=state["undrafted_tokens"],
            min_tokens=state["min_tokens"],
            max_tokens=state["max_tokens"],
            limits=state["max_draft_tokens"],
        )
        drafts = drafter.draft(rows, np.minimum(budgets.tokens, limits), budgets.min_survivals)
        lengths = np.fromiter(map(len, drafts), np.int64, len(drafts))
        expected = np.fromiter((draft.expected for draft in drafts), np.float64, len(drafts))
        self._tracked["expected"][rows] = expected
        selected = controller.select(rows, lengths, expected)
        self.proposed_tokens += int(lengths[selected].sum())
        return [(index, drafts[index].tokens) for index in selected.tolist()]

    def _track(self, drafter: Drafter, controller: DraftController, request_id: str, tokens: NDArray[np.int32]) -> None:
        """Start to track a request, if it has draft settings."""
        request = self._runner.requests[request_id]
        settings = DraftSettings.from_extra_args(request.sampling_params.extra_args)
        if settings is None:
            return
        # The prefix belongs to the response, although it is part of vLLM's prompt.
        prompt_tokens = len(request.prompt_token_ids) - settings.prefix_tokens
        row = controller.open(
            settings.problem, prompt_tokens=prompt_tokens, generated=0, max_tokens=settings.max_tokens
        )
        drafter.open(
            row,
            settings.problem,
            tokens[:prompt_tokens].astype(np.uint32),
            settings.sources,
            later_turn=settings.later_turn,
            stop_tokens=end_token_ids(request.sampling_params),
        )
        self._tracked = with_row(self._tracked, row)
        max_draft_tokens = self.max_draft_tokens
        if settings.budget is not None:
            max_draft_tokens = min(settings.budget, max_draft_tokens)
        self._tracked[row] = (
            prompt_tokens,
            prompt_tokens,
            _NEVER,
            0.0,
            settings.undrafted_tokens,
            settings.min_tokens,
            settings.max_tokens,
            max_draft_tokens,
        )
        self._rows[request_id], self._keys[row] = row, settings.key

    def _catch_up(
        self,
        drafter: Drafter,
        controller: DraftController,
        rows: Integers,
        num_tokens: Integers,
        token_ids: NDArray[np.int32],
        batch_indices: Integers,
    ) -> None:
        """Tell the drafter the tokens that were sampled in steps in which the request was not seen."""
        for index in np.flatnonzero(num_tokens > self._tracked["num_tokens"][rows]):
            row = rows[index : index + 1]
            known = int(self._tracked["num_tokens"][row[0]])
            missed = token_ids[batch_indices[index], known : int(num_tokens[index])].tolist()
            drafter.advance(row, [missed], np.zeros(1, np.int64))
            controller.add_unobserved(int(row[0]), len(missed))

    def _close(self, request_ids: Iterable[str]) -> None:
        drafter, controller = self._drafter, self._controller
        if drafter is None or controller is None:
            return
        for request_id in request_ids:
            row = self._rows.pop(request_id)
            controller.close(row)
            self._finished[self._keys.pop(row)] = drafter.close(row)
