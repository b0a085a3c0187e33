"""Looks at jobs: observe, plan, apply, again and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rollout_api.asyncio_tasks import end
from rollout_api.manifest.status import ConditionType
from rollout_operator import names
from rollout_operator.actions import Note
from rollout_operator.api import ApiError, KubernetesApi
from rollout_operator.apply import OutdatedError, carry_out, post
from rollout_operator.cluster import Cluster
from rollout_operator.conditions import is_true
from rollout_operator.heads import Heads
from rollout_operator.observed import Manifest, Observed, Obstacle
from rollout_operator.plan import plan
from rollout_operator.store import JobKey, Store
from rollout_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_AT_ONCE = 16
_REFUSED_AGAIN_AFTER_S = 10.0
_OBSTACLE_KEPT_S = 2.5 * _REFUSED_AGAIN_AFTER_S


@dataclass
class Figures:
    """What the operator counts of its own work."""

    looks: int = 0
    failed_looks: int = 0
    outdated: int = 0
    seconds: float = 0.0
    """Spent in looks."""


class Reconciler:
    """One operator's work."""

    def __init__(self, api: KubernetesApi, store: Store, default_image: str) -> None:
        self.figures = Figures()
        self.cluster = Cluster()
        self.queue: WorkQueue[JobKey] = WorkQueue()
        self._api, self._store, self._image = api, store, default_image
        self._heads = Heads()
        self._obstacles: dict[JobKey, tuple[Obstacle, ...]] = {}

    async def run(self) -> None:
        """Look at jobs as they come, some at once, until cancelled."""
        workers = [asyncio.ensure_future(self._work()) for _ in range(_AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            await end(*workers)
            await self._heads.close()

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            began = time.monotonic()
            self.figures.looks += 1
            try:
                await self._look(key)
            except asyncio.CancelledError:
                raise
            except OutdatedError:
                # the watch brings what is new, and with it another look; this is for the case that it had already
                self.figures.outdated += 1
                self.queue.failed(key)
            except ApiError as error:
                self.figures.failed_looks += 1
                logger.warning("Kubernetes does not do it now: %s", error, extra={"job": "/".join(key)})
                self.queue.failed(key)
            except Exception:
                self.figures.failed_looks += 1
                logger.exception("This look at a job failed; it is looked at again.", extra={"job": "/".join(key)})
                self.queue.failed(key)
            else:
                self.queue.done(key)
            self.figures.seconds += time.monotonic() - began

    async def _look(self, key: JobKey) -> None:
        job = self._store.job(key)
        if job is None:
            self._obstacles.pop(key, None)
            return
        seen = await self._observe(key, job)
        what = plan(seen)
        refused = await carry_out(self._api, self._store, seen, what)
        kept = tuple(one for one in self._obstacles.get(key, ()) if seen.now - one.time < _OBSTACLE_KEPT_S)
        news = {one.what for one in refused}
        self._obstacles[key] = (*(one for one in kept if one.what not in news), *refused)
        if not self._obstacles[key]:
            del self._obstacles[key]
        for one in refused:
            if one.what not in {before.what for before in kept}:
                await post(self._api, job, Note("Warning", one.reason, str(one)), seen.now)
        if refused:
            # once now, to say so in the status; and again, to try
            self.queue.add(key, 0.0 if news - {one.what for one in kept} else _REFUSED_AGAIN_AFTER_S)
        if what.again is not None:
            self.queue.add(key, what.again)

    async def _observe(self, key: JobKey, job: Manifest) -> Observed:
        uid = job["metadata"]["uid"]
        pods = self._store.pods(key, uid)
        head = next((pod for pod in pods if pod.component == names.HEAD and pod.deleting is None), None)
        return Observed(
            job=job,
            pods=pods,
            objects=self._store.objects(key, uid),
            now=time.time(),
            cluster=self.cluster,
            default_image=self._image,
            said=await self._heads.ask(head) if _active(job) else None,
            obstacles=self._obstacles.get(key, ()),
        )


def _active(job: Manifest) -> bool:
    conditions: list[Mapping[str, str]] = (job.get("status") or {}).get("conditions") or []
    return not any(is_true(conditions, kind) for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED))
