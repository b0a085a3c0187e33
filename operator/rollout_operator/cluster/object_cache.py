"""The last known state of jobs, of the objects that they own, of runtimes and of namespaces, as watches deliver it."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from rollout_api.manifest.rollout_job import GROUP, KIND
from rollout_operator.cluster.kubernetes_api import ResourceKind
from rollout_operator.objects.observed import Manifest, PodView
from rollout_operator.objects.runtimes import RuntimeKey

JobKey = tuple[str, str]
"""Namespace and name of a job."""

_DROPPED_METADATA = ("managedFields", "selfLink")
_MAX_TOMBSTONES = 10_000
_POD = "Pod"


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


class _Entry(NamedTuple):
    """An object of a job."""

    owner: str
    """Uid of the owning job."""
    uid: str
    content: PodView | bytes


class ObjectCache:
    """Jobs, pods and other objects by job.

    To save memory with thousands of jobs, pods are reduced to a :class:`PodView`, and all other objects are kept as
    JSON text, which takes a fifth of the memory of dicts.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobKey, bytes] = {}
        self._runtimes: dict[JobKey, RuntimeKey] = {}
        """The runtimes that jobs name."""
        self._objects: defaultdict[JobKey, dict[tuple[str, str], _Entry]] = defaultdict(dict)
        """Job → kind and name → the object."""
        self._places: dict[str, tuple[JobKey, tuple[str, str]]] = {}
        """Uid of an object → its place in ``_objects``, which may have a newer object of the same name by now."""
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
        key, owner_uid = owner
        uid, place = body["metadata"]["uid"], (kind, body["metadata"]["name"])
        self._versions[uid] = _resource_version(body)
        entry = _Entry(owner_uid, uid, PodView.from_pod(body) if kind == _POD else _serialize(body))
        if self._objects[key].get(place) == entry:
            return None
        self._objects[key][place] = entry
        self._places[uid] = key, place
        return key

    def remove(self, uid: str) -> JobKey | None:
        """Remove the object with this uid, and return the job that owned it. A newer one of the same name is kept."""
        self._versions.pop(uid, None)
        self._tombstones[uid] = None
        if len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        if uid not in self._places:
            return None
        key, place = self._places.pop(uid)
        if place in self._objects[key] and self._objects[key][place].uid == uid:
            del self._objects[key][place]
        if not self._objects[key]:
            del self._objects[key]
        return key

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all objects of a kind in a namespace, or in all namespaces if it is empty."""
        return {uid for uid, (key, (known, _)) in self._places.items() if known == kind and namespace in ("", key[0])}

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
        entries = self._objects.get(key, {}).values()
        return tuple(one.content for one in entries if one.owner == uid and isinstance(one.content, PodView))

    def objects(self, key: JobKey, uid: str) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the other objects of the job with this uid, by kind and name."""
        return {
            place: json.loads(entry.content)
            for place, entry in self._objects.get(key, {}).items()
            if entry.owner == uid and isinstance(entry.content, bytes)
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

    def __init__(self, jobs: ObjectCache, on_change: Callable[[JobKey], None]) -> None:
        self._jobs, self._on_change = jobs, on_change
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

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all runtimes of a kind in a namespace, or in all namespaces if it is empty."""
        return {
            runtime["metadata"]["uid"]
            for key, runtime in self._runtimes.items()
            if key.kind == kind and namespace in ("", key.namespace)
        }

    def remove(self, uid: str) -> None:
        """Remove the runtime with this uid. A newer one of the same name is kept."""
        for key, runtime in list(self._runtimes.items()):
            if runtime["metadata"]["uid"] == uid:
                del self._runtimes[key]
                self._reconcile_jobs(key)

    def _reconcile_jobs(self, key: RuntimeKey) -> None:
        for job in self._jobs.jobs_with_runtime(key):
            self._on_change(job)


NAMESPACES = ResourceKind("Namespace", "", "v1", "namespaces")


class SelectedNamespaces:
    """The names of the namespaces that an informer with a label selector finds."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        """Begin without namespaces.

        *on_change* is called with the name of a namespace that was added or removed.
        """
        self._on_change = on_change
        self._uids: dict[str, str] = {}
        """By name; a namespace that was created again has its new uid."""

    def __contains__(self, name: object) -> bool:
        """Return whether a namespace is selected."""
        return name in self._uids

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all selected namespaces."""
        return set(self._uids.values())

    def update(self, body: Manifest, kind: str) -> None:
        """Add a namespace."""
        name, uid = body["metadata"]["name"], body["metadata"]["uid"]
        if self._uids.get(name) != uid:
            self._uids[name] = uid
            self._on_change(name)

    def remove(self, uid: str) -> None:
        """Remove the namespace with this uid, which was deleted or has lost the labels."""
        for name in [name for name, known in self._uids.items() if known == uid]:
            del self._uids[name]
            self._on_change(name)
