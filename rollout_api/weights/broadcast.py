"""A group of processes for broadcasting tensors, in which the trainer has rank 0.

The group uses gloo on CPUs, and NCCL (through vLLM) on GPUs. It is independent of torch's default group, because
trainer and engine each have a default group already. torch is only imported when a group is joined, and vLLM only
for NCCL.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

from rollout_api.weights.buckets import plan_buckets, plan_packed

BACKENDS = ("gloo", "nccl")
"""Supported backends."""
JOIN_TIMEOUT_S = 120.0
"""How long the first process to join waits for the last, and how long a broadcast may take."""
_CONNECT_TIMEOUT_S = 20.0
"""How long a process tries to reach rank 0, which may not listen yet."""
_POLL_INTERVAL_S = 0.05
_NUM_PRESENT_KEY, _COMPLETE_KEY, _UNIQUE_ID_KEY = "das-present", "das-complete", "das-nccl-id"
"""Keys of the store through which the processes of a group find each other."""


Exchange = Callable[[Any, Any, bool], Any]
"""Sends or receives an identifier: called with the store, this process's object, and whether it is the sender's."""


class BroadcastGroup(Protocol):
    """Processes that receive the same tensors in the same order."""

    def broadcast(self, tensor: Any) -> None:
        """Send *tensor* (rank 0) or receive into it (all other ranks).

        Raises:
            RuntimeError: a process of the group is gone, or does not take part in time.
        """
        ...

    def leave(self) -> None:
        """Release the group's resources. The group cannot be used afterwards."""
        ...


def join(
    backend: str,
    host: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    device: Any,
    withdrawn: threading.Event | None = None,
) -> BroadcastGroup:
    """Wait for all processes of a group. Rank 0 listens on *port*, and the others connect to it.

    When rank 0 stops waiting, the others stop too, because their connection closes.

    Args:
        backend: gloo or nccl.
        host: host of rank 0.
        port: port of rank 0.
        rank: rank of this process.
        world_size: number of processes in the group.
        device: torch device of this process's tensors.
        withdrawn: event with which another thread of rank 0 makes it stop waiting.

    Raises:
        RuntimeError: not all processes joined in time, or *withdrawn* was set.
        ImportError: the environment lacks what *backend* needs.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{backend!r} is not a broadcast backend; use {' or '.join(BACKENDS)}")
    store = _rendezvous(host, port, rank, world_size, withdrawn or threading.Event())
    if backend == "gloo":
        return GlooGroup(store, rank, world_size)
    return NcclGroup(nccl_rendezvous(store, rank, world_size), device)


TensorTuple = tuple[str, str, list[int]]
"""Name, torch data type and shape of a tensor."""


def send(
    group: BroadcastGroup, specs: Sequence[TensorTuple], tensors: Iterator[tuple[str, Any]], *, bucket_bytes: int
) -> None:
    """Broadcast tensors as rank 0.

    Args:
        group: the group.
        specs: what the other processes expect.
        tensors: the name and the whole value of each tensor, in the same order.
        bucket_bytes: largest number of bytes of successive tensors that are sent at once; 0 to send each alone.

    Raises:
        RuntimeError: a tensor is not the expected one, or a process of the group is gone.
    """
    import torch

    expected = iter(specs)
    for bucket in plan_buckets(map(_size, specs), bucket_bytes):
        memory = None
        for offset in bucket.offsets:
            name, dtype, shape = next(expected)
            sent, tensor = next(tensors, ("nothing", torch.empty(0)))
            if (sent, tensor.dtype, list(tensor.shape)) != (name, getattr(torch, dtype), shape):
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise RuntimeError(
                    f"{name} ({dtype} {shape}) was announced, and {sent} ({found}) is to be sent; return the same "
                    "tensors in the same order each time"
                )
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            if len(bucket.offsets) == 1:
                memory = flat
                continue
            if memory is None:
                memory = torch.empty(bucket.size, dtype=torch.uint8, device=tensor.device)
            memory[offset : offset + flat.numel()] = flat
        group.broadcast(memory)


def receive(
    group: BroadcastGroup,
    specs: Sequence[TensorTuple],
    *,
    bucket_bytes: int,
    packed_bytes: int | None = None,
    device: Any,
) -> Iterator[tuple[str, Any]]:
    """Receive tensors from rank 0, and yield each with its name.

    Args:
        group: the group.
        specs: what rank 0 sends.
        bucket_bytes: see :func:`send`.
        packed_bytes: set if rank 0 sends in vLLM's formats instead; see
            :class:`~rollout_api.protocol.messages.Broadcast`.
        device: torch device of the tensors.

    Raises:
        RuntimeError: rank 0 is gone.
    """
    import torch

    expected = iter(specs)
    sizes = map(_size, specs)
    for bucket in plan_packed(sizes, packed_bytes) if packed_bytes else plan_buckets(sizes, bucket_bytes):
        members = [next(expected) for _ in bucket.offsets]
        memory = torch.empty(bucket.size, dtype=torch.uint8, device=device)
        # vLLM sends a tensor that is alone with its own data type, and NCCL wants the same one from all processes.
        group.broadcast(memory.view(getattr(torch, members[0][1])) if packed_bytes == 0 else memory)
        for offset, spec in zip(bucket.offsets, members, strict=True):
            name, dtype, shape = spec
            piece = memory[offset : offset + _size(spec)]
            if offset % getattr(torch, dtype).itemsize:
                piece = piece.clone()  # vLLM's packed format does not align tensors
            yield name, piece.view(getattr(torch, dtype)).view(shape)


def _size(spec: TensorTuple) -> int:
    """Return the size of a tensor in bytes."""
    import torch

    _, dtype, shape = spec
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _rendezvous(host: str, port: int, rank: int, world_size: int, withdrawn: threading.Event) -> Any:
    """Return the torch store of a group once all its processes are connected to it."""
    import torch

    distributed: Any = torch.distributed
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    store = distributed.TCPStore(
        host, port, world_size, rank == 0, timedelta(seconds=_CONNECT_TIMEOUT_S), wait_for_workers=False
    )
    store.set_timeout(timeout)
    if store.add(_NUM_PRESENT_KEY, 1) == world_size:
        store.set(_COMPLETE_KEY, "")
    if rank != 0:
        store.wait([_COMPLETE_KEY], timeout)  # fails when rank 0 is gone
        return store
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not store.check([_COMPLETE_KEY]):
        if withdrawn.wait(_POLL_INTERVAL_S) or time.monotonic() > deadline:
            reason = "the broadcast was withdrawn" if withdrawn.is_set() else f"timed out after {JOIN_TIMEOUT_S:.0f} s"
            num_present = store.add(_NUM_PRESENT_KEY, 0)
            del store  # otherwise the traceback would keep it alive, and the other processes waiting
            raise RuntimeError(f"{num_present} of {world_size} processes joined at {host}:{port}: {reason}")
    return store


class GlooGroup:
    """Broadcasts tensors in main memory.

    Args:
        store: torch store to which all processes of the group are connected.
        rank: rank of this process.
        world_size: number of processes in the group.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        import torch

        self._bytes = torch.uint8
        distributed: Any = torch.distributed
        self._store = store
        self._group = distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=JOIN_TIMEOUT_S))

    def broadcast(self, tensor: Any) -> None:
        """See :class:`BroadcastGroup`."""
        # gloo does not support all of torch's types.
        self._group.broadcast(tensor.reshape(-1).view(self._bytes), 0).wait()

    def leave(self) -> None:
        """See :class:`BroadcastGroup`."""
        self._group = self._store = None


