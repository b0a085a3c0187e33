"""An engine as a Ray actor. Ray places and restarts it; its rollouts are in Redis.

The actor runs its part in an asyncio event loop of its own, in a thread. When the part fails, the process exits and Ray
starts a new one. Calls to the actor's method may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import uvloop

from rollout_api.ports import free_port
from rollout_store.job import JobStore
from rollout_store.job.engines import EngineError
from rollout_store.job.setup import JobSetup
from rollout_store.models.model_source import ModelError
from rollout_store.runtime.garbage_collection import collect_rarely
from rollout_worker.engine.config import EngineConfig, EngineNode, vllm_settings
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.vllm_client import own_address
from rollout_worker.engine_worker.engine_group import EngineGroup
from rollout_worker.engine_worker.engine_setup import engine_config
from rollout_worker.engine_worker.fleet import EngineState
from rollout_worker.engine_worker.published_weights import WeightDirectories
from rollout_worker.engine_worker.worker import EngineWorker

logger = logging.getLogger(__name__)
_EXIT_FAILED = 1
_SLEEP_POLL_INTERVAL_S = 1.0
"""Seconds between two checks whether a job that sleeps has woken."""


class EngineActor:
    """Runs one vLLM engine."""

    def __init__(self, setup: JobSetup, name: str, speculative: bool) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
        self._name = name
        self.started = False
        """Whether the engine serves, or is known not to be able to start."""
        self.error = ""
        self.worker: EngineWorker | None = None
        """Connects the engine to the job while it serves."""
        self._process_id = secrets.token_hex(8)
        loop = uvloop.new_event_loop()
        threading.Thread(target=loop.run_forever, name="engine", daemon=True).start()
        self._work = asyncio.run_coroutine_threadsafe(_serve(self, setup, name, speculative=speculative), loop)
        self._work.add_done_callback(_exit_on_failure)

    def __repr__(self) -> str:
        """Return the engine's name, which Ray puts before each line of its output."""
        return self._name

    def state(self) -> EngineState:
        """Return the state of this process and its engine."""
        engine = "" if self.worker is None else self.worker.engine_id
        return EngineState(self._process_id, os.getpid(), self.started, engine, self.error)


def _exit_on_failure(work: Future[Any]) -> None:
    """End the process, so that Ray restarts the actor."""
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.error("Exiting, so that Ray restarts this actor: %s: %s", type(error).__name__, error)
        logging.shutdown()
        os._exit(_EXIT_FAILED)


def _exit_with_descendants(reason: str) -> None:
    """End the process and those of vLLM, which may wait for each other for a long time."""
    logger.error("Exiting, so that Ray restarts this actor: %s", reason)
    logging.shutdown()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(_EXIT_FAILED)


# The actor's work is in functions, because an actor with a coroutine as a method has all its methods run by Ray in one
# event loop, where a method that blocks delays the others.


async def _serve(actor: EngineActor, setup: JobSetup, name: str, *, speculative: bool) -> None:
    worker = await _serve_once(actor, setup, name, speculative=speculative, speculation_disabled=False)
    if worker is not None and worker.speculation_cut_off:
        await _serve_once(actor, setup, name, speculative=False, speculation_disabled=True)


async def _serve_once(
    actor: EngineActor, setup: JobSetup, name: str, *, speculative: bool, speculation_disabled: bool
) -> EngineWorker | None:
    """Start an engine and serve with it until it has left the job; None if it does not start."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            model = await asyncio.to_thread(setup.model)
            config = engine_config(setup, model, speculative=speculative)
            job_store = setup.job_store()
            await _wait_until_awake(job_store, name)
            if setup.machines_per_engine > 1:
                config = await stack.enter_async_context(_gathered(setup, config))
            engine = await Engine.start(config)
        except Exception as error:
            # The fleet reads the error from state() and starts another actor later.
            is_expected = isinstance(error, EngineError | ModelError)
            actor.error = str(error) if is_expected else f"{type(error).__name__}: {error}"
            actor.started = True
            return None
        return await _serve_with(
            engine, actor, setup, job_store, name, model, speculation_disabled=speculation_disabled
        )


async def _wait_until_awake(job_store: JobStore, name: str) -> None:
    """Wait while the job sleeps, because a trainer may use the memory that the engine would take.

    A job that is closed wakes. The process of an engine that waits is ended without a message.
    """
    is_logged = False
    while (mode := await job_store.job.pause()) is not None and mode.sleep_level:
        if not is_logged:
            logger.warning("The job sleeps, so that %s waits to start until the job wakes.", name)
            is_logged = True
        await asyncio.sleep(_SLEEP_POLL_INTERVAL_S)


@contextlib.asynccontextmanager
async def _gathered(setup: JobSetup, config: EngineConfig) -> AsyncIterator[EngineConfig]:
    """Gather the other machines of an engine, and return the configuration of this one's part.

    When one of them is lost, this process exits, so that Ray restarts the actor.
    """
    node = EngineNode(setup.machines_per_engine, rank=0, address=own_address(), port=free_port())
    config = replace(config, node=node)
    store = setup.group_store()
    group = EngineGroup(store, node.count, vllm_settings(config), _exit_with_descendants)
    try:
        await asyncio.to_thread(group.gather)
        yield config
    finally:
        await asyncio.to_thread(group.close)


async def _serve_with(
    engine: Engine,
    actor: EngineActor,
    setup: JobSetup,
    job_store: JobStore,
    name: str,
    model: Path,
    *,
    speculation_disabled: bool,
) -> EngineWorker:
    """Serve with an engine until it has left the job, and close it."""
    job = setup.job
    worker = EngineWorker(
        engine,
        job_store,
        setup.history_store(),
        name=setup.engine_name(name),
        worker=setup.worker,
        max_running=job.spec.engine.max_num_seqs,
        checkpoint_tokens=job.spec.engine.checkpoint_tokens,
        sampling=job.spec.sampling,
        directories=weight_directories(setup, model, job_store),
        speculation_disabled=speculation_disabled,
    )
    collect_rarely()  # scanning vLLM's many objects would pause decoding

    def mark_started() -> None:
        actor.started = True

    actor.worker = worker
    try:
        await worker.run(mark_started)
    finally:
        actor.worker = None
        engine.close()
    return worker


def weight_directories(setup: JobSetup, model: Path, job_store: JobStore) -> WeightDirectories:
    """Return where published weights may be, for an engine of *model*."""
    spec = setup.job.spec
    return WeightDirectories(
        model,
        setup.cache,
        spec.weights.allowed_roots,
        model_uri=spec.model.uri,
        checksum=job_store.weight_checksums,
    )
