"""Keeps a cache consistent with the cluster, for one kind of object that jobs own or name, and a queue of changed jobs.

These objects are not watched with kopf, because they are far more numerous than jobs and kopf keeps a task and a memory
for each. Moreover, after a watch has been interrupted for too long (410 Gone), kopf does not report what was deleted
meanwhile. This informer works like client-go's reflector: a new list replaces what was known.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from rollout_operator.cluster.kubernetes_api import OWN_OBJECTS, ApiError, KubernetesApi, ResourceKind
from rollout_operator.cluster.object_cache import JobKey
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

    def remove(self, uid: str) -> JobKey | None:
        """Remove the object with this uid. A newer one of the same name is kept."""


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

        *selector* selects objects by their labels. An *optional* kind is one that the operator can do without if it
        does not exist or must not be read.
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
            self._reconcile(self._cache.remove(uid))
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
                        self._reconcile(self._cache.remove(body["metadata"]["uid"]))
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


_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 60.0

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """Keys with due times, for one asyncio event loop.

    A key is processed by at most one worker at a time, however often it is added.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Key]] = []
        self._due: dict[Key, float] = {}
        """When each key is due next. Entries of the heap with another time are outdated."""
        self._processing: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._sequence = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that are due now or later."""
        return len(self._due)

    def add(self, key: Key, after: float = 0.0) -> None:
        """Make *key* due after this many seconds, unless it is due sooner."""
        due = asyncio.get_running_loop().time() + after
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._changed.set()

    def discard(self, key: Key) -> None:
        """Remove *key* and the record of its failures."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """Wait for a key that is due and not being processed; pass it to :meth:`done` or :meth:`retry` afterwards."""
        while True:
            self._changed.clear()
            timeout = None
            now = asyncio.get_running_loop().time()
            processing = []
            found = None
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due:
                    heapq.heappop(self._heap)
                elif due > now:
                    timeout = due - now
                    break
                elif key in self._processing:
                    processing.append(heapq.heappop(self._heap))
                else:
                    heapq.heappop(self._heap)
                    found = key
                    break
            for entry in processing:
                heapq.heappush(self._heap, entry)
            if found is not None:
                del self._due[found]
                self._processing.add(found)
                return found
            waiter = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({waiter}, timeout=timeout)
            finally:
                waiter.cancel()

    def done(self, key: Key) -> None:
        """Record that *key* was processed successfully."""
        self._failures.pop(key, None)
        self._processing.discard(key)
        self._changed.set()

    def retry(self, key: Key) -> None:
        """Record that processing *key* failed, and make it due after a delay that doubles with each failure."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        self._processing.discard(key)
        delay = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** (count - 1))
        self.add(key, delay * random.uniform(0.8, 1.2))
        self._changed.set()
