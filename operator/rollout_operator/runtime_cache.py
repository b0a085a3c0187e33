"""The last known runtimes, as the watches deliver them."""

from __future__ import annotations

from typing import Any

from rollout_operator.object_cache import JobKey, ObjectCache
from rollout_operator.observed import Manifest
from rollout_operator.runtimes import RuntimeKey
from rollout_operator.work_queue import WorkQueue


class RuntimeCache:
    """The runtimes, of which there are few. A change causes the jobs that name the runtime to be reconciled."""

    def __init__(self, jobs: ObjectCache, queue: WorkQueue[JobKey]) -> None:
        self._jobs, self._queue = jobs, queue
        self._runtimes: dict[RuntimeKey, Manifest] = {}

    def settings(self, key: RuntimeKey) -> dict[str, Any] | None:
        """Return the ``spec`` of a runtime, or None if there is no such runtime."""
        runtime = self._runtimes.get(key)
        return None if runtime is None else runtime.get("spec") or {}

    def update(self, body: Manifest, kind: str) -> None:
        """Add or replace a runtime."""
        key = RuntimeKey.of_runtime(body, kind)
        is_changed = self.settings(key) != (body.get("spec") or {})
        self._runtimes[key] = body
        if is_changed:
            self._reconcile_jobs(key)

    def remove(self, body: Manifest, kind: str) -> None:
        """Remove a runtime. A newer one of the same name is kept."""
        self.remove_uid(kind, body["metadata"]["uid"])

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all runtimes of a kind in a namespace, or in all namespaces if it is empty."""
        return {
            runtime["metadata"]["uid"]
            for key, runtime in self._runtimes.items()
            if key.kind == kind and namespace in ("", key.namespace)
        }

    def remove_uid(self, kind: str, uid: str) -> None:
        """Remove the runtime with this uid."""
        for key, runtime in list(self._runtimes.items()):
            if key.kind == kind and runtime["metadata"]["uid"] == uid:
                del self._runtimes[key]
                self._reconcile_jobs(key)

    def _reconcile_jobs(self, key: RuntimeKey) -> None:
        for job in self._jobs.jobs_with_runtime(key):
            self._queue.add(job)
