"""Keeps the engines of a worker running, as actors of the worker's own Ray cluster."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
import redis

from rollout_api.redis_client.connection import connect
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.setup import JobSetup

logger = logging.getLogger(__name__)

FLEET_INTERVAL_S = 1.0
"""Seconds between two passes over the engine actors."""
ENGINE_RETRY_DELAY_S = 30.0
"""Seconds after which an engine that could not start is started again."""
ACTOR_ANSWER_TIMEOUT_S = 0.2
"""Seconds for which a pass waits for the actors' answers."""
ACTOR_RESTART_TIMEOUT_S = 120.0
"""Seconds within which Ray must have restarted an actor that has died; then it is replaced."""
SILENCE_LOG_INTERVAL_S = 30.0
"""Seconds after which an engine's process that does not answer is reported in the log, again and again."""
MAX_START_FAILURES = 3
"""Number of consecutive deaths of an engine's process during its start that are reported as an error."""

ENGINE_RESOURCE = "rollout_engine"
"""Ray resource. A worker has one unit of it for each of its engines."""


class EngineState(NamedTuple):
    """What an engine's actor answers to the fleet."""

    process: str
    """Id of the actor's process, which no other process has."""
    pid: int
    """Its process id on this machine."""
    started: bool
    """Whether the engine has served, or is known not to be able to start."""
    engine: str
    """Id of the engine's registration; empty if it does not serve."""
    error: str
    """Why it cannot start; empty if it can."""


