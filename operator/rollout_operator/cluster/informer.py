"""Keeps a cache consistent with the cluster, for one kind of object that jobs own or name.

These objects are not watched with kopf, because they are far more numerous than jobs and kopf keeps a task and a memory
for each. Moreover, after a watch has been interrupted for too long (410 Gone), kopf does not report what was deleted
meanwhile. This informer works like client-go's reflector: a new list replaces what was known.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Protocol

from rollout_operator.cluster.kubernetes_api import OWN_OBJECTS, ApiError, KubernetesApi, ResourceKind
from rollout_operator.cluster.object_cache import JobKey
from rollout_operator.cluster.work_queue import WorkQueue
from rollout_operator.objects.observed import Manifest

logger = logging.getLogger(__name__)

_RETRY_DELAY_S = 1.0
_UNAVAILABLE_RETRY_DELAYS_S = {403: 60.0, 404: 5.0}
"""By HTTP status: seconds until an optional kind is listed again that the operator may not read, or does not exist.

A kind that does not exist may just have been installed: the API server serves it some seconds later.
"""
_HTTP_GONE = 410


class InformerCache(Protocol):
    """What an informer keeps up to date. Changes return the job to reconcile, if there is exactly one."""

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all objects of a kind in a namespace, or in all namespaces if it is empty."""

    def update(self, body: Manifest, kind: str) -> JobKey | None:
        """Add or replace an object."""

    def remove(self, body: Manifest, kind: str) -> JobKey | None:
        """Remove an object."""

    def remove_uid(self, kind: str, uid: str) -> JobKey | None:
        """Remove the object with this uid."""


class Informer:
    """Watches one kind in one namespace, or in all namespaces if *namespace* is empty."""

    def __init__(
        self,
        api: KubernetesApi,
        cache: InformerCache,
        queue: WorkQueue[JobKey],
        kind: ResourceKind,
        namespace: str,
        *,
        selector: str = OWN_OBJECTS,
        optional: bool = False,
    ) -> None:
        """Prepare an informer.

        Args:
            api: the client of the API server.
            cache: the cache to keep up to date.
            queue: receives the jobs to reconcile.
            kind: the kind to watch.
            namespace: the namespace to watch.
            selector: label selector of the objects.
            optional: whether the operator can do without this kind if it does not exist or must not be read.
        """
        self.synced = asyncio.Event()
        """Set once the cache has received a complete list."""
        self._api, self._cache, self._queue = api, cache, queue
        self._kind, self._namespace = kind, namespace
        self._selector, self._optional = selector, optional

    async def run(self) -> None:
        """List the objects and watch for changes until cancelled; list again whenever the watch cannot be continued."""
        while True:
            try:
                version = await self._list()
                self.synced.set()
                await self._watch(version)
            except ApiError as error:
                if error.status == _HTTP_GONE:
                    logger.info("The watch of %s was interrupted for too long; listing them again.", self._kind.plural)
                    continue
                if self._optional and error.status in _UNAVAILABLE_RETRY_DELAYS_S:
                    if not self.synced.is_set():
                        logger.warning("%s are not available: %s", self._kind.plural, error)
                    self.synced.set()
                    await asyncio.sleep(_UNAVAILABLE_RETRY_DELAYS_S[error.status])
                    continue
                logger.warning("%s cannot be watched at the moment: %s", self._kind.plural, error)
                await _pause()

    async def _list(self) -> str:
        """Bring the cache up to date, and return the resource version to watch from."""
        # Objects that arrive in the cache while the list is being read must not be removed.
        known = self._cache.uids(self._kind.kind, self._namespace)
        listed: set[str] = set()
        version = ""
        async for page in self._api.list_pages(self._kind, self._namespace, selector=self._selector):
            version = page["metadata"]["resourceVersion"]
            for item in page["items"]:
                listed.add(item["metadata"]["uid"])
                # A list states the type of its items only once, for all of them.
                body = {"apiVersion": self._kind.api_version, "kind": self._kind.kind, **item}
                self._reconcile(self._cache.update(body, self._kind.kind))
        for uid in known - listed:
            self._reconcile(self._cache.remove_uid(self._kind.kind, uid))
        return version

    async def _watch(self, version: str) -> None:
        while True:
            try:
                async for event in self._api.watch(self._kind, self._namespace, version, selector=self._selector):
                    body = event["object"]
                    if event["type"] == "ERROR":
                        raise ApiError(body.get("code", 0), body.get("reason", "Error"), body.get("message", ""))
                    version = body["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        self._reconcile(self._cache.remove(body, self._kind.kind))
                    elif event["type"] in ("ADDED", "MODIFIED"):
                        self._reconcile(self._cache.update(body, self._kind.kind))
            except ApiError as error:
                if not error.transient:
                    raise
                logger.warning("The watch of %s broke: %s", self._kind.plural, error)
                await _pause()

    def _reconcile(self, key: JobKey | None) -> None:
        if key is not None:
            self._queue.add(key)


async def _pause() -> None:
    """Wait for a random time, so that informers do not all reconnect at the same moment."""
    await asyncio.sleep(_RETRY_DELAY_S * random.uniform(0.5, 1.5))
