"""``/readyz`` of a process whose own thread does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ReadinessServer:
    """Answers ``GET /readyz`` with 200, or with 503 and the reason; and ``GET /healthz`` with 200."""

    def __init__(self, port: int, why_not: Callable[[], str]) -> None:
        """Listen on *port*, from now until closed.

        Args:
            port: on all addresses; 0 for a free one.
            why_not: '' when ready, else why not; called in threads of this server, for every question.

        Raises:
            OSError: if the port is taken.
        """

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in ("/readyz", "/healthz"):
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                reason = why_not() if self.path == "/readyz" else ""
                body = (reason or "ok").encode() + b"\n"
                self.send_response(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 – as the base class has it
                """Say nothing: kubelets ask every few seconds."""

        self._server = ThreadingHTTPServer(("", port), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="readiness", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
