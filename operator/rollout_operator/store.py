"""What the watches have brought: the last known state of all jobs and of what they own."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from rollout_api.job import GROUP, KIND
from rollout_operator.observed import Manifest, PodView

JobKey = tuple[str, str]
"""Namespace and name."""

_NOT_KEPT = ("managedFields", "selfLink")


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
        """An object is so now; the job that owns it."""
        if (owner := owner_of(body)) is None:
            return None
        key, uid = owner
        name = body["metadata"]["name"]
        if kind == "Pod":
            self._pods[key][name] = (uid, PodView.of(body))
        else:
            self._objects[key][kind, name] = (uid, _packed({**body, "kind": kind}))
        return key

    def drop(self, body: Manifest, kind: str) -> JobKey | None:
        """An object is gone; the job that owned it."""
        if (owner := owner_of(body)) is None:
            return None
        key, name, uid = owner[0], body["metadata"]["name"], body["metadata"]["uid"]
        if kind == "Pod":
            # not the next one by this name, which may be known already
            if name in self._pods[key] and self._pods[key][name][1].uid == uid:
                del self._pods[key][name]
            if not self._pods[key]:
                del self._pods[key]
        else:
            self._objects[key].pop((kind, name), None)
            if not self._objects[key]:
                del self._objects[key]
        return key

    def known(self, kind: str) -> dict[str, tuple[str, str]]:
        """Uids of all objects of a kind, with their namespaces and names."""
        if kind == "Pod":
            return {pod.uid: (key[0], name) for key, pods in self._pods.items() for name, (_, pod) in pods.items()}
        return {
            json.loads(data)["metadata"]["uid"]: (key[0], name)
            for key, objects in self._objects.items()
            for (what, name), (_, data) in objects.items()
            if what == kind
        }

    def drop_uid(self, kind: str, uid: str) -> JobKey | None:
        """An object is gone; the job that owned it."""
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


def _packed(body: Manifest) -> bytes:
    metadata = {name: value for name, value in body["metadata"].items() if name not in _NOT_KEPT}
    return json.dumps({**body, "metadata": metadata}, separators=(",", ":")).encode()
