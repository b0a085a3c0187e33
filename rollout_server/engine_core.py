"""A rollout job in the place of vLLM's engine core."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import sha256
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgpack
from starlette.responses import JSONResponse
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

from rollout_api.client.job_info import PreparedRequest
from rollout_api.client.prompts import Prompt
from rollout_api.client.request_client import RequestClient
from rollout_api.errors import (
    InvalidRequestError,
    JobEndedError,
    JobFullError,
    PauseError,
    RedisUnreachableError,
    RequestRefusedError,
    RolloutClientError,
    VersionMismatchError,
    WeightsError,
)
from rollout_api.manifest.spec import MAX_TOP_LOGPROBS
from rollout_api.protocol.messages import MAX_KEEP_SECONDS, FinishReason, Partial, Rollout
from rollout_server.access import LimitError, current_model_tokens, error_response
from rollout_server.conversations import SampledTurn
from rollout_server.engine_outputs import ResponseOutputs
from rollout_server.request_context import (
    REQUEST_IDS_HEADER,
    TURN_HEADER,
    ContextError,
    RequestContext,
    RolloutFields,
    current_context,
)

if TYPE_CHECKING:  # it uses this module
    from rollout_server.images import MediaSource

logger = logging.getLogger(__name__)


@dataclass
class Group:
    """The requests of vLLM's server for the samples of one prompt, which become one request to the job."""

    params: SamplingParams
    """Sampling parameters, with the number of samples."""
    client_tokens: Sequence[int] = ()
    """Tokens of the prompt before those of earlier turns were replaced; empty if it does not consist of messages."""
    source: MediaSource | None = None
    """What the prompt was rendered from if it has images or other media."""
    requests: list[EngineCoreRequest] = field(default_factory=list)
    trajectory_id: str | None = None
    turn: int = 0
    num_aborted: int = 0

    @property
    def is_streamed(self) -> bool:
        """Whether the server wants tokens before a response is complete."""
        return self.params.output_kind is not RequestOutputKind.FINAL_ONLY


_adding: ContextVar[Group] = ContextVar("group")


