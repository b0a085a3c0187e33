"""Weights that are broadcast from a trainer's memory to the engines, without files. Needs torch; NCCL needs vLLM."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rollout_api.errors import InvalidRequestError, WeightsError
from rollout_api.ports import free_port
from rollout_api.protocol.messages import Broadcast, TensorSpec
from rollout_api.weights.broadcast import BroadcastGroup, join, send
from rollout_api.weights.buckets import DEFAULT_BUCKET_BYTES
from rollout_api.weights.checkpoint_names import checkpoint_pieces

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | Callable[[], Iterable[tuple[str, Any]]]
"""Names and torch tensors, or a function that returns them anew for each publication."""
_Split = Callable[[str, Any], Iterable[tuple[str, Any]]]


@dataclass(frozen=True)
class _Membership:
    """A group that the trainer and some engines have agreed on."""

    name: str = ""
    """Name of the group."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Rank of the first worker process of each engine."""
    group: BroadcastGroup | None = None
    """The group; None until it was joined."""


class TensorsInMemory:
    """Tensors that can be published from memory.

    They are broadcast with NCCL from a GPU, and with gloo from main memory. The job must allow it
    (``spec.weights.broadcast``). Engines do not decode while they wait for each other, so ``mode="drain"`` is not
    supported. An engine that joins later receives the weights from another engine. If there is none, it serves the
    weights that the job was started with until the next version is published.

    If the tensors are sharded (``DTensor``, as with FSDP2 and torch's tensor parallelism), every process of the trainer
    creates an instance. The process with rank 0 publishes, and every other one calls :meth:`take_part` meanwhile.

    Args:
        tensors: all tensors of the model, with the names and shapes of the checkpoint with which the engines were
            started. They are read once to describe them, and once more while they are sent, so that a function which
            computes them should yield them one after the other.
        host: address of this machine that the engines can reach. Default: that of its default route.
        port: port on which this process listens for engines that join; 0 chooses a free one.
        trainers: process group (``torch.distributed``) of the trainer's processes that hold shards; None if the tensors
            are not sharded, or for torch's default group if they are.
        device: torch device to which each tensor is copied before it is sent, and which decides between NCCL and gloo;
            None to send the tensors from where they are.

    Raises:
        InvalidRequestError: there are no tensors, or they are on several kinds of devices and *device* is None.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        *,
        host: str | None = None,
        port: int = 0,
        trainers: Any = None,
        device: Any = None,
    ) -> None:
        self._host, self._port, self._trainers, self._target = host, port, trainers, device
        self._membership = _Membership()
        self._withdrawn = threading.Event()
        self.replace(tensors)

    def replace(self, tensors: NamedTensors) -> None:
        """Publish these tensors from now on.

        Raises:
            InvalidRequestError: see :class:`TensorsInMemory`.
        """
        self._read = _reader(tensors)
        devices, self._is_sharded = set(), False
        self._specs: list[TensorSpec] = []
        for source, tensor in self._read():
            self._device = _device_of(tensor, self._target)
            devices.add(self._device.type)
            self._is_sharded = self._is_sharded or hasattr(tensor, "full_tensor")
            self._specs += [
                TensorSpec(name=name, dtype=str(piece.dtype).removeprefix("torch."), shape=list(piece.shape))
                for name, piece in self._split(source, _without_data(tensor))
            ]
        if devices not in ({"cpu"}, {"cuda"}):
            found = ", ".join(sorted(devices)) or "no device"
            raise InvalidRequestError(f"the tensors are on {found}; they must all be on cpu, or all on cuda")
        self.backend = "gloo" if devices == {"cpu"} else "nccl"
        """Backend of the broadcast."""

    def _split(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        """Return the tensors of the checkpoint that a whole tensor contains."""
        return [(name, tensor)]

    def offer(self, engines: Mapping[str, int], *, buckets: bool) -> tuple[str, Broadcast]:
        """See :class:`~rollout_api.client.weight_publisher.InMemoryWeights`."""
        self._withdrawn = threading.Event()
        ranks, world_size = {}, 1
        for engine, num_processes in sorted(engines.items()):
            ranks[engine] = world_size
            world_size += num_processes
        if self._membership.ranks != ranks:
            if self._membership.group is not None:
                self._membership.group.leave()
            self._membership = _Membership(secrets.token_hex(8), ranks)
        host = self._host or _own_address()
        uri = f"{self.backend}://{host}:{self._port or free_port('')}"
        return uri, Broadcast(
            group=self._membership.name,
            ranks=ranks,
            world_size=world_size,
            tensors=self._specs,
            bucket_bytes=DEFAULT_BUCKET_BYTES if buckets else 0,
        )

    def send(self, uri: str, offer: Broadcast) -> None:
        """See :class:`~rollout_api.client.weight_publisher.InMemoryWeights`."""
        membership = self._membership
        self._membership = _Membership()  # a group in which a broadcast has failed must not be used again
        group = membership.group
        try:
            if group is None:
                group = join(
                    self.backend,
                    urlsplit(uri).hostname or "",
                    urlsplit(uri).port or 0,
                    rank=0,
                    world_size=offer.world_size,
                    device=self._device,
                    withdrawn=self._withdrawn,
                )
            specs = [(spec.name, spec.dtype, spec.shape) for spec in offer.tensors]
            send(group, specs, self._gather(), bucket_bytes=offer.bucket_bytes)
        except BaseException as error:
            if group is not None:
                group.leave()
            self.abort(str(error) or type(error).__name__)
            raise
        self._tell(_DONE)
        self._membership = _Membership(membership.name, membership.ranks, group)

    def withdraw(self) -> None:
        """See :class:`~rollout_api.client.weight_publisher.InMemoryWeights`."""
        self._withdrawn.set()

    def abort(self, reason: str) -> None:
        """See :class:`~rollout_api.client.weight_publisher.InMemoryWeights`."""
        self._tell(f"{_FAILED}{reason}")

    def take_part(self) -> None:
        """Gather the tensors together with the process that publishes them; for every other process of the trainer.

        It does nothing if the tensors are not sharded.

        Raises:
            WeightsError: the weights were not published; it says why.
            RuntimeError: the process that publishes is gone.
        """
        if not self._is_sharded:
            return
        tensors = iter(self._read())
        while (told := self._hear()) != _DONE:
            if told.startswith(_FAILED):
                reason = told.removeprefix(_FAILED)
                raise WeightsError(f"the process with rank 0 has not published the weights: {reason}")
            _, tensor = next(tensors)
            _whole(tensor)

    def gather(self) -> Iterator[tuple[str, Any]]:
        """Yield each tensor of the checkpoint as a whole, with its name.

        If the tensors are sharded, the trainer's other processes must call :meth:`take_part` meanwhile. They are told
        when the last tensor was taken, or that the iterator was closed before.
        """
        try:
            yield from self._gather()
        except BaseException as error:
            self.abort(str(error) or type(error).__name__)
            raise
        self._tell(_DONE)

    def _gather(self) -> Iterator[tuple[str, Any]]:
        for source, tensor in self._read():
            self._tell(_NEXT)
            yield from self._split(source, _whole(tensor).to(self._device))

    def _tell(self, message: str) -> None:
        """Tell the trainer's other processes what happens next."""
        if self._is_sharded:
            import torch

            torch.distributed.broadcast_object_list([message], src=self._root(), group=self._trainers)

    def _hear(self) -> str:
        import torch

        messages: list[Any] = [None]
        torch.distributed.broadcast_object_list(messages, src=self._root(), group=self._trainers)
        return str(messages[0])

    def _root(self) -> int:
        """Return the rank, within torch's default group, of the process that publishes."""
        import torch

        if self._trainers is None:
            return 0
        return int(torch.distributed.get_global_rank(self._trainers, 0))


