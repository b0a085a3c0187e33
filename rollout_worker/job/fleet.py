"""Keeps one engine actor running for every slot of a worker's Ray cluster."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
import redis
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout_api.redis_client.connection import connect
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.job.limits import (
    ACTOR_ANSWER_TIMEOUT_S,
    ENGINE_RETRY_DELAY_S,
    FLEET_INTERVAL_S,
    MAX_START_FAILURES,
)
from rollout_worker.job.setup import JobSetup

logger = logging.getLogger(__name__)

ENGINE_RESOURCE = "rollout_engine"
"""Ray resource of which a worker node has one unit for each engine that fits on it."""
_SPECULATIVE, _NON_SPECULATIVE = "engine-", "non-speculative-"
"""Prefixes of the engines' names."""


class EngineState(NamedTuple):
    """What an engine's actor answers to the fleet."""

    process: str
    """Id of the actor's process, which no other process has."""
    pid: int
    """Its process id on this machine."""
    started: bool
    """Whether the engine serves, or is known not to be able to start."""
    error: str
    """Why it cannot start; empty if it can."""


class Fleet:
    """Starts the engine actors that are missing. Every pass compares the available slots with the existing actors.

    Each worker of a job has a Ray cluster and a fleet of its own, so that its engines depend on no other machine. Ray
    restarts an actor that has died. An engine that cannot start is retried later.
    """

    def __init__(self, setup: JobSetup, actor: type, on_process: Callable[[int], None] = lambda pid: None) -> None:
        """Manage the engines of a worker.

        Args:
            setup: the job.
            actor: class of the engines' actors.
            on_process: called with the process id of an engine, more than once.
        """
        self.errors: dict[str, str] = {}
        """Engines that cannot start, with the reasons."""
        self._setup, self._actor, self._on_process = setup, actor, on_process
        self._store = LauncherStore(connect(setup.redis_url), setup.keys)
        self._failing_since: float | None = None
        self._reported = False
        """Whether the last report to the coordinator contained errors."""
        self._calls: dict[str, Any] = {}
        """Engine → a call of its ``state`` that has not been answered yet."""
        self._starting: dict[str, str] = {}
        """Engine → the process that was last seen starting it."""
        self._retry_at: dict[str, float] = {}
        self._start_failures: Counter[str] = Counter()
        """Engine → number of consecutive deaths of its process during its start."""

    def run(self, stopping: threading.Event) -> None:
        """Manage the engines, and report those that cannot start, until *stopping* is set."""
        while not stopping.wait(FLEET_INTERVAL_S):
            try:
                self.run_once()
                self._failing_since = None
            except Exception as error:  # Ray raises many kinds of errors, and the next pass starts afresh
                self._failing_since = self._failing_since or time.monotonic()
                logger.warning("Cannot manage the engines; trying again: %s: %s", type(error).__name__, error)
            self._report()

    def failing_seconds(self) -> float:
        """Return for how long all passes have failed; 0.0 if the last one succeeded."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def _report(self) -> None:
        if not self.errors and not self._reported:
            return
        errors = {self._setup.engine_name(name): error for name, error in self.errors.items()}
        try:
            # By name, so that the report of an earlier process of this worker is replaced.
            self._store.report_failed_engines(self._setup.worker.partition("/")[0], errors)
        except redis.RedisError as error:
            logger.debug("Engines that cannot start are not reported: %s", error)
        else:
            self._reported = bool(errors)

    def run_once(self) -> None:
        """Start the actors that are missing, and read the state of the others."""
        nodes: Any = ray.nodes()
        slots = sum(int(node["Resources"].get(ENGINE_RESOURCE, 0)) for node in nodes if node["Alive"])
        wanted = {f"{_NON_SPECULATIVE}{number}": False for number in range(self._setup.non_speculative_engines)}
        wanted |= {f"{_SPECULATIVE}{number}": True for number in range(slots - len(wanted))}
        for name in self.errors.keys() - wanted.keys():  # the engine's worker has left
            self.errors.pop(name, None)
        namespace = ray_namespace(self._setup.uid)
        named = ray.util.list_named_actors(all_namespaces=True)
        existing = {actor["name"] for actor in named if actor["namespace"] == namespace}
        for name, speculative in wanted.items():
            if name not in existing:
                self._start(name, speculative=speculative)
        self._poll([name for name in sorted(existing) if name.startswith((_SPECULATIVE, _NON_SPECULATIVE))])

    def _start(self, name: str, *, speculative: bool) -> None:
        if time.monotonic() < self._retry_at.get(name, 0.0):
            return
        spec = self._setup.job.spec
        gpus = spec.engine.gpus if spec.workers.gpus_per_worker else 0
        bundle: dict[str, float] = {ENGINE_RESOURCE: 1.0}
        if gpus:
            bundle["GPU"] = float(gpus)
        group = self._placement_group(name, bundle)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=False)
        actor = ray.remote(self._actor).options(
            **detached_actor_options(name, self._setup.uid),
            num_gpus=gpus,
            resources={ENGINE_RESOURCE: 1.0},
            scheduling_strategy=strategy,
        )
        actor.remote(self._setup, name, speculative)

    def _placement_group(self, name: str, bundle: dict[str, float]) -> PlacementGroup:
        """Reserve an engine's resources on one node; they stay reserved while the engine restarts."""
        group_name = f"{ray_namespace(self._setup.uid)}-{name}"
        try:
            return get_placement_group(group_name)
        except ValueError:
            return placement_group([bundle], strategy="STRICT_PACK", name=group_name, lifetime="detached")

    def _poll(self, names: list[str]) -> None:
        """Read which engines have started. A call that is not answered in time is read in a later pass."""
        actors = {name: ray.get_actor(name, namespace=ray_namespace(self._setup.uid)) for name in names}
        self._calls = {name: self._calls.get(name) or actor.state.remote() for name, actor in actors.items()}
        calls = list(self._calls.values())
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=ACTOR_ANSWER_TIMEOUT_S) if calls else ([], [])
        for name, actor in actors.items():
            if self._calls[name] in done:
                self._handle_state(name, actor, self._calls.pop(name))

    def _handle_state(self, name: str, actor: Any, call: Any) -> None:
        """Record an engine's state; kill an actor whose engine cannot start, so that a later pass replaces it."""
        try:
            state: EngineState = ray.get(call)
        except ray.exceptions.RayError as unavailable:
            # The process was killed or its node is gone. Ray restarts the actor, and its new process answers then.
            logger.debug("Engine %s does not answer: %s", name, unavailable)
            return
        self._on_process(state.pid)
        error = state.error
        if not state.started:
            self._start_failures[name] += self._starting.get(name, state.process) != state.process
            self._starting[name] = state.process
            if self._start_failures[name] < MAX_START_FAILURES:
                return
            error = (
                f"its process died {self._start_failures[name]} times while it started; "
                "the machine may have too little memory"
            )
        del self._start_failures[name]
        self._starting.pop(name, None)
        if error:
            if self.errors.get(name) != error:
                logger.error("Engine %s cannot start: %s", name, error)
            self.errors[name] = error
            self._retry_at[name] = time.monotonic() + ENGINE_RETRY_DELAY_S
            ray.kill(actor, no_restart=True)
        else:
            self.errors.pop(name, None)


def detached_actor_options(name: str, uid: str) -> dict[str, Any]:
    """Return the Ray options of a named actor of job *uid* that outlives its creator and is restarted when it dies."""
    return {
        "name": name,
        "namespace": ray_namespace(uid),
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 8,
        "num_cpus": 0,
    }


def ray_namespace(uid: str) -> str:
    """Return the Ray namespace of a job."""
    return f"rollout-{uid}"
