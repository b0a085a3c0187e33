"""A small client of the Kubernetes API server that works on plain dicts."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from rollout_api.manifest.pod_spec import CLUSTER_RUNTIME_KIND, RUNTIME_KIND, RUNTIME_PLURALS
from rollout_api.manifest.rollout_job import API_VERSION, GROUP, KIND, PLURAL, VERSION
from rollout_operator.objects import names
from rollout_operator.objects.observed import Manifest

_TIMEOUT_S = 30.0
_PAGE_SIZE = 500
_WATCH_TIMEOUT_S = 300
_WATCH_INACTIVITY_S = 70.0
"""Seconds after which a watch that delivers nothing is continued over another connection.

API servers send a bookmark about every 60 s and keep events for at least 75 s; kopf uses the same value.
"""
_MAX_CONNECTIONS = 64
_FORBIDDEN = 403
OWN_OBJECTS = f"{names.MANAGED_BY}={names.APP}"
"""Label selector of the objects that the operator creates."""
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_JSON_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"


@dataclass(frozen=True)
class ResourceKind:
    """One kind of object."""

    kind: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """The value of ``apiVersion`` in manifests of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version


ROLLOUT_JOBS = ResourceKind(KIND, GROUP, VERSION, PLURAL)
CLUSTER_RUNTIMES, RUNTIMES = (
    ResourceKind(kind, GROUP, VERSION, RUNTIME_PLURALS[kind]) for kind in (CLUSTER_RUNTIME_KIND, RUNTIME_KIND)
)


def owned_kinds(disruption_budget_api: str | None, gang_api: str | None = None) -> list[ResourceKind]:
    """Return the kinds that jobs own on a cluster with these API versions of optional kinds, if it has them."""
    kinds = [
        ResourceKind("Pod", "", "v1", "pods"),
        ResourceKind("ServiceAccount", "", "v1", "serviceaccounts"),
        ResourceKind("ConfigMap", "", "v1", "configmaps"),
        ResourceKind("Service", "", "v1", "services"),
        ResourceKind("Deployment", "apps", "v1", "deployments"),
        ResourceKind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    ]
    if disruption_budget_api is not None:
        group, _, version = disruption_budget_api.partition("/")
        kinds.append(ResourceKind("PodDisruptionBudget", group, version, "poddisruptionbudgets"))
    if gang_api is not None:
        group, _, version = gang_api.partition("/")
        kinds.append(ResourceKind(names.GANG_KIND, group, version, names.GANG_PLURAL))
    return kinds


_PLURALS = {
    KIND: PLURAL,
    "Event": "events",
    "Lease": "leases",
    "Secret": "secrets",
    names.WORKLOAD_KIND: names.WORKLOAD_PLURAL,
    **{kind.kind: kind.plural for kind in owned_kinds("policy/v1", names.COSCHEDULING_API)},
}


class ApiError(Exception):
    """An error response of the API server, or its unavailability (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message
        super().__init__(f"{status} {reason}: {message}")

    @property
    def not_found(self) -> bool:
        """Whether the object does not exist."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """Whether the object exists already, or has changed since it was read."""
        return self.status == 409

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later without any other change."""
        return self.status in (0, 429) or self.status >= 500


