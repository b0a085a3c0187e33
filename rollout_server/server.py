"""Serves a job over HTTP with vLLM's API server."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from rollout_api.client.request_client import RequestClient
from rollout_api.manifest.rollout_job import RolloutJobSpec
from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_server.access import error_response
from rollout_server.body_check import BodyCheckMiddleware
from rollout_server.http_protocol import LimitedProtocol, max_connections
from rollout_server.idempotency import IdempotencyMiddleware
from rollout_server.request_context import RequestContextMiddleware
from rollout_worker.engine.vllm_version import check_vllm

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, which then close it first."""
_SHUTDOWN_S = 30
"""Seconds that running requests have to finish when the server is told to end. They can be sent again afterwards."""
_RESOLVE_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that makes vLLM's server offer its endpoints for adapters, and resolve their names."""
_MAX_ADAPTER_NAMES = 1024
"""Number of adapters that can be used at a time, as vLLM's server and its clients are told."""


class ServerArgumentError(ValueError):
    """An argument of vLLM's API server cannot be used."""


async def build_app(
    client: RequestClient,
    model: Path,
    names: Sequence[str],
    spec: RolloutJobSpec,
    arguments: Sequence[str] = (),
) -> FastAPI:
    """Return vLLM's API server for a job.

    Args:
        client: connection to the job, which the caller closes.
        model: directory of the model's configuration and tokenizer.
        names: names that HTTP requests may use for the model.
        spec: the job's specification.
        arguments: further command line arguments of vLLM's API server, for example ``--tool-call-parser=hermes``.

    Raises:
        ServerArgumentError: an argument cannot be used.
        EngineError: the installed vLLM is not supported.
    """
    check_vllm()
    from vllm import AsyncEngineArgs
    from vllm.config import DeviceConfig, VllmConfig, WeightTransferConfig
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app as build_vllm_app
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rollout_server.chat import ConversationChat
    from rollout_server.images import CONNECTOR
    from rollout_server.job_engine import JobEngine
    from rollout_server.sglang_api import SglangApi
    from rollout_server.trainer_api import TrainerApi
    from rollout_worker.engine.config import transfer_backend

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    except ModuleNotFoundError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser(prog="rollout serve", add_help=False))
    try:
        args = parser.parse_args([*_arguments(client, model, names, spec.engine), *arguments])
        validate_parsed_serve_args(args)
    except SystemExit:  # the parser has printed what is wrong
        raise ServerArgumentError(f"vLLM's API server does not accept {' '.join(arguments)}") from None
    except (TypeError, ValueError) as error:
        raise ServerArgumentError(str(error)) from None
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    # The server only tokenizes. It needs neither a GPU nor kernels for quantized weights.
    model_config.quantization = None
    model_config.logprobs_mode = f"{spec.engine.logprobs_mode}_logprobs"
    vllm_config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
        lora_config=_lora_config(spec.engine),
        weight_transfer_config=WeightTransferConfig(backend=backend) if (backend := transfer_backend(spec)) else None,
    )
    engine = JobEngine(
        vllm_config,
        client,
        _reported_draft_length(spec, args.per_request_spec_decode_metrics),
        engines_find_reasoning=_engines_find_reasoning(spec.engine),
    )
    tasks = await engine.get_supported_tasks()
    # vLLM's own endpoints for adapters are left out, but its server must look up names that it does not know.
    os.environ.pop(_RESOLVE_ADAPTERS, None)
    os.environ["VLLM_MEDIA_CONNECTOR"] = CONNECTOR
    # vLLM checks the domain of the first URL only.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    with _log_levels_kept():
        app: FastAPI = build_vllm_app(args, tasks, model_config)
    os.environ[_RESOLVE_ADAPTERS] = "1"
    await init_app_state(engine, app.state, args, tasks)
    _refuse_full_prompts()
    for kind in (AttributeError, LookupError, AssertionError, RecursionError):
        app.add_exception_handler(kind, _answer_invalid_body)
    app.add_exception_handler(NotImplementedError, _answer_unsupported)
    app.add_exception_handler(HTTPException, _answer_unknown_route)
    app.middleware_stack = None  # vLLM's server has built it, with the handlers that there were; it is built again
    app.state.request_client = client
    ConversationChat.adopt(app.state.openai_serving_chat, engine.conversations)
    sglang, trainers = SglangApi(client, engine), TrainerApi(client, engine, app)
    for api in (sglang, trainers):
        app.include_router(api.router())

    async def server_info() -> Mapping[str, Any]:
        return {**sglang.server_info(), "vllm_config": trainers.server_info()}

    for path in ("/server_info", "/get_server_info"):
        app.add_api_route(path, server_info, methods=["GET"])
    for serving in vars(app.state)["_state"].values():
        # vLLM would reduce a client's max_tokens to the job's default.
        if getattr(serving, "override_max_tokens", None) is not None:
            serving.override_max_tokens = None
    return app


async def _answer_invalid_body(request: Request, error: Exception) -> Response:
    """Answer a request whose body has made a validator of vLLM fail: it expects a type that it does not check."""
    frames = traceback.extract_tb(error.__traceback__)
    if not any(frame.name == "request_body_to_args" for frame in frames):
        raise error
    message = f"body: a field has another type than the API's ({type(error).__name__}: {error})"
    return error_response(HTTPStatus.BAD_REQUEST, message)