class JobEngineCore:
    """Takes the place of the client of vLLM's engine core, and has a job sample the responses."""

    engine_ranks_managed = (0,)

    def __init__(
        self,
        client: RequestClient,
        output_processor: OutputProcessor,
        reported_draft_length: int | None = None,
        *,
        engines_find_reasoning: bool,
    ) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._client, self._output_processor = client, output_processor
        self._reported_draft_length, self._engines_find_reasoning = reported_draft_length, engines_find_reasoning
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._running: dict[str, tuple[Group, asyncio.Task[None]]] = {}
        """Request of vLLM's server → its group, and the task that receives the group's rollouts."""

    @contextmanager
    def group(self, group: Group) -> Iterator[None]:
        """Make one request of the requests that are added within this context."""
        token = _adding.set(group)
        try:
            yield
        finally:
            _adding.reset(token)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request to the job, after the last one of its group was added.

        Raises:
            VLLMError: the job cannot serve the request.
        """
        group = _adding.get()
        group.requests.append(request)
        if len(group.requests) < group.params.n:
            return
        context = current_context()
        try:
            prepared = self._prepare(group, context)
        except BaseException as error:
            if isinstance(error, VLLMError):
                context.refusal = _refusal(error)
            # vLLM's server does so itself if there are several.
            self._output_processor.abort_requests([member.request_id for member in group.requests], internal=True)
            raise
        task = asyncio.create_task(self._sample(group, prepared, context))
        for member in group.requests:
            self._running[member.request_id] = group, task
        task.add_done_callback(lambda _: self._forget(group))
        await context.prepared()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next outputs."""
        await asyncio.sleep(0)  # other tasks must run, too, while there are many outputs
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Cancel requests. Those of a group are one request to the job, which is cancelled with the last of them."""
        for request_id in request_ids:
            group, task = self._running.pop(request_id, (None, None))
            if group is not None and task is not None:
                group.num_aborted += 1
                if group.num_aborted == group.params.n:
                    task.cancel()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the tasks of vLLM that the job performs."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Do nothing: the engines have caches of their own."""

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Return no sources of events about KV caches: those of the engines are not a client's."""
        return {}

    async def is_sleeping_async(self) -> bool:
        """Return that the job is awake."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel all requests."""
        for _, task in list(self._running.values()):
            task.cancel()

    def __getattr__(self, name: str) -> Any:
        """Return a function that refuses an operation of vLLM's engine core that a job does not have."""
        if not name.endswith("_async") and "elastic" not in name:
            raise AttributeError(name)

        async def refuse(*_: Any, **__: Any) -> None:
            operation = name.removesuffix("_async").replace("_", " ")
            raise NotImplementedError(
                f"a rollout job does not support this operation of vLLM's engine: {operation}; remove the call, or use "
                "the job's Python client"
            )

        return refuse

    def _forget(self, group: Group) -> None:
        for request in group.requests:
            self._running.pop(request.request_id, None)

    def _prepare(self, group: Group, context: RequestContext) -> PreparedRequest:
        """Return the request for a group.

        Raises:
            VLLMError: the job cannot serve it.
        """
        request_id = context.next_request_id()
        try:
            fields = RolloutFields.parse(context.headers, group.params.extra_args or {})
        except ContextError as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from None
        sampling = _sampling_overrides(group.params)
        if not self._engines_find_reasoning and {**self._client.job.sampling, **sampling}["structured_outputs"]:
            _check_reasoning(group.requests[0])
        client_tokens = group.client_tokens or group.requests[0].prompt_token_ids or ()
        prompt = _prompt_of(group)
        image_hashes = [sha256(image).digest() for image in prompt.images]
        identity: bytes = msgpack.packb([list(client_tokens), sampling, fields.as_list(), *image_hashes])
        fields = self._with_conversation(fields, group, context, request_id)
        # vLLM processes requests with lower values first.
        fields = replace(fields, priority=fields.priority - group.requests[0].priority)
        prepared = prepare_request(
            self._client,
            prompt,
            sampling,
            fields,
            context,
            image_tokens=len(group.requests[0].prompt_token_ids or ()) - len(prompt.token_ids),
            request_id=request_id,
            # What is known of a conversation may change until a call is repeated.
            identity=identity if request_id else None,
            stream=group.is_streamed,
        )
        if group.source is not None:  # the engines decode and process the images themselves
            group.source = replace(group.source, prompt={})
            for request in group.requests:
                request.mm_features = None
        group.trajectory_id, group.turn = fields.trajectory_id, fields.turn or 0
        context.report(REQUEST_IDS_HEADER, f"{self._client.job.uid}/{prepared.request_id}")
        if context.conversation is not None:
            context.report(TURN_HEADER, str(group.turn))
        return prepared

    @staticmethod
    def _with_conversation(
        fields: RolloutFields, group: Group, context: RequestContext, request_id: str
    ) -> RolloutFields:
        """Return the fields, with those that follow from the conversation if the client has not set them."""
        conversation = context.conversation
        if conversation is not None and conversation.continuation is not None:
            last = conversation.continuation.last_turn
            return replace(
                fields,
                trajectory_id=fields.trajectory_id or last.trajectory_id,
                turn=last.turn + 1 if fields.turn is None else fields.turn,
                problem_id=fields.problem_id or last.problem_id,
            )
        session_id = group.requests[0].session_id
        if fields.trajectory_id is None and (session_id or conversation is not None):
            return replace(fields, trajectory_id=session_id or request_id or uuid.uuid4().hex)
        return fields

    async def _sample(self, group: Group, prepared: PreparedRequest, context: RequestContext) -> None:
        """Receive the rollouts of a group."""
        responses = [ResponseOutputs(request, self._reported_draft_length) for request in group.requests]

        def put_tokens(sample: int, tokens: Partial) -> None:
            self._put(responses[sample].append(tokens))

        try:
            rollouts = await self._client.receive(
                prepared,
                may_be_answered=bool(context.idempotency_key),
                may_wait=False,
                on_tokens=put_tokens if group.is_streamed else None,
            )
            for rollout in rollouts:
                raise_if_failed(rollout)
            if context.conversation is not None and group.source is None:
                prompt = group.requests[0].prompt_token_ids or []
                context.conversation.sampled = SampledTurn(prompt, rollouts, group.trajectory_id or "", group.turn)
            for response, rollout in zip(responses, rollouts, strict=True):
                self._put(response.finish(rollout))
        except Exception as error:
            self._fail(group, error if isinstance(error, VLLMError) else http_error(error))

    def _put(self, outputs: Iterable[EngineCoreOutputs]) -> None:
        for output in outputs:
            self._outputs.put_nowait(output)

    def _fail(self, group: Group, error: VLLMError) -> None:
        """Make the callers of a group raise *error*."""
        processor = self._output_processor
        queues = {
            id(state.queue): state.queue
            for request in group.requests
            if (state := processor.request_states.get(request.request_id)) is not None and state.queue is not None
        }
        for queue in queues.values():
            processor.abort_requests([queue.request_id], internal=True)
            queue.put(error)


