"""The methods that the host process calls on vLLM's worker processes with ``collective_rpc``."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.vllm_patches import enable_amx

if TYPE_CHECKING:
    from rollout_worker.engine.drafting_loop import DraftingLoop
    from rollout_worker.engine.speculator import DraftScheduling
    from rollout_worker.engine.transfer_group import TransferGroup
    from rollout_worker.engine.weight_stream import StagedTensors, StreamTensor, TensorReceiver, TensorSender
    from rollout_worker.history.sync import HistorySync
    from rollout_worker.policy.controller import DraftController

logger = logging.getLogger(__name__)

enable_amx()  # vLLM imports this module in the worker process before it runs any kernel

_MAX_DRAFTING_THREADS = 4
_CORES_PER_DRAFTING_THREAD = 4
"""On machines with fewer cores, drafts are made by the calling thread only."""
_WEIGHTS_CHANGED = "the engine has loaded other weights meanwhile"
"""Why weights that were being read are not passed on."""


class EngineExtension:
    """Mixed into vLLM's worker class by ``worker_extension_cls``. Every method runs between two steps."""

    model_runner: Any
    vllm_config: Any
    parallel_config: Any
    device: Any
    reload_weights: Callable[..., None]
    _das_group: tuple[str, Any] = ("", None)
    """Name of the process group of the last broadcast, and the group."""
    _das_transfer_group: TransferGroup | None = None
    """The trainer's process group that was joined last."""
    _das_reading: tuple[Iterator[tuple[StreamTensor, Any] | None], list[tuple[StreamTensor, Any]]] | None = None
    """The tensors that are being read in order to pass them on, and those that were read."""
    _das_senders: tuple[TensorSender, ...] = ()
    """Senders that pass the weights on to other engines."""
    _das_receiver: TensorReceiver | StagedTensors | None = None
    """Connection to an engine that passes its weights on, or what was received from it."""

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
        from rollout_worker.engine.vllm_patches import rewind_cpu_generators

        return rewind_cpu_generators(self.model_runner)

    def das_patch_adapters(self) -> bool:
        """See :func:`rollout_worker.engine.vllm_patches.patch_adapter_rows`."""
        from rollout_worker.engine.vllm_patches import patch_adapter_rows

        return patch_adapter_rows()

    def das_load_weights(self, directory: str) -> str | None:
        """Replace the weights by the safetensors in *directory*.

        Returns:
            Why that has failed, in which case some weights are old and some new; None if it has not. An exception on
            several ranks would leave replies in vLLM's queue, where they would be taken for those to the next call.
        """
        return self._das_reload(weights_path=directory)

    def das_load_from_memory(self, path: str, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> str | None:
        """Replace the weights by those in the host process's memory; see :meth:`das_load_weights`.

        Args:
            path: see :class:`~rollout_worker.engine.patched_checkpoint.MemoryTensors`, also for *tensors*.
            tensors: the tensors.
        """
        from rollout_worker.engine.patched_checkpoint import map_tensors

        return self._das_reload(weights_iterator=map_tensors(path, tensors))

    def das_join_broadcast(self, weights: dict[str, Any]) -> None:
        """Join the process group of a broadcast, unless it was joined before.

        Args:
            weights: :class:`~rollout_worker.engine.checkpoint_check.BroadcastWeights` as a dictionary.
        """
        from rollout_api.weights.broadcast import join

        self.das_stop_passing()  # the engines that receive these weights take part in the broadcast, too
        name, group = self._das_group
        if name == weights["group"]:
            return
        self._das_group = ("", None)
        if group is not None:
            group.leave()
        group = join(
            weights["backend"],
            weights["host"],
            weights["port"],
            rank=weights["rank"] + self.parallel_config.rank,
            world_size=weights["world_size"],
            device=self.device,
        )
        self._das_group = (weights["group"], group)

    def das_receive_weights(self, weights: dict[str, Any]) -> str | None:
        """Replace the weights by those that are broadcast to the joined group; see :meth:`das_load_weights`."""
        from rollout_api.weights.broadcast import receive

        name, group = self._das_group
        self._das_group = ("", None)  # a group in which something has failed is not used again
        failure = self._das_reload(
            weights_iterator=receive(
                group, weights["tensors"], bucket_bytes=weights["bucket_bytes"], device=self.device
            )
        )
        if failure is None:
            self._das_group = (name, group)
        else:
            group.leave()
        return failure

    def das_join_transfer_group(self, membership: dict[str, Any]) -> str | None:
        """Join a trainer's process group, and leave the one that was joined before.

        Args:
            membership: :class:`~rollout_worker.engine.transfer_group.GroupMembership` as a dictionary.

        Returns:
            Why it was not joined; None if it was.
        """
        from rollout_worker.engine.transfer_group import GroupMembership, TransferGroup

        self.das_interrupt_timing()
        self.das_leave_transfer_group()
        try:
            self._das_transfer_group = TransferGroup(
                GroupMembership(**membership), self.parallel_config.rank, self.device
            )
        except Exception as error:
            return _error_text(error)
        return None

    def das_leave_transfer_group(self) -> None:
        """Leave the trainer's process group, if one was joined."""
        group, self._das_transfer_group = self._das_transfer_group, None
        if group is not None:
            group.leave()

    def das_await_transfer(self, weights: dict[str, Any]) -> str | None:
        """Wait until all engines of the transfer group are about to receive weights.

        The group is left if this fails, because its processes do not expect the same tensors any more.

        Args:
            weights: :class:`~rollout_worker.engine.checkpoint_check.BroadcastWeights` as a dictionary.

        Returns:
            Why the weights cannot be received; None if they can.
        """
        self.das_interrupt_timing()
        self.das_stop_passing()  # the engines that receive these weights take part in the broadcast, too
        group = self._das_transfer_group
        if group is None or group.name != weights["group"]:
            return "the engine is no member of the trainer's process group"
        try:
            group.meet()
        except Exception as error:
            self.das_leave_transfer_group()
            return _error_text(error)
        return None

    def das_receive_transferred(self, weights: dict[str, Any]) -> str | None:
        """Replace the weights by those that are sent in the transfer group; see :meth:`das_load_weights`.

        The group is left if this fails; see :meth:`das_await_transfer`.

        Args:
            weights: :class:`~rollout_worker.engine.checkpoint_check.BroadcastWeights` as a dictionary.

        Returns:
            Why not all weights were received; None if they were.
        """
        group = self._das_transfer_group
        if group is None:
            return "the engine is no member of the trainer's process group"
        failure = self._das_reload(weights_iterator=group.receive(weights["tensors"], weights["packed_bytes"]))
        if failure is not None:
            self.das_leave_transfer_group()
        return failure

    def das_read_weights(self, restart: bool, seconds: float) -> bool | str:
        """Read the weights of this rank in order to pass them on to another engine.

        On GPUs, they are only listed. On CPUs, they are unpacked, which takes several calls.

        Args:
            restart: whether to begin with the first tensor.
            seconds: after about how many seconds to return.

        Returns:
            Whether all weights are read, or why they cannot be passed on. An exception on one of several ranks would
            leave the replies of the others in vLLM's queue, where they would be taken for those to the next call.
        """
        from rollout_worker.engine.model_tensors import read_tensors

        self.das_interrupt_timing()
        if restart:
            for sender in self._das_senders:
                if not sender.connected:
                    sender.stop()  # its copy of the weights would only take memory
            self._das_reading = read_tensors(self.model_runner.get_model(), self.vllm_config), []
        if self._das_reading is None:
            return _WEIGHTS_CHANGED
        tensors, read = self._das_reading
        deadline = time.monotonic() + seconds
        try:
            for tensor in tensors:
                if tensor is not None:
                    read.append(tensor)
                if time.monotonic() > deadline:
                    return False
        except Exception as error:
            self._das_reading = None
            return _error_text(error)
        return True

    def das_pass_weights(self, token: str) -> tuple[str, int] | str:
        """Pass the weights that were read on to the same rank of another engine, in a thread.

        Args:
            token: what the other engine must send.

        Returns:
            The host and port to which the other engine must connect, or why the weights cannot be passed on.
        """
        from rollout_worker.engine.vllm_client import own_address
        from rollout_worker.engine.weight_stream import TensorSender

        if self._das_reading is None:
            return _WEIGHTS_CHANGED
        (_, tensors), self._das_reading = self._das_reading, None
        try:
            sender = TensorSender(token, tensors)
        except Exception as error:
            return _error_text(error)
        self._das_senders = (*(sender for sender in self._das_senders if sender.active), sender)
        return own_address(), sender.port

    def das_stop_passing(self) -> None:
        """Stop passing the weights on, because they change."""
        for sender in self._das_senders:
            sender.stop()
        self._das_senders, self._das_reading = (), None

    def das_connect_to_engine(self, addresses: list[tuple[str, int]], token: str, staged: bool) -> str | None:
        """Connect to an engine that passes its weights on.

        Args:
            addresses: hosts and ports of the other engine's ranks.
            token: what the other engine expects.
            staged: whether to receive all weights into main memory, so that no weights are lost if the other engine
                fails meanwhile.

        Returns:
            Why the weights cannot be received; None if they can.
        """
        from rollout_worker.engine.model_tensors import list_tensors
        from rollout_worker.engine.weight_stream import StagedTensors, TensorReceiver

        self.das_disconnect()
        host, port = addresses[self.parallel_config.rank]
        try:
            tensors = [one.description for one in list_tensors(self.model_runner.get_model(), self.vllm_config)]
            self._das_receiver = receiver = TensorReceiver(host, port, token, tensors)
            if staged:
                self._das_receiver = StagedTensors(receiver, tensors)
        except Exception as error:
            self.das_disconnect()
            return _error_text(error)
        return None

    def das_receive_from_engine(self) -> str | None:
        """Replace the weights by those of the engine to which this one is connected; see :meth:`das_load_weights`.

        Returns:
            Why not all weights were received; None if they were.
        """
        from rollout_worker.engine.model_tensors import load_tensors

        receiver = self._das_receiver
        if receiver is None:
            return "the connection to the other engine was closed"
        self.das_interrupt_timing()
        self.das_stop_passing()
        try:
            load_tensors(self.model_runner.get_model(), self.vllm_config, receiver.receive)
        except Exception as error:
            return _error_text(error)
        finally:
            self.das_disconnect()
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):  # as vLLM's reload does
            if hasattr(self.model_runner, reset):
                getattr(self.model_runner, reset)()
        return None

    def das_disconnect(self) -> None:
        """Close the connection to another engine, if there is one, and forget what was received."""
        if self._das_receiver is not None:
            self._das_receiver.close()
        self._das_receiver = None

    def _das_reload(self, **source: Any) -> str | None:
        from rollout_worker.engine.vllm_patches import packing_experts, repacking_output_projection, reset_failed_reload

        self.das_interrupt_timing()
        self.das_stop_passing()
        self.das_disconnect()
        model = self.model_runner.get_model()
        is_cpu = self.device.type == "cpu"
        try:
            with (
                packing_experts(model) if is_cpu else contextlib.nullcontext(),
                repacking_output_projection(model) if is_cpu else contextlib.nullcontext(),
            ):
                self.reload_weights(**source)
        except Exception as error:
            logger.exception("Cannot load weights.")
            reset_failed_reload(model)
            return _error_text(error)
        return None

    def das_interrupt_timing(self) -> None:
        """Do not measure the current step; nothing is measured without a drafter."""

    def das_stats(self) -> dict[str, Any]:
        """Return statistics; an engine without speculation has none, but the reply shows that it is alive."""
        return {}