async def _answer_unknown_route(_: Request, error: Any) -> Response:
    """Answer a request with a path or a method that the server does not have, as all other mistakes are answered."""
    response = error_response(HTTPStatus(error.status_code), error.detail)
    response.headers.update(error.headers or {})
    return response


async def _answer_unsupported(_: Request, error: Exception) -> Response:
    """Answer a request for something that this server never does.

    vLLM's server would answer with a status that says that the server has failed, so that clients repeat the request.
    """
    return error_response(HTTPStatus.BAD_REQUEST, str(error) or "a rollout job does not support this")


def _refuse_full_prompts() -> None:
    """Let vLLM's server say that a prompt leaves no room for a response, where it would refuse 0 as ``max_tokens``."""
    from vllm.entrypoints.serve.utils import api_utils
    from vllm.exceptions import VLLMValidationError

    original = api_utils.get_max_tokens

    def get_max_tokens(max_model_len: int, max_tokens: int | None, input_length: int, *args: Any, **kwargs: Any) -> int:
        if input_length == max_model_len and kwargs.get("truncate_prompt_tokens") is None:
            raise VLLMValidationError(
                f"the prompt has {input_length} tokens, as many as the job's engine.maxModelLen, so that no token can "
                "be sampled; shorten the prompt",
                parameter="prompt",
            )
        return int(original(max_model_len, max_tokens, input_length, *args, **kwargs))

    for name, module in list(sys.modules.items()):
        is_user = name.startswith("vllm.entrypoints.") and module is not api_utils
        if is_user and getattr(module, "get_max_tokens", None) is original:
            module.get_max_tokens = get_max_tokens  # type: ignore[attr-defined]


@contextmanager
def _log_levels_kept() -> Iterator[None]:
    """Restore the levels of the root logger and of its handlers.

    vLLM's API server imports ``model_hosting_container_standards``, which hides all warnings of the process when it is
    imported: it sets these levels to ``ERROR``.
    """
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, handler_level in handlers:
            handler.setLevel(handler_level)


def _reported_draft_length(spec: RolloutJobSpec, level: str) -> int | None:
    """Return the maximum number of tokens of a draft, which metrics in responses report; None without such metrics.

    Raises:
        ServerArgumentError: the metrics are not available.
    """
    if level == "none":
        return None
    if level == "detailed":
        raise ServerArgumentError(
            "--per-request-spec-decode-metrics detailed: a job does not record the drafts of single steps; use summary"
        )
    if spec.speculation.policy == "off":
        raise ServerArgumentError(
            '--per-request-spec-decode-metrics: the job drafts nothing, because spec.speculation.policy is "off"; '
            "remove the option"
        )
    return spec.speculation.max_draft_length


def _engines_find_reasoning(engine_spec: EngineSpec) -> bool:
    """Return whether the engines have a reasoning parser, and so apply structured outputs to what follows."""
    config = engine_spec.extra_args.get("structured_outputs_config")
    nested = config.get("reasoning_parser") if isinstance(config, dict) else None
    return bool(engine_spec.extra_args.get("reasoning_parser") or nested)


def _lora_config(engine_spec: EngineSpec) -> Any:
    """Return vLLM's configuration of adapters; None if the engines load none."""
    from vllm.config import LoRAConfig

    from rollout_worker.engine.config import lora_rank

    if not engine_spec.max_lora_rank:
        return None
    return LoRAConfig(max_lora_rank=lora_rank(engine_spec.max_lora_rank), max_loras=_MAX_ADAPTER_NAMES)


def _arguments(client: RequestClient, model: Path, names: Sequence[str], engine_spec: EngineSpec) -> list[str]:
    """Return the arguments of vLLM's API server that follow from the job."""
    sampling = client.job.sampling
    defaults: dict[str, Any] = {
        name: sampling[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    defaults["max_new_tokens"] = sampling["max_tokens"]
    return [
        f"--model={model}",
        "--served-model-name",
        *names,
        f"--max-model-len={client.job.max_model_len}",
        f"--dtype={engine_spec.dtype}",
        "--generation-config=vllm",
        f"--override-generation-config={json.dumps(defaults)}",
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-log-stats",
    ]


async def serve(app: FastAPI, access: Callable[[ASGIApp], ASGIApp], *, host: str, port: int, **settings: Any) -> None:
    """Serve until the process is told to end; running requests may then finish.

    *access* adds middleware that decides who may use the server. The port 0 stands for any free one, and *settings* are
    further ones of uvicorn.
    """
    config = uvicorn.Config(
        access(as_asgi(app)),
        host=host,
        port=port,
        log_level="info",
        access_log=False,
        http=LimitedProtocol.with_limit(max_connections()),
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        **settings,
    )
    server = uvicorn.Server(config)
    app.state.server, engine = server, app.state.engine_client
    try:
        await server.serve()
    finally:
        engine.shutdown()


def as_asgi(app: FastAPI) -> ASGIApp:
    """Return the application with the middleware that reads what requests say about their rollouts."""
    state = app.state
    idempotent = IdempotencyMiddleware(app, state.request_client)
    return BodyCheckMiddleware(RequestContextMiddleware(idempotent), state.engine_client.max_prompt_characters)
