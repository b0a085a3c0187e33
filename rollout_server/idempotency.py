"""Refuses an ``Idempotency-Key`` that belongs to another request."""

from __future__ import annotations

import asyncio
import json
import logging
from hashlib import blake2b
from http import HTTPStatus

from starlette.datastructures import URL
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_api.client.request_client import DEFAULT_KEEP_SECONDS, RequestClient
from rollout_api.client.server_records import IdempotencyKeys
from rollout_api.errors import RolloutClientError
from rollout_server.access import error_response
from rollout_server.body_check import MAX_BYTES_AT_ONCE, read_body
from rollout_server.request_context import IDEMPOTENCY_HEADER, current_context

logger = logging.getLogger(__name__)

_DELIVERY_FIELDS = ("stream", "stream_options")
"""Fields of a body that say how a response arrives, and may differ when a request is repeated."""
_UPDATE_TIMEOUT_S = 2.0
"""Seconds that updating the lifetime of a key may take after the response."""


def fingerprint(target: str, headers: dict[str, str], body: bytes) -> bytes:
    """Return a hash of what must be equal for a request to be a repetition of another one.

    If the body is a JSON object, the order of its fields and how the response arrives do not matter.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        relevant = {name: value for name, value in fields.items() if name not in _DELIVERY_FIELDS}
        body = json.dumps(relevant, sort_keys=True).encode()
    known = json.dumps([target, sorted(headers.items())]).encode()
    return blake2b(known + b"\0" + body, digest_size=16).digest()


class IdempotencyMiddleware:
    """ASGI middleware that answers requests whose ``Idempotency-Key`` belongs to another request with an error.

    A key belongs to a request as long as the job keeps its rollouts. If no rollout is sampled because the request is
    invalid, it does not get the key. :class:`~rollout_server.request_context.RequestContextMiddleware` and
    :class:`~rollout_server.body_check.BodyCheckMiddleware` must be outside of it.
    """

    def __init__(self, app: ASGIApp, client: RequestClient) -> None:
        self._app, self._client = app, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        key = current_context().idempotency_key if scope["type"] == "http" and scope["method"] == "POST" else ""
        if not key:
            await self._app(scope, receive, send)
            return
        if (body := await read_body(receive)) is None:
            return
        keys, url = self._client.idempotency_keys, URL(scope=scope)
        identity = f"{url.path}?{url.query}", current_context().headers, body
        own = (
            fingerprint(*identity)
            if len(body) <= MAX_BYTES_AT_ONCE
            else await asyncio.to_thread(fingerprint, *identity)
        )
        try:
            owner = await keys.claim(key, own)
        except RolloutClientError as error:
            await error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))(scope, receive, send)
            return
        if owner not in (None, own):
            message = (
                f"{IDEMPOTENCY_HEADER}: {key!r} belongs to another request of the last minutes, with another body or "
                "other headers; repeat that request without changes, or use another key"
            )
            conflict = error_response(HTTPStatus.UNPROCESSABLE_ENTITY, message, IDEMPOTENCY_HEADER)
            await conflict(scope, receive, send)
            return
        exchange = _Exchange(body, receive, send)
        await self._app(scope, exchange.receive, exchange.send)
        if (refusal := current_context().refusal) is not None:
            exchange.status = refusal.status_code
        await _update(keys, key, exchange, is_new=owner is None)


class _Exchange:
    """A request whose body was read before, and what is known of its response."""

    def __init__(self, body: bytes, receive: Receive, send: Send) -> None:
        self.status = 0
        """HTTP status of a response that was sent as a whole; 0 without."""
        self._body: bytes | None = body
        self._receive, self._send = receive, send
        self._started_status = 0
        self._is_connected = True

    async def receive(self) -> Message:
        """Return the body, then what follows it."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        self._is_connected = self._is_connected and message["type"] != "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        await self._send(message)
        if message["type"] == "http.response.start":
            self._started_status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body") and self._is_connected:
            self.status = self._started_status


async def _update(keys: IdempotencyKeys, key: str, exchange: _Exchange, *, is_new: bool) -> None:
    """Update the lifetime of a key after its request.

    Without a response, or after an error of the server, the job may still sample the rollouts.
    """
    if not exchange.status or exchange.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return
    is_invalid = exchange.status >= HTTPStatus.BAD_REQUEST and exchange.status != HTTPStatus.TOO_MANY_REQUESTS
    try:
        async with asyncio.timeout(_UPDATE_TIMEOUT_S):
            if is_invalid and is_new:
                await keys.release(key)
            else:
                await keys.keep(key, DEFAULT_KEEP_SECONDS)
    except (TimeoutError, RolloutClientError) as error:
        reason = str(error) or f"Redis took more than {_UPDATE_TIMEOUT_S:g} s"
        logger.warning("An idempotency key belongs to its request for up to a day: %s", reason)
