"""Who may use the server, and how much of it: bearer tokens, and limits of what may be in progress."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.error_response import error_response

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths that need no token, because kubelets and load balancers read them."""
RETRY_AFTER_S = 1
"""Seconds after which a client should repeat a request that the server or the job had no room for."""
DEFAULT_MAX_BODY_BYTES = 64 * 2**20
"""Largest body of a request by default."""
_MIN_CHARACTERS = 16
_ANYONE = ""
"""Name of the caller where no tokens are required."""


class TokensError(ValueError):
    """The files with tokens cannot be used."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of those who may use the server."""

    names: Mapping[bytes, str] = field(default_factory=dict)
    """SHA-256 hash of each token → its name. Everyone may use the server if there are none."""

    @classmethod
    def read(cls, directory: Path) -> Tokens:
        """Read tokens from a directory, such as a mounted Secret, with one file for each, which has the token's name.

        Raises:
            TokensError: the directory has no tokens, or one is too short.
        """
        try:
            files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
            tokens = {path.name: path.read_text().strip() for path in files}
        except (OSError, UnicodeDecodeError) as error:
            raise TokensError(f"the tokens cannot be read: {error}") from None
        if not tokens:
            raise TokensError(f"{directory} has no files; it must have one with the token of each client")
        for name, token in tokens.items():
            if len(token) < _MIN_CHARACTERS:
                raise TokensError(f"the token in {directory / name} must have at least {_MIN_CHARACTERS} characters")
        return cls({_hash(token): name for name, token in tokens.items()})

    def name_of(self, authorization: str) -> str | None:
        """Return the name of the token in a header ``Authorization``; None if it is not permitted.

        Only hashes are looked up, so that the time that this takes says nothing about other tokens.
        """
        if not self.names:
            return _ANYONE
        scheme, _, token = authorization.partition(" ")
        return self.names.get(_hash(token.strip())) if scheme.lower() == "bearer" else None


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class LimitError(Exception):
    """A request exceeds a limit of its caller."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the response."""


class ModelTokens:
    """The tokens of prompts and responses that one HTTP request has in progress.

    Args:
        in_progress: caller → number of tokens in progress of all its requests.
        caller: name of the request's caller.
        limit: number of tokens that the caller may have in progress; 0 for any number.
    """

    def __init__(self, in_progress: Counter[str], caller: str, limit: int) -> None:
        self._in_progress, self._caller, self._limit = in_progress, caller, limit
        self._own = 0

    def add(self, count: int) -> None:
        """Add the tokens of a prompt and of its responses, if each has as many as it may have.

        Raises:
            LimitError: the caller would have too many in progress.
        """
        if self._limit and self._own + count > self._limit:
            message = (
                f"prompts and max_tokens of the responses are {self._own + count} tokens or more, but the bearer token "
                f"may have at most {self._limit} tokens in progress; reduce n, max_tokens or the prompts"
            )
            raise LimitError(HTTPStatus.BAD_REQUEST, message)
        if self._limit and self._in_progress[self._caller] + count > self._limit:
            message = (
                f"with this request, the bearer token would have more than {self._limit} tokens of prompts and "
                "responses in progress, which is its limit; try again later"
            )
            raise LimitError(HTTPStatus.TOO_MANY_REQUESTS, message)
        self._own += count
        self._in_progress[self._caller] += count

    def release(self) -> None:
        """Remove all tokens of the request."""
        self._in_progress[self._caller] -= self._own
        if not self._in_progress[self._caller]:
            del self._in_progress[self._caller]
        self._own = 0


_model_tokens: ContextVar[ModelTokens | None] = ContextVar("model_tokens", default=None)


def current_model_tokens() -> ModelTokens:
    """Return the tokens of the HTTP request that is being processed; without a limit if there is no middleware."""
    return _model_tokens.get() or ModelTokens(Counter(), _ANYONE, 0)


class AccessMiddleware:
    """ASGI middleware that refuses requests which exceed a limit or have no token.

    Args:
        app: the application.
        tokens: the tokens.
        max_requests: number of requests that one token may have in progress at this server; 0 for any number.
        max_model_tokens: number of tokens of prompts and responses that one bearer token may have in progress at this
            server; 0 for any number.
        max_body_bytes: largest body of a request.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens,
        *,
        max_requests: int = 0,
        max_model_tokens: int = 0,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    ) -> None:
        self.tokens = tokens
        """The tokens; they may be replaced while the server runs."""
        self._app, self._max_requests, self._max_body_bytes = app, max_requests, max_body_bytes
        self._max_model_tokens = max_model_tokens
        self._in_progress: Counter[str] = Counter()
        self._model_tokens: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = self.tokens.name_of(headers.get("Authorization", ""))
        if caller is None:
            message = "the request needs the header 'Authorization: Bearer TOKEN', with a token of this server"
            await _refuse(HTTPStatus.UNAUTHORIZED, message, scope, receive, send)
            return
        if self._max_requests and self._in_progress[caller] >= self._max_requests:
            message = f"this token has {self._max_requests} requests in progress, which is its limit; try again later"
            await _refuse(HTTPStatus.TOO_MANY_REQUESTS, message, scope, receive, send)
            return
        length = headers.get("Content-Length", "0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            await _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._body_message(), scope, receive, send)
            return
        self._in_progress[caller] += 1
        model_tokens = ModelTokens(self._model_tokens, caller, self._max_model_tokens)
        reset = _model_tokens.set(model_tokens)
        try:
            await self._app(scope, self._limited(receive), _with_retry_after(send))
        finally:
            _model_tokens.reset(reset)
            model_tokens.release()
            self._in_progress[caller] -= 1
            if not self._in_progress[caller]:
                del self._in_progress[caller]

    def _body_message(self) -> str:
        return f"the body of a request may have at most {self._max_body_bytes} bytes"

    def _limited(self, receive: Receive) -> Receive:
        """Return *receive*, which raises an error once the body is too large."""
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                # FastAPI answers with this error, and not with that of an invalid body.
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._body_message())
            return message

        return receive_limited


def _with_retry_after(send: Send) -> Send:
    """Return *send*, which adds the header ``Retry-After`` to responses of a server or job that has no room."""

    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in (429, 503):
            MutableHeaders(scope=message).setdefault("Retry-After", str(RETRY_AFTER_S))
        await send(message)

    return send_with_header


async def _refuse(status: HTTPStatus, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error in OpenAI's shape."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message})
        return
    response = error_response(status, message)
    if status is HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = 'Bearer realm="das-rollout"'
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    await response(scope, receive, send)