class Fleet:
    """Starts the engine actors that are missing.

    Each worker of a job has a Ray cluster and a fleet of its own, so that its engines depend on no other machine. Ray
    restarts an actor that has died. An engine that cannot start is retried later.
    """

    def __init__(
        self, setup: JobSetup, actor: type, on_state: Callable[[EngineState], None] = lambda state: None
    ) -> None:
        """Manage the engines of a worker.

        *actor* is the class of the engines' actors; *on_state* is called with every answer of an engine.
        """
        self._setup, self._actor, self._on_state = setup, actor, on_state
        self._wanted = {f"engine-{number}": True for number in range(setup.engines_per_machine)}
        """Engine → whether it has speculation."""
        self._wanted |= {f"non-speculative-{number}": False for number in range(setup.non_speculative_engines)}
        self._store = LauncherStore(connect(setup.redis_url), setup.keys)
        self._actors: dict[str, Any] = {}
        self._calls: dict[str, Any] = {}
        """Engine → a call of its ``state`` that has not been answered yet."""
        self._serving: set[str] = set()
        self._dead: set[str] = set()
        """Engines whose process has ended and does not answer again yet."""
        self._heard_at: dict[str, float] = {}
        """Engine → when it was started, or its process answered last."""
        self._silence_logged_at: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._starting: dict[str, str] = {}
        """Engine → the process that was last seen starting it."""
        self._retry_at: dict[str, float] = {}
        self._dead_since: dict[str, float] = {}
        """Engine → since when Ray has reported its actor as dead."""
        self._start_failures: Counter[str] = Counter()
        """Engine → number of consecutive deaths of its process during its start."""
        self._succeeded_at = time.monotonic()
        """When the last pass succeeded, or the first one began."""
        self._reported = False
        """Whether the last report to the coordinator contained errors."""

    @property
    def errors(self) -> dict[str, str]:
        """Engines that cannot start, with the reasons."""
        return dict(self._errors)

    @property
    def num_serving(self) -> int:
        """Number of engines that are registered with the job."""
        return len(self._serving)

    @property
    def failing_seconds(self) -> float:
        """Seconds since a pass has succeeded, because Ray does not answer."""
        return time.monotonic() - self._succeeded_at

    def run(self, stopping: threading.Event) -> None:
        """Manage the engines, and report those that cannot start, until *stopping* is set."""
        while not stopping.wait(FLEET_INTERVAL_S):
            try:
                self.run_once()
                self._report()
                self._succeeded_at = time.monotonic()
            except Exception as error:  # Ray raises many kinds of errors, and the next pass starts afresh
                logger.warning("Cannot manage the engines; trying again: %s: %s", type(error).__name__, error)

    def run_once(self) -> None:
        """Start the actors that are missing, and read the state of the others."""
        if not any(node["Alive"] for node in ray.nodes()):
            raise RuntimeError("Ray's process raylet has ended")
        for name, speculative in self._wanted.items():
            if name not in self._actors and time.monotonic() >= self._retry_at.get(name, 0.0):
                self._start(name, speculative=speculative)
        self._poll()

    def _start(self, name: str, *, speculative: bool) -> None:
        spec = self._setup.job.spec
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": spec.engine.gpus // self._setup.machines_per_engine if spec.workers.gpus_per_worker else 0,
            "resources": {ENGINE_RESOURCE: 1.0},
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 8,
        }
        self._heard_at[name] = time.monotonic()
        self._actors[name] = ray.remote(self._actor).options(**options).remote(self._setup, name, speculative)

    def _poll(self) -> None:
        """Read which engines have started. A call that is not answered in time is read in a later pass."""
        self._calls = {name: self._calls.get(name) or actor.state.remote() for name, actor in self._actors.items()}
        calls = list(self._calls.values())
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=ACTOR_ANSWER_TIMEOUT_S) if calls else ([], [])
        for name in list(self._actors):
            if self._calls[name] in done:
                self._read_state(name, self._calls.pop(name))
        for name in self._actors:
            self._log_silence(name)

    def _read_state(self, name: str, call: Any) -> None:
        try:
            state: EngineState = ray.get(call)
        except ray.exceptions.ActorDiedError as died:
            # Ray restarts an actor that was killed, but not one whose constructor has failed.
            self._note_death(name, died)
            since = self._dead_since.setdefault(name, time.monotonic())
            if time.monotonic() - since > ACTOR_RESTART_TIMEOUT_S:
                self._set_error(name, f"its process cannot be started: {died}")
            return
        except ray.exceptions.RayError as unavailable:
            # The process was killed. Ray restarts the actor, and its new process answers then.
            self._note_death(name, unavailable)
            return
        self._dead.discard(name)
        self._heard_at[name] = time.monotonic()
        self._on_state(state)
        self._dead_since.pop(name, None)
        if state.engine:
            self._serving.add(name)
        else:
            self._serving.discard(name)
        if (error := state.error or self._start_error(name, state)) or state.started:
            del self._start_failures[name]
            self._starting.pop(name, None)
            self._set_error(name, error)

    def _note_death(self, name: str, error: Exception) -> None:
        """Log, once for each death, that an engine's process has ended."""
        self._serving.discard(name)
        if name not in self._dead:
            self._dead.add(name)
            logger.warning(
                "The process of %s has ended, and Ray starts it again. If its log has no error, it was killed, for "
                "example for lack of memory. (%s)",
                name,
                str(error).partition("\n")[0],
            )

    def _log_silence(self, name: str) -> None:
        """Log, now and then, that an engine's process does not answer.

        A process that is killed before it can answer is restarted by Ray without a word.
        """
        now, heard_at = time.monotonic(), self._heard_at[name]
        if now - max(heard_at, self._silence_logged_at.get(name, 0.0)) >= SILENCE_LOG_INTERVAL_S:
            self._silence_logged_at[name] = now
            logger.warning(
                "The process of %s has not answered for %.0f s. It is still starting, or it is killed each time; then "
                "/tmp/ray/session_latest/logs/raylet.out says why.",
                name,
                now - heard_at,
            )

    def _start_error(self, name: str, state: EngineState) -> str:
        """Return an error if the engine's processes die again and again before they have started."""
        if state.started:
            return ""
        self._start_failures[name] += self._starting.get(name, state.process) != state.process
        self._starting[name] = state.process
        if (deaths := self._start_failures[name]) < MAX_START_FAILURES:
            return ""
        return f"its process died {deaths} times while it started; the machine may have too little memory"

    def _set_error(self, name: str, error: str) -> None:
        """Record why an engine cannot start, and kill its actor, so that a later pass replaces it."""
        if not error:
            self._errors.pop(name, None)
            return
        if self._errors.get(name) != error:
            logger.error("Engine %s cannot start: %s", name, error)
        self._errors[name] = error
        self._retry_at[name] = time.monotonic() + ENGINE_RETRY_DELAY_S
        self._dead_since.pop(name, None)
        ray.kill(self._actors.pop(name), no_restart=True)

    def _report(self) -> None:
        """Tell the coordinator which engines cannot start, as long as there are any."""
        errors = self.errors
        if not errors and not self._reported:
            return
        try:
            # By the worker's name, so that the report of an earlier process of this worker is replaced.
            self._store.report_failed_engines(
                self._setup.worker_name,
                {self._setup.engine_name(name): error for name, error in errors.items()},
            )
        except redis.RedisError as error:
            logger.debug("Engines that cannot start are not reported: %s", error)
        else:
            self._reported = bool(errors)
