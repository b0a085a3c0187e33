"""A small garbage collector for an API server without one: it deletes the dependents of RolloutJobs."""

from __future__ import annotations

from typing import Any

from rollout_operator.objects import names

from rollout_api.manifest.rollout_job import GROUP, KIND, PLURAL, VERSION
from tests.support.cluster.controller import Controller

_COLLECTIONS = (
    "/api/v1/pods",
    "/api/v1/configmaps",
    "/api/v1/secrets",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/networking.k8s.io/v1/networkpolicies",
    "/apis/policy/v1/poddisruptionbudgets",
)


class GarbageCollector(Controller):
    """Deletes the dependents of deleted RolloutJobs, and those of RolloutJobs that are deleted in the foreground."""

    period_s = 0.5

    def reconcile(self) -> None:
        """Delete what has to be deleted, and let go of the jobs in the foreground whose dependents are gone."""
        # Those in the foreground are listed before their dependents, so that one without dependents has had none.
        foreground = {
            job["metadata"]["uid"]: job
            for job in self._jobs()
            if names.FOREGROUND_FINALIZER in job["metadata"].get("finalizers", ())
        }
        dependents = [(path, item) for path in _COLLECTIONS for item in self.api.list_objects(path)]
        # Listed after the dependents, so that the owner of each one that is not listed here was deleted.
        existing = {job["metadata"]["uid"] for job in self._jobs()}
        blocked = set()
        for path, item in dependents:
            metadata = item["metadata"]
            owners = {owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner["kind"] == KIND}
            blocked |= owners
            is_unowned = owners and not owners & (existing - foreground.keys())
            if is_unowned and not metadata.get("deletionTimestamp"):
                root, plural = path.rsplit("/", 1)
                self.api.request("DELETE", f"{root}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}")
        for uid, job in foreground.items():
            if uid not in blocked:
                self._let_go(job)

    def _jobs(self) -> list[dict[str, Any]]:
        return self.api.list_objects(f"/apis/{GROUP}/{VERSION}/{PLURAL}")

    def _let_go(self, job: dict[str, Any]) -> None:
        metadata = job["metadata"]
        finalizers = [name for name in metadata["finalizers"] if name != names.FOREGROUND_FINALIZER]
        patch = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{metadata['namespace']}/{PLURAL}/{metadata['name']}"
        self.api.patch(path, patch)
