"""A job's side of the protocol with one engine that receives weights from a trainer's memory over gloo."""

from __future__ import annotations

from typing import Any

import torch

from rollout_api import WeightUpdate
from rollout_api.protocol.messages import InitWeightTransfer, TransferStep, decode
from tests.support.gloo_receiver import GlooReceiver
from tests.support.updating_job import UpdatingJob


class ReceivingJob(UpdatingJob):
    """A fake job whose engine receives weights as a real one does.

    Args:
        url: URL of Redis.
        num_failures: number of transfers, the first ones, in which the engine does not take part.
        **options: arguments of :class:`UpdatingJob`.
    """

    def __init__(self, url: str, num_failures: int = 0, **options: Any) -> None:
        super().__init__(url, transfer_backend="gloo", **options)
        self._num_failures = num_failures
        self._receiver = GlooReceiver()
        self._update: WeightUpdate | None = None
        """The transfer in progress."""
        self.weights: list[dict[str, torch.Tensor]] = []
        """The tensors of each transfer."""

    def join(self, message: InitWeightTransfer) -> None:
        """Join the trainer's group."""
        self._receiver = GlooReceiver()
        self._receiver.init_weight_transfer_engine(message.init_info)
        self.report(transfer_group=message.group)

    def load(self, update: WeightUpdate) -> str | None:
        """Get ready to receive weights from memory; those in a directory are not read."""
        if update.transfer is None:
            return ""
        if self._num_failures:
            self._num_failures -= 1
            return "the trainer cannot be reached"
        self._update, self._cursor = update, "0"
        self.report(receiving=update.uri, received=0)
        return None

    def continue_loading(self) -> None:
        """Receive what the trainer sends."""
        if self._update is None:
            return
        update = self._update
        for entry, fields in self.redis.xrange(self.keys.transfer_steps(update.uri), min=f"({self._cursor}"):
            self._cursor, step = entry.decode(), decode(fields[b"d"])
            assert isinstance(step, TransferStep)
            if step.step == "update":
                assert step.update_info is not None
                self._receiver.update_weights(step.update_info)
                self.weights.append(dict(self._receiver.tensors))
                self.report(received=1)
            else:
                self._update = None
                self.finish(update, step.reason)
