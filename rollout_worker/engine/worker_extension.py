"""What the host asks of vLLM's worker processes, through ``collective_rpc``."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rollout_worker.engine.compat import permit_matrix_tiles
from rollout_worker.engine.drafting import Drafting

if TYPE_CHECKING:
    from rollout_worker.engine.proposer import HistoryProposer
    from rollout_worker.history.sync import HistorySync
    from rollout_worker.policy.controller import DraftController

logger = logging.getLogger(__name__)

permit_matrix_tiles()  # vLLM imports this module in the worker process, before a kernel runs

_MOST_DRAFTING_THREADS = 4
_CORES_FOR_A_DRAFTING_THREAD = 4
"""Of a machine with fewer, all are the model's."""


class HostExtension:
    """Mixed into vLLM's worker class by ``worker_extension_cls``; every method runs between two steps."""

    model_runner: Any
    parallel_config: Any
    device: Any
    reload_weights: Callable[..., None]
    _das_group: tuple[str, Any] = ("", None)
    """Name of the group in which weights were broadcast last, and the group."""

    def das_follow_host(self, host: int) -> None:
        """End the engine's processes when process *host* is gone, however it ended.

        vLLM's engine core waits for ever for the messages of a host that was killed, and keeps its memory and GPU.
        """
        descriptor = os.pidfd_open(host)
        core = os.getppid()  # of this worker, unless the core runs its worker itself

        def follow() -> None:
            select.select([descriptor], [], [])
            if core != host:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(core, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=follow, name="follow-host", daemon=True).start()

    def das_mend_adapters(self) -> bool:
        """See :func:`rollout_worker.engine.compat.mend_adapter_rows`."""
        from rollout_worker.engine.compat import mend_adapter_rows

        return mend_adapter_rows()

    def das_load_weights(self, directory: str) -> None:
        """Replace the weights by the safetensors in *directory*; if that fails, some are old and some new."""
        self._das_reload(weights_path=directory)

    def das_join(self, incoming: dict[str, Any]) -> None:
        """Meet trainer and other engines of a broadcast (``Incoming``, as a dictionary), unless they have met."""
        from rollout_api.weights.broadcast import join

        name, group = self._das_group
        if name == incoming["group"]:
            return
        self._das_group = ("", None)
        if group is not None:
            group.leave()
        where = (incoming["backend"], incoming["host"], incoming["port"])
        rank = incoming["rank"] + self.parallel_config.rank
        group = join(*where, rank=rank, world_size=incoming["world_size"], device=self.device)
        self._das_group = (incoming["group"], group)

    def das_receive_weights(self, incoming: dict[str, Any]) -> None:
        """Replace the weights by those that are broadcast to the group joined; if that fails, as above."""
        import torch

        name, group = self._das_group
        self._das_group = ("", None)  # one in which something fails is not used again

        def received() -> Iterator[tuple[str, Any]]:
            for tensor, kind, shape in incoming["tensors"]:
                weight = torch.empty(shape, dtype=getattr(torch, kind), device=self.device)
                group.broadcast(weight)
                yield tensor, weight

        try:
            self._das_reload(weights_iterator=received())
        except BaseException:
            group.leave()
            raise
        self._das_group = (name, group)

    def _das_reload(self, **source: Any) -> None:
        from rollout_worker.engine.compat import abandon_reload, renew_packed_output

        self.das_interrupt()
        try:
            self.reload_weights(**source)
        except BaseException:
            abandon_reload(self.model_runner.get_model())
            raise
        if renew_packed_output(self.model_runner.get_model()):
            logger.info("Packed the output projection anew: vLLM's reload leaves it stale.")

    def das_interrupt(self) -> None:
        """The time until the next step is no step's."""

    def das_stats(self) -> dict[str, Any]:
        """Nothing; but it answers."""
        return {}


