"""Keeps the store's objects of one kind as they are in the cluster.

kopf watches RolloutJobs; of the much more numerous objects that jobs own it would keep a task and a memory each, and
after a watch that was away for too long (410 Gone) it does not say what was deleted meanwhile. Here a new list replaces
what was known, as client-go's reflector does it.
"""

from __future__ import annotations

import asyncio
import logging
import random

from rollout_operator.api import ApiError, KubernetesApi
from rollout_operator.store import JobKey, Store
from rollout_operator.watched import Watched
from rollout_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_GONE = 410


class Informer:
    """Of one kind in one namespace, or (empty) in all."""

    def __init__(
        self, api: KubernetesApi, store: Store, queue: WorkQueue[JobKey], kind: Watched, namespace: str
    ) -> None:
        self.listed = asyncio.Event()
        """Whether everything was in the store once."""
        self._api, self._store, self._queue = api, store, queue
        self._kind, self._namespace = kind, namespace

    async def run(self) -> None:
        """List, watch from there, and list again when the watch cannot go on; until cancelled."""
        while True:
            try:
                version = await self._list()
                self.listed.set()
                await self._watch(version)
            except ApiError as error:
                if error.status == _GONE:
                    logger.info("The watch of %s was away for too long; listing anew.", self._kind.plural)
                    continue
                logger.warning("%s cannot be watched now: %s", self._kind.plural, error)
                await _pause()

    async def _list(self) -> str:
        """Make the store as the cluster is; from which version on to watch."""
        # what comes into the store while the list is on its way is not in question
        known = self._store.known(self._kind.kind, self._namespace)
        there: set[str] = set()
        version, page = "", ""
        while True:
            answer = await self._api.page(self._kind, self._namespace, page)
            for item in answer["items"]:
                there.add(item["metadata"]["uid"])
                # a list says once, for all of its items, what they are
                body = {"apiVersion": self._kind.api_version, "kind": self._kind.kind, **item}
                self._changed(self._store.put(body, self._kind.kind))
            version, page = answer["metadata"]["resourceVersion"], answer["metadata"].get("continue", "")
            if not page:
                break
        for uid in known - there:
            self._changed(self._store.drop_uid(self._kind.kind, uid))
        return str(version)

    async def _watch(self, version: str) -> None:
        while True:
            try:
                async for event in self._api.watch(self._kind, self._namespace, version):
                    body = event["object"]
                    if event["type"] == "ERROR":
                        raise ApiError(body.get("code", 0), body.get("reason", "Error"), body.get("message", ""))
                    version = body["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        self._changed(self._store.drop(body, self._kind.kind))
                    elif event["type"] in ("ADDED", "MODIFIED"):
                        self._changed(self._store.put(body, self._kind.kind))
            except ApiError as error:
                if not error.passes:
                    raise
                logger.warning("The watch of %s broke off: %s", self._kind.plural, error)
                await _pause()

    def _changed(self, key: JobKey | None) -> None:
        if key is not None:
            self._queue.add(key)


async def _pause() -> None:
    """Not all at once, when the API server is back."""
    await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.5))
