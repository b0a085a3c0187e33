"""vLLM's endpoints for trainers: pauses, weights and LoRA adapters.

Paths, fields and responses are those of vLLM 0.32 (``vllm/entrypoints/rl/online/api_router.py`` and
``vllm/entrypoints/serve/lora/api_router.py``), so that trainers send weights from memory as to vLLM's own server.
``/update_weights`` also accepts what prime-rl sends.

SkyRL adds endpoints to vLLM's server, and calls them on servers that it has not started. Their paths and fields are
those of SkyRL 0.4 (``skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py`` and
``vllm_server_actor.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, FastAPI, Query
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from rollout_api.client.request_client import RequestClient
from rollout_api.client.server_records import NamedAdapter
from rollout_api.protocol.messages import PauseMode, WeightsKind
from rollout_server.engine_core import http_errors
from rollout_server.job_engine import JobEngine

_PAUSE_TIMEOUT_S = 600.0
"""Seconds that the engines have to pause or to resume."""
_SLEEP_LEVELS = {1: PauseMode.SLEEP, 2: PauseMode.DEEP_SLEEP}
"""vLLM's level of sleep → how a job is paused."""
_ENGINE_TIMEOUT_S = 240.0
"""Seconds that a trainer that asks for the number of processes waits for the first engine."""
_JOIN_TIMEOUT_S = 300.0
"""Seconds that the engines have to join the trainer's group. vLLM's trainers wait as long."""
PUBLISH_TIMEOUT_S = 600.0
"""Seconds that the engines have to load weights."""


_ADVICE_FOR_SKYRL = (
    "a job receives neither changes of weights nor adapters from a trainer's memory; load adapters from a directory "
    "(POST /v1/load_lora_adapter), or send all weights (weight_sync_backend: nccl)"
)


class UpdateWeightsRequest(BaseModel):
    """The body of ``/update_weights``."""

    model_config = ConfigDict(extra="forbid")

    weight_dir: str | None = None
    weight_version: int | None = None
    update_info: dict[str, Any] | None = None


class LoadAdapterRequest(BaseModel):
    """The body of ``/v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterRequest(BaseModel):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: str
    lora_int_id: int | None = None


class LoadSkyrlAdapterRequest(BaseModel):
    """The body of ``/skyrl/v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = ""
    in_memory: bool = Field(default=False, description="The adapter was sent with the trainer's process group.")


