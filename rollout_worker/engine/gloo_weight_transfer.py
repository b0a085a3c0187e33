"""A backend of vLLM's weight transfer for engines on CPUs: gloo in place of NCCL, which vLLM has no backend for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from rollout_api.weights.gloo import GlooGroup
from rollout_worker.engine.limits import TRANSFER_CONNECT_TIMEOUT_S


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives what vLLM's trainers send over NCCL, in the same formats, over gloo."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group; see the base class."""
        self.packed, self.packed_buffer_size_bytes = init_info.packed, init_info.packed_buffer_size_bytes
        rank = init_info.rank_offset + self.parallel_config.rank
        group = StatelessProcessGroup.create(
            init_info.master_address,
            init_info.master_port,
            rank,
            init_info.world_size,
            store_timeout=int(TRANSFER_CONNECT_TIMEOUT_S),
        )
        self.model_update_group = GlooGroup(group.store, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load tensors; unlike the base class, wait for no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load tensors; see the base class."""
        if self.model_update_group is None:
            raise RuntimeError("the engine is no member of a trainer's group")
        with disable_mtp_completeness_check():
            for named_tensor in self._receive(update_info):
                self.model.load_weights([named_tensor])

    def _receive(self, info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        described = zip(info.names, info.dtype_names, info.shapes, strict=True)
        tensors = [(name, getattr(torch, dtype), shape) for name, dtype, shape in described]
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
        start = total = 0
        for number, size in enumerate(sizes):
            total += size
            # In vLLM's packed format, a block ends with the tensor that makes it exceed the limit.
            if self.packed and total <= self.packed_buffer_size_bytes and number + 1 < len(sizes):
                continue
            block = torch.empty(total, dtype=torch.uint8)
            self.model_update_group.broadcast(block, src=0)
            pieces = torch.split(block, sizes[start : number + 1])
            for (name, dtype, shape), piece in zip(tensors[start : number + 1], pieces, strict=True):
                yield name, piece.clone().view(dtype).view(shape)  # a block does not align its tensors
            start, total = number + 1, 0
