"""The parts of a job as Ray actors. Ray places them and starts them again; what they know is in Redis.

Each actor runs its part in an asyncio loop of its own, in a thread. When the part fails, the process ends, and Ray
makes a new one; nothing is asked of an actor that it could not be asked again.
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

from rollout_worker.engine.compat import EngineError
from rollout_worker.engine.host import Engine
from rollout_worker.engine.model_source import ModelError
from rollout_worker.history.connection import connect, connect_history
from rollout_worker.history.maintenance import MaintenanceThread
from rollout_worker.job.coordinator import Coordinator
from rollout_worker.job.engine_worker import EngineWorker
from rollout_worker.job.fleet import Fleet
from rollout_worker.job.http import StatusServer
from rollout_worker.job.job_store import StaleCoordinatorError
from rollout_worker.job.relay import Relay
from rollout_worker.job.setup import JobSetup

logger = logging.getLogger(__name__)

WORKER_ENV = "ROLLOUT_WORKER"
"""Names the worker that started this machine's part of Ray; its engines inherit it."""
_FAILED_EXIT = 1


class _Loop:
    """An asyncio loop in a thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


def _end_process_when_failed(work: Future[Any]) -> None:
    """Let Ray start the actor anew; the error is in the log by then."""
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.error("Ending, to begin anew: %s: %s", type(error).__name__, error)
        logging.shutdown()
        os._exit(_FAILED_EXIT)


def _log_plainly() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)


class CoordinatorActor:
    """The coordinator of a job, the engines' fleet and the status server."""

    def __init__(self, setup: JobSetup) -> None:
        _log_plainly()
        self._loop = _Loop("coordinator")
        self.http_port = 0
        self.fleet = Fleet(setup, EngineActor)
        self._work = self._loop.start(_coordinate(self, setup))
        self._work.add_done_callback(_end_process_when_failed)

    def address(self) -> int:
        """Port of the status server."""
        return self.http_port

    def engine_errors(self) -> dict[str, str]:
        """Engines that do not start, and why."""
        return dict(self.fleet.errors)

    def ended(self) -> bool:
        """Whether the job was closed and answered."""
        return self._work.done()


class RelayActor:
    """Carries ended rollouts into the history, and looks after that where no service does."""

    def __init__(self, setup: JobSetup) -> None:
        _log_plainly()
        self._relay = Relay(connect(setup.redis_url), setup.keys, setup.store())
        self._relay.start()
        self._keeper = MaintenanceThread(connect_history(setup.history_url or setup.redis_url), setup.history_keys)
        self._keeper.start()


class EngineActor:
    """One vLLM engine."""

    def __init__(self, setup: JobSetup, name: str, plain: bool) -> None:
        _log_plainly()
        self.started = False
        """Serving, or known not to be able to start."""
        self.error = ""
        self._process = secrets.token_hex(8)
        self._loop = _Loop("engine")
        self._work = self._loop.start(_serve(self, setup, name, plain))
        self._work.add_done_callback(_end_process_when_failed)

    def state(self) -> tuple[str, bool, str]:
        """Which process this is, whether its engine has started or cannot start, and why it cannot."""
        return self._process, self.started, self.error


# What actors do in their loops. No actor has a coroutine as a method: Ray would then run all its methods in one loop of
# its own, where one that waits holds the others up.


async def _coordinate(actor: CoordinatorActor, setup: JobSetup) -> None:
    coordinator = Coordinator(
        setup.job,
        setup.job_store(),
        setup.store(),
        vocabulary=setup.vocabulary,
        history_apart=bool(setup.history_url),
    )
    coordinator.board.rollouts, coordinator.board.engine_errors = setup.rollouts, actor.fleet.errors
    server = StatusServer(coordinator.board)
    actor.http_port = await server.start(setup.http_host, setup.http_port)
    fleet = asyncio.ensure_future(actor.fleet.run())
    try:
        await coordinator.run()
    except StaleCoordinatorError:
        # the newer one is the actor by this name; this process is left over
        os._exit(0)
    finally:
        fleet.cancel()


async def _serve(actor: EngineActor, setup: JobSetup, name: str, plain: bool) -> None:
    worker = await _serve_once(actor, setup, name, plain=plain, given_up=False)
    if worker is not None and worker.gives_up:
        await _serve_once(actor, setup, name, plain=True, given_up=True)


async def _serve_once(
    actor: EngineActor, setup: JobSetup, name: str, *, plain: bool, given_up: bool
) -> EngineWorker | None:
    """Start an engine and serve with it until it has left; None if it does not start."""
    job = setup.job
    try:
        model = await asyncio.to_thread(setup.model)
        engine = await Engine.start(setup.engine_config(model, plain=plain))
    except Exception as error:
        # said by state(), and tried again by the fleet
        actor.error = str(error) if isinstance(error, EngineError | ModelError) else f"{type(error).__name__}: {error}"
        actor.started = True
        return None
    worker = EngineWorker(
        engine,
        setup.job_store(),
        setup.store(),
        name=name,
        worker=os.environ.get(WORKER_ENV, ""),
        slots=job.spec.engine.max_num_seqs,
        checkpoint_tokens=job.spec.engine.checkpoint_tokens,
        sampling=job.spec.sampling,
        transport=setup.transport(model),
        broadcast=job.spec.weights.broadcast,
        given_up=given_up,
    )
    # what vLLM brought stays: to look through it again and again would hold all rollouts up
    gc.collect()
    gc.freeze()

    def serving() -> None:
        actor.started = True

    try:
        await worker.run(serving)
    finally:
        engine.close()
    return worker
