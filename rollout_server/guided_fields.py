"""Fields for structured outputs that vLLM has removed, and clients still send."""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PREFIX = "guided_"
_FIELDS = ("json", "regex", "choice", "grammar", "whitespace_pattern")
"""Fields of ``structured_outputs`` that had this prefix and were fields of the body."""


class GuidedFieldsMiddleware:
    """ASGI middleware that replaces ``guided_json`` and its like by ``structured_outputs``.

    vLLM's server would ignore them, so that the responses would not be constrained.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def receive_replaced() -> Message:
            nonlocal is_read
            parts: list[bytes] = []
            while True:
                message = await receive()
                if is_read or message["type"] != "http.request":
                    return message
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    is_read = True
                    return {"type": "http.request", "body": replace_guided_fields(b"".join(parts)), "more_body": False}

        await self._app(scope, receive_replaced, send)


def replace_guided_fields(body: bytes) -> bytes:
    """Return a body with ``structured_outputs`` in place of the fields that vLLM has removed."""
    if f'"{_PREFIX}'.encode() not in body:
        return body
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(fields, dict):
        return body
    given = {name: fields.pop(_PREFIX + name, None) for name in _FIELDS}
    constraints = {name: value for name, value in given.items() if value is not None}
    own = fields.get("structured_outputs") or {}
    if not constraints or not isinstance(own, dict):  # vLLM's server says what is wrong with its type
        return body
    # If there are several constraints, vLLM's server refuses the request.
    fields["structured_outputs"] = own | constraints
    return json.dumps(fields).encode()