class ModelInMemory(TensorsInMemory):
    """A model whose current weights can be published from memory::

        weights = ModelInMemory(model)
        client.publish_weights(version, weights)

    The model's parameters may be sharded and may be named otherwise than in a checkpoint, as are the experts of
    transformers' models; see :class:`TensorsInMemory`.

    Args:
        model: a ``torch.nn.Module``.
        host: see :class:`TensorsInMemory`.
        port: see :class:`TensorsInMemory`.
        trainers: see :class:`TensorsInMemory`.
        device: see :class:`TensorsInMemory`.

    Raises:
        InvalidRequestError: the parameters are on several kinds of devices and *device* is None.
    """

    def __init__(
        self, model: Any, *, host: str | None = None, port: int = 0, trainers: Any = None, device: Any = None
    ) -> None:
        self._model = model
        super().__init__(model.named_parameters, host=host, port=port, trainers=trainers, device=device)

    def _split(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        return checkpoint_pieces(self._model, name, tensor)


_NEXT, _DONE, _FAILED = "next", "done", "failed: "
"""What the process that publishes tells the trainer's other processes; the last is followed by a reason."""


def _reader(tensors: NamedTensors) -> Callable[[], Iterable[tuple[str, Any]]]:
    """Return a function that returns the tensors anew at each call."""
    if callable(tensors):
        return tensors
    found = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    return lambda: iter(found)


def _whole(tensor: Any) -> Any:
    """Return a tensor as a whole, without its gradient; its other shards' processes must do the same."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _device_of(tensor: Any, target: Any) -> Any:
    """Return the device from which a tensor is sent: *target*, or if that is None, the one that it is on."""
    import torch

    return tensor.device if target is None else torch.device(target)


def _without_data(tensor: Any) -> Any:
    """Return a tensor with the shape and the data type of *tensor* that takes no memory."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _own_address() -> str:
    """Return the address that this machine uses towards others; the loopback address if it has no route to them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737); nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
