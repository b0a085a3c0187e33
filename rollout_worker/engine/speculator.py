"""Connects the drafting loop to the V2 model runner of vLLM.

**Interface.** V2 builds a speculator on each rank of the last pipeline stage, and calls its ``propose`` after each
step. With asynchronous scheduling, the next step is planned while the device still computes the last one, with
``num_speculative_tokens`` places for each request.

**Order of events.** ``propose`` only starts to copy the number of tokens of each request to the host. When the planned
step is about to be executed, :class:`DraftScheduling` waits for the copy, drafts, copies the drafts to the device and
reduces the planned step to the places that have drafts. The runner therefore knows exactly how many tokens each request
has, and a step without drafts is the same as without speculation.

**Ranks.** Only one rank drafts; the others receive its drafts, so that all ranks execute the same step.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from inspect import signature
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from rollout_store.arrays import Integers
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.drafting_loop import EngineArrays
from rollout_worker.engine.sampling_params import end_token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.engine.drafting_loop import DraftingLoop

Broadcast = Callable[[Any], Any]
"""Returns the object that the drafting rank passes, on every rank; the other ranks pass None."""
_NO_DRAFT = -1
_PADDING = 0
_NO_ROW = -1
_GONE = ""
"""Takes the place of a request's id; no request has it."""


class SampledStep(NamedTuple):
    """A step whose numbers of tokens are being copied to the host."""

    request_ids: list[str]
    rows: Integers
    """Row of each request in the runner's state, shape (requests,)."""
    verified: Integers
    """Number of draft tokens that the step verified, shape (requests,)."""
    total_len: torch.Tensor
    """Number of tokens by row, on the host, shape (max_num_reqs,); valid after :meth:`wait`."""
    processed_tokens: int
    """Number of tokens that the step processed."""
    copied: torch.cuda.Event | None

    def wait(self) -> NDArray[np.int32]:
        """Wait until the step has sampled its tokens; return the numbers of tokens by row, shape (max_num_reqs,)."""
        if self.copied is not None:
            self.copied.synchronize()
        return np.asarray(self.total_len.numpy())


