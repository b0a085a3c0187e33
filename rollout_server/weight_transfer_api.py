"""vLLM's endpoints for trainers that send all weights from memory, over NCCL.

Paths, fields and responses are those of vLLM 0.32 (``vllm/entrypoints/rl/online/api_router.py`` and
``vllm/distributed/weight_transfer/nccl_engine.py``).
"""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    DEFAULT_PACKED_NUM_BUFFERS,
)
from vllm.exceptions import VLLMValidationError

from rollout_api.client.request_client import RequestClient
from rollout_api.client.weight_publisher import PublishedWeights
from rollout_api.protocol.messages import TensorSpec
from rollout_server.engine_core import http_errors
from rollout_server.weight_publishing import PUBLISH_TIMEOUT_S

_JOIN_TIMEOUT_S = 300.0
"""Seconds that the engines have to join the trainer's process group. It is the time for which vLLM's trainers wait."""


class InitInfo(BaseModel):
    """``init_info`` of ``/init_weight_transfer_engine``: how the engines find the trainer."""

    model_config = ConfigDict(extra="forbid")

    master_address: str = Field(min_length=1)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = 1
    world_size: int = Field(ge=2)
    packed: bool = False
    packed_buffer_size_bytes: int = Field(default=DEFAULT_PACKED_BUFFER_SIZE_BYTES, ge=1)
    packed_num_buffers: int = Field(default=DEFAULT_PACKED_NUM_BUFFERS, description="Without effect on what is sent.")

    @property
    def packed_bytes(self) -> int:
        """What broadcasts in the group have as ``packed_bytes``."""
        return self.packed_buffer_size_bytes if self.packed else 0


class UpdateInfo(BaseModel):
    """``update_info`` of ``/update_weights``: the tensors that the trainer sends, in their order.

    Before vLLM 0.28, it also says how they are sent; since then, ``init_info`` does.
    """

    model_config = ConfigDict(extra="forbid")

    names: list[str] = Field(min_length=1)
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    packed_buffer_size_bytes: int = Field(default=DEFAULT_PACKED_BUFFER_SIZE_BYTES, ge=1)
    packed_num_buffers: int = Field(default=DEFAULT_PACKED_NUM_BUFFERS, description="Without effect on what is sent.")
    is_checkpoint_format: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"there are {len(self.names)} names, {len(self.dtype_names)} dtype_names and {len(self.shapes)} "
                "shapes; they must be as many"
            )
        if not self.is_checkpoint_format:
            raise ValueError("is_checkpoint_format must be true: send the tensors of the checkpoint")
        return self

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors."""
        described = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in described]

    @property
    def packed_bytes(self) -> int | None:
        """``packed_bytes`` of the broadcast; None for what ``init_info`` has said."""
        if self.packed is None:
            return None
        return self.packed_buffer_size_bytes if self.packed else 0


class WeightTransferApi:
    """The endpoints for one job, apart from ``/update_weights``.

    Args:
        client: connection to the job.
    """

    def __init__(self, client: RequestClient) -> None:
        self._client = client

    def router(self) -> APIRouter:
        """Return the endpoints."""
        router = APIRouter()
        for path, endpoint in (
            ("init_weight_transfer_engine", self.init),
            ("start_weight_update", self.start),
            ("finish_weight_update", self.finish),
        ):
            router.add_api_route(f"/{path}", endpoint, methods=["POST"])
        return router

    async def init(self, init_info: Annotated[InitInfo, Body(embed=True)]) -> dict[str, str]:
        """Let the job's engines join the trainer's process group, in which it has rank 0, and wait until they have."""
        if init_info.rank_offset != 1:
            raise VLLMValidationError(
                f"rank_offset is {init_info.rank_offset}, but must be 1: the trainer has rank 0 and the job's engines "
                "have all others. A job has any number of engines behind one URL, so give the trainer no other URLs",
                parameter="rank_offset",
            )
        with http_errors():
            await self._client.transfer.form_group(
                init_info.master_address,
                init_info.master_port,
                init_info.world_size,
                packed_bytes=init_info.packed_bytes,
                timeout=_JOIN_TIMEOUT_S,
            )
        return {"message": "Weight transfer initialized"}

    async def start(self) -> dict[str, str]:
        """Check that the process group is complete, so that a trainer fails before it sends anything."""
        with http_errors():
            await self._client.transfer.check_group()
        return {"message": "Weight update started"}

    async def receive(self, update_info: UpdateInfo) -> PublishedWeights:
        """Let the engines receive the weights that the trainer sends, and wait until they serve them.

        Raises:
            RolloutClientError: they cannot be received; it says why.
        """
        return await self._client.transfer.update(
            update_info.tensors, packed_bytes=update_info.packed_bytes, timeout=PUBLISH_TIMEOUT_S
        )

    async def finish(self, weight_version: Annotated[str | None, Body(embed=True)] = None) -> dict[str, str]:
        """Do nothing but check the version: the engines serve the weights since ``/update_weights`` has returned."""
        with http_errors():
            newest = await self._client.publisher.newest()
        if weight_version not in (None, str(newest)):
            raise VLLMValidationError(
                f"the weights are served as version {newest}, not {weight_version}; omit weight_version",
                parameter="weight_version",
            )
        return {"message": "Weight update finished"}
