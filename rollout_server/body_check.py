"""Refuses bodies of requests whose texts cannot be encoded."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_api.manifest.structured_outputs import is_encodable

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""What a JSON text contains that has a surrogate, paired or not."""


def unpaired_surrogate(value: Any) -> str | None:
    """Return the place of a text or name in a JSON value that has an unpaired surrogate; None if there is none."""
    waiting = [("", value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str) and not is_encodable(value):
            return place or "body"
        if isinstance(value, dict):
            if not all(map(is_encodable, value)):
                return place or "body"
            waiting += [(f"{place}.{name}" if place else name, one) for name, one in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{place}[{index}]", one) for index, one in reversed([*enumerate(value)])]
    return None


class BodyCheckMiddleware:
    """ASGI middleware that refuses JSON with an unpaired surrogate, such as ``"\\\\ud83d"``, which is not Unicode.

    Python reads such a text, but neither Redis nor a tokenizer accepts it. Models write one if a client cuts an emoji.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        parts: list[bytes] = []

        async def receive_checked() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    _check(b"".join(parts))
                    parts.clear()
            return message

        await self._app(scope, receive_checked if scope["type"] == "http" else receive, send)


def _check(body: bytes) -> None:
    """Raise the error of a body with an unpaired surrogate."""
    if not _SURROGATE.search(body):
        return
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return  # the endpoint says what is wrong with it
    if (place := unpaired_surrogate(value)) is not None:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"{place}: the text has an unpaired surrogate, so it is not Unicode; send whole characters",
        )