class KubernetesApi:
    """A connection to the API server. Every failed request raises :class:`ApiError`."""

    def __init__(self, client: ApiClient, *, watch_inactivity_s: float = _WATCH_INACTIVITY_S) -> None:
        self._client, self._watch_inactivity_s = client, watch_inactivity_s
        self.request_counts: Counter[tuple[str, str]] = Counter()
        """Number of requests by verb and kind, for the metrics."""

    @classmethod
    async def connect(cls) -> Self:
        """Connect with KUBECONFIG, else with the pod's service account, else with ~/.kube/config."""
        configuration = Configuration()
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(client_configuration=configuration)
        configuration.connection_pool_maxsize = _MAX_CONNECTIONS
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def request(self, verb: str, path: str, body: Any = None, **settings: Any) -> dict[str, Any]:
        """Send a request and return the parsed response; the settings are those of :meth:`_send`.

        Raises:
            ApiError: if the server responds with an error; with status 0 if it does not respond.
        """
        return _parse(await self._send(verb, path, body, **settings))

    async def _send(
        self,
        verb: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = _JSON,
        accept: str = _JSON,
        query: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Send a request and return the body of the response; the errors are those of :meth:`request`."""
        pairs = list((query or {}).items())
        headers = {"Accept": accept, "Content-Type": content_type}
        try:
            prepared = await self._client.param_serialize(
                verb, path, query_params=pairs, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = await self._client.call_api(*prepared, _request_timeout=_TIMEOUT_S)
            data: bytes = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(0, "Unreachable", f"{type(error).__name__}: {error}") from error
        if not 200 <= response.status < 300:
            error_fields = _parse(data)
            reason = error_fields.get("reason") or str(response.reason)
            raise ApiError(response.status, reason, error_fields.get("message", ""))
        return data

    async def create(self, manifest: Manifest) -> dict[str, Any]:
        """Create an object. ``ApiError.conflict`` means that an object of this name exists.

        Unknown fields of pods and Deployments, which users can set in templates, are errors since Kubernetes 1.25.
        """
        self._count("create", manifest["kind"])
        query = {"fieldManager": names.FIELD_MANAGER}
        if manifest["kind"] in ("Pod", "Deployment"):
            query["fieldValidation"] = "Strict"
        return await self.request("POST", _path(manifest), manifest, query=query)

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> dict[str, Any]:
        """Set these fields of an object, and remove fields that an earlier apply set and this one lacks.

        This is server-side apply with the operator's field manager.
        """
        self._count("apply", manifest["kind"] + (f"/{subresource}" if subresource else ""))
        path = _path(manifest, manifest["metadata"]["name"], subresource)
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self.request("PATCH", path, manifest, content_type=_APPLY_PATCH, query=query)

    async def replace(self, manifest: Manifest) -> dict[str, Any]:
        """Replace an object. ``ApiError.conflict`` means that it has changed since it was read."""
        self._count("update", manifest["kind"])
        return await self.request("PUT", _path(manifest, manifest["metadata"]["name"]), manifest)

    async def patch(self, manifest: Manifest, *, subresource: str = "") -> dict[str, Any]:
        """Patch an object with a JSON merge patch."""
        self._count("patch", manifest["kind"] + (f"/{subresource}" if subresource else ""))
        path = _path(manifest, manifest["metadata"]["name"], subresource)
        return await self.request("PATCH", path, manifest, content_type=_JSON_MERGE_PATCH)

    async def get(self, reference: Manifest) -> dict[str, Any]:
        """Return the object with the kind, namespace and name of *reference*."""
        self._count("get", reference["kind"])
        return await self.request("GET", _path(reference, reference["metadata"]["name"]))

    async def metadata(self, reference: Manifest) -> dict[str, Any] | None:
        """Return the metadata of an object as :meth:`get` does, without its content; None if it does not exist."""
        self._count("get", reference["kind"])
        return await self._find(_path(reference, reference["metadata"]["name"]), accept=_METADATA)

    async def _find(self, path: str, **settings: Any) -> dict[str, Any] | None:
        """Return what is at a path; None if there is nothing. The settings are those of :meth:`request`."""
        try:
            return await self.request("GET", path, **settings)
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def log(
        self, namespace: str, pod: str, container: str, *, previous: bool, num_lines: int, max_bytes: int
    ) -> str:
        """Return the last lines of the log of a container, each with its time.

        *previous* asks for the log of the container that ran before it was restarted. What exceeds *max_bytes* is
        missing at the end.
        """
        self._count("get", "Pod/log")
        query = {
            "container": container,
            "previous": str(previous).lower(),
            "timestamps": "true",
            "tailLines": num_lines,
            "limitBytes": max_bytes,
        }
        path = _path(reference("Pod", namespace, pod), pod, "log")
        return (await self._send("GET", path, accept="*/*", query=query)).decode(errors="replace")

    async def events(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """Return the Events on the objects of this name."""
        self._count("list", "Event")
        query = {"fieldSelector": f"involvedObject.name={name}", "limit": _PAGE_SIZE}
        found = await self.request("GET", f"/api/v1/namespaces/{namespace}/events", query=query)
        events: list[dict[str, Any]] = found["items"]
        return events

    async def delete(self, reference: Manifest, *, uid: str | None = None, grace_period: int | None = None) -> None:
        """Delete an object, only if it has this uid if one is given. It is no error if the object no longer exists."""
        self._count("delete", reference["kind"])
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_period is not None:
            options["gracePeriodSeconds"] = grace_period
        try:
            await self.request("DELETE", _path(reference, reference["metadata"]["name"]), options)
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise

    async def list_pages(
        self, kind: ResourceKind, namespace: str, *, selector: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the pages of the list of a kind in one namespace, or in all namespaces if *namespace* is empty.

        Without a label *selector*, all objects are listed.

        Raises:
            ApiError: a page cannot be read.
        """
        query: dict[str, Any] = {"limit": _PAGE_SIZE, **({"labelSelector": selector} if selector else {})}
        while True:
            self._count("list", kind.kind)
            page = await self.request("GET", _collection(kind, namespace), query=query)
            yield page
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return

    async def watch(
        self, kind: ResourceKind, namespace: str, version: str, *, selector: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield changes to the objects of a kind since a version, until the API server ends the stream or falls silent.

        Without a *namespace*, all of them are watched; without a label *selector*, all objects.

        Raises:
            ApiError: if the watch cannot be started, or breaks.
        """
        self._count("watch", kind.kind)
        query = [
            *([("labelSelector", selector)] if selector else []),
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", random.randint(_WATCH_TIMEOUT_S, 2 * _WATCH_TIMEOUT_S)),
        ]
        try:
            prepared = await self._client.param_serialize(
                "GET",
                _collection(kind, namespace),
                query_params=query,
                header_params={"Accept": _JSON},
                auth_settings=["BearerToken"],
            )
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=self._watch_inactivity_s)
            response = await self._client.call_api(*prepared, _request_timeout=timeout)
            if response.status != 200:
                data = await response.read()
                raise ApiError(response.status, str(response.reason), data[:300].decode(errors="replace"))
            try:
                rest = b""
                async for chunk in response.response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield json.loads(line)
            except aiohttp.SocketTimeoutError:
                # The connection may be dead, or nothing has changed: there are no bookmarks without any earlier change.
                return
            finally:
                response.response.close()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ApiError(0, "Unreachable", f"{type(error).__name__}: {error}") from error

    async def job_keys(self, namespace: str) -> set[tuple[str, str]]:
        """Return namespace and name of all RolloutJobs in a namespace, or in all namespaces if it is empty.

        The list contains the jobs' metadata only.
        """
        self._count("list", KIND)
        found = await self.request("GET", _collection(ROLLOUT_JOBS, namespace), accept=_METADATA_LIST)
        # If there are none, a list of metadata has null in place of an empty list (seen with Kubernetes 1.20).
        return {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in found["items"] or ()}

    async def is_node_lost(self, name: str) -> bool:
        """Return whether a node does not exist or is not ready. A node that must not be read is assumed to be ready."""
        self._count("get", "Node")
        try:
            node = await self._find(f"/api/v1/nodes/{name}") or {}
        except ApiError as error:
            if error.status == _FORBIDDEN:
                return False
            raise
        conditions = node.get("status", {}).get("conditions") or ()
        return not any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    async def serves(self, api_version: str, plural: str) -> bool:
        """Return whether the API server serves a resource."""
        root = "/api" if "/" not in api_version else "/apis"
        found = await self._find(f"{root}/{api_version}") or {}
        return any(resource["name"] == plural for resource in found.get("resources", ()))

    async def preferred_version(self, group: str) -> str | None:
        """Return the preferred API version of a group, or None if the API server does not serve the group."""
        found = await self._find(f"/apis/{group}")
        return None if found is None else str(found["preferredVersion"]["groupVersion"])

    async def version(self) -> tuple[int, int]:
        """Return the major and the minor version of the API server."""
        version = await self.request("GET", "/version")
        # Some distributions append a plus sign to the minor version.
        return int(version["major"]), int(version["minor"].rstrip("+"))

    def _count(self, verb: str, kind: str) -> None:
        self.request_counts[verb, kind] += 1


def _parse(data: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(data) if data else {}
    except ValueError:
        fields = {"message": data[:300].decode(errors="replace")}
    return fields


def _collection(kind: ResourceKind, namespace: str) -> str:
    root = "/apis" if kind.group else "/api"
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}/{kind.api_version}{scope}/{kind.plural}"


def _path(manifest: Manifest, name: str = "", subresource: str = "") -> str:
    version, metadata = manifest["apiVersion"], manifest["metadata"]
    root = "/api" if "/" not in version else "/apis"
    parts = [root, version, "namespaces", metadata["namespace"], _PLURALS[manifest["kind"]], name, subresource]
    return "/".join(part for part in parts if part)


def reference(kind: str, namespace: str, name: str, *, api_version: str = "v1") -> dict[str, Any]:
    """Return a reference to an object for the methods of :class:`KubernetesApi`."""
    return {"apiVersion": api_version, "kind": kind, "metadata": {"namespace": namespace, "name": name}}


def job_reference(namespace: str, name: str) -> dict[str, Any]:
    """Return a reference to a RolloutJob for the methods of :class:`KubernetesApi`."""
    return reference(KIND, namespace, name, api_version=API_VERSION)
