"""The parts of an HTTP request about its rollouts, beyond the body that vLLM's server reads."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_api.client.job_info import parse_traceparent
from rollout_api.protocol.messages import DraftMode, Purpose
from rollout_server.conversations import Conversation

IDEMPOTENCY_HEADER = "Idempotency-Key"
"""Header with the id under which a repeated request returns the same rollouts."""
REQUEST_IDS_HEADER = "X-Rollout-Request-Ids"
"""Response header: for each prompt, the beginning of its rollouts' ids."""
TURN_HEADER = "X-Rollout-Turn"
"""Response header: number of the turn within the conversation."""
PREFIX_HEADER = "X-Rollout-Prefix"
"""Response header of conversations: where the tokens before the last messages come from; see
:class:`~rollout_server.conversations.PrefixSource`."""
_HEADER_PREFIX = "x-rollout-"
_FIELD_INTEGERS = range(-(2**63), 2**63)
"""Integers that the fields of a rollout can have, in messages to the job and in its history."""


class ContextError(ValueError):
    """A header or an extra argument has an invalid value; ``parameter`` is its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


@dataclass(frozen=True)
class RolloutFields:
    """What a request says about its rollouts."""

    problem_id: str = ""
    """Id under which the history keeps the rollouts; default: a hash of the prompt."""
    trajectory_id: str | None = None
    """Id of the conversation that the prompt continues."""
    turn: int | None = None
    """Number of the turn within its trajectory."""
    purpose: Purpose = Purpose.TRAIN
    """Whether the rollouts are for training or for an evaluation."""
    step: int | None = None
    """Training step."""
    priority: int = 0
    """Requests with a higher priority start earlier."""
    weight_version: int | None = None
    """Weight version that samples all tokens."""
    deadline_seconds: float | None = None
    """Seconds after which rollouts end with the tokens sampled so far."""
    draft_mode: DraftMode = DraftMode.HISTORY
    """Where drafts may come from."""

    @classmethod
    def parse(cls, headers: Mapping[str, str], extra_args: Mapping[str, Any]) -> RolloutFields:
        """Read the fields from headers ``X-Rollout-…`` and from ``vllm_xargs`` in the body, which take precedence.

        Args:
            headers: field, with hyphens or underscores → value.
            extra_args: ``rollout_`` and the field → value; other arguments are ignored.

        Raises:
            ContextError: a value is invalid, or a field is unknown.
        """
        given: dict[str, tuple[str, Any]] = {}
        for name, value in headers.items():
            given[name.replace("-", "_")] = (f"X-Rollout-{name.title()}", value)
        for name, value in extra_args.items():
            if name.startswith("rollout_"):
                given[name.removeprefix("rollout_")] = (f"vllm_xargs.{name}", value)
        values: dict[str, Any] = {}
        for name, (where, value) in given.items():
            if name not in _FIELDS:
                raise ContextError(where, f"unknown; known are {', '.join(_FIELDS)}")
            field_name, parse, description = _FIELDS[name]
            try:
                values[field_name] = parse(value)
            except (TypeError, ValueError):
                raise ContextError(where, f"{value!r} is not {description}") from None
        return cls(**values)

    def as_list(self) -> list[Any]:
        """Return the values, which can be packed: without those at the end that earlier releases did not have."""
        values = list(asdict(self).values())
        return values if self.draft_mode is not DraftMode.HISTORY else values[:-1]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    if (number := int(value)) not in _FIELD_INTEGERS:
        raise ValueError
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    if not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _header_text(value: str) -> str:
    """Return the text of a header, which Starlette decodes as Latin-1, but most clients encode in UTF-8."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


_FIELDS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "problem": ("problem_id", _text, "a text that is not empty"),
    "trajectory": ("trajectory_id", _text, "a text that is not empty"),
    "turn": ("turn", _integer, "an integer of at most 64 bits"),
    "purpose": ("purpose", Purpose, f"one of {', '.join(Purpose)}"),
    "step": ("step", _integer, "an integer of at most 64 bits"),
    "priority": ("priority", _integer, "an integer of at most 64 bits"),
    "weight_version": ("weight_version", _integer, "an integer of at most 64 bits"),
    "deadline_seconds": ("deadline_seconds", _number, "a finite number"),
    "drafts": ("draft_mode", DraftMode, f"one of {', '.join(DraftMode)}"),
}
"""Name in a request → field of :class:`RolloutFields`, what reads its value, and what the value must be."""


@dataclass
class RequestContext:
    """What the headers of the current HTTP request say, and what its response headers will say."""

    idempotency_key: str = ""
    """Id under which a repeated request returns the same rollouts; empty without."""
    traceparent: str | None = None
    """Span of the caller, if it has sent a valid header ``traceparent``."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers ``X-Rollout-…`` without this prefix → values."""
    conversation: Conversation | None = None
    """The messages, if the prompt arrives as messages, whose tokens vLLM's server chooses."""
    only_renders: bool = False
    """Whether the client wants the prompt as it would go to an engine, in place of a response."""
    num_prompts: int = 0
    """Number of prompts of this HTTP request so far."""
    response_headers: dict[str, list[str]] = field(default_factory=dict)
    """Response header → its values, one for each prompt."""
    start_response: Callable[[], Awaitable[None]] | None = None
    """Sends the headers of a response that is streamed; None if they were sent, or wait for the body."""
    refusal: Response | None = None
    """The error for answering the request if no header of a streamed response was sent yet."""

    def next_request_id(self) -> str:
        """Return the id of the request for the next prompt; empty if a new one may be chosen."""
        index, self.num_prompts = self.num_prompts, self.num_prompts + 1
        return f"{self.idempotency_key}.{index}" if self.idempotency_key else ""

    async def prepared(self) -> None:
        """Send the headers of a response that is streamed, once a prompt has been accepted."""
        if (start := self.start_response) is not None:
            self.start_response = None
            await start()

    def report(self, header: str, value: str) -> None:
        """Add a value to a response header."""
        self.response_headers.setdefault(header, []).append(value)


_current: ContextVar[RequestContext | None] = ContextVar("rollout_request", default=None)


def current_context() -> RequestContext:
    """Return the context of the HTTP request that is being processed; an empty one outside of requests."""
    return _current.get() or RequestContext()


class RequestContextMiddleware:
    """ASGI middleware that provides :func:`current_context`, and adds the response header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        context = RequestContext(
            idempotency_key=headers.get(IDEMPOTENCY_HEADER, "").strip(),
            traceparent=parse_traceparent(headers.get("traceparent", "")),
            only_renders=scope["path"].endswith("/render"),
            headers={
                name.removeprefix(_HEADER_PREFIX): _header_text(value)
                for name, value in headers.items()
                if name.startswith(_HEADER_PREFIX)
            },
        )

        is_successful = is_refused = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_successful, is_refused
            if message["type"] != "http.response.start":
                if context.refusal is not None and context.start_response is not None and is_successful:
                    # vLLM's server would put the error into a stream with the status 200.
                    context.start_response, is_refused = None, True
                    await context.refusal(scope, receive, send)
                if not is_refused:
                    await context.prepared()
                    await send(message)
                return
            is_successful = message["status"] < HTTPStatus.BAD_REQUEST

            async def start() -> None:
                headers = MutableHeaders(scope=message)
                for name, values in context.response_headers.items():
                    headers.append(name, ",".join(values))
                await send(message)

            # A response that is streamed starts before vLLM's server looks at the prompts.
            context.start_response = start
            if context.response_headers:
                await context.prepared()

        token = _current.set(context)
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            _current.reset(token)
