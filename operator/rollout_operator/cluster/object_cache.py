"""The last known state of jobs, of the objects that they own, of runtimes and of namespaces, as watches deliver it."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Any

from rollout_api.manifest.rollout_job import GROUP, KIND
from rollout_operator.cluster.kubernetes_api import ResourceKind
from rollout_operator.cluster.work_queue import WorkQueue
from rollout_operator.objects.observed import Manifest, PodView
from rollout_operator.objects.runtimes import RuntimeKey

JobKey = tuple[str, str]
"""Namespace and name of a job."""

_DROPPED_METADATA = ("managedFields", "selfLink")
_MAX_TOMBSTONES = 10_000


def job_key(body: Manifest) -> JobKey:
    """Return the key of a RolloutJob."""
    return body["metadata"]["namespace"], body["metadata"]["name"]


def owner_of(body: Manifest) -> tuple[JobKey, str] | None:
    """Return key and uid of the job that owns an object, or None if no job owns it."""
    metadata = body["metadata"]
    for owner in metadata.get("ownerReferences", ()):
        if owner.get("controller") and owner["kind"] == KIND and owner["apiVersion"].startswith(f"{GROUP}/"):
            return (metadata["namespace"], owner["name"]), owner["uid"]
    return None


class ObjectCache:
    """Jobs, pods and other objects by job.

    To save memory with thousands of jobs, pods are reduced to a :class:`PodView`, and all other objects are kept as
    JSON text, which takes a fifth of the memory of dicts.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobKey, bytes] = {}
        self._runtimes: dict[JobKey, RuntimeKey] = {}
        """The runtimes that jobs name."""
        self._pods: defaultdict[JobKey, dict[str, tuple[str, PodView]]] = defaultdict(dict)
        """Job → name of the pod → uid of the owning job, and the pod."""
        self._objects: defaultdict[JobKey, dict[tuple[str, str], tuple[str, bytes]]] = defaultdict(dict)
        """Job → kind and name of the object → uid of the owning job, and the object."""
        self._versions: dict[str, int] = {}
        """Uid → resource version of the cached object."""
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        """Uids of recently deleted objects. The response to a write may arrive after the deletion of its object."""

    def statuses(self, namespaces: Container[str] | None = None) -> dict[JobKey, Mapping[str, Any]]:
        """Return the ``status`` of the jobs in some namespaces, or of all jobs. That of a new job is empty."""
        return {
            key: json.loads(data).get("status") or {}
            for key, data in self._jobs.items()
            if namespaces is None or key[0] in namespaces
        }

    def update_job(self, body: Manifest) -> JobKey:
        """Add or replace a job."""
        key = job_key(body)
        self._jobs[key] = _serialize(body)
        if (runtime := RuntimeKey.of_job(body)) is not None:
            self._runtimes[key] = runtime
        else:
            self._runtimes.pop(key, None)
        return key

    def remove_job(self, key: JobKey) -> None:
        """Remove a job."""
        self._jobs.pop(key, None)
        self._runtimes.pop(key, None)

    def jobs_with_runtime(self, runtime: RuntimeKey) -> list[JobKey]:
        """Return the keys of the jobs that name a runtime."""
        return [job for job, named in self._runtimes.items() if named == runtime]

    def job_keys(self) -> set[JobKey]:
        """Return the keys of all jobs."""
        return set(self._jobs)

    def update(self, body: Manifest, kind: str) -> JobKey | None:
        """Add or replace an object.

        Returns:
            The job that owns the object; None if no job owns it, or if nothing relevant has changed.
        """
        if (owner := owner_of(body)) is None:
            return None
        key, uid = owner
        name = body["metadata"]["name"]
        self._versions[body["metadata"]["uid"]] = _resource_version(body)
        if kind == "Pod":
            view = (uid, PodView.from_pod(body))
            if self._pods[key].get(name) == view:
                return None
            self._pods[key][name] = view
        else:
            entry = (uid, _serialize(body))
            if self._objects[key].get((kind, name)) == entry:
                return None
            self._objects[key][kind, name] = entry
        return key

    def remove(self, body: Manifest, kind: str) -> JobKey | None:
        """Remove an object, and return the job that owned it. A newer object of the same name is kept."""
        if (owner := owner_of(body)) is None:
            return None
        key, name, uid = owner[0], body["metadata"]["name"], body["metadata"]["uid"]
        self._mark_deleted(uid)
        if kind == "Pod":
            if name in self._pods[key] and self._pods[key][name][1].uid == uid:
                del self._pods[key][name]
            if not self._pods[key]:
                del self._pods[key]
        else:
            entry = self._objects[key].get((kind, name))
            if entry is not None and json.loads(entry[1])["metadata"]["uid"] == uid:
                del self._objects[key][kind, name]
            if not self._objects[key]:
                del self._objects[key]
        return key

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all objects of a kind in a namespace, or in all namespaces if it is empty."""
        keys = {key for key in (*self._pods, *self._objects) if not namespace or key[0] == namespace}
        if kind == "Pod":
            return {pod.uid for key in keys for _, pod in self._pods.get(key, {}).values()}
        return {
            json.loads(data)["metadata"]["uid"]
            for key in keys
            for (object_kind, _), (_, data) in self._objects.get(key, {}).items()
            if object_kind == kind
        }

    def remove_uid(self, kind: str, uid: str) -> JobKey | None:
        """Remove the object with this uid, and return the job that owned it."""
        self._mark_deleted(uid)
        for key, pods in self._pods.items():
            for name, (_, pod) in pods.items():
                if kind == "Pod" and pod.uid == uid:
                    del pods[name]
                    return key
        for key, objects in self._objects.items():
            for (object_kind, name), (_, data) in objects.items():
                if object_kind == kind and json.loads(data)["metadata"]["uid"] == uid:
                    del objects[object_kind, name]
                    return key
        return None

    def _mark_deleted(self, uid: str) -> None:
        self._versions.pop(uid, None)
        self._tombstones[uid] = None
        if len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def update_from_response(self, body: Manifest, kind: str) -> None:
        """Update an object from the response to a write, unless the watch has already delivered a later version."""
        uid = body["metadata"]["uid"]
        if uid not in self._tombstones and _resource_version(body) > self._versions.get(uid, -1):
            self.update(body, kind)

    def update_job_from_response(self, body: Manifest) -> None:
        """Update a job from the response to a write, unless the watch has already delivered a later version."""
        key = job_key(body)
        data = self._jobs.get(key)
        if data is not None and _resource_version(json.loads(data)) < _resource_version(body):
            self._jobs[key] = _serialize(body)

    def job(self, key: JobKey) -> dict[str, Any] | None:
        """Return a job, or None if there is none."""
        data = self._jobs.get(key)
        job: dict[str, Any] | None = None if data is None else json.loads(data)
        return job

    def pods(self, key: JobKey, uid: str) -> tuple[PodView, ...]:
        """Return the pods of the job with this uid, and none of an earlier job of the same name."""
        return tuple(pod for owner_uid, pod in self._pods.get(key, {}).values() if owner_uid == uid)

    def objects(self, key: JobKey, uid: str) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the other objects of the job with this uid, by kind and name."""
        return {
            identity: json.loads(data)
            for identity, (owner_uid, data) in self._objects.get(key, {}).items()
            if owner_uid == uid
        }


