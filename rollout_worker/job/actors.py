"""The parts of a job as Ray actors. Ray places and restarts them; their state is in Redis.

Each actor runs its part in an asyncio event loop of its own, in a thread. When the part fails, the process exits and
Ray starts a new one. Calls to an actor's methods may be repeated.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from rollout_api.redis_client.connection import connect, connect_history
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.errors import EngineError
from rollout_worker.engine.model_source import ModelError
from rollout_worker.history.maintenance.thread import MaintenanceThread
from rollout_worker.job.coordinator import Coordinator
from rollout_worker.job.coordinator.status_server import StatusServer
from rollout_worker.job.engine_worker import EngineWorker
from rollout_worker.job.fleet import Fleet
from rollout_worker.job.job_store import StaleCoordinatorError
from rollout_worker.job.relay import Relay
from rollout_worker.job.setup import JobSetup

logger = logging.getLogger(__name__)

WORKER_ENV = "ROLLOUT_WORKER"
"""Environment variable with the id of the worker that started Ray on this machine; the worker's engines inherit it."""
_EXIT_FAILED = 1


class CoordinatorActor:
    """Runs the coordinator of a job, the fleet of engines and the status server."""

    def __init__(self, setup: JobSetup) -> None:
        _configure_logging()
        self.status_port = 0
        """Port of the status server; 0 until it listens."""
        self.fleet = Fleet(setup, EngineActor)
        self._work = _EventLoopThread("coordinator").start(_coordinate(self, setup))
        self._work.add_done_callback(_exit_on_failure)

    def get_status_port(self) -> int:
        """Return the port of the status server; 0 until it listens."""
        return self.status_port

    def engine_errors(self) -> dict[str, str]:
        """Return the engines that cannot start, with the reasons."""
        return dict(self.fleet.errors)

    def ended(self) -> bool:
        """Return whether the job was closed and all its requests are answered."""
        return self._work.done()


class RelayActor:
    """Moves finished rollouts to the history, and maintains the history where no history service does."""

    def __init__(self, setup: JobSetup) -> None:
        _configure_logging()
        self._relay = Relay(connect(setup.redis_url), setup.keys, setup.history_store())
        self._relay.start()
        self._maintenance = MaintenanceThread(connect_history(setup.history_url or setup.redis_url), setup.history_keys)
        self._maintenance.start()


class EngineActor:
    """Runs one vLLM engine."""

    def __init__(self, setup: JobSetup, name: str, speculative: bool) -> None:
        _configure_logging()
        self.started = False
        """Whether the engine serves, or is known not to be able to start."""
        self.error = ""
        self._process_id = secrets.token_hex(8)
        self._work = _EventLoopThread("engine").start(_serve(self, setup, name, speculative=speculative))
        self._work.add_done_callback(_exit_on_failure)

    def state(self) -> tuple[str, bool, str]:
        """Return the id of this process, whether its engine has started or cannot start, and why it cannot."""
        return self._process_id, self.started, self.error


class _EventLoopThread:
    """An asyncio event loop in a thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _exit_on_failure(work: Future[Any]) -> None:
    """End the process, so that Ray restarts the actor."""
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.error("Exiting, so that Ray restarts this actor: %s: %s", type(error).__name__, error)
        logging.shutdown()
        os._exit(_EXIT_FAILED)


def _configure_logging() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)


# The actors' work is in functions, because an actor with a coroutine as a method has all its methods run by Ray in one
# event loop, where a method that blocks delays the others.


async def _coordinate(actor: CoordinatorActor, setup: JobSetup) -> None:
    coordinator = Coordinator(
        setup.job,
        setup.job_store(),
        setup.history_store(),
        vocabulary=setup.vocabulary_size,
        separate_history=bool(setup.history_url),
        total_rollouts=setup.total_rollouts,
        engine_errors=actor.fleet.errors,
    )
    server = StatusServer(coordinator.board)
    actor.status_port = await server.start(setup.http_host, setup.http_port)
    fleet = asyncio.ensure_future(actor.fleet.run())
    try:
        await coordinator.run()
    except StaleCoordinatorError:
        # A newer coordinator has taken this actor's name, and nobody can reach this process any more.
        os._exit(0)
    finally:
        fleet.cancel()


async def _serve(actor: EngineActor, setup: JobSetup, name: str, *, speculative: bool) -> None:
    worker = await _serve_once(actor, setup, name, speculative=speculative, speculation_disabled=False)
    if worker is not None and worker.speculation_cut_off:
        await _serve_once(actor, setup, name, speculative=False, speculation_disabled=True)


async def _serve_once(
    actor: EngineActor, setup: JobSetup, name: str, *, speculative: bool, speculation_disabled: bool
) -> EngineWorker | None:
    """Start an engine and serve with it until it has left the job; None if it does not start."""
    job = setup.job
    try:
        model = await asyncio.to_thread(setup.model)
        engine = await Engine.start(setup.engine_config(model, speculative=speculative))
    except Exception as error:
        # The fleet reads the error from state() and starts another actor later.
        actor.error = str(error) if isinstance(error, EngineError | ModelError) else f"{type(error).__name__}: {error}"
        actor.started = True
        return None
    worker = EngineWorker(
        engine,
        setup.job_store(),
        setup.history_store(),
        name=name,
        worker=os.environ.get(WORKER_ENV, ""),
        max_running=job.spec.engine.max_num_seqs,
        checkpoint_tokens=job.spec.engine.checkpoint_tokens,
        sampling=job.spec.sampling,
        transport=setup.weight_transport(model),
        broadcast=job.spec.weights.broadcast,
        speculation_disabled=speculation_disabled,
    )
    # vLLM's many objects live as long as this process; scanning them in each garbage collection would pause decoding.
    gc.collect()
    gc.freeze()

    def mark_started() -> None:
        actor.started = True

    try:
        await worker.run(mark_started)
    finally:
        engine.close()
    return worker
