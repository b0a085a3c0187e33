"""How the server reads HTTP from clients that have not shown a token yet."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout_server.access import RETRY_AFTER_S

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 32 * 2**10
"""Largest request line with all headers, and largest part of a body that is none of its content, such as trailers."""
_HEAD_TIMEOUT_S = 20.0
"""Seconds that a client has for the headers of a request, after it has begun to send them."""
_MAX_CONNECTIONS = 2**15
"""Number of connections, each of which may have unfinished headers of the largest size, together 1 GiB."""
_RESERVED_FILES = 256
"""Files that are left for Redis, for the model's files, and for connections that are being closed."""
_MAX_REFUSED = 64
"""Number of these files for connections that are kept until their clients have read why they are refused."""
_REFUSED_S = 1.0
"""Seconds for which they are kept. If they were closed at once, most clients would see that they were reset."""
_WARNING_INTERVAL_S = 10.0
"""Seconds between two warnings that connections are refused."""


def max_connections() -> int:
    """Raise this process's limit of open files as far as it may, and return how many connections have room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, max(hard // 2, hard - _RESERVED_FILES))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for what a client may send before it has shown a token.

    Neither uvicorn nor httptools limits the size of headers, or the time in which they must arrive.
    """

    limit: ClassVar[int]
    """Number of connections.

    At the limit, a new one replaces the one that has waited for its client the longest. If all others have requests in
    progress, it is answered with the status 503.
    """
    waiting: ClassVar[dict[LimitedProtocol, None]]
    """Connections of a server without a request that has arrived as a whole, beginning with the oldest."""

    next_warning: ClassVar[float] = 0.0
    """Time of the event loop before which no other warning is logged."""

    @classmethod
    def with_limit(cls, limit: int) -> type[LimitedProtocol]:
        """Return the protocol for one server."""
        return type(cls.__name__, (cls,), {"limit": limit, "waiting": {}})

    _head_bytes = 0
    """Bytes that were received since the last ones that are known to belong to something else."""
    _timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: Any) -> None:
        """See the base class."""
        super().connection_made(transport)
        self.waiting[self] = None
        # Proxies connect before they have a request.
        self._start_timer(self.timeout_keep_alive)
        if len(self.connections) > self.limit:
            oldest = next(iter(self.waiting))
            if oldest is self:
                self._refuse()
            else:
                oldest._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See the base class."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See the base class."""
        if self._is_refused or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers of a request have at most {_MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """See the base class."""
        super().on_message_begin()
        self._stop_timer()
        self._start_timer(_HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """See the base class."""
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See the base class."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See the base class."""
        self._head_bytes = 0
        if self.cycle is None or not self.cycle.response_complete:
            self.waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See the base class."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # no other request is pipelined
            self.waiting[self] = None

    def handle_websocket_upgrade(self) -> None:
        """See the base class."""
        self._forget()
        super().handle_websocket_upgrade()

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self) -> None:
        """Answer a client without waiting for its request, for which there is no room."""
        cls, message = type(self), f"All {self.limit} connections of the server have requests in progress."
        if self.loop.time() >= cls.next_warning:
            cls.next_warning = self.loop.time() + _WARNING_INTERVAL_S
            logger.warning("%s Others are refused; start more servers.", message)
        self._forget()
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + f"retry-after: {RETRY_AFTER_S}\r\ncontent-length: {len(message)}\r\n\r\n{message}".encode()
        )
        if len(self.connections) > self.limit + _MAX_REFUSED:
            self.transport.close()
        else:
            self._is_refused = True
            self._timer = self.loop.call_later(_REFUSED_S, self.transport.close)

    def _abort(self) -> None:
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._stop_timer()
        self.waiting.pop(self, None)
