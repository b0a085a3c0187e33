"""Compares the store with the cluster now and then.

A watch that was away for too long (410 Gone) begins with a new list, and kopf does not say what was deleted meanwhile:
a pod would be taken to be there for ever. Listing all the operator's objects once in a while costs a few calls.
"""

from __future__ import annotations

import asyncio
import logging

from rollout_operator.api import ApiError, KubernetesApi
from rollout_operator.store import JobKey, Store
from rollout_operator.watched import Watched
from rollout_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_PERIOD_S = 120.0


class Resync:
    """One operator's."""

    def __init__(
        self,
        api: KubernetesApi,
        store: Store,
        queue: WorkQueue[JobKey],
        kinds: list[Watched],
        namespaces: list[str],
    ) -> None:
        self._api, self._store, self._queue = api, store, queue
        self._kinds, self._namespaces = kinds, namespaces or [""]

    async def run(self) -> None:
        """Compare from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self.compare()
            except ApiError as error:
                logger.warning("The operator's objects could not be listed: %s", error)

    async def compare(self) -> None:
        """Take out of the store what is gone from the cluster."""
        for kind in self._kinds:
            # before the list: what comes into the store meanwhile is not in question
            known = self._store.known(kind.kind)
            there: set[str] = set()
            for namespace in self._namespaces:
                there |= await self._api.uids(kind.api_version, kind.plural, namespace)
            for uid in known.keys() - there:
                logger.warning("%s %s went unnoticed.", kind.kind, "/".join(known[uid]))
                if (key := self._store.drop_uid(kind.kind, uid)) is not None:
                    self._queue.add(key)
