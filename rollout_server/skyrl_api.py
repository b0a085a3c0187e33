"""Endpoints that SkyRL adds to vLLM's server and calls on servers that it has not started.

Paths and fields are those of SkyRL 0.4
(``skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py`` and ``vllm_server_actor.py``).
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field
from vllm.exceptions import GracefulHTTPError

from rollout_server.trainer_api import LoadAdapterRequest, TrainerApi

_ADVICE = (
    "a job receives neither changes of weights nor adapters from a trainer's memory; load adapters from a directory "
    "(POST /v1/load_lora_adapter), or send all weights (weight_sync_backend: nccl)"
)


class LoadSkyrlAdapterRequest(BaseModel):
    """The body of ``/skyrl/v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = ""
    in_memory: bool = Field(default=False, description="The adapter was sent with the trainer's process group.")


class SkyrlApi:
    """The endpoints for one job.

    Args:
        trainers: vLLM's endpoints for trainers.
    """

    def __init__(self, trainers: TrainerApi) -> None:
        self._trainers = trainers

    def router(self) -> APIRouter:
        """Return the endpoints."""
        router = APIRouter()
        router.add_api_route("/skyrl/v1/load_lora_adapter", self.load_adapter, methods=["POST"])
        router.add_api_route("/fetch_weights", self.refuse, methods=["POST"])
        for path in ("reset_prefix_cache", "finish_session"):
            router.add_api_route(f"/{path}", self.do_nothing, methods=["POST"])
        return router

    async def load_adapter(self, body: LoadSkyrlAdapterRequest) -> Response:
        """Publish an adapter as the next weight version; an adapter that has its name loses it."""
        if body.in_memory or not body.lora_path:
            await self.refuse()
        return await self._trainers.load_adapter(
            LoadAdapterRequest(lora_name=body.lora_name, lora_path=body.lora_path, load_inplace=True)
        )

    async def refuse(self) -> None:
        """Say how weights can be published instead."""
        raise GracefulHTTPError(_ADVICE, HTTPStatus.NOT_IMPLEMENTED)

    async def do_nothing(self) -> dict[str, str]:
        """Answer that it is done: engines clear their caches when they load weights, and the job has no sessions."""
        return {"status": "ok"}
