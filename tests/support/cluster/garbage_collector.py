"""A small garbage collector for an API server without one: it deletes objects whose RolloutJob no longer exists."""

from __future__ import annotations

import threading
import time

from kubernetes import client

from rollout_api.manifest.rollout_job import GROUP, KIND, PLURAL, VERSION
from tests.support.cluster.raw_api import RawApi

_PERIOD_S = 0.5
_COLLECTIONS = (
    "/api/v1/pods",
    "/api/v1/configmaps",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/networking.k8s.io/v1/networkpolicies",
    "/apis/policy/v1/poddisruptionbudgets",
)


class GarbageCollector:
    """Deletes the dependents of deleted RolloutJobs."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = RawApi(api)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start to collect in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            try:
                self._collect()
            except Exception:  # A test may have killed the API server.
                time.sleep(0.2)

    def _collect(self) -> None:
        dependents = [(path, item) for path in _COLLECTIONS for item in self._api.list_objects(path)]
        # Listed after the dependents, so that the owner of each one that is not listed here was deleted.
        existing = {job["metadata"]["uid"] for job in self._api.list_objects(f"/apis/{GROUP}/{VERSION}/{PLURAL}")}
        for path, item in dependents:
            metadata = item["metadata"]
            owners = [owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner["kind"] == KIND]
            if owners and not existing.intersection(owners) and not metadata.get("deletionTimestamp"):
                root, plural = path.rsplit("/", 1)
                self._api.request("DELETE", f"{root}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}")
