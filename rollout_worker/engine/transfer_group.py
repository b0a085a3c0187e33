"""The process group in which a trainer transfers weights as it would to vLLM's own server.

The processes find each other and send tensors as in ``vllm/distributed/weight_transfer`` of vLLM 0.32, whose sender the
trainer uses. On CPUs, the group uses gloo where vLLM has NCCL only.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rollout_api.weights.broadcast import (
    JOIN_TIMEOUT_S,
    BroadcastGroup,
    GlooGroup,
    NcclGroup,
    TensorTuple,
    nccl_rendezvous,
    receive,
)
from rollout_worker.engine.limits import TRANSFER_CONNECT_TIMEOUT_S


@dataclass(frozen=True)
class GroupMembership:
    """Which transfer group an engine joins."""

    name: str
    """Name of the group."""
    backend: str
    """nccl or gloo."""
    host: str
    """The trainer's address."""
    port: int
    rank: int
    """Rank of the engine's first worker process in the group."""
    world_size: int
    """Number of processes in the group. All but rank 0, which is the trainer, belong to engines."""


class TransferGroup:
    """A joined transfer group, in one worker process of an engine.

    NCCL would wait forever for a process that does not take part. The engines' processes therefore first wait for each
    other, for a limited time, with the trainer's store.

    Args:
        membership: the group.
        rank: rank of this process within its engine.
        device: torch device of this process's tensors.

    Raises:
        RuntimeError: the trainer cannot be reached, or an engine is missing.
    """

    def __init__(self, membership: GroupMembership, rank: int, device: Any) -> None:
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        self.name = membership.name
        self._num_receivers, self._device = membership.world_size - 1, device
        own_rank = membership.rank + rank
        self._store = StatelessProcessGroup.create(
            membership.host,
            membership.port,
            own_rank,
            membership.world_size,
            store_timeout=int(TRANSFER_CONNECT_TIMEOUT_S),
        ).store
        self._store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
        self._num_meetings = 0
        self.meet()
        self._group: BroadcastGroup
        if membership.backend == "gloo":
            self._group = GlooGroup(self._store, own_rank, membership.world_size)
        else:
            group = nccl_rendezvous(self._store, own_rank, membership.world_size, receive_unique_id)
            with unpinned_nccl_env():  # as vLLM does for communicators that it shares with a trainer
                self._group = NcclGroup(group, device)

    def receive(self, tensors: Sequence[TensorTuple], packed_bytes: int) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that the trainer sends; :meth:`meet` must be called before.

        Args:
            tensors: what it sends.
            packed_bytes: see :class:`~rollout_api.protocol.messages.Broadcast`.

        Raises:
            RuntimeError: the trainer is gone, or another process of the group is.
        """
        return receive(self._group, tensors, bucket_bytes=0, packed_bytes=packed_bytes, device=self._device)

    def meet(self) -> None:
        """Wait until all processes of engines have called this.

        Raises:
            RuntimeError: a process has not, or the trainer is gone.
        """
        self._num_meetings += 1
        arrived, complete = f"das-arrived-{self._num_meetings}", f"das-complete-{self._num_meetings}"
        try:
            if self._store.add(arrived, 1) == self._num_receivers:
                self._store.set(complete, "")
            self._store.wait([complete], timedelta(seconds=JOIN_TIMEOUT_S))
        except RuntimeError as error:
            count = "some"
            with contextlib.suppress(RuntimeError):
                count = str(self._store.add(arrived, 0))
            raise RuntimeError(
                f"{count} of {self._num_receivers} processes of the engines take part in the trainer's process group: "
                f"{error}"
            ) from error

    def leave(self) -> None:
        """Release the group's resources. The group cannot be used afterwards."""
        self._group.leave()
        self._store = None


def receive_unique_id(store: Any, identifier: Any, is_source: bool) -> Any:
    """Receive the identifier of the trainer's communicator; see :func:`~rollout_api.weights.broadcast.nccl_rendezvous`.

    The key is that of ``StatelessProcessGroup.broadcast_obj`` (vLLM 0.32), with which vLLM's trainers send it.
    """
    if is_source:
        raise ValueError("an engine sends no identifier")
    return load_unique_id(store.get("broadcast_from/0/0"))


def load_unique_id(pickled: bytes) -> Any:
    """Return NCCL's identifier, which vLLM's trainers send pickled.

    vLLM's own servers unpickle whatever they receive. This function does not, so that whoever tells engines a trainer's
    address cannot run code in them.

    Raises:
        pickle.UnpicklingError: it is something else.
    """
    loaded = _UniqueIdUnpickler(io.BytesIO(pickled)).load()
    if type(loaded).__name__ != _UNIQUE_ID[1]:
        raise pickle.UnpicklingError(f"a {type(loaded).__name__} in place of NCCL's identifier")
    return loaded


_UNIQUE_ID = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"


class _UniqueIdUnpickler(pickle.Unpickler):
    """Loads NCCL's identifier, a ctypes structure, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in (_UNIQUE_ID, ("_ctypes", "_unpickle")):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of NCCL's identifier")
        return super().find_class(module, name)