class NcclGroup:
    """Broadcasts tensors on one CUDA device with vLLM's communicator, which the engine's workers use too.

    Args:
        group: process group of vLLM through which the processes exchange NCCL's identifier.
        device: the CUDA device.
    """

    def __init__(self, group: Any, device: Any) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        self._cuda, self._device = torch.cuda, device
        with self._cuda.device(device):  # the current device is a property of the thread
            self._communicator: Any = PyNcclCommunicator(group, device=device)

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


def nccl_rendezvous(store: Any, rank: int, world_size: int, exchange: Exchange | None = None) -> Any:
    """Return a process group of vLLM through which the processes exchange the identifier of a NCCL communicator.

    vLLM's own group would unpickle whatever it receives, so that whoever tells engines a trainer's address could run
    code in them.

    Args:
        store: torch store to which all processes are connected.
        rank: rank of this process.
        world_size: number of processes in the group.
        exchange: sends or receives the identifier. Default: as its bytes.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    class _UniqueIdGroup(StatelessProcessGroup):  # type: ignore[misc]
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            """Send *obj*, a ctypes structure, or receive another of its type."""
            return (exchange or _exchange_bytes)(self.store, obj, self.rank == src)

    # Some versions of vLLM have a listening socket among the fields.
    fields = {"socket": None} if "socket" in StatelessProcessGroup.__dataclass_fields__ else {}
    return _UniqueIdGroup(rank=rank, world_size=world_size, store=store, **fields)


def _exchange_bytes(store: Any, identifier: Any, is_source: bool) -> Any:
    if is_source:
        store.set(_UNIQUE_ID_KEY, bytes(identifier))
        return identifier
    return type(identifier).from_buffer_copy(store.get(_UNIQUE_ID_KEY))
