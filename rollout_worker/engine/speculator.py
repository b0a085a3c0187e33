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
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from inspect import signature
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from rollout_store.arrays import Integers
from rollout_worker.engine.draft_settings import DraftSettings, settings_of_request
from rollout_worker.engine.drafting_loop import EngineArrays
from rollout_worker.engine.exact_verification import FILLER, DeferredStep, Release, fit_lengths
from rollout_worker.engine.sampling_params import end_token_ids
from rollout_worker.policy.step_cost import CudaGraphs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.engine.drafting_loop import DraftingLoop

Broadcast = Callable[[Any], Any]
"""Returns the object that the drafting rank passes, on every rank; the other ranks pass None."""
_NO_ROW = -1
_HAS_MASKS_OF_DRAFTS = "num_bonus_tokens" in signature(StructuredOutputsWorker).parameters
"""Whether V2 expects as many masks of a grammar as a step has positions for it, as in vLLM 0.32. vLLM 0.33 expects one
for each place that may be planned."""
_MAX_TIMES_EXPIRED = 3
"""Number of steps that have not got their drafts in time after which drafts are made before the launch."""
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
    """Number of tokens that the step processed, without those that take the place of drafts."""
    copied: torch.cuda.Event | None
    """Reached when the step has ended and its numbers were copied; None on CPUs, where it has."""
    ended_s: float
    """When it ended, on CPUs."""
    is_late: bool = False
    """Whether the next step of its requests was launched without waiting for it."""

    @property
    def has_ended(self) -> bool:
        """Whether the step has sampled its tokens."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

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
        self.filler_tokens = 0
        """Number of tokens of the running step that take the place of drafts."""
        self.sampled: deque[SampledStep] = deque(maxlen=vllm_config.parallel_config.pipeline_parallel_size + 2)
        """The steps without drafts so far, oldest first. The pipeline holds one for each of its stages, and one more
        may have ended before a step at rest."""
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
                copied = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                copied.record()
            rows = input_batch.idx_mapping_np.astype(np.int64)
            tokens = int(input_batch.num_tokens) - self.filler_tokens
            self.filler_tokens = 0
            step = SampledStep(
                input_batch.req_ids, rows, self.verified[rows], total_len, tokens, copied, time.perf_counter()
            )
            self.sampled.append(step)
            if self.on_launched is not None:
                self.on_launched(input_batch.req_ids)
        return self._placeholders[: input_batch.num_reqs]


class DraftScheduling:
    """Replaces the places that the scheduler has planned for drafts by the drafts; one for each rank.

    It wraps two methods: ``execute_model`` of vLLM's worker, where the drafts are made and the planned step is reduced,
    and ``prepare_inputs`` of its model runner, where the drafts are copied to the device. In between, later pipeline
    stages receive the hidden states of the step, and earlier ones the placeholders of a previous step. A third method
    selects the adapters of the positions that drafts add.

    **Grammars.** vLLM plans and launches a step with grammars like any other, but samples it when the scheduler knows
    the tokens of the step before. Only then the scheduler asks for the drafts (``take_draft_token_ids``), keeps of each
    what its grammar accepts, and passes the tokens that the grammar permits at each planned place (``sample_tokens``).
    The drafts have been made by then. Those of a launched step cannot be shortened any more, so vLLM rejects what the
    grammar does not accept.
    """

    def __init__(self, worker: Any, broadcast: Broadcast | None) -> None:
        """Wrap the methods. *broadcast* sends the drafts to the other ranks, if there are any."""
        runner = worker.model_runner
        self._runner, self._broadcast = runner, broadcast
        self._graphs = CudaGraphs(runner.compilation_config.cudagraph_capture_sizes or ())
        self._drafts_per_request = 0.0
        """Largest number of draft tokens per request in the last two steps for which drafts were made."""
        self._last_drafts_per_request = 0.0
        self.draft_tokens = 0
        """Number of draft tokens that were passed to verification."""
        self._loop: DraftingLoop | None = None
        self.settings_of: Callable[[Any], DraftSettings | None] = settings_of_request
        """Returns the drafting settings of a request of vLLM that begins."""
        self.on_finished: Callable[[str, NDArray[np.int32]], None] | None = None
        """Called with a request that has ended, and its tokens; some of them may have been sampled after its end."""
        self._taken: deque[SampledStep] = deque(maxlen=runner.speculator.sampled.maxlen if runner.speculator else 0)
        """The last steps that were drafted for."""
        self._clock = _DeviceClock()
        states = runner.req_states
        self._drafts = torch.full(
            states.draft_tokens.shape, FILLER, dtype=torch.int64, pin_memory=states.device.type == "cuda"
        )
        """The drafts by row of the runner's state, shape (max_num_reqs, num_speculative_tokens).

        What follows the end of a draft is in the vocabulary, too."""
        self.uniform_lengths = uniform_draft_lengths(runner)
        """The lengths of drafts that have CUDA graphs, in ascending order; empty if all have."""
        self._lengths = np.zeros(len(self._drafts), np.int32)
        """Number of tokens of the drafts that were not scheduled yet, by row."""
        self._verified = np.zeros(len(self._drafts), np.int64)
        """Number of draft tokens of the step that is executed, by row."""
        self._planned: dict[str, list[int]] = {}
        """The places for drafts that were planned for this step, by request."""
        if runner.speculator is not None:
            runner.speculator.verified = self._verified
        self._execute_model, worker.execute_model = worker.execute_model, self.execute_model
        self._prepare_inputs, runner.prepare_inputs = runner.prepare_inputs, self.prepare_inputs
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self.sample_tokens
        runner.take_draft_token_ids = self.take_draft_token_ids
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
        """Execute a planned step with the drafts that are made for it.

        If possible, the drafts are made after the step was launched, so that the device does not wait for the
        preparation of the step. Otherwise, the planned step is reduced to the drafts before.
        """
        loop = self._loop
        if loop is not None:
            loop.guard(lambda: self._follow(loop, scheduler_output))
        planned = self._planned = scheduler_output.scheduled_spec_decode_tokens
        rests = loop is not None and self._rest(loop, planned)
        budget = self._choose_budget(scheduler_output, rests=rests)
        if budget is None and loop is not None and not rests:
            loop.guard(lambda: self._draft(loop, planned))
        verification = self._runner.adaptive_verification
        if verification is not None:
            # Log-probabilities are split by the boundaries on the device if the host does not know these.
            self._runner.rejection_sampler.enable_adaptive_verification = bool(budget)
        if not budget:
            return self._execute_model(self._schedule_drafts(scheduler_output))
        self._verified[:] = 0
        verification.defer(budget, functools.partial(self._prepare_drafts, planned, budget))
        try:
            return self._execute_model(scheduler_output)
        finally:
            verification.complete()

    def _is_deferrable(self, scheduler_output: Any) -> bool:
        """Return whether a step can be prepared before its drafts are known. All ranks decide alike.

        This excludes steps that read prompts, and what needs the exact layout on the host: grammars, adapters, and
        routed experts.
        """
        planned = scheduler_output.scheduled_spec_decode_tokens
        runner = self._runner
        return bool(
            planned
            and len(planned) == len(scheduler_output.num_scheduled_tokens)
            and not scheduler_output.scheduled_new_reqs
            and not scheduler_output.preempted_req_ids
            and not scheduler_output.has_structured_output_requests
            and not runner.use_pp
            and runner.lora_config is None
            and runner.aux_output_connector is None
            and all(
                tokens == 1 + len(planned[request_id])
                for request_id, tokens in scheduler_output.num_scheduled_tokens.items()
            )
        )

    def _rest(self, loop: DraftingLoop, planned: dict[str, list[int]]) -> bool:
        """Return whether a step is to be launched at once and without drafts, as in an engine that does not draft."""
        sampled = self._runner.speculator.sampled
        due = [number for number, step in enumerate(sampled) if not planned.keys().isdisjoint(step.request_ids)]
        if not due or not loop.rest():
            return False
        for number in due:
            sampled[number] = sampled[number]._replace(is_late=True)
        return True

    def _choose_budget(self, scheduler_output: Any, *, rests: bool) -> int | None:
        """Return how many draft tokens a step verifies whose drafts are made after its launch.

        0 means that it has no such drafts: the drafter rests, or has drafted already. None means that the drafts must
        be made before. The step fills the smallest CUDA graph that holds as many drafts for each request as one of the
        last two steps had.
        """
        verification = self._runner.adaptive_verification
        if verification is None or not self._is_deferrable(scheduler_output):
            return None
        planned: dict[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
        requests = len(planned)
        places = min(sum(map(len, planned.values())), verification.max_logits - requests)
        if places <= 0:
            return None
        budget: int | None = 0
        loop = self._loop
        tokens = requests + max(1, math.ceil(self._drafts_per_request * requests))
        # Without a graph, a step may have more launches than CUDA queues behind the gate, so that the host would wait.
        if verification.times_expired >= _MAX_TIMES_EXPIRED or tokens > self._graphs.max_tokens:
            budget = None
        elif loop is not None and not rests and loop.guard(lambda: self._draft_early(loop, planned)) is False:
            budget = min(self._graphs.pad(tokens) - requests, places)
        return budget if self._broadcast is None else self._broadcast(budget)

    def _draft_early(self, loop: DraftingLoop, planned: dict[str, list[int]]) -> bool:
        """Return whether the drafts of a planned step are known before its launch.

        That is so if the drafter rests, and if its requests were not all sampled by one step, so that they are drafted
        for here.
        """
        sampled = self._runner.speculator.sampled
        while sampled and sampled[0].is_late:
            self._draft_next(loop)
        if len(sampled) != 1 or planned.keys().isdisjoint(sampled[0].request_ids):
            self._draft(loop, planned)
            return True
        if skips := loop.skip_step():
            self._lengths[self._take_next().rows] = 0
        return skips

    def _prepare_drafts(self, planned: dict[str, list[int]], budget: int, req_ids: list[str]) -> DeferredStep:
        index = self._runner.req_states.req_id_to_index
        rows = np.fromiter(map(index.__getitem__, req_ids), np.int64, len(req_ids))
        capacities = np.fromiter((len(planned[request_id]) for request_id in req_ids), np.int64, len(req_ids))
        return DeferredStep(budget, rows, capacities, self._make_drafts)

    def _make_drafts(self, step: DeferredStep, release: Release) -> None:
        """Make the drafts of a step that was launched, or receive them from the rank that does.

        Drafts that do not fit are shortened, the longest first. Places that are left over have a token that belongs to
        no draft. It is verified like one, and rarely accepted.
        """
        if self._loop is None:
            drafts = None if self._broadcast is None else self._broadcast(None)
            if drafts is not None and not release(*drafts):
                # vLLM ends the engine if a rank exits.
                raise SystemExit("This rank has waited too long for drafts, and others verify them; the engine ends.")
            return
        loop, rows = self._loop, step.rows
        loop.guard(lambda: self._draft_for(loop, self._take_next()))
        wanted = np.minimum(self._lengths[rows], step.capacities)
        self._lengths[rows] = 0
        lengths, verified = fit_lengths(wanted, step.capacities, step.budget)
        tokens = self._drafts.numpy()[rows]
        is_in_time = release(lengths, tokens)
        if self._broadcast is not None:
            self._broadcast((lengths, tokens) if is_in_time else None)
        if is_in_time:
            self._verified[rows] = verified
        num_verified = int(self._verified.sum())
        self.draft_tokens += num_verified
        self._runner.speculator.filler_tokens = step.budget - num_verified
        per_request = float(wanted.sum()) / len(rows)
        self._drafts_per_request = max(per_request, self._last_drafts_per_request)
        self._last_drafts_per_request = per_request

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the drafts to the device if they are known, and prepare the inputs."""
        if self._verified.any():
            self._runner.req_states.draft_tokens.copy_(self._drafts, non_blocking=True)
        return self._prepare_inputs(*args, **kwargs)

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Return the drafts of the step that is executed, for the scheduler to compare with grammars."""
        index, drafts = self._runner.req_states.req_id_to_index, self._drafts.numpy()
        rows = [(request_id, index[request_id]) for request_id in self._planned if request_id in index]
        return DraftTokenIds(
            [request_id for request_id, _ in rows], [drafts[row, : self._verified[row]].tolist() for _, row in rows]
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the tokens of the step that was executed.

        vLLM 0.32 expects masks for the places that have drafts, although the scheduler has made one for each place.
        """
        if grammar_output is not None and _HAS_MASKS_OF_DRAFTS:
            index = self._runner.req_states.req_id_to_index
            has_position = [
                np.arange(1 + len(self._planned.get(request_id, ()))) <= self._verified[index[request_id]]
                for request_id in grammar_output.structured_output_request_ids
            ]
            masks = grammar_output.grammar_bitmask[np.concatenate(has_position)]
            grammar_output = dataclasses.replace(grammar_output, grammar_bitmask=masks)
        return self._sample_tokens(grammar_output)

    def make_lora_inputs(self, req_ids: list[str], idx_mapping: Any, num_scheduled_tokens: Any) -> Any:
        """Return the adapters of a step, by position of the logits and by token, and the set of adapters.

        vLLM (seen in 0.32) returns one adapter for each request, although a draft adds further positions of logits.
        """
        by_request, by_token, adapters = self._make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens)
        by_position = np.repeat(np.array(by_request), self._verified[idx_mapping] + 1)
        return tuple(by_position), by_token, adapters

    def _schedule_drafts(self, scheduler_output: Any) -> Any:
        planned: dict[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
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
            drafts[rows] = np.where(np.arange(drafts.shape[1]) < lengths[has_row, None], drafts[rows], FILLER)
            length = next((n for n in self.uniform_lengths if n >= lengths.max()), self.uniform_lengths[-1])
            lengths[has_row] = np.minimum(length, places[has_row])
        if self._broadcast is not None:
            lengths, tokens = self._broadcast((lengths, drafts[rows]))
            drafts[rows] = tokens
        self._verified[rows] = lengths[has_row]
        return reduce_to_drafts(scheduler_output, lengths)

    def _follow(self, loop: DraftingLoop, scheduler_output: Any) -> None:
        finished = scheduler_output.finished_req_ids
        self.finish(finished)
        preempted = scheduler_output.preempted_req_ids or set()
        for request_id in preempted:
            loop.count_steps(request_id, self._sampled_steps(request_id))
        self._forget_places(finished | preempted)
        for request in scheduler_output.scheduled_new_reqs:
            # A request that was preempted is passed as a new one, without the tokens that vLLM has discarded.
            if loop.knows(request.req_id):
                loop.rewind(request.req_id, len(request.prefill_token_ids))
                continue
            settings = self.settings_of(request)
            if settings is not None:
                prompt = request.prefill_token_ids[: request.prompt_len]
                loop.add(request.req_id, settings, prompt, end_token_ids(request.sampling_params))

    def finish(self, request_ids: Iterable[str]) -> None:
        """Stop drafting for requests that have ended; further calls have no effect."""
        if self._loop is not None:
            self._loop.remove(request_ids)
        if self.on_finished is not None:
            for request_id in request_ids:
                self.on_finished(request_id, self._text(request_id))

    def _text(self, request_id: str) -> NDArray[np.int32]:
        """Return a copy of the tokens of a request that has ended: its prompt and what was sampled for it so far.

        It is empty if the engine has forgotten the request.
        """
        row = self._runner.req_states.req_id_to_index.get(request_id)
        steps = [step for step in (*self._taken, *self._runner.speculator.sampled) if request_id in step.request_ids]
        ended = [step for step in steps if step.has_ended]
        if row is None or not ended:
            return np.zeros(0, np.int32)
        return np.array(self.arrays.token_ids[row, : ended[-1].total_len.numpy()[row]])

    def _take_next(self) -> SampledStep:
        """Take the oldest step out of those that were not drafted for."""
        step: SampledStep = self._runner.speculator.sampled.popleft()
        self._taken.append(step)
        return step

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
        for steps in (self._runner.speculator.sampled, self._taken):
            for number, step in enumerate(steps):
                if not request_ids.isdisjoint(step.request_ids):
                    remaining = [_GONE if request_id in request_ids else request_id for request_id in step.request_ids]
                    steps[number] = step._replace(request_ids=remaining)

    def _draft(self, loop: DraftingLoop, planned: dict[str, list[int]]) -> None:
        """Draft for the requests of a planned step.

        It waits for the steps that sampled them, and not for later ones, which the pipeline still runs.
        """
        sampled, wanted = self._runner.speculator.sampled, planned.keys()
        due = [number for number, step in enumerate(sampled, 1) if not wanted.isdisjoint(step.request_ids)]
        for _ in range(max(due, default=0)):
            self._draft_next(loop)

    def _draft_next(self, loop: DraftingLoop) -> None:
        """Draft for the requests of the oldest step, unless the drafter skips it."""
        step = self._take_next()
        if loop.skip_step():
            self._lengths[step.rows] = 0
            return
        self._draft_for(loop, step)
        if step.is_late:
            loop.plan(step.request_ids)

    def _draft_for(self, loop: DraftingLoop, step: SampledStep) -> None:
        """Wait for the tokens that a step samples, and draft for its requests."""
        self._lengths[step.rows] = 0
        total_len = step.wait()
        loop.draft(
            step.request_ids,
            total_len,
            step.rows,
            step.verified,
            step.processed_tokens,
            ended_s=self._clock.end_of(step),
            is_late=step.is_late,
        )


class _DeviceClock:
    """Measures when steps end, from the end of the first one."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last: torch.cuda.Event | None = None

    def end_of(self, step: SampledStep) -> float:
        """Return when a step ended that has been waited for, in seconds. Steps must be passed in order."""
        if step.copied is None:
            return step.ended_s
        if self._last is not None:
            self._seconds += self._last.elapsed_time(step.copied) / 1e3
        self._last = step.copied
        return self._seconds


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
