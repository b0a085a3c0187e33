"""An engine that receives weights over gloo, in the place of a client for one."""

from __future__ import annotations

from typing import Any

import torch

from rollout_api.weights.gloo import GlooGroup


class GlooReceiver:
    """Receives what a sender sends, as the only engine."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors of the last transfer."""
        self._group: GlooGroup | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the sender's group."""
        store = torch.distributed.TCPStore(
            init_info["master_address"], init_info["master_port"], wait_for_workers=False
        )
        self._group = GlooGroup(store, init_info["rank_offset"], init_info["world_size"])

    def start_weight_update(self) -> None:
        """Get ready."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive tensors."""
        assert self._group is not None
        described = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
        for name, dtype, shape in described:
            self.tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(self.tensors[name])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve them."""
