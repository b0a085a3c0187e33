"""Weights that are broadcast from a trainer's memory to the engines, without files. Needs torch; NCCL needs vLLM."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import Broadcast, TensorSpec
from rollout_api.weights.broadcast import BroadcastGroup, join


@dataclass(frozen=True)
class _Membership:
    """A group that the trainer and some engines have agreed on."""

    name: str = ""
    """Name of the group."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Rank of the first worker process of each engine."""
    group: BroadcastGroup | None = None
    """The group; None until it was joined."""


class ModelInMemory:
    """A model whose current weights can be published from memory::

        weights = ModelInMemory(model, host="10.0.0.7")  # an address of this machine that the engines can reach
        client.publish_weights(version, weights)

    The weights are broadcast with NCCL from a GPU, and with gloo from main memory. The job must allow it
    (``spec.weights.broadcast``). Engines do not decode while they wait for each other, so ``mode="drain"`` is not
    supported. An engine that joins later receives the weights from another engine. If there is none, it serves the
    weights that the job was started with until the next version is published.

    If the model is sharded (FSDP), every process creates an instance, and every process except the one that publishes
    calls :meth:`gather`.

    Args:
        model: a ``torch.nn.Module`` whose parameters have the names and shapes of the engines' checkpoint.
        host: address of this machine that the engines can reach.
        port: port on which this process listens for engines that join; 0 chooses a free one.

    Raises:
        InvalidRequestError: the parameters are on several kinds of devices.
    """

    def __init__(self, model: Any, *, host: str, port: int = 0) -> None:
        self._model, self._host, self._port = model, host, port
        devices = {parameter.device.type for parameter in model.parameters()}
        if devices not in ({"cpu"}, {"cuda"}):
            found = ", ".join(sorted(devices)) or "no device"
            raise InvalidRequestError(f"the model's parameters are on {found}; they must all be on cpu, or all on cuda")
        self.backend = "gloo" if devices == {"cpu"} else "nccl"
        """Backend of the broadcast."""
        self._membership = _Membership()
        self._withdrawn = threading.Event()

    def offer(self, engines: Mapping[str, int]) -> tuple[str, Broadcast]:
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
        tensors = [
            TensorSpec(name=name, dtype=str(parameter.dtype).removeprefix("torch."), shape=list(parameter.shape))
            for name, parameter in self._model.named_parameters()
        ]
        uri = f"{self.backend}://{self._host}:{self._port or _free_port()}"
        return uri, Broadcast(group=self._membership.name, ranks=ranks, world_size=world_size, tensors=tensors)

    def send(self, uri: str, offer: Broadcast) -> None:
        """See :class:`~rollout_api.client.weight_publisher.InMemoryWeights`."""
        membership = self._membership
        self._membership = _Membership()  # a group in which a broadcast has failed must not be used again
        group = membership.group
        if group is None:
            group = join(
                self.backend,
                self._host,
                urlsplit(uri).port or 0,
                rank=0,
                world_size=offer.world_size,
                device=next(self._model.parameters()).device,
                withdrawn=self._withdrawn,
            )
        try:
            for tensor in self.gather():
                group.broadcast(tensor)
        except BaseException:
            group.leave()
            raise
        self._membership = _Membership(membership.name, membership.ranks, group)

    def withdraw(self) -> None:
        """See :class:`~rollout_api.client.weight_publisher.InMemoryWeights`."""
        self._withdrawn.set()

    def gather(self) -> Iterator[Any]:
        """Yield each parameter as a whole. For a sharded model, all processes must iterate together."""
        parameters: Iterable[Any] = self._model.parameters()
        for parameter in parameters:
            tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            yield tensor.detach().contiguous()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