def client_trajectory(params: SamplingParams, context: RequestContext, session_id: str | None) -> str:
    """Return the id that a client has given to its conversation; empty if it has given none."""
    given = (params.extra_args or {}).get("rollout_trajectory") or context.headers.get("trajectory") or session_id
    return str(given or "")


@contextmanager
def http_errors() -> Iterator[None]:
    """Raise the errors of the client as errors of vLLM's server; see :func:`http_error`."""
    try:
        yield
    except RolloutClientError as error:
        raise http_error(error) from None


def http_error(error: Exception) -> VLLMError:
    """Return the error of vLLM's server, which determines the HTTP status, for an error of the client or a limit."""
    if isinstance(error, InvalidRequestError | RequestRefusedError | VersionMismatchError):
        return VLLMValidationError(str(error))
    if isinstance(error, LimitError):
        return GracefulHTTPError(str(error), error.status)
    if isinstance(error, WeightsError):
        return GracefulHTTPError(str(error), HTTPStatus.BAD_REQUEST)
    if isinstance(error, PauseError):
        return GracefulHTTPError(str(error), HTTPStatus.CONFLICT)
    if isinstance(error, JobFullError):
        return GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS)
    if isinstance(error, RedisUnreachableError | JobEndedError):
        return GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
    if not isinstance(error, RolloutClientError):
        logger.error("A request failed.", exc_info=error)
    return GracefulHTTPError(str(error) or type(error).__name__, HTTPStatus.INTERNAL_SERVER_ERROR)


def raise_if_failed(rollout: Rollout) -> None:
    """Check that a rollout has not failed.

    Raises:
        VLLMError: it has. If another request may succeed, the status says that the request is wrong, because clients
            repeat requests after a status that says that the server has failed.
    """
    if rollout.finish_reason is not FinishReason.FAILED:
        return
    if rollout.refused:
        raise VLLMValidationError(rollout.detail)
    raise GracefulHTTPError(rollout.detail or "the rollout failed", HTTPStatus.INTERNAL_SERVER_ERROR)


def _refusal(error: VLLMError) -> JSONResponse:
    """Return the response of a request that raises *error* before anything is sampled."""
    status = getattr(error, "http_status", HTTPStatus.BAD_REQUEST)
    return error_response(status, getattr(error, "message", str(error)), getattr(error, "parameter", None))


def _prompt_of(group: Group) -> Prompt:
    """Return the tokens and the images of a prompt, without settings.

    Raises:
        VLLMValidationError: it consists of something else.
    """
    request, source = group.requests[0], group.source
    tokens: list[int] | None = request.prompt_token_ids
    if tokens is None or request.prompt_embeds is not None:
        raise VLLMValidationError("engines of a rollout job generate text from tokens and images only")
    if source is None:
        return Prompt(tokens)
    images = source.images()
    return Prompt(source.token_ids, images=images, image_positions=source.positions)