def _error_text(error: Exception) -> str:
    """Return the message of an expected error, and the type of another one, too."""
    from rollout_worker.engine.errors import EngineError
    from rollout_worker.engine.weight_stream import StreamError

    return str(error) if isinstance(error, EngineError | StreamError) else f"{type(error).__name__}: {error}"


class DraftingExtension(EngineExtension):
    """The extension of an engine that drafts."""

    _das_index: Any = None
    _das_sync: HistorySync | None = None
    _das_loop: DraftingLoop | None = None
    _das_controller: DraftController
    _das_scheduling: DraftScheduling | None = None

    def das_start_drafting(self, drafting: dict[str, Any]) -> bool:
        """Create the index, the policy and the thread that reads the history, and start the proposer.

        Args:
            drafting: :class:`DraftingConfig` as a dictionary.

        Returns:
            Whether this rank drafts.
        """
        from rollout_api.protocol.keys import HistoryKeys
        from rollout_api.redis_client.connection import connect_history
        from rollout_worker.drafting.index import POOL_TOKENS, SuffixIndex
        from rollout_worker.engine.drafting_loop import DraftingLoop, EngineArrays
        from rollout_worker.engine.vllm_patches import patch_sampling_without_drafts
        from rollout_worker.engine.vllm_patches_v2 import is_output_rank
        from rollout_worker.history.store import HistoryStore
        from rollout_worker.history.sync import HistorySync
        from rollout_worker.policy.controller import DraftController
        from rollout_worker.policy.draft_policy import DraftLimits, make_policy
        from rollout_worker.policy.step_cost import CPU, H100_7B

        if self._das_uses_v2:
            scheduling = self._das_scheduling = self._das_schedule_drafts()
        else:
            patch_sampling_without_drafts(self.model_runner)
        if not is_output_rank():
            return False
        config = DraftingConfig.from_dict(drafting)
        history = config.history
        cores = len(os.sched_getaffinity(0))
        threads = max(1, min(_MAX_DRAFTING_THREADS, cores // _CORES_PER_DRAFTING_THREAD))
        self._das_index = SuffixIndex(
            threads=threads, max_bytes=config.max_index_bytes, pool_tokens=POOL_TOKENS, draft_ahead=cores > 2
        )
        keys = HistoryKeys(history.namespace, history.name)
        store = HistoryStore(connect_history(history.redis_url), keys, window=history.window)
        model_config = self.model_runner.model_config
        vocabulary = model_config.get_vocab_size()
        self._das_sync = HistorySync(store, self._das_index, vocabulary=vocabulary)
        scheduler = self.model_runner.scheduler_config
        step_tokens = max(0, scheduler.max_num_batched_tokens - scheduler.max_num_seqs)
        limits = DraftLimits(config.max_draft_tokens, step_tokens)
        experts = model_config.get_num_experts()
        is_cpu = self.device.type == "cpu"
        prior = CPU if is_cpu else H100_7B
        self._das_controller = DraftController(
            make_policy(config.policy, limits),
            prior.with_experts(model_config.get_num_experts_per_tok() / experts if experts else 0.0),
            graph_tokens=0 if is_cpu else self.model_runner.compilation_config.max_cudagraph_capture_size or 0,
            governed=config.governed,
        )
        if self._das_uses_v2:
            arrays = scheduling.arrays
        else:
            arrays = EngineArrays.create(self.model_runner.input_batch.token_ids_cpu, config.max_draft_tokens)
        self._das_loop = DraftingLoop(self._das_index, self._das_controller, arrays)
        if self._das_uses_v2:
            scheduling.start(self._das_loop)
        else:
            self.model_runner.drafter.start(self.model_runner, self._das_loop, arrays)
        self._das_sync.start()
        return True

    @property
    def _das_uses_v2(self) -> bool:
        return bool(self.vllm_config.use_v2_model_runner)

    def _das_schedule_drafts(self) -> DraftScheduling:
        """Let the V2 model runner of this rank verify the drafts of the rank that drafts."""
        from rollout_worker.engine.speculator import DraftScheduling
        from rollout_worker.engine.vllm_patches_v2 import broadcast_drafts, check

        check(self.model_runner, self.vllm_config)
        return DraftScheduling(self, broadcast_drafts(self.vllm_config))

    def das_announce(self, problems: list[str], generation: int, wanted: list[str] | None) -> None:
        """Fetch the history of *problems* in the background; see :meth:`Engine.announce`."""
        if self._das_sync is not None:
            self._das_sync.announce(problems, generation, wanted)
            self._das_controller.set_generation(generation)

    def das_history_ready(self) -> bool:
        """Return whether the history of all announced problems is in the index."""
        return self._das_sync is None or self._das_sync.wait_ready(timeout=0)

    def das_interrupt_timing(self) -> None:
        """See :meth:`DraftingLoop.interrupt_timing`."""
        if self._das_loop is not None:
            self._das_loop.interrupt_timing()

    def das_take_counts(self, keys: list[str]) -> dict[str, tuple[tuple[int, ...], bytes]]:
        """Return the fields of ``ResponseDraftCounts`` of responses that have ended, by key."""
        if self._das_loop is None:
            return {}
        return {
            key: (counts.drafted_by_source, counts.token_sources)
            for key, counts in self._das_loop.take_counts(keys).items()
        }

    def das_stats(self) -> dict[str, Any]:
        """Return statistics of the drafter, its index and the cost model; empty on ranks that do not draft."""
        if self._das_sync is None or self._das_loop is None:
            return {}
        from rollout_worker.engine.metrics import labeled_counters

        loop, controller = self._das_loop, self._das_controller
        cost = controller.linear_cost(loop.num_requests)
        scheduling = self._das_scheduling
        return ({} if scheduling is None else {"draft_tokens": scheduling.draft_tokens}) | {
            "decoding_steps": loop.steps,
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
            "timed_seconds": controller.timed_s,
            "timed_seconds_without_drafts": controller.without_drafts_s,
            "drafting_disabled": float(controller.governor.drafting_disabled),
            "drafting_stops": controller.governor.num_stops,
            "trial_tokens": controller.governor.trial_tokens,
            "labeled_counters": labeled_counters(self._das_index),
            "history": asdict(self._das_sync.counters),
        }
