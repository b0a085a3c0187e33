"""Weights that go from a trainer's memory straight into the engines, past any disk. Needs torch; NCCL needs vLLM."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import Broadcast, TensorToCome
from rollout_api.weights.broadcast import BroadcastGroup, join


class ModelInMemory:
    """A model's weights as they are whenever they are published::

        weights = ModelInMemory(model, host="10.0.0.7")  # an address of this machine that the engines reach
        client.publish_weights(version, weights)

    They are broadcast by NCCL from a GPU, by gloo from main memory; the job must allow it (``spec.weights.broadcast``).
    Engines decode nothing while they wait for one another to take part, so ``mode="drain"`` makes all wait for the
    longest rollout. An engine that joins later has the weights that the job was started with until the next version.

    With a sharded model (FSDP) every process makes one and calls :meth:`gather`, except the one that publishes.
    """

    def __init__(self, model: Any, *, host: str, port: int = 0) -> None:
        """Publish the parameters of *model*.

        Args:
            model: a ``torch.nn.Module`` with the names and shapes of the engines' checkpoint.
            host: address of this machine, as the engines reach it.
            port: on which it listens for engines that join; 0: any that is free.
        """
        self._model, self._host, self._port = model, host, port
        devices = {parameter.device.type for parameter in model.parameters()}
        if devices not in ({"cpu"}, {"cuda"}):
            found = ", ".join(sorted(devices)) or "no device"
            raise InvalidRequestError(f"the model's parameters are on {found}; they must all be on cpu, or all on cuda")
        self.backend = "gloo" if devices == {"cpu"} else "nccl"
        self._joined: tuple[str, Mapping[str, int], BroadcastGroup | None] = ("", {}, None)
        self._withdrawn = threading.Event()

    def offer(self, engines: Mapping[str, int]) -> tuple[str, Broadcast]:
        """See :class:`~rollout_api.client.weight_publisher.InMemory`."""
        self._withdrawn = threading.Event()
        name, members, group = self._joined
        ranks, following = {}, 1
        for engine, processes in sorted(engines.items()):
            ranks[engine] = following
            following += processes
        if members != ranks:
            if group is not None:
                group.leave()
            name = secrets.token_hex(8)
            self._joined = (name, ranks, None)
        tensors = [
            TensorToCome(name=tensor, dtype=str(parameter.dtype).removeprefix("torch."), shape=list(parameter.shape))
            for tensor, parameter in self._model.named_parameters()
        ]
        uri = f"{self.backend}://{self._host}:{self._port or _free_port()}"
        return uri, Broadcast(group=name, ranks=ranks, world_size=following, tensors=tensors)

    def send(self, uri: str, offer: Broadcast) -> None:
        """See :class:`~rollout_api.client.weight_publisher.InMemory`."""
        name, ranks, group = self._joined
        self._joined = ("", {}, None)  # a group in which something failed is not used again
        if group is None:
            at = urlsplit(uri)
            device = next(self._model.parameters()).device
            group = join(
                self.backend,
                self._host,
                at.port or 0,
                rank=0,
                world_size=offer.world_size,
                device=device,
                given_up=self._withdrawn,
            )
        try:
            for tensor in self.gather():
                group.broadcast(tensor)
        except BaseException:
            group.leave()
            raise
        self._joined = (name, ranks, group)

    def withdraw(self) -> None:
        """See :class:`~rollout_api.client.weight_publisher.InMemory`."""
        self._withdrawn.set()

    def gather(self) -> Iterator[Any]:
        """Each parameter, whole. Of a sharded model this is a collective: all processes go through it together."""
        parameters: Iterable[Any] = self._model.parameters()
        for parameter in parameters:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            yield whole.detach().contiguous()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
