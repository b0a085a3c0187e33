"""A job's side of the protocol with one engine that receives weights from a trainer's memory over gloo."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import torch

from rollout_api import WeightUpdate
from rollout_api.weights.broadcast import BroadcastGroup, join, receive
from tests.support.updating_job import UpdatingJob


class ReceivingJob(UpdatingJob):
    """A fake job whose engine takes part in broadcasts as a real one does.

    Args:
        url: URL of Redis.
        num_failures: number of broadcasts, the first ones, in which the engine does not take part.
        **options: arguments of :class:`UpdatingJob`.
    """

    def __init__(self, url: str, num_failures: int = 0, **options: Any) -> None:
        super().__init__(url, broadcast="gloo", **options)
        self._num_failures = num_failures
        self._groups: dict[str, BroadcastGroup] = {}
        self.weights: list[dict[str, torch.Tensor]] = []
        """The tensors of each broadcast."""

    def load(self, update: WeightUpdate) -> str:
        """Receive a broadcast; weights in a directory are not read."""
        if update.broadcast is None:
            return ""
        if self._num_failures:
            self._num_failures -= 1
            return "the trainer cannot be reached"
        offer, address = update.broadcast, urlsplit(update.uri)
        if offer.group not in self._groups:
            rank, host, port = offer.ranks["engine-0"], str(address.hostname), int(address.port or 0)
            self._groups[offer.group] = join(
                address.scheme, host, port, rank=rank, world_size=offer.world_size, device="cpu"
            )
        specs = [(spec.name, spec.dtype, spec.shape) for spec in offer.tensors]
        received = receive(self._groups[offer.group], specs, bucket_bytes=offer.bucket_bytes, device="cpu")
        self.weights.append({name: tensor.clone() for name, tensor in received})
        return ""
