"""A group of processes between which tensors are broadcast, of which the trainer is rank 0.

Made by gloo on CPUs and by NCCL, through vLLM, on GPUs. Nothing here touches torch's own default group, which a
trainer and an engine each have already. Imports torch, and for NCCL vLLM, when a group is joined.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

BACKENDS = ("gloo", "nccl")
JOIN_S = 120.0
"""How long the first to come waits for the last, and how long a broadcast may take."""


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


def join(backend: str, host: str, port: int, *, rank: int, world_size: int, device: Any) -> BroadcastGroup:
    """Wait for all processes of a group; rank 0 listens on *port*, where the others find it.

    Args:
        backend: gloo or nccl.
        host: of rank 0.
        port: of rank 0.
        rank: of this process.
        world_size: processes of the group.
        device: torch's, on which this process' tensors are.

    Raises:
        RuntimeError: if they are not all there in time.
        ImportError: if the trainer's environment lacks what *backend* needs.
    """
    if backend == "gloo":
        return _Gloo(host, port, rank, world_size)
    if backend == "nccl":
        return _Nccl(host, port, rank, world_size, device)
    raise ValueError(f"{backend!r} is no way to broadcast tensors; there are {' and '.join(BACKENDS)}")


class _Gloo:
    """Tensors in main memory."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        import torch

        self._bytes = torch.uint8
        distributed: Any = torch.distributed
        patience = timedelta(seconds=JOIN_S)
        self._store = distributed.TCPStore(host, port, world_size, rank == 0, patience)
        self._group = distributed.ProcessGroupGloo(self._store, rank, world_size, patience)

    def broadcast(self, tensor: Any) -> None:
        """See :class:`BroadcastGroup`."""
        # gloo does not know all of torch's types
        self._group.broadcast(tensor.reshape(-1).view(self._bytes), 0).wait()

    def leave(self) -> None:
        """See :class:`BroadcastGroup`."""
        self._group = self._store = None


class _Nccl:
    """Tensors on one CUDA device, by vLLM's communicator, which an engine's worker has as well."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        meeting = StatelessProcessGroup.create(
            host=host, port=port, rank=rank, world_size=world_size, store_timeout=int(JOIN_S)
        )
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
