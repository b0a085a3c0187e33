"""What the host asks of vLLM's worker processes, through ``collective_rpc``."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_worker.engine.proposer import HistoryProposer
    from rollout_worker.history.sync import HistorySync

logger = logging.getLogger(__name__)

_MOST_DRAFTING_THREADS = 4
_CORES_FOR_A_DRAFTING_THREAD = 4
"""Of a machine with fewer, all are the model's."""


@dataclass(frozen=True)
class HistoryBinding:
    """Where a worker reads the history from."""

    redis_url: str
    namespace: str
    name: str
    window: int
    """Generations that are drafted from."""


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
        from rollout_api.broadcast import join

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

        try:
            self.reload_weights(**source)
        except BaseException:
            abandon_reload(self.model_runner.get_model())
            raise
        if renew_packed_output(self.model_runner.get_model()):
            logger.info("Packed the output projection anew: vLLM's reload leaves it stale.")

    def das_stats(self) -> dict[str, Any]:
        """Nothing; but it answers."""
        return {}


class DraftingExtension(HostExtension):
    """What the host asks of an engine that drafts."""

    _das_index: Any = None
    _das_sync: HistorySync | None = None

    def das_bind(self, binding: dict[str, Any], base_tokens: float, index_bytes: int) -> bool:
        """Connect the proposer to its model runner, an index and, in the background, the history.

        Returns:
            Whether this rank drafts.
        """
        from rollout_api.keys import HistoryKeys
        from rollout_worker.drafting.drafter import Drafter
        from rollout_worker.drafting.index import POOL_TOKENS, SuffixIndex
        from rollout_worker.engine.compat import on_output_rank
        from rollout_worker.history.connection import connect_history
        from rollout_worker.history.store import HistoryStore
        from rollout_worker.history.sync import HistorySync

        if not on_output_rank():
            return False
        history = HistoryBinding(**binding)
        proposer: HistoryProposer = self.model_runner.drafter
        threads = max(1, min(_MOST_DRAFTING_THREADS, len(os.sched_getaffinity(0)) // _CORES_FOR_A_DRAFTING_THREAD))
        self._das_index = SuffixIndex(threads=threads, max_bytes=index_bytes, pool_tokens=POOL_TOKENS)
        drafter = Drafter(self._das_index, max_draft_tokens=proposer.max_draft_tokens, base_tokens=base_tokens)
        proposer.bind(self.model_runner, drafter)
        keys = HistoryKeys(history.namespace, history.name)
        store = HistoryStore(connect_history(history.redis_url), keys, window=history.window)
        vocabulary = self.model_runner.model_config.get_vocab_size()
        self._das_sync = HistorySync(store, self._das_index, vocabulary=vocabulary)
        self._das_sync.start()
        return True

    def das_announce(self, problems: list[str], generation: int, wanted: list[str] | None) -> None:
        """Rollouts of *problems* are coming: fetch what the history has of them, in the background."""
        if self._das_sync is not None:
            self._das_sync.announce(problems, generation, wanted)

    def das_ready(self) -> bool:
        """Whether all that was announced is in the index."""
        return self._das_sync is None or self._das_sync.wait_ready(timeout=0)

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
        return {
            "steps": proposer.steps,
            "following": proposer.following,
            "drafting_seconds": proposer.seconds,
            "sampling_mended": proposer.sampling_mended,
            "index_bytes": self._das_index.bytes(),
            "history": asdict(self._das_sync.counters),
        }
