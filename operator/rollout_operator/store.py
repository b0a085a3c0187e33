"""What the watches have brought: the last known state of all jobs and of what they own."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from typing import Any

from rollout_api.manifest.rollout_job import GROUP, KIND
from rollout_operator.observed import Manifest, PodView

JobKey = tuple[str, str]
"""Namespace and name."""

_NOT_KEPT = ("managedFields", "selfLink")
_REMEMBERED = 10_000


def owner_of(body: Manifest) -> tuple[JobKey, str] | None:
    """Key and uid of the job that owns an object."""
    metadata = body["metadata"]
    for owner in metadata.get("ownerReferences", ()):
        if owner.get("controller") and owner["kind"] == KIND and owner["apiVersion"].startswith(f"{GROUP}/"):
            return (metadata["namespace"], owner["name"]), owner["uid"]
    return None


class Store:
    """Objects are kept as JSON, which takes a fifth of what dicts do: thousands of jobs fit into little memory."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, bytes] = {}
        self._pods: defaultdict[JobKey, dict[str, tuple[str, PodView]]] = defaultdict(dict)
        self._objects: defaultdict[JobKey, dict[tuple[str, str], tuple[str, bytes]]] = defaultdict(dict)
        self._versions: dict[str, int] = {}
        """Uid → the version that is kept here."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Uids of what was deleted last: an answer to a write may come after the news of that."""

    def _bury(self, uid: str) -> None:
        self._versions.pop(uid, None)
        self._gone[uid] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def keys(self) -> list[JobKey]:
        """Of all jobs."""
        return list(self._jobs)

    def states(self) -> list[str]:
        """Of all jobs, as their status has it."""
        return [(json.loads(data).get("status") or {}).get("state", "Pending") for data in self._jobs.values()]

    def put_job(self, body: Manifest) -> JobKey:
        """A job is so now."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        self._jobs[key] = _packed(body)
        return key

    def drop_job(self, body: Manifest) -> JobKey:
        """A job is gone."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        self._jobs.pop(key, None)
        return key

    def put(self, body: Manifest, kind: str) -> JobKey | None:
        """An object is so now; the job that owns it, if that is news to it."""
        if (owner := owner_of(body)) is None:
            return None
        key, uid = owner
        name = body["metadata"]["name"]
        self._versions[body["metadata"]["uid"]] = _version(body)
        if kind == "Pod":
            view = (uid, PodView.of(body))
            if self._pods[key].get(name) == view:
                return None
            self._pods[key][name] = view
        else:
            packed = (uid, _packed(body))
            if self._objects[key].get((kind, name)) == packed:
                return None
            self._objects[key][kind, name] = packed
        return key

    def drop(self, body: Manifest, kind: str) -> JobKey | None:
        """An object is gone; the job that owned it."""
        if (owner := owner_of(body)) is None:
            return None
        key, name, uid = owner[0], body["metadata"]["name"], body["metadata"]["uid"]
        self._bury(uid)
        if kind == "Pod":
            # not the next one by this name, which may be known already
            if name in self._pods[key] and self._pods[key][name][1].uid == uid:
                del self._pods[key][name]
            if not self._pods[key]:
                del self._pods[key]
        else:
            there = self._objects[key].get((kind, name))
            if there is not None and json.loads(there[1])["metadata"]["uid"] == uid:
                del self._objects[key][kind, name]
            if not self._objects[key]:
                del self._objects[key]
        return key

    def known(self, kind: str, namespace: str) -> set[str]:
        """Uids of all objects of a kind in a namespace, or (empty) in all."""
        here = {key for key in (*self._pods, *self._objects) if not namespace or key[0] == namespace}
        if kind == "Pod":
            return {pod.uid for key in here for _, pod in self._pods.get(key, {}).values()}
        return {
            json.loads(data)["metadata"]["uid"]
            for key in here
            for (what, _), (_, data) in self._objects.get(key, {}).items()
            if what == kind
        }

    def drop_uid(self, kind: str, uid: str) -> JobKey | None:
        """An object is gone; the job that owned it."""
        self._bury(uid)
        for key, pods in self._pods.items():
            for name, (_, pod) in pods.items():
                if kind == "Pod" and pod.uid == uid:
                    del pods[name]
                    return key
        for key, objects in self._objects.items():
            for (what, name), (_, data) in objects.items():
                if what == kind and json.loads(data)["metadata"]["uid"] == uid:
                    del objects[what, name]
                    return key
        return None

    def answered(self, body: Manifest, kind: str) -> None:
        """Take an object from the answer to a write, unless the watch was quicker and has brought a later state."""
        uid = body["metadata"]["uid"]
        if uid not in self._gone and _version(body) > self._versions.get(uid, -1):
            self.put(body, kind)

    def answered_job(self, body: Manifest) -> None:
        """As :meth:`answered`, for a job."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        data = self._jobs.get(key)
        if data is not None and _version(json.loads(data)) < _version(body):
            self._jobs[key] = _packed(body)

    def job(self, key: JobKey) -> dict[str, Any] | None:
        """A job; None if there is none."""
        data = self._jobs.get(key)
        found: dict[str, Any] | None = None if data is None else json.loads(data)
        return found

    def pods(self, key: JobKey, uid: str) -> tuple[PodView, ...]:
        """Pods that the job with this uid owns: those of an earlier one by its name are not its own."""
        return tuple(pod for owner, pod in self._pods.get(key, {}).values() if owner == uid)

    def objects(self, key: JobKey, uid: str) -> dict[tuple[str, str], dict[str, Any]]:
        """What else that job owns, by kind and name."""
        return {about: json.loads(data) for about, (owner, data) in self._objects.get(key, {}).items() if owner == uid}


def _version(body: Manifest) -> int:
    """Resource versions of one kind grow; Kubernetes promises it since 1.35, and etcd has always done so."""
    text = body["metadata"].get("resourceVersion", "")
    return int(text) if text.isdigit() else 0


def _packed(body: Manifest) -> bytes:
    metadata = {name: value for name, value in body["metadata"].items() if name not in _NOT_KEPT}
    return json.dumps({**body, "metadata": metadata}, separators=(",", ":"), sort_keys=True).encode()
