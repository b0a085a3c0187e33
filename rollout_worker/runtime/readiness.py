"""Readiness probes of a process whose main thread is busy with something else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _DualStackServer(ThreadingHTTPServer):
    """Listens on all IPv4 addresses and, where the machine supports IPv6, on all IPv6 addresses."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class ReadinessServer:
    """Answers ``GET /readyz`` with 200, or with 503 and the reason, and ``GET /healthz`` with 200."""

    def __init__(self, port: int, why_not_ready: Callable[[], str]) -> None:
        """Listen on all addresses until :meth:`close`.

        Args:
            port: the port; 0 for a free one.
            why_not_ready: returns '' when the process is ready, else the reason why it is not. It is called for every
                request, in threads of this server.

        Raises:
            OSError: if the port is in use.
        """

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in ("/readyz", "/healthz"):
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                reason = why_not_ready() if self.path == "/readyz" else ""
                body = (reason or "ok").encode() + b"\n"
                self.send_response(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
                """Log nothing, because kubelets send a request every few seconds."""

        self._server = _DualStackServer(("", port), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="readiness", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
