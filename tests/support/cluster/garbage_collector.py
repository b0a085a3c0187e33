"""A small garbage collector for an API server without one: it deletes objects whose RolloutJob no longer exists."""

from __future__ import annotations

from rollout_api.manifest.rollout_job import GROUP, KIND, PLURAL, VERSION
from tests.support.cluster.controller import Controller

_COLLECTIONS = (
    "/api/v1/pods",
    "/api/v1/configmaps",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/networking.k8s.io/v1/networkpolicies",
    "/apis/policy/v1/poddisruptionbudgets",
)


class GarbageCollector(Controller):
    """Deletes the dependents of deleted RolloutJobs."""

    period_s = 0.5

    def reconcile(self) -> None:
        """Delete the objects whose jobs do not exist any more."""
        dependents = [(path, item) for path in _COLLECTIONS for item in self.api.list_objects(path)]
        # Listed after the dependents, so that the owner of each one that is not listed here was deleted.
        existing = {job["metadata"]["uid"] for job in self.api.list_objects(f"/apis/{GROUP}/{VERSION}/{PLURAL}")}
        for path, item in dependents:
            metadata = item["metadata"]
            owners = [owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner["kind"] == KIND]
            if owners and not existing.intersection(owners) and not metadata.get("deletionTimestamp"):
                root, plural = path.rsplit("/", 1)
                self.api.request("DELETE", f"{root}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}")