def prepare_request(
    client: RequestClient,
    prompt: Prompt,
    sampling: dict[str, Any],
    fields: RolloutFields,
    context: RequestContext,
    *,
    image_tokens: int = 0,
    request_id: str,
    identity: bytes | None = None,
    stream: bool,
) -> PreparedRequest:
    """Return the request of a prompt to the job, and count its tokens.

    *image_tokens* is the number of tokens that images add to those of the prompt.

    Raises:
        VLLMError: the job cannot serve it, or its caller would exceed a limit.
    """
    prompt = replace(
        prompt,
        problem_id=fields.problem_id,
        sampling=sampling,
        purpose=fields.purpose,
        priority=fields.priority,
        deadline_seconds=fields.deadline_seconds,
        weight_version=fields.weight_version,
        draft_mode=fields.draft_mode,
    )
    if prompt.deadline_seconds is None and request_id:
        # Its key is free then, and nobody has to wait for it: weights that it is pinned to may never be published.
        prompt = replace(prompt, deadline_seconds=MAX_KEEP_SECONDS)
    try:
        prepared = client.prepare(
            prompt,
            request_id=request_id,
            identity=identity,
            step=fields.step,
            trajectory_id=fields.trajectory_id,
            turn=fields.turn or 0,
            stream=stream,
            traceparent=context.traceparent,
        )
        current_model_tokens().add(prepared.max_tokens + image_tokens)
    except (RolloutClientError, LimitError) as error:
        raise http_error(error) from None
    return prepared


def _check_reasoning(request: EngineCoreRequest) -> None:
    """Check that a response with structured outputs, from engines without a reasoning parser, begins without reasoning.

    Raises:
        VLLMValidationError: the server would take the response for reasoning, and return no content.
    """
    if request.reasoning_parser_kwargs is not None and not request.reasoning_ended:
        raise VLLMValidationError(
            "this server has a reasoning parser, but the job's engines have none, so they would apply the structured "
            "outputs to the reasoning; set reasoning_parser in the job's spec.engine.extraArgs, or turn reasoning off "
            "in the request",
            parameter="structured_outputs",
        )


_UNSUPPORTED = {
    "prompt_logprob_token_ids": "prompt_logprob_token_ids",
    "logprob_token_ids": "logprob_token_ids",
    "bad_words": "bad_words",
    "repetition_detection": "repetition_detection",
    "thinking_token_budget": "thinking_token_budget",
}
"""Parameters that engines of a job do not apply, and how errors call them. They must have vLLM's defaults."""


_SAME_SETTINGS = (
    *("n", "temperature", "top_p", "min_p", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Settings that have the same names and values in vLLM and in a request to a job."""


def _sampling_overrides(params: SamplingParams) -> dict[str, Any]:
    """Return the settings of a request, as fields of :class:`rollout_api.Sampling`.

    All settings but the seed are explicit, because the job's defaults have been applied before.

    Raises:
        VLLMValidationError: a parameter cannot be applied.
    """
    defaults = SamplingParams()
    for name in _UNSUPPORTED:
        if getattr(params, name, None) != getattr(defaults, name, None):
            message = f"engines of a rollout job do not support {_UNSUPPORTED[name]}; remove it"
            raise VLLMValidationError(message, parameter=name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
            raise VLLMValidationError(
                f"engines of a rollout job return at most the {MAX_TOP_LOGPROBS} most likely tokens; ask for fewer",
                parameter=name,
            )
    overrides: dict[str, Any] = {name: getattr(params, name) for name in _SAME_SETTINGS} | {
        "top_k": max(0, params.top_k),
        "stop": list(params.stop or ()),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "allowed_token_ids": list(params.allowed_token_ids or ()),
        "logit_bias": dict(params.logit_bias or {}),
        "logprobs": params.logprobs is not None,
    }
    if params.seed is not None:
        # Without a seed of its own, a request has the job's. Seeds of a job have 31 bits.
        overrides["seed"] = params.seed % 2**31
    if params.logprobs:
        overrides["top_logprobs"] = params.logprobs
    if params.prompt_logprobs is not None:
        overrides["prompt_logprobs"] = True
    if params.prompt_logprobs:
        overrides["top_prompt_logprobs"] = params.prompt_logprobs
    if params.ignore_eos:
        overrides["ignore_eos"] = True
    if params.structured_outputs is not None:
        # Without any, a request has the job's.
        overrides["structured_outputs"] = {
            name: value
            for name, value in vars(params.structured_outputs).items()
            if value is not None and value is not False and not name.startswith("_")
        }
    return overrides
