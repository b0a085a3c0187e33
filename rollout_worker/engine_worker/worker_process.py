"""A worker of a job on several machines: it runs the engines of this machine.

A worker has a Ray cluster of its own. Its engines get their rollouts through Redis and depend on no other machine: they
continue while the head is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import redis

from rollout_api.redis_client.connection import (
    RedisUnusableError,
    check,
    connect,
    connect_history,
    explain_error,
    wait_until_usable,
)
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.setup import JobSetup
from rollout_worker.engine_worker.engines import check_ray, running_engines

if TYPE_CHECKING:
    from rollout_worker.engine_worker.fleet import Fleet


logger = logging.getLogger(__name__)
_POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the job or of Ray."""
HANDOVER_MARGIN_S = 10.0
"""Seconds after ``workers.drainSeconds`` that engines have to hand over their rollouts."""
_SHUTDOWN_POLL_INTERVAL_S = 0.25
"""Seconds between two checks whether a worker's engines have left the job."""


def run_worker(setup: JobSetup, *, name: str, http_port: int) -> bool:
    """Run a worker of a job until SIGTERM. Its engines then hand over their running rollouts, unless the job has ended.

    The job's status calls the worker *name*. ``/readyz`` is served if *http_port* is not 0.

    Returns:
        Whether the job has ended.

    Raises:
        EngineError: if Ray does not start, or does not answer any more. The process has to be restarted then.
    """
    setup = replace(setup, worker=f"{name}/{secrets.token_hex(4)}")
    server = connect(setup.redis_url)
    job_store = LauncherStore(server, setup.keys)
    terminated = threading.Event()
    readiness = WorkerReadiness(setup.num_engines)
    with serving_readiness(http_port, readiness.why_not_ready):
        wait_until_usable(server, setup.redis_url)
        if setup.history_url:
            warn_if_unusable(setup.history_url)
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
        try:
            with running_engines(setup, terminated) as fleet:
                readiness.fleet = fleet
                while not terminated.wait(_POLL_INTERVAL_S):
                    check_ray(fleet)
                shut_down_engines(job_store, setup.worker, fleet, float(setup.job.spec.workers.drain_seconds))
        except KeyboardInterrupt:
            if not terminated.is_set():  # else SIGTERM has interrupted the start of Ray
                raise
        return _has_ended(job_store)


def warn_if_unusable(history_url: str) -> None:
    """Log a warning if the history cannot be reached: rollouts are produced without it, but more slowly."""
    try:
        with connect_history(history_url) as history:
            check(history, history_url)
    except (RedisUnusableError, redis.RedisError) as error:
        reason = explain_error(error, history_url) if isinstance(error, redis.RedisError) else error
        logger.warning("Drafting without the job's history until it can be reached: %s", reason)


def shut_down_engines(job_store: LauncherStore, worker: str, fleet: Fleet, grace: float) -> None:
    """Tell a worker's engines to leave the job within *grace* seconds, and wait until they have."""
    deadline = time.monotonic() + grace + HANDOVER_MARGIN_S
    try:
        if job_store.has_ended():
            return  # the engines have no work
        job_store.request_shutdown(worker, grace)
    except redis.RedisError as error:
        logger.warning("Cannot tell the engines through Redis to leave (%s); their leases will expire.", error)
        return
    while time.monotonic() < deadline and fleet.num_serving:
        time.sleep(_SHUTDOWN_POLL_INTERVAL_S)


@dataclass
class WorkerReadiness:
    """Reports whether all of this worker's engines serve."""

    engines: int
    """Number of engines that belong on this worker."""
    fleet: Fleet | None = None
    """The engines; None while Ray starts."""

    def why_not_ready(self) -> str:
        """Return why not all engines serve, or '' if they do."""
        if self.fleet is None:
            return "the worker is starting"
        serving = self.fleet.num_serving
        return "" if serving >= self.engines else f"{serving} of {self.engines} engines serve"


def _has_ended(job_store: LauncherStore) -> bool:
    """Return whether the job has ended; False while Redis does not answer."""
    try:
        return job_store.has_ended()
    except redis.RedisError:
        return False


class _DualStackServer(ThreadingHTTPServer):
    """Listens on all IPv4 addresses and, where the machine supports IPv6, on all IPv6 addresses."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


@contextlib.contextmanager
def serving_readiness(port: int, why_not_ready: Callable[[], str]) -> Iterator[None]:
    """Serve ``GET /readyz`` and ``GET /healthz`` on all addresses within the context, unless *port* is 0.

    The former answers 200, or 503 and the reason that *why_not_ready* returns; '' means ready. It is called for every
    request, in threads of the server.

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

    if not port:
        yield
        return
    with _DualStackServer(("", port), Handler) as server:
        threading.Thread(target=server.serve_forever, name="readiness", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
