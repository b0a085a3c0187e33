"""The part of SGLang's HTTP API that slime calls on engines that it has not started itself.

The endpoints and their fields were read in slime (commit ``624b824``: ``slime/rollout/sglang_rollout.py`` and
``slime/backends/sglang_utils``). Fields that a job cannot honour are refused.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from rollout_api.arrays import flatten_kept_tokens, routed_experts_array
from rollout_api.client.prompts import Prompt
from rollout_api.client.request_client import RequestClient
from rollout_api.errors import InvalidRequestError, RolloutClientError, WeightsError
from rollout_api.protocol.messages import FinishReason, Partial, Rollout, WeightsKind
from rollout_server.engine_core import http_error, http_errors, prepare_request, raise_if_failed
from rollout_server.job_engine import JobEngine
from rollout_server.request_context import REQUEST_IDS_HEADER, ContextError, RolloutFields, current_context
from rollout_server.trainer_api import PUBLISH_TIMEOUT_S

_ENDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "abort",
    FinishReason.CANCELLED: "abort",
}
"""Finish reason of a rollout → SGLang's name for it."""


_SAME_SETTINGS = {
    *("temperature", "top_p", "min_p", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Settings that have the same names and values in SGLang and in a request to a job."""


def _as_list(value: Any) -> Any:
    return [] if value is None else value if isinstance(value, list) else [value]


class CustomParams(BaseModel):
    """What slime's patch of SGLang reads in ``custom_params``."""

    model_config = ConfigDict(extra="forbid")

    return_top_p_token_ids: bool = False


class SamplingFields(BaseModel):
    """SGLang's sampling parameters. What a request omits is the job's."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], BeforeValidator(_as_list)] = Field(default_factory=list)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: CustomParams = Field(default_factory=CustomParams)

    def overrides(self) -> dict[str, Any]:
        """Return the settings that the request has, as fields of :class:`rollout_api.Sampling`."""
        settings = self.model_dump(include=_SAME_SETTINGS) | {
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "max_tokens": self.max_new_tokens,
            "min_tokens": self.min_new_tokens,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids or None,
            "seed": None if self.sampling_seed is None else self.sampling_seed % 2**31,
            "kept_tokens": self.custom_params.return_top_p_token_ids or None,
        }
        return {name: value for name, value in settings.items() if value is not None}


class GenerateRequest(BaseModel):
    """The body of ``/generate``."""

    model_config = ConfigDict(extra="forbid")

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: SamplingFields = Field(default_factory=SamplingFields)
    return_logprob: bool = False
    return_routed_experts: bool = False
    rid: str | None = None


class AbortRequest(BaseModel):
    """The body of ``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


class UpdateWeightsRequest(BaseModel):
    """The body of ``/update_weights_from_disk``."""

    model_config = ConfigDict(extra="forbid")

    model_path: str
    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool = True


class _Running:
    """A request that is being sampled."""

    def __init__(self) -> None:
        self.tokens: list[Partial] = []
        """What was sampled so far."""
        self.aborted = asyncio.Event()


class SglangApi:
    """The endpoints for one job.

    *engine* is what vLLM's server has as its engine.
    """

    def __init__(self, client: RequestClient, engine: JobEngine) -> None:
        self._client, self._engine = client, engine
        # A tokenizer may only be used by one thread at a time, and vLLM's server uses its own in threads.
        self._tokenizer = copy.deepcopy(engine.get_tokenizer())
        self._running: dict[str, _Running] = {}

    def router(self) -> APIRouter:
        """Return the endpoints."""
        router = APIRouter()
        for path in ("/model_info", "/get_model_info"):
            router.add_api_route(path, self.model_info, methods=["GET"])
        router.add_api_route("/health_generate", self.do_nothing, methods=["GET"])
        router.add_api_route("/get_weight_version", self.get_weight_version, methods=["GET"])
        router.add_api_route("/v1/loads", self.loads, methods=["GET"])
        router.add_api_route("/generate", with_cancellation(self.generate), methods=["POST"])
        router.add_api_route("/abort_request", self.abort_request, methods=["POST"])
        router.add_api_route("/update_weights_from_disk", self.update_weights_from_disk, methods=["POST"])
        # The engines clear their caches when they load weights, and running rollouts continue with the new weights.
        router.add_api_route("/flush_cache", self.do_nothing, methods=["GET", "POST"])
        for path in ("/pause_generation", "/continue_generation"):
            router.add_api_route(path, self.do_nothing, methods=["POST"])
        return router

    async def do_nothing(self) -> Response:
        """Return that the call succeeded."""
        return JSONResponse({"status": "ok"})

    def server_info(self) -> Mapping[str, Any]:
        """Return the properties of the job, which looks like one engine on one GPU, for ``/server_info``."""
        return {
            "served_model_name": self._client.job.name,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "ep_size": 1,
            "num_gpus": 1,
            "enable_memory_saver": False,
            "max_model_len": self._client.job.max_model_len,
        }

    async def model_info(self) -> dict[str, Any]:
        """Return what SGLang's router asks of a new engine."""
        return {"model_path": self._client.job.name, "is_generation": True}

    async def get_weight_version(self) -> dict[str, str]:
        """Return the newest weight version."""
        with http_errors():
            return {"weight_version": str(await self._client.publisher.newest())}

    async def loads(self) -> dict[str, Any]:
        """Return the number of requests that this server is waiting for."""
        return {"loads": [{"num_running_reqs": len(self._running), "num_waiting_reqs": 0}]}

    async def abort_request(self, body: AbortRequest) -> dict[str, str]:
        """End one request or all requests of this server with the tokens that were sampled so far."""
        for request_id, running in self._running.items():
            if body.abort_all or request_id == body.rid:
                running.aborted.set()
        return {"status": "ok"}

    async def update_weights_from_disk(self, body: UpdateWeightsRequest) -> Response:
        """Publish weights, and wait until the job's engines serve them."""
        version = body.weight_version
        if version is not None and not version.isdecimal():
            message = f"weight_version: {version!r} is not a number; pass a number or omit it"
            return JSONResponse({"success": False, "message": message}, HTTPStatus.BAD_REQUEST)
        try:
            published = await self._client.publisher.publish_next(
                body.model_path,
                kind=WeightsKind.FULL,
                version=None if version is None else int(version),
                timeout=PUBLISH_TIMEOUT_S,
            )
        except (InvalidRequestError, WeightsError) as error:
            return JSONResponse({"success": False, "message": str(error)}, HTTPStatus.BAD_REQUEST)
        except RolloutClientError as error:
            raise http_error(error) from None
        message = f"{len(published.loaded)} engines serve weight version {published.version}"
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def generate(self, body: GenerateRequest, raw_request: Request) -> Response:
        """Sample one rollout."""
        context = current_context()
        prompt_tokens = await self._prompt_tokens(body)
        try:
            fields = RolloutFields.parse(context.headers, {})
        except ContextError as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from None
        sampling = body.sampling_params.overrides() | {
            "n": 1,
            "logprobs": body.return_logprob,
            "routed_experts": body.return_routed_experts,
        }
        key = context.next_request_id()
        request_id = body.rid or uuid.uuid4().hex
        if request_id in self._running:
            raise VLLMValidationError(f"rid: a request {request_id!r} is running; use another rid", parameter="rid")
        running = self._running[request_id] = _Running()
        try:
            prepared = prepare_request(
                self._client, Prompt(prompt_tokens), sampling, fields, context, request_id=key, stream=True
            )
            receiving = asyncio.ensure_future(
                self._client.receive(
                    prepared,
                    may_be_answered=bool(key),
                    may_wait=False,
                    on_tokens=lambda _, tokens: running.tokens.append(tokens),
                )
            )
            rollout = await _unless_aborted(receiving, running)
        except RolloutClientError as error:
            raise http_error(error) from None
        finally:
            del self._running[request_id]
        context.report(REQUEST_IDS_HEADER, f"{self._client.job.uid}/{prepared.request_id}")
        meta: dict[str, Any] = {"id": request_id, "prompt_tokens": len(prompt_tokens)}
        if rollout is None:
            return JSONResponse(self._reply(body, Partial.join(running.tokens), FinishReason.CANCELLED, meta))
        raise_if_failed(rollout)
        meta |= {
            "cached_tokens": rollout.num_cached_tokens,
            "spec_accept_token_num": rollout.num_accepted_tokens,
            "spec_draft_token_num": rollout.num_draft_tokens,
            "spec_verify_ct": rollout.num_decoding_steps,
        }
        if body.return_routed_experts and rollout.routed_experts is not None:
            meta["routed_experts"] = _int32(routed_experts_array(rollout.routed_experts))
        return JSONResponse(self._reply(body, rollout.since(0), rollout.finish_reason, meta))

    async def _prompt_tokens(self, body: GenerateRequest) -> Sequence[int]:
        if (body.input_ids is None) == (body.text is None):
            raise VLLMValidationError("a request has either input_ids or text; pass one of them", parameter="input_ids")
        return body.input_ids if body.text is None else await self._engine.tokenize(body.text)

    def _reply(self, body: GenerateRequest, tokens: Partial, end: FinishReason, meta: dict[str, Any]) -> dict[str, Any]:
        """Return SGLang's response for these tokens."""
        settings, token_ids = body.sampling_params, tokens.token_ids
        text, matched = self._text(token_ids, settings, is_stopped=end is FinishReason.STOP)
        meta["finish_reason"] = _finish_reason(end, len(token_ids), matched)
        meta["completion_tokens"] = len(token_ids)
        if tokens.weight_version is not None:
            meta["weight_version"] = str(tokens.weight_version)
        if body.return_logprob:
            logprobs = tokens.logprobs or []
            meta["output_token_logprobs"] = [[*pair, None] for pair in zip(logprobs, token_ids, strict=True)]
        if settings.custom_params.return_top_p_token_ids:
            try:
                ids, offsets = flatten_kept_tokens(tokens.kept_token_ids or [])
            except InvalidRequestError as error:
                raise GracefulHTTPError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from None
            meta |= {"top_p_token_ids": _int32(ids), "top_p_token_offsets": _int32(offsets)}
        return {"text": text, "output_ids": token_ids, "meta_info": meta}

    def _text(
        self, token_ids: Sequence[int], settings: SamplingFields, *, is_stopped: bool
    ) -> tuple[str, int | str | None]:
        """Return the text of a response, and the token or the string that has stopped it."""
        defaults = self._client.job.sampling
        is_trimmed, matched = not settings.no_stop_trim, None
        if is_stopped and token_ids:
            ignores_eos = defaults["ignore_eos"] if settings.ignore_eos is None else settings.ignore_eos
            end_tokens = set(settings.stop_token_ids or defaults["stop_token_ids"])
            if not ignores_eos:
                end_tokens |= self._engine.end_tokens
            if token_ids[-1] in end_tokens:
                matched = token_ids[-1]
        text: str = self._tokenizer.decode(
            token_ids[:-1] if matched is not None and is_trimmed else token_ids,
            skip_special_tokens=settings.skip_special_tokens,
            spaces_between_special_tokens=settings.spaces_between_special_tokens,
        )
        if not is_stopped or matched is not None:
            return text, matched
        for string in settings.stop or defaults["stop"]:
            if (start := text.find(string)) >= 0:
                return text[:start] if is_trimmed else text, string
        return text, None


async def _unless_aborted(receiving: asyncio.Future[list[Rollout]], running: _Running) -> Rollout | None:
    """Return the rollout of a request; None if the request was aborted before."""
    aborted = asyncio.ensure_future(running.aborted.wait())
    try:
        await asyncio.wait((receiving, aborted), return_when=asyncio.FIRST_COMPLETED)
        return receiving.result()[0] if receiving.done() else None
    finally:
        aborted.cancel()
        receiving.cancel()


def _int32(values: NDArray[Any]) -> str:
    """Return an array as slime reads it: base64 of little-endian int32."""
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


def _finish_reason(end: FinishReason, length: int, matched: int | str | None) -> dict[str, Any]:
    kind = _ENDS[end]
    if kind == "stop":
        return {"type": kind, "matched": matched}
    if kind == "length":
        return {"type": kind, "length": length}
    return {"type": kind, "message": "the deadline passed" if end is FinishReason.DEADLINE else "aborted"}
