"""The coordinator and the relay of a job as processes: ``python -m rollout_head.services SERVICE``.

A process reads the job's settings as JSON from stdin, which keeps the password of Redis out of the list of processes.
Its state is in Redis, so it may be killed at any time and started again. It imports neither Ray nor vLLM, which would
take longer than all the rest of its start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from enum import StrEnum
from pathlib import Path

import uvloop

from rollout_api.redis_client.connection import connect, connect_history
from rollout_api.status_token import StatusToken
from rollout_head.coordinator import Coordinator
from rollout_head.relay import Relay
from rollout_head.tracing import TraceExporter
from rollout_store.history.maintenance.maintainer import MaintenanceThread
from rollout_store.job import StaleCoordinatorError
from rollout_store.job.setup import JobSetup
from rollout_store.runtime.garbage_collection import collect_rarely
from rollout_store.runtime.output import logging_to_file

logger = logging.getLogger(__name__)

_STATUS_SERVER_DELAY_S = 2.0
"""Seconds after which the status server starts although there is no status."""
_POLL_INTERVAL_S = 0.02
EXIT_SUPERSEDED = 9
"""Exit code of a coordinator that another coordinator has replaced."""


class Service(StrEnum):
    """A part of a job that runs once, beside its engines."""

    COORDINATOR = "coordinator"
    """Runs until the job was closed and all its requests are answered."""
    RELAY = "relay"
    """Moves finished rollouts to the history, and maintains it where no history service does, until SIGTERM."""


async def coordinate(setup: JobSetup) -> int:
    """Run the coordinator and its status server, and return the exit code.

    The status server follows the coordinator, because rollouts wait for that one, and its modules load slowly.
    """
    token = StatusToken.from_environment()
    traces = _traces(setup, Service.COORDINATOR)
    coordinator = Coordinator(
        setup.job,
        setup.job_store(),
        setup.history_store(),
        vocabulary=setup.vocabulary_size,
        separate_history=bool(setup.history_url),
        total_rollouts=setup.total_rollouts,
        traces=traces,
    )
    coordinating = asyncio.create_task(coordinator.run())
    serving = asyncio.create_task(_serve_status(coordinator, token, setup))
    if traces is not None:  # otherwise, a coordinator has nothing to do before it ends
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, coordinating.cancel)
    await asyncio.wait([coordinating, serving], return_when=asyncio.FIRST_EXCEPTION)
    try:
        if serving.done():
            serving.result()
        await coordinating
    except StaleCoordinatorError:
        return EXIT_SUPERSEDED
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    finally:
        if traces is not None:
            await asyncio.to_thread(traces.close)
    return 0


async def _serve_status(coordinator: Coordinator, token: StatusToken, setup: JobSetup) -> None:
    """Start the status server once the coordinator has published a status, or has no Redis to publish it to."""
    deadline = time.monotonic() + _STATUS_SERVER_DELAY_S
    while coordinator.status.last is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_INTERVAL_S)
    from rollout_head.coordinator.status_server import StatusServer

    await StatusServer(coordinator.status, token).start(setup.http_host, setup.http_port)


def relay(setup: JobSetup) -> int:
    """Run the relay and the maintenance of the history, and return the exit code."""
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    traces = _traces(setup, Service.RELAY)
    outbox = Relay(connect(setup.redis_url), setup.keys, setup.history_store(), traces)
    maintenance = MaintenanceThread(connect_history(setup.history_url or setup.redis_url), setup.history_keys)
    outbox.start()
    maintenance.start()
    terminated.wait()
    stopping = threading.Thread(target=maintenance.stop)
    stopping.start()  # both may take some seconds
    outbox.stop()
    if traces is not None:
        traces.close()
    stopping.join()
    return 0


def _traces(setup: JobSetup, service: Service) -> TraceExporter | None:
    """Return what sends the traces of a service, if there are to be any."""
    metadata = setup.job.metadata
    return TraceExporter.from_environment(service, f"{metadata.namespace}/{metadata.name}", setup.uid)


def main() -> int:
    """Run the service that the command line names."""
    service, setup = Service(sys.argv[1]), JobSetup.from_json(sys.stdin.read())
    collect_rarely()
    with logging_to_file(Path(setup.log_directory) if setup.log_directory else None, service):
        try:
            return uvloop.run(coordinate(setup)) if service is Service.COORDINATOR else relay(setup)
        except Exception:
            logger.exception("The %s ends with an unexpected error.", service)
            return 1


if __name__ == "__main__":
    sys.exit(main())
