"""The methods that the host process calls on vLLM's worker processes with ``collective_rpc``."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.sampling_params import end_token_ids
from rollout_worker.engine.vllm_patches import (
    apply_settings_without_drafts,
    enable_amx,
    noting_not_finite,
    packing_experts,
    patch_adapter_rows,
    patch_sampling_without_drafts,
    repacking_output_projection,
    reset_failed_reload,
    rewind_cpu_generators,
    unpickling_nccl_ids_only,
)
from rollout_worker.policy.length_classes import NO_COUNTERS

if TYPE_CHECKING:
    from rollout_store.history.known_lengths import KnownLengths
    from rollout_store.history.sync import HistorySync
    from rollout_worker.drafting.index import SuffixIndex
    from rollout_worker.engine.draft_settings import DraftSettings
    from rollout_worker.engine.drafting_loop import DraftingLoop
    from rollout_worker.engine.speculator import DraftScheduling
    from rollout_worker.policy.controller import DraftController
    from rollout_worker.policy.length_classes import LengthClasses
    from rollout_worker.policy.step_cost import StepCost

logger = logging.getLogger(__name__)

enable_amx()  # vLLM imports this module in the worker process before it runs any kernel

_MAX_DRAFTING_THREADS = 4
_CORES_PER_DRAFTING_THREAD = 4
"""An engine with fewer cores drafts ahead in one thread; with fewer than three, it does not draft ahead."""
_SWITCH_INTERVAL_S = 2e-4
"""Time after which a Python thread gives way to one that waits. The thread that runs the steps waits this long whenever
it comes back from waiting for the device while another one runs, such as the one that reads the history. Python's
default is 5 ms, as long as a whole step."""


def _returning_errors(method: Callable[..., None]) -> Callable[..., str | None]:
    """Let a method return why it has failed, or None if it has not.

    An exception on several ranks would leave replies in vLLM's queue, where they would be taken for those to the next
    call.
    """

    @wraps(method)
    def call(*args: Any) -> str | None:
        from rollout_store.job.engines import EngineError

        try:
            method(*args)
        except Exception as error:
            logger.exception("%s has failed.", method.__name__)
            return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        return None

    return call


class EngineExtension:
    """Mixed into vLLM's worker class by ``worker_extension_cls``. Every method runs between two steps."""

    model_runner: Any
    vllm_config: Any
    parallel_config: Any
    device: Any
    reload_weights: Callable[..., None]
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    shutdown_weight_transfer_engine: Callable[[], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool
    _das_reload: AbstractContextManager[None] | None = None
    """What is patched during a weight update."""
    _das_names_not_finite: list[str]
    """Names of the tensors of the last weight update that were not finite."""

    def das_exit_with_host(self, host_pid: int) -> None:
        """Let the engine's processes exit when the host process has ended in any way.

        vLLM's engine core would wait for messages of a killed host forever, and keep its memory and its GPU. On a
        machine without the engine's core, the process exits with its parent.
        """
        if self.parallel_config.node_rank_within_dp:
            host_pid = os.getppid()
        descriptor = os.pidfd_open(host_pid)
        core_pid = os.getppid()  # the host itself, if it runs the worker in its own process

        def exit_with_host() -> None:
            select.select([descriptor], [], [])
            if core_pid != host_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(core_pid, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=exit_with_host, name="exit-with-host", daemon=True).start()

    def das_rewind_generators(self) -> bool:
        """See :func:`rollout_worker.engine.vllm_patches.rewind_cpu_generators`."""
        return rewind_cpu_generators(self.model_runner)

    def das_patch_adapters(self) -> bool:
        """See :func:`rollout_worker.engine.vllm_patches.patch_adapter_rows`."""
        return patch_adapter_rows()

    @_returning_errors
    def das_load_weights(self, directory: str) -> None:
        """Replace the weights by the safetensors in *directory*. If that fails, some weights are old and some new."""
        self.das_interrupt_timing()
        try:
            with self._das_patched_reload():
                self.reload_weights(weights_path=directory)
        except Exception:
            reset_failed_reload(self.model_runner.get_model())
            raise

    @_returning_errors
    def das_init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Call vLLM's ``init_weight_transfer_engine``, after releasing the connection to an earlier trainer."""
        self.das_interrupt_timing()
        self.shutdown_weight_transfer_engine()
        if "nccl" in self.vllm_config.weight_transfer_config.backend:
            from rollout_api.weights.in_memory import check_nccl

            check_nccl()
        with unpickling_nccl_ids_only():
            self.init_weight_transfer_engine(init_info)

    @_returning_errors
    def das_start_weight_update(self) -> None:
        """Call vLLM's ``start_weight_update``."""
        self.das_interrupt_timing()
        self._das_reload = self._das_receiving()
        self._das_reload.__enter__()
        self.start_weight_update()

    @_returning_errors
    def das_update_weights(self, update_info: dict[str, Any]) -> None:
        """Call vLLM's ``update_weights``."""
        self.update_weights(update_info)

    @_returning_errors
    def das_finish_weight_update(self) -> None:
        """Call vLLM's ``finish_weight_update``."""
        self.finish_weight_update()
        reload, self._das_reload = self._das_reload, None
        if reload is not None:
            reload.__exit__(None, None, None)
        for reset in ("reset_encoder_cache", "reset_mm_cache"):  # as vLLM does when it reloads a directory
            getattr(self.model_runner, reset)()

    def das_abort_weight_update(self) -> None:
        """End a weight update that has failed; the tensors that were received completely stay."""
        reload, self._das_reload = self._das_reload, None
        if reload is not None:
            reload.__exit__(_AbortedError, _AbortedError(), None)
        self._weight_update_active = False
        reset_failed_reload(self.model_runner.get_model())
        with contextlib.suppress(Exception):  # the trainer may be gone
            self.shutdown_weight_transfer_engine()

    def das_not_finite(self) -> list[str]:
        """Return the names of the tensors of the last weight update that were not finite."""
        return self._das_names_not_finite

    @contextlib.contextmanager
    def _das_receiving(self) -> Iterator[None]:
        """Correct what vLLM leaves out when it receives weights."""
        self._das_names_not_finite = []
        with noting_not_finite(self.model_runner.get_model(), self._das_names_not_finite), self._das_patched_reload():
            yield

    @contextlib.contextmanager
    def _das_patched_reload(self) -> Iterator[None]:
        """Correct what vLLM leaves out when it reloads weights on CPUs."""
        if self.device.type != "cpu":
            yield
            return
        model = self.model_runner.get_model()
        with packing_experts(model), repacking_output_projection(model):
            yield

    def das_interrupt_timing(self) -> None:
        """Do not measure the current step; nothing is measured without a drafter."""

    def das_stats(self) -> dict[str, Any]:
        """Return statistics; an engine without speculation has none, but the reply shows that it is alive."""
        return {}


class _AbortedError(Exception):
    """A weight update is aborted."""


class DraftingExtension(EngineExtension):
    """The extension of an engine that drafts."""

    _das_index: Any = None
    _das_sync: HistorySync | None = None
    _das_lengths: KnownLengths | None = None
    """The lengths of earlier rollouts; None if the policy does not use them."""
    _das_loop: DraftingLoop | None = None
    _das_controller: DraftController
    _das_scheduling: DraftScheduling | None = None

    def das_start_drafting(self, drafting: dict[str, Any]) -> bool:
        """Create the index, the policy and the thread that reads the history, and start the proposer.

        *drafting* is a :class:`DraftingConfig` as a dictionary.

        Returns:
            Whether this rank drafts.
        """
        from rollout_api.protocol.keys import HistoryKeys
        from rollout_api.redis_client.connection import connect_history
        from rollout_store.history.known_lengths import KnownLengths
        from rollout_store.history.store import HistoryStore
        from rollout_store.history.sync import HistorySync
        from rollout_store.runtime.control_groups import usable_cores
        from rollout_worker.drafting.index import POOL_TOKENS, SuffixIndex
        from rollout_worker.engine.drafting_loop import DraftingLoop, EngineArrays
        from rollout_worker.engine.learned_state import LearnedState
        from rollout_worker.engine.recurrent_states import check_layers
        from rollout_worker.engine.vllm_plugin import is_output_rank
        from rollout_worker.policy.controller import DraftController
        from rollout_worker.policy.draft_policy import DraftLimits
        from rollout_worker.policy.named_policies import make_policy, uses_lengths

        check_layers(self.vllm_config)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if self._das_uses_v2:
            scheduling = self._das_scheduling = self._das_schedule_drafts()
        else:
            patch_sampling_without_drafts(self.model_runner)
            apply_settings_without_drafts(self.model_runner)
        if not is_output_rank():
            return False
        config = DraftingConfig.from_dict(drafting)
        history = config.history
        cores = int(usable_cores() / config.engines)
        threads = max(1, min(_MAX_DRAFTING_THREADS, cores // _CORES_PER_DRAFTING_THREAD))
        self._das_index = SuffixIndex(
            threads=threads, max_bytes=config.max_index_bytes, pool_tokens=POOL_TOKENS, draft_ahead=cores > 2
        )
        model_config = self.model_runner.model_config
        scheduler = self.model_runner.scheduler_config
        step_tokens = max(0, scheduler.max_num_batched_tokens - scheduler.max_num_seqs)
        places = self.vllm_config.num_speculative_tokens
        limits = DraftLimits(places, step_tokens, config.min_survival, scheduler.max_num_seqs)
        self._das_lengths = KnownLengths() if uses_lengths(config.policy) else None
        is_cpu = self.device.type == "cpu"
        self._das_controller = DraftController(
            make_policy(config.policy, limits, self._das_lengths),
            self._das_predicted_step_cost(),
            graph_sizes=() if is_cpu else self.model_runner.compilation_config.cudagraph_capture_sizes or (),
            uniform_lengths=scheduling.uniform_lengths if self._das_uses_v2 else (),
            governed=config.governed,
        )
        weights = sum(parameter.numel() for parameter in self.model_runner.get_model().parameters())
        learned = LearnedState(self._das_index, self._das_controller.governor, f"{weights} weights, {self._das_card()}")
        if history is not None:
            keys = HistoryKeys(history.namespace, history.name)
            store = HistoryStore(connect_history(history.redis_url), keys, window=history.window)
            vocabulary = model_config.get_vocab_size()
            self._das_sync = HistorySync(
                store, self._das_index, vocabulary=vocabulary, statistics=learned, lengths=self._das_lengths
            )
        if self._das_uses_v2:
            arrays = scheduling.arrays
        else:
            arrays = EngineArrays.create(self.model_runner.input_batch.token_ids_cpu, places)
        self._das_loop = DraftingLoop(self._das_index, self._das_controller, arrays)
        if self._das_uses_v2:
            scheduling.start(self._das_loop)
        else:
            self.model_runner.drafter.start(self.model_runner, self._das_loop, arrays)
        if self._das_sync is not None:
            self._das_sync.start()
        return True

    def das_follow(
        self, settings_of: Callable[[Any], DraftSettings | None], on_finished: Callable[[str, Any], None]
    ) -> Callable[[Iterable[str]], None]:
        """Draft for requests that have no settings of a job.

        Args:
            settings_of: returns the settings of a request of vLLM that begins.
            on_finished: called with the id and the tokens of a request that has ended.

        Returns:
            A function that tells the drafter that requests have ended. It learns that with the next step, at the
            latest; further calls have no effect.
        """
        runner, loop, scheduling = self.model_runner, self._das_loop, self._das_scheduling
        if scheduling is not None:
            scheduling.settings_of, scheduling.on_finished = settings_of, on_finished
            return scheduling.finish
        if loop is None:
            return lambda _: None
        update_states = runner._update_states

        def finish(request_ids: Iterable[str]) -> None:
            for request in filter(None, map(runner.requests.get, request_ids)):
                loop.remove([request.req_id])
                on_finished(request.req_id, [*(request.prompt_token_ids or ()), *request.output_token_ids])

        def add(requests: Iterable[Any]) -> None:
            for request in requests:
                settings = None if loop.knows(request.req_id) else settings_of(request)
                if settings is not None:
                    loop.add(request.req_id, settings, request.prompt_token_ids, end_token_ids(request.sampling_params))

        def follow(scheduler_output: Any) -> Any:
            loop.guard(lambda: finish(scheduler_output.finished_req_ids))
            loop.guard(lambda: add(scheduler_output.scheduled_new_reqs))
            return update_states(scheduler_output)

        runner._update_states = follow
        return finish

    def _das_card(self) -> str:
        import torch

        return "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    def _das_predicted_step_cost(self) -> StepCost:
        """Predict the cost of steps until some were measured."""
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from rollout_worker.policy.hardware import ModelPart, predicted_step_cost
        from rollout_worker.policy.step_cost import CPU

        model_config = self.model_runner.model_config
        experts = model_config.get_num_experts()
        expert_share = model_config.get_num_experts_per_tok() / experts if experts else 0.0
        if self.device.type == "cpu":
            return CPU.with_experts(expert_share)
        # Quantized weights of 4 bits are packed.
        packed = {torch.int32: 8, torch.uint8: 2}
        sizes = {
            name: (parameter.numel() * parameter.element_size(), parameter.numel() * packed.get(parameter.dtype, 1))
            for name, parameter in self.model_runner.get_model().named_parameters()
        }
        of_experts = [size for name, size in sizes.items() if ".experts." in name]
        specs = [spec for spec in self.model_runner.get_kv_cache_spec().values() if isinstance(spec, FullAttentionSpec)]
        part = ModelPart(
            weight_bytes=sum(size for size, _ in sizes.values()),
            weights=sum(count for _, count in sizes.values()),
            kv_bytes_per_token=sum(spec.page_size_bytes / spec.block_size for spec in specs),
            expert_bytes=sum(size for size, _ in of_experts),
            expert_weights=sum(count for _, count in of_experts),
            expert_share=expert_share,
        )
        return predicted_step_cost(self._das_card(), part)

    @property
    def _das_uses_v2(self) -> bool:
        return bool(self.vllm_config.use_v2_model_runner)

    def _das_schedule_drafts(self) -> DraftScheduling:
        """Let the V2 model runner of this rank verify the drafts of the rank that drafts."""
        from rollout_worker.engine.speculator import DraftScheduling
        from rollout_worker.engine.vllm_plugin import broadcast_drafts, check

        check(self.model_runner, self.vllm_config)
        return DraftScheduling(self, broadcast_drafts(self.vllm_config))

    def das_announce(self, problems: list[str], generation: int, wanted: list[str] | None) -> None:
        """Fetch the history of *problems* in the background; see :meth:`Engine.announce`."""
        if self._das_sync is not None:
            self._das_sync.announce(problems, wanted)
            self._das_controller.set_generation(generation)

    def das_history_ready(self) -> bool:
        """Return whether the history of all announced problems is in the index."""
        return self._das_sync is None or self._das_sync.wait_ready(timeout=0)

    def das_interrupt_timing(self) -> None:
        """See :meth:`DraftingLoop.interrupt_timing`."""
        if self._das_loop is not None:
            self._das_loop.interrupt_timing()

    def das_take_counts(self, keys: list[str]) -> dict[str, tuple[tuple[int, ...], bytes, str]]:
        """Return the fields of ``ResponseDraftCounts`` of responses that have ended, by key."""
        if self._das_loop is None:
            return {}
        return {
            key: (counts.drafted_by_source, counts.token_sources, counts.length_class)
            for key, counts in self._das_loop.take_counts(keys).items()
        }

    def das_stats(self) -> dict[str, Any]:
        """Return statistics of the drafter, its index and the cost model; empty on ranks that do not draft."""
        if self._das_loop is None:
            return {}
        loop, controller = self._das_loop, self._das_controller
        cost = controller.fit.cost.linear_between(loop.num_requests, loop.num_requests)
        scheduling = self._das_scheduling
        return ({} if scheduling is None else {"draft_tokens": scheduling.draft_tokens}) | {
            "decoding_steps": loop.steps,
            "tokens": loop.tokens,
            "tracked_responses": loop.num_tracked,
            "proposed_tokens": loop.proposed_tokens,
            "drafting_seconds": loop.seconds,
            "drafting_failures": loop.failures,
            "last_drafting_failure": loop.last_failure,
            "sampling_patched": not self._das_uses_v2 and self.model_runner.drafter.sampling_patched,
            "index_bytes": self._das_index.bytes(),
            "cost_base_seconds": cost.base_s,
            "cost_token_seconds": cost.per_token_s,
            "cost_context_token_seconds": cost.per_context_token_s,
            "cost_drafting_seconds": cost.drafting_s,
            "cost_experts_seconds": controller.fit.cost.experts_s,
            "cost_error_ratio": controller.fit.median_relative_error,
            "length_explained_ratio": controller.explained_lengths,
            "timed_seconds": controller.timed_s,
            "timed_seconds_without_drafts": controller.without_drafts_s,
            "drafting_disabled": float(controller.governor.drafting_disabled),
            "drafting_stops": controller.governor.num_stops,
            "trial_tokens": controller.governor.trial_tokens,
            "labeled_counters": labeled_counters(self._das_index, controller.length_classes),
            "history": {} if self._das_sync is None else asdict(self._das_sync.counters),
        }


def labeled_counters(index: SuffixIndex, classes: LengthClasses | None = None) -> dict[str, Mapping[str, int]]:
    """Return the numbers of draft tokens, and of rollouts in length classes, by name and then by label.

    Labels are sources, or the positions 1, 2, … of a draft, or the length classes of rollouts. The last position, such
    as 16+, also counts all later positions. Positions after the last one that was verified are left out.
    """
    by_source, by_position = index.verification_counts()
    positions = [str(number) for number in range(1, len(by_position))] + [f"{len(by_position)}+"]
    used = {label: counts for label, counts in zip(positions, by_position, strict=True) if counts.verified}
    return {
        "source_proposed_tokens": {source: counts.drafted for source, counts in index.counters().items()},
        "source_draft_tokens": {source: counts.verified for source, counts in by_source.items()},
        "source_accepted_tokens": {source: counts.accepted for source, counts in by_source.items()},
        "position_draft_tokens": {label: counts.verified for label, counts in used.items()},
        "position_accepted_tokens": {label: counts.accepted for label, counts in used.items()},
        **(NO_COUNTERS if classes is None else classes.counters()),
    }
