"""A group of processes between which tensors are broadcast, of which the trainer is rank 0.

Made by gloo on CPUs and by NCCL, through vLLM, on GPUs. Nothing here touches torch's own default group, which a
trainer and an engine each have already. Imports torch, and for NCCL vLLM, when a group is joined.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Protocol

BACKENDS = ("gloo", "nccl")
JOIN_S = 120.0
"""How long the first to come waits for the last, and how long a broadcast may take."""
_CONNECT_S = 20.0
"""How long to try to reach rank 0, which may just begin to listen."""
_LOOK_S = 0.05
_PRESENT, _COMPLETE = "das-present", "das-complete"
"""Keys of the store at which the processes of a group meet."""


class BroadcastGroup(Protocol):
    """Processes that hear the same tensors in the same order."""

    def broadcast(self, tensor: Any) -> None:
        """Send *tensor* (rank 0), or receive into it, as every other rank does at the same time.

        Raises:
            RuntimeError: if a process of the group has gone, or does not take part in time.
        """
        ...

    def leave(self) -> None:
        """Give back what the group holds; it cannot be used any more."""
        ...


def join(
    backend: str,
    host: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    device: Any,
    given_up: threading.Event | None = None,
) -> BroadcastGroup:
    """Wait for all processes of a group; rank 0 listens on *port*, where the others find it.

    When rank 0 stops waiting the others do so as well, since what they are connected to is gone.

    Args:
        backend: gloo or nccl.
        host: of rank 0.
        port: of rank 0.
        rank: of this process.
        world_size: processes of the group.
        device: torch's, on which this process' tensors are.
        given_up: set by another thread of rank 0 when there is nothing to wait for any more.

    Raises:
        RuntimeError: if they are not all there in time, or *given_up* is set.
        ImportError: if the trainer's environment lacks what *backend* needs.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{backend!r} is no way to broadcast tensors; there are {' and '.join(BACKENDS)}")
    store = _meet(host, port, rank, world_size, given_up or threading.Event())
    return _Gloo(store, rank, world_size) if backend == "gloo" else _Nccl(store, rank, world_size, device)


def _meet(host: str, port: int, rank: int, world_size: int, given_up: threading.Event) -> Any:
    """torch's store of a group, once all its processes are connected to it."""
    import torch

    distributed: Any = torch.distributed
    patience = timedelta(seconds=JOIN_S)
    store = distributed.TCPStore(
        host, port, world_size, rank == 0, timedelta(seconds=_CONNECT_S), wait_for_workers=False
    )
    store.set_timeout(patience)
    if store.add(_PRESENT, 1) == world_size:
        store.set(_COMPLETE, "")
    if rank != 0:
        store.wait([_COMPLETE], patience)  # it fails when rank 0 is gone
        return store
    end = time.monotonic() + JOIN_S
    while not store.check([_COMPLETE]):
        if given_up.wait(_LOOK_S) or time.monotonic() > end:
            why = "it was given up" if given_up.is_set() else f"after {JOIN_S:.0f} s"
            present = store.add(_PRESENT, 0)
            del store  # or the traceback would keep it, and the others waiting
            raise RuntimeError(f"{present} of {world_size} processes met on {host}:{port}: {why}")
    return store


class _Gloo:
    """Tensors in main memory."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        import torch

        self._bytes = torch.uint8
        distributed: Any = torch.distributed
        self._store = store
        self._group = distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=JOIN_S))

    def broadcast(self, tensor: Any) -> None:
        """See :class:`BroadcastGroup`."""
        # gloo does not know all of torch's types
        self._group.broadcast(tensor.reshape(-1).view(self._bytes), 0).wait()

    def leave(self) -> None:
        """See :class:`BroadcastGroup`."""
        self._group = self._store = None


class _Nccl:
    """Tensors on one CUDA device, by vLLM's communicator, which an engine's worker has as well."""

    def __init__(self, store: Any, rank: int, world_size: int, device: Any) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # vLLM had a listening socket among its fields for some time
        more = {"socket": None} if "socket" in StatelessProcessGroup.__dataclass_fields__ else {}
        meeting = StatelessProcessGroup(rank=rank, world_size=world_size, store=store, **more)
        self._cuda, self._device = torch.cuda, device
        with self._cuda.device(device):  # the current one is a matter of the thread
            self._communicator: Any = PyNcclCommunicator(meeting, device=device)

    def broadcast(self, tensor: Any) -> None:
        """See :class:`BroadcastGroup`."""
        with self._cuda.device(self._device):
            stream = self._cuda.current_stream()
            self._communicator.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()

    def leave(self) -> None:
        """See :class:`BroadcastGroup`."""
        destroy = getattr(self._communicator, "destroy", None)  # vLLM 0.26 has none
        if destroy is not None:
            destroy()
        self._communicator = None