class HistorySpeculator(BaseSpeculator):
    """Copies the numbers of tokens of each step to the host. The drafts are made by :class:`DraftScheduling`."""

    supports_mm_inputs = False
    draft_logits: torch.Tensor | None = None
    draft_token_confidence_probs: torch.Tensor | None = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        rows, width = req_states.draft_tokens.shape
        self.verified = np.zeros(rows, np.int64)
        """Number of draft tokens that the running step verifies, by row of the runner's state."""
        self.sampled: deque[SampledStep] = deque(maxlen=vllm_config.parallel_config.pipeline_parallel_size + 1)
        """The steps without drafts so far, oldest first. The pipeline holds one for each of its stages."""
        self.on_launched: Callable[[list[str]], None] | None = None
        """Called with the requests of a step when everything that it runs on the device was launched."""
        # vLLM runs steps with these drafts to warm up, so that they must be in the vocabulary.
        self._placeholders = torch.zeros((rows, width), dtype=torch.int64, device=device)
        self._req_states, self._is_cuda = req_states, device.type == "cuda"

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing, because drafting runs no model."""

    def capture(self) -> None:
        """Do nothing, because drafting runs no model."""

    def propose(self, input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> torch.Tensor:
        """Start to copy the numbers of tokens of all requests to the host.

        Returns:
            Placeholders, shape (requests, num_speculative_tokens); :class:`DraftScheduling` replaces them.
        """
        if not dummy_run:
            source = self._req_states.total_len.gpu
            total_len = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._is_cuda)
            total_len.copy_(source, non_blocking=True)
            copied = None
            if self._is_cuda:
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            rows = input_batch.idx_mapping_np.astype(np.int64)
            step = SampledStep(
                input_batch.req_ids, rows, self.verified[rows], total_len, int(input_batch.num_tokens), copied
            )
            self.sampled.append(step)
            if self.on_launched is not None:
                self.on_launched(input_batch.req_ids)
        return self._placeholders[: input_batch.num_reqs]

    def invalidate_placeholders(self) -> None:
        """Return tokens that no grammar accepts from now on, because :class:`DraftScheduling` replaces all drafts.

        vLLM checks the drafts of requests with a grammar before they are replaced.
        """
        self._placeholders.fill_(_NO_DRAFT)


class DraftScheduling:
    """Replaces the places that the scheduler has planned for drafts by the drafts; one for each rank.

    It wraps two methods: ``execute_model`` of vLLM's worker, where the drafts are made and the planned step is reduced,
    and ``prepare_inputs`` of its model runner, where the drafts are copied to the device. In between, later pipeline
    stages receive the hidden states of the step, and earlier ones the placeholders of a previous step. A third method
    selects the adapters of the positions that drafts add.
    """

    def __init__(self, worker: Any, broadcast: Broadcast | None) -> None:
        """Wrap the methods. *broadcast* sends the drafts to the other ranks, if there are any."""
        runner = worker.model_runner
        self._runner, self._broadcast = runner, broadcast
        self.draft_tokens = 0
        """Number of draft tokens that were passed to verification."""
        self._loop: DraftingLoop | None = None
        states = runner.req_states
        self._drafts = torch.full(
            states.draft_tokens.shape, _NO_DRAFT, dtype=torch.int64, pin_memory=states.device.type == "cuda"
        )
        """The drafts by row of the runner's state, shape (max_num_reqs, num_speculative_tokens)."""
        self.uniform_lengths = uniform_draft_lengths(runner)
        """The lengths of drafts that have CUDA graphs, in ascending order; empty if all have."""
        self._lengths = np.zeros(len(self._drafts), np.int32)
        """Number of tokens of the drafts that were not scheduled yet, by row."""
        self._verified = np.zeros(len(self._drafts), np.int64)
        """Number of draft tokens of the step that is executed, by row."""
        if runner.speculator is not None:
            runner.speculator.verified = self._verified
            runner.speculator.invalidate_placeholders()
        self._execute_model, worker.execute_model = worker.execute_model, self.execute_model
        self._prepare_inputs, runner.prepare_inputs = runner.prepare_inputs, self.prepare_inputs
        self._make_lora_inputs = runner.lora_state.make_lora_inputs
        runner.lora_state.make_lora_inputs = self.make_lora_inputs

    @property
    def arrays(self) -> EngineArrays:
        """The arrays that the drafting loop reads and writes; a place is a row of the runner's state."""
        return EngineArrays(host_view(self._runner.req_states.all_token_ids), self._drafts.numpy(), self._lengths)

    def start(self, loop: DraftingLoop) -> None:
        """Make drafts with a loop that has :attr:`arrays`."""
        self._loop = loop
        self._runner.speculator.on_launched = loop.plan

    def execute_model(self, scheduler_output: Any) -> Any:
        """Make the drafts of a planned step, reduce the step to them, and execute it."""
        return self._execute_model(self._schedule_drafts(scheduler_output))

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the drafts to the device, and prepare the inputs."""
        if self._verified.any():
            self._runner.req_states.draft_tokens.copy_(self._drafts, non_blocking=True)
        return self._prepare_inputs(*args, **kwargs)

    def make_lora_inputs(self, req_ids: list[str], idx_mapping: Any, num_scheduled_tokens: Any) -> Any:
        """Return the adapters of a step, by position of the logits and by token, and the set of adapters.

        vLLM (seen in 0.32) returns one adapter for each request, although a draft adds further positions of logits.
        """
        by_request, by_token, adapters = self._make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens)
        by_position = np.repeat(np.array(by_request), self._verified[idx_mapping] + 1)
        return tuple(by_position), by_token, adapters

    def _schedule_drafts(self, scheduler_output: Any) -> Any:
        planned: dict[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
        if (loop := self._loop) is not None:
            loop.guard(lambda: self._follow(loop, scheduler_output))
            loop.guard(lambda: self._draft(loop, planned))
        self._verified[:] = 0
        if not planned:
            return scheduler_output
        index = self._runner.req_states.req_id_to_index
        # A request that has not started has neither a row nor a draft. vLLM plans places for it nevertheless, so that
        # the step keeps its CUDA graph, if the KV cache has its whole prompt but for the last token.
        rows = np.fromiter(map(index.get, planned, repeat(_NO_ROW)), np.int64, len(planned))
        has_row = rows != _NO_ROW
        rows = rows[has_row]
        places = np.fromiter(map(len, planned.values()), np.int64, len(planned))
        lengths = np.zeros_like(places)
        lengths[has_row] = np.minimum(self._lengths[rows], places[has_row])
        self.draft_tokens += int(lengths.sum())
        self._lengths[rows] = 0
        drafts = self._drafts.numpy()
        if self.uniform_lengths and lengths.any():
            # vLLM's n-gram speculator, too, pads with tokens that are verified like drafts, so that any will do.
            drafts[rows] = np.where(np.arange(drafts.shape[1]) < lengths[has_row, None], drafts[rows], _PADDING)
            length = next((n for n in self.uniform_lengths if n >= lengths.max()), self.uniform_lengths[-1])
            lengths[has_row] = np.minimum(length, places[has_row])
        if self._broadcast is not None:
            lengths, tokens = self._broadcast((lengths, drafts[rows]))
            drafts[rows] = tokens
        self._verified[rows] = lengths[has_row]
        return reduce_to_drafts(scheduler_output, lengths)

    def _follow(self, loop: DraftingLoop, scheduler_output: Any) -> None:
        preempted = scheduler_output.preempted_req_ids or set()
        for request_id in preempted:
            loop.count_steps(request_id, self._sampled_steps(request_id))
        self._forget_places(scheduler_output.finished_req_ids | preempted)
        loop.remove(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            # A request that was preempted is passed as a new one, without the tokens that vLLM has discarded.
            if loop.knows(request.req_id):
                loop.rewind(request.req_id, len(request.prefill_token_ids))
                continue
            params = request.sampling_params
            settings = DraftSettings.from_extra_args(None if params is None else params.extra_args)
            if settings is not None:
                prompt = request.prefill_token_ids[: request.prompt_len]
                loop.add(request.req_id, settings, prompt, end_token_ids(params))

    def _sampled_steps(self, request_id: str) -> list[tuple[int, int]]:
        """Return a request's number of tokens after, and of verified tokens in, the steps not yet drafted for."""
        steps = []
        for step in self._runner.speculator.sampled:
            if request_id in step.request_ids:
                place = step.request_ids.index(request_id)
                steps.append((int(step.wait()[step.rows[place]]), int(step.verified[place])))
        return steps

    def _forget_places(self, request_ids: set[str]) -> None:
        """Do not draft for requests that lose their rows, although a step with them may not have been drafted for."""
        sampled = self._runner.speculator.sampled
        for number, step in enumerate(sampled):
            if not request_ids.isdisjoint(step.request_ids):
                remaining = [_GONE if request_id in request_ids else request_id for request_id in step.request_ids]
                sampled[number] = step._replace(request_ids=remaining)

    def _draft(self, loop: DraftingLoop, planned: dict[str, list[int]]) -> None:
        """Draft for the requests of a planned step.

        It waits for the steps that sampled them, and not for later ones, which the pipeline still runs. A step is timed
        if each planned step waits for one.
        """
        sampled, wanted = self._runner.speculator.sampled, planned.keys()
        due = [number for number, step in enumerate(sampled, 1) if not wanted.isdisjoint(step.request_ids)]
        count = max(due, default=0)
        if count != 1:
            loop.interrupt_timing()
        for _ in range(count):
            step = sampled.popleft()
            self._lengths[step.rows] = 0
            if loop.skip_step():
                continue
            loop.draft(step.request_ids, step.wait(), step.rows, step.verified, step.processed_tokens)
            if count > 1:
                loop.interrupt_timing()  # The next step has ended meanwhile.