def _resource_version(body: Manifest) -> int:
    """Return the resource version as a number.

    Resource versions of one resource can be compared: Kubernetes guarantees it since 1.35, and etcd always ensured it.
    """
    text = body["metadata"].get("resourceVersion", "")
    return int(text) if text.isdigit() else 0


def _serialize(body: Manifest) -> bytes:
    metadata = {name: value for name, value in body["metadata"].items() if name not in _DROPPED_METADATA}
    return json.dumps({**body, "metadata": metadata}, separators=(",", ":"), sort_keys=True).encode()


class RuntimeCache:
    """The runtimes; there are few. A change causes the jobs that name the runtime to be reconciled."""

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


NAMESPACES = ResourceKind("Namespace", "", "v1", "namespaces")


class SelectedNamespaces:
    """The names of the namespaces that an informer with a label selector finds."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        """Begin without namespaces.

        Args:
            on_change: called with the name of a namespace that was added or removed.
        """
        self._on_change = on_change
        self._names: dict[str, str] = {}
        """By uid."""
        self._counts: Counter[object] = Counter()
        """Name → number of its uids, of which a namespace that was created again has two for a moment."""

    def __contains__(self, name: object) -> bool:
        """Return whether a namespace is selected."""
        return self._counts[name] > 0

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all selected namespaces."""
        return set(self._names)

    def update(self, body: Manifest, kind: str) -> None:
        """Add a namespace."""
        name, uid = body["metadata"]["name"], body["metadata"]["uid"]
        if uid not in self._names:
            self._names[uid] = name
            self._counts[name] += 1
            self._on_change(name)

    def remove(self, body: Manifest, kind: str) -> None:
        """Remove a namespace that was deleted or has lost the labels."""
        self.remove_uid(kind, body["metadata"]["uid"])

    def remove_uid(self, kind: str, uid: str) -> None:
        """Remove the namespace with this uid."""
        if (name := self._names.pop(uid, None)) is not None:
            self._counts[name] -= 1
            self._on_change(name)
