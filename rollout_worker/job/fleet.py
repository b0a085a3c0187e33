"""Keeps an engine actor for every place that the workers of a job have."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout_worker.job.setup import JobSetup

logger = logging.getLogger(__name__)

ENGINE_RESOURCE = "rollout_engine"
"""Ray resource of which a worker node has one for each engine that fits on it."""
_LOOK_S = 1.0
_RETRY_S = 30.0
_ANSWER_S = 0.2
_DEATHS = 3
"""Starts in a row in which an engine's process dies before that is an error."""


class Fleet:
    """Level-triggered: each pass looks what room and which engine actors there are, and makes what is missing.

    A worker that joins brings room, and so gets an engine for each of its places. The actors are detached and bear
    names, so that they outlive the coordinator that made them and are found again. Ray starts one that died anew; one
    whose worker has gone waits for the room of the next. One that cannot start is made anew after a while.
    """

    def __init__(self, setup: JobSetup, actor: type) -> None:
        """Keep the engines of a job; *actor* is their class."""
        self.errors: dict[str, str] = {}
        """Engines that do not start, and why."""
        self._setup, self._actor = setup, actor
        self._asked: dict[str, Any] = {}
        """Engine → a call that has not been answered yet."""
        self._starting: dict[str, str] = {}
        """Engine → its process, when it was last seen to start."""
        self._retry_at: dict[str, float] = {}
        self._deaths: Counter[str] = Counter()
        """How often in a row an engine's process died while it started."""

    async def run(self) -> None:
        """Look after the engines until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._look)
            except Exception as error:  # Ray's own errors are many; the next pass looks again
                logger.warning("The engines cannot be looked after right now: %s: %s", type(error).__name__, error)
            await asyncio.sleep(_LOOK_S)

    def _look(self) -> None:
        nodes: Any = ray.nodes()
        room = sum(int(node["Resources"].get(ENGINE_RESOURCE, 0)) for node in nodes if node["Alive"])
        wanted = {f"plain-{number}": True for number in range(self._setup.plain_engines)}
        wanted |= {f"engine-{number}": False for number in range(room - len(wanted))}
        for name in self.errors.keys() - wanted.keys():  # its worker has gone
            self.errors.pop(name, None)
        ours = namespace(self._setup.uid)
        named = ray.util.list_named_actors(all_namespaces=True)
        there = {actor["name"] for actor in named if actor["namespace"] == ours}
        for name, plain in wanted.items():
            if name not in there:
                self._make(name, plain)
        self._ask([name for name in sorted(there) if name.startswith(("engine-", "plain-"))])

    def _make(self, name: str, plain: bool) -> None:
        if time.monotonic() < self._retry_at.get(name, 0.0):
            return
        spec = self._setup.job.spec
        gpus = spec.engine.gpus if spec.workers.gpus_per_worker else 0
        bundle: dict[str, float] = {ENGINE_RESOURCE: 1.0}
        if gpus:
            bundle["GPU"] = float(gpus)
        group = self._group(name, bundle)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=False)
        actor = ray.remote(self._actor).options(
            **lasting(name, self._setup.uid),
            num_gpus=gpus,
            resources={ENGINE_RESOURCE: 1.0},
            scheduling_strategy=strategy,
        )
        actor.remote(self._setup, name, plain)

    def _group(self, name: str, bundle: dict[str, float]) -> PlacementGroup:
        """An engine lives on one node, and its place is kept for it while it starts anew."""
        named = f"{namespace(self._setup.uid)}-{name}"
        try:
            return get_placement_group(named)
        except ValueError:
            return placement_group([bundle], strategy="STRICT_PACK", name=named, lifetime="detached")

    def _ask(self, names: list[str]) -> None:
        """Learn which engines have started; who does not answer now is heard at a later pass."""
        actors = {name: ray.get_actor(name, namespace=namespace(self._setup.uid)) for name in names}
        self._asked = {name: self._asked.get(name) or actor.state.remote() for name, actor in actors.items()}
        calls = list(self._asked.values())
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S) if calls else ([], [])
        for name, actor in actors.items():
            if self._asked[name] in done:
                self._judge(name, actor, self._asked.pop(name))

    def _judge(self, name: str, actor: Any, call: Any) -> None:
        """Note what an engine answered; one that cannot start is ended, to be made anew."""
        try:
            process, started, error = ray.get(call)
        except ray.exceptions.RayError as away:
            # killed, or its node is gone: Ray starts it anew, and another process answers then
            logger.debug("%s does not answer: %s", name, away)
            return
        if not started:
            self._deaths[name] += self._starting.get(name, process) != process
            self._starting[name] = process
            if self._deaths[name] < _DEATHS:
                return
            error = f"its process died {self._deaths[name]} times while it started, for want of memory perhaps"
        del self._deaths[name]
        self._starting.pop(name, None)
        if error:
            if self.errors.get(name) != error:
                logger.error("%s does not start: %s", name, error)
            self.errors[name] = error
            self._retry_at[name] = time.monotonic() + _RETRY_S
            ray.kill(actor, no_restart=True)
        else:
            self.errors.pop(name, None)


def lasting(name: str, uid: str) -> dict[str, Any]:
    """Options of an actor of job *uid* that outlives its maker, is started anew when it dies, and bears a *name*."""
    return {
        "name": name,
        "namespace": namespace(uid),
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 8,
        "num_cpus": 0,
    }


def namespace(uid: str) -> str:
    """The Ray namespace of a job."""
    return f"rollout-{uid}"