class TrainerApi:
    """The endpoints for one job.

    *app* is vLLM's application, whose state has been initialised.
    """

    def __init__(self, client: RequestClient, engine: JobEngine, app: FastAPI) -> None:
        self._client, self._engine = client, engine
        self._models: Any = app.state.openai_serving_models
        self._models.lora_resolvers.append(_NamedAdapterResolver(client))

    def router(self) -> APIRouter:
        """Return the endpoints."""
        router = APIRouter()
        router.add_api_route("/pause", self.pause, methods=["POST"])
        router.add_api_route("/resume", self.resume, methods=["POST"])
        router.add_api_route("/is_paused", self.is_paused, methods=["GET"])
        router.add_api_route("/sleep", self.sleep, methods=["POST"])
        router.add_api_route("/wake_up", self.wake_up, methods=["POST"])
        router.add_api_route("/is_sleeping", self.is_sleeping, methods=["GET"])
        router.add_api_route("/get_world_size", self.get_world_size, methods=["GET"])
        router.add_api_route("/weight_info", self.weight_info, methods=["GET"])
        router.add_api_route("/init_weight_transfer_engine", self.init_weight_transfer_engine, methods=["POST"])
        router.add_api_route("/start_weight_update", self.start_weight_update, methods=["POST"])
        router.add_api_route("/update_weights", self.update_weights, methods=["POST"])
        router.add_api_route("/finish_weight_update", self.finish_weight_update, methods=["POST"])
        router.add_api_route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"])
        router.add_api_route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"])
        router.add_api_route("/skyrl/v1/load_lora_adapter", self.load_skyrl_adapter, methods=["POST"])
        router.add_api_route("/fetch_weights", self.refuse_skyrl, methods=["POST"])
        for path in ("/reset_prefix_cache", "/finish_session"):
            router.add_api_route(path, self.do_nothing, methods=["POST"])
        return router

    def server_info(self) -> Mapping[str, Any]:
        """Return the part of vLLM's configuration that trainers read, for ``/server_info``."""
        config = self._engine.vllm_config
        lora, transfer = config.lora_config, config.weight_transfer_config
        return {
            "model_config": {
                "dtype": str(config.model_config.dtype),
                "max_model_len": config.model_config.max_model_len,
                "logprobs_mode": config.model_config.logprobs_mode,
            },
            "weight_transfer_config": None if transfer is None else {"backend": transfer.backend},
            "lora_config": None if lora is None else {"max_lora_rank": lora.max_lora_rank, "max_loras": lora.max_loras},
            "parallel_config": {
                "data_parallel_size": 1,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "world_size": 1,
            },
        }

    async def pause(
        self,
        mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort",
        clear_cache: Annotated[bool, Query()] = True,
    ) -> Response:
        """Pause all engines of the job; with ``abort``, after the requests of this server have ended.

        vLLM ignores ``clear_cache`` for ``keep``. A job always ignores it: its engines clear their caches when they
        load weights.
        """
        with http_errors():
            if mode == "abort":
                await self._abort_requests()
            await self._client.pauser.pause(PauseMode.WAIT if mode == "wait" else PauseMode.KEEP, _PAUSE_TIMEOUT_S)
        return JSONResponse({"status": "paused"})

    async def _abort_requests(self) -> None:
        processor = self._engine.output_processor
        await self._engine.abort([*processor.request_states, *processor.parent_requests], internal=True)

    async def resume(self) -> Response:
        """Resume all engines of the job."""
        with http_errors():
            await self._client.pauser.resume(_PAUSE_TIMEOUT_S)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self) -> dict[str, bool]:
        """Return whether the job is paused."""
        with http_errors():
            return {"is_paused": await self._client.pauser.mode() is not None}

    async def sleep(
        self,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort",
    ) -> Response:
        """Pause all engines of the job as :meth:`pause` does, and let them free the memory of their GPUs."""
        if not level:
            await self.pause(mode)
            return JSONResponse({"status": "sleeping", "level": level})
        pauser = self._client.pauser
        with http_errors():
            await pauser.require_sleep_mode()
            current = await pauser.mode()
            if current is None or not current.sleep_level:  # engines that sleep must not wake for a repeated call
                if mode == "abort":
                    await self._abort_requests()
                elif mode == "wait":
                    await pauser.pause(PauseMode.WAIT, _PAUSE_TIMEOUT_S)
            await pauser.pause(_SLEEP_LEVELS[level], _PAUSE_TIMEOUT_S)
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake_up(self, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Let all engines of the job claim all of their memory, whatever the tags are, and sample again."""
        await self.resume()
        return JSONResponse({"status": "awake", "tags": tags})

    async def is_sleeping(self) -> dict[str, bool]:
        """Return whether the job sleeps."""
        with http_errors():
            mode = await self._client.pauser.mode()
        return {"is_sleeping": mode is not None and mode.sleep_level > 0}

    async def get_world_size(self) -> dict[str, int]:
        """Return the number of worker processes of all engines, once there is one.

        Trainers ask for it when the server answers, which vLLM's does not before its engine has started.
        """
        with http_errors():
            return {"world_size": await self._client.transfer.world_size(_ENGINE_TIMEOUT_S)}

    async def weight_info(self) -> dict[str, str]:
        """Return the newest weight version."""
        with http_errors():
            return {"weight_version": str(await self._client.publisher.newest())}

    async def init_weight_transfer_engine(
        self, init_info: Annotated[dict[str, Any], Body(embed=True)]
    ) -> dict[str, str]:
        """Let the job's engines join the trainer's group, and wait until they have. The trainer has rank 0 there."""
        with http_errors():
            await self._client.transfer.init(init_info, timeout=_JOIN_TIMEOUT_S)
        return {"message": "Weight transfer initialized"}

    async def start_weight_update(self) -> dict[str, str]:
        """Begin to publish the next weight version, and wait until all engines are ready to receive it."""
        with http_errors():
            await self._client.transfer.start(timeout=PUBLISH_TIMEOUT_S)
        return {"message": "Weight update started"}

    async def update_weights(self, body: UpdateWeightsRequest) -> Response:
        """Let the engines receive weights, or publish full weights from a directory and wait until they are served."""
        with http_errors():
            if body.update_info is not None:
                update = await self._client.transfer.update(body.update_info, timeout=PUBLISH_TIMEOUT_S)
                version = update.weight_version
            elif body.weight_dir is not None:
                published = await self._client.publisher.publish_next(
                    body.weight_dir, kind=WeightsKind.FULL, version=body.weight_version, timeout=PUBLISH_TIMEOUT_S
                )
                version = published.version
            else:
                raise VLLMValidationError("set weight_dir or update_info", parameter="update_info")
        return JSONResponse({"message": "Weights updated", "weight_version": version})

    async def finish_weight_update(
        self, weight_version: Annotated[str | None, Body(embed=True)] = None
    ) -> dict[str, str]:
        """Wait until the engines serve the weights that they have received, and check their version."""
        with http_errors():
            published = await self._client.transfer.finish(timeout=PUBLISH_TIMEOUT_S)
            published.raise_if_failed()
        if weight_version not in (None, str(published.version)):
            raise VLLMValidationError(
                f"the weights are served as version {published.version}, not {weight_version}; omit weight_version",
                parameter="weight_version",
            )
        return {"message": "Weight update finished"}

    async def load_adapter(self, body: LoadAdapterRequest) -> Response:
        """Publish an adapter as the next weight version, and remember its name."""
        if self._engine.vllm_config.lora_config is None:
            raise VLLMValidationError(
                "the job serves no adapters, because spec.engine.maxLoraRank is 0; set it to the rank of the adapter",
                parameter="lora_path",
            )
        if body.is_3d_lora_weight:
            raise VLLMValidationError("the job's engines do not load such adapters", parameter="is_3d_lora_weight")
        name = body.lora_name
        if self._models.is_base_model(name):
            raise VLLMValidationError(f"{name} is the name of the model; use another one", parameter="lora_name")
        with http_errors():
            if not body.load_inplace and (known := await self._client.adapters.get(name)) is not None:
                raise VLLMValidationError(
                    f"The lora adapter '{name}' has already been loaded, from {known.path}; use another name, or set "
                    "load_inplace to replace it",
                    parameter="lora_name",
                )
            published = await self._client.publisher.publish_next(
                body.lora_path, kind=WeightsKind.LORA, timeout=PUBLISH_TIMEOUT_S
            )
            await self._client.adapters.set(name, NamedAdapter(body.lora_path, published.version))
        self._models.lora_requests.pop(name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, body: UnloadAdapterRequest) -> Response:
        """Forget the name of an adapter. The engines serve it until another one is loaded."""
        with http_errors():
            was_known = await self._client.adapters.delete(body.lora_name)
        self._models.lora_requests.pop(body.lora_name, None)
        if not was_known:
            raise GracefulHTTPError(
                f"The lora adapter '{body.lora_name}' cannot be found; GET /v1/models lists those that were used",
                HTTPStatus.NOT_FOUND,
            )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def load_skyrl_adapter(self, body: LoadSkyrlAdapterRequest) -> Response:
        """Publish an adapter as the next weight version; an adapter that has its name loses it."""
        if body.in_memory or not body.lora_path:
            await self.refuse_skyrl()
        return await self.load_adapter(
            LoadAdapterRequest(lora_name=body.lora_name, lora_path=body.lora_path, load_inplace=True)
        )

    async def refuse_skyrl(self) -> None:
        """Say to SkyRL how weights can be published instead."""
        raise GracefulHTTPError(_ADVICE_FOR_SKYRL, HTTPStatus.BAD_REQUEST)

    async def do_nothing(self) -> dict[str, bool]:
        """Answer that it is done: engines clear their caches when they load weights, and the job has no sessions."""
        return {"success": True}


class _NamedAdapterResolver(LoRAResolver):
    """Finds adapters that were loaded through any server of the job."""

    def __init__(self, client: RequestClient) -> None:
        self._client = client

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """See the base class."""
        with http_errors():
            adapter = await self._client.adapters.get(lora_name)
        if adapter is None:
            return None
        return LoRARequest(lora_name, adapter.weight_version, adapter.path, base_model_name=base_model_name)