def host_view(tensor: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the host's memory of a ``StagedWriteTensor`` that the device accesses through unified addressing."""
    buffer = getattr(tensor, "_uva_buf", None)
    return np.asarray(tensor.gpu.numpy() if buffer is None else buffer.np)


def uniform_draft_lengths(runner: Any) -> list[int]:
    """Return the lengths of drafts for which a runner has captured CUDA graphs, if all drafts of a step have one."""
    graphs = runner.cudagraph_manager.graphs
    return sorted({graph.uniform_token_count - 1 for graph in graphs if graph.uniform_token_count is not None})


def reduce_to_drafts(scheduler_output: Any, lengths: Integers) -> Any:
    """Return a copy of a planned step with fewer places for drafts.

    The scheduler keeps the original. From it, it computes how many places were rejected; a place that was removed
    counts as rejected. *lengths* are those of the requests of ``scheduled_spec_decode_tokens``, in this order.
    """
    planned = scheduler_output.scheduled_spec_decode_tokens
    scheduled, drafts = scheduler_output.num_scheduled_tokens.copy(), {}
    for (request_id, places), length in zip(planned.items(), lengths.tolist(), strict=True):
        scheduled[request_id] -= len(places) - length
        if length:
            drafts[request_id] = places[:length]
    return dataclasses.replace(
        scheduler_output,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts,
    )


class ExactVerification:
    """Stands in for V2's ``AdaptiveVerificationManager``, which enables CUDA graphs for drafts of different lengths.

    vLLM's manager selects draft positions on the device, so that the host knows only upper bounds. Here, the host has
    selected them before, in :func:`reduce_to_drafts`, so that the layout that the host has prepared is exact.
    """

    _ADMITTED = (None,) if "copy_admitted_drafts_to_host" in signature(AdaptiveVerificationManager).parameters else ()
    """Says to vLLM 0.33 that the host's numbers of drafts are exact; vLLM 0.32 expects nothing."""

    def __init__(self, query_start_loc: torch.Tensor) -> None:
        self._query_start_loc = query_start_loc
        self._cu_num_logits = torch.empty_like(query_start_loc)
        self._layout: tuple[np.ndarray[Any, Any], int] | None = None

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
        return sum(num_tokens_per_req.values())

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray[Any, Any],
        num_scheduled_tokens: np.ndarray[Any, Any],
        cu_num_logits_np: np.ndarray[Any, Any],
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the layout as it is."""
        self._layout = cu_num_logits_np, int(num_draft_tokens_per_req.sum())
        return num_scheduled_tokens, cu_num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Return the boundaries of logits and queries on the device, and the number of draft tokens."""
        from vllm.utils.torch_utils import async_tensor_h2d

        if self._layout is None:
            raise RuntimeError("vLLM has prepared no layout for this step")
        (cu_num_logits_np, drafts), self._layout = self._layout, None
        cu_num_logits = self._cu_num_logits[: len(cu_num_logits_np)]
        async_tensor_h2d(cu_num_logits_np, out=cu_num_logits)
        return cu_num_logits, self._query_start_loc, drafts, *self._ADMITTED