class DraftingExtension(HostExtension):
    """What the host asks of an engine that drafts."""

    _das_index: Any = None
    _das_sync: HistorySync | None = None
    _das_controller: DraftController

    def das_bind(self, drafting: dict[str, Any]) -> bool:
        """Connect the proposer to its model runner, an index, a policy and, in the background, the history.

        Args:
            drafting: :class:`Drafting`, as a dictionary.

        Returns:
            Whether this rank drafts.
        """
        from rollout_api.protocol.keys import HistoryKeys
        from rollout_worker.drafting.drafter import Drafter
        from rollout_worker.drafting.index import POOL_TOKENS, SuffixIndex
        from rollout_worker.engine.compat import on_output_rank, sample_plainly_without_drafts
        from rollout_worker.history.connection import connect_history
        from rollout_worker.history.store import HistoryStore
        from rollout_worker.history.sync import HistorySync
        from rollout_worker.policy.budgets import Pool
        from rollout_worker.policy.controller import DraftController
        from rollout_worker.policy.policies import make_policy
        from rollout_worker.policy.step_cost import CPU, H100_7B

        sample_plainly_without_drafts(self.model_runner)
        if not on_output_rank():
            return False
        settings = Drafting.read(drafting)
        history = settings.history
        proposer: HistoryProposer = self.model_runner.drafter
        threads = max(1, min(_MOST_DRAFTING_THREADS, len(os.sched_getaffinity(0)) // _CORES_FOR_A_DRAFTING_THREAD))
        self._das_index = SuffixIndex(threads=threads, max_bytes=settings.index_bytes, pool_tokens=POOL_TOKENS)
        keys = HistoryKeys(history.namespace, history.name)
        store = HistoryStore(connect_history(history.redis_url), keys, window=history.window)
        vocabulary = self.model_runner.model_config.get_vocab_size()
        self._das_sync = HistorySync(store, self._das_index, vocabulary=vocabulary)
        scheduled = self.model_runner.scheduler_config
        pool = Pool(settings.max_draft_tokens, max(0, scheduled.max_num_batched_tokens - scheduled.max_num_seqs))
        policy = make_policy(settings.policy, pool, self._das_sync.expected_lengths, self._das_sync.length_stats)
        prior = CPU if self.device.type == "cpu" else H100_7B
        self._das_controller = DraftController(policy, prior, governed=settings.governed)
        proposer.bind(self.model_runner, Drafter(self._das_index), self._das_controller)
        self._das_sync.start()
        return True

    def das_announce(self, problems: list[str], generation: int, wanted: list[str] | None) -> None:
        """Rollouts of *problems* are coming: fetch what the history has of them, in the background."""
        if self._das_sync is not None:
            self._das_sync.announce(problems, generation, wanted)

    def das_ready(self) -> bool:
        """Whether all that was announced is in the index."""
        return self._das_sync is None or self._das_sync.wait_ready(timeout=0)

    def das_interrupt(self) -> None:
        """See :meth:`HostExtension.das_interrupt`."""
        self.model_runner.drafter.interrupt()

    def das_waiting(self, rollouts: int, tokens: float) -> None:
        """So many rollouts, which are expected to say so many tokens, wait for a place in this engine's batch."""
        from rollout_worker.policy.budgets import Waiting

        self.model_runner.drafter.waiting = Waiting(rollouts, tokens)

    def das_take_counts(self, keys: list[str]) -> dict[str, tuple[int, int, int]]:
        """Draft tokens (drafted, accepted) and tokens produced of rollouts that have ended, by key."""
        proposer: HistoryProposer = self.model_runner.drafter
        return {
            key: (counts.drafted, counts.accepted, counts.produced)
            for key, counts in proposer.take_counts(keys).items()
        }

    def das_stats(self) -> dict[str, Any]:
        """Sizes and times of the drafter and its index; empty on ranks that do not draft."""
        if self._das_sync is None:
            return {}
        proposer: HistoryProposer = self.model_runner.drafter
        controller = self._das_controller
        cost = controller.fit.cost
        return {
            "steps": proposer.steps,
            "following": proposer.following,
            "proposed_tokens": proposer.proposed,
            "drafting_seconds": proposer.seconds,
            "sampling_mended": proposer.sampling_mended,
            "index_bytes": self._das_index.bytes(),
            "cost_base_seconds": cost.base,
            "cost_token_seconds": cost.per_token,
            "cost_context_token_seconds": cost.per_context,
            "cost_drafting_seconds": cost.drafting,
            "cost_error_ratio": controller.fit.error,
            "timed_seconds": controller.seconds,
            "timed_seconds_without_drafts": controller.seconds_without,
            "drafting_stopped": float(controller.governor.stopped),
            "drafting_stops": controller.governor.stops,
            "explored_tokens": controller.governor.explored,
            "history": asdict(self._das_sync.counters),
        }
