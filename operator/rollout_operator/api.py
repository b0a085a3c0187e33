"""The few calls that the operator makes to the API server, on plain dicts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from rollout_api.manifest.rollout_job import API_VERSION, KIND, PLURAL
from rollout_operator import names
from rollout_operator.observed import Manifest
from rollout_operator.watched import Watched, watched

_TIMEOUT_S = 30.0
_PAGE = 500
_WATCH_S = 300
_CONNECTIONS = 64
_OURS = f"{names.MANAGED_BY}={names.APP}"

_PLURALS = {
    KIND: PLURAL,
    "Event": "events",
    "Lease": "leases",
    "Secret": "secrets",
    **{kind.kind: kind.plural for kind in watched("policy/v1")},
}

_JSON = "application/json"
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class ApiError(Exception):
    """What the API server answered instead of doing it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message
        super().__init__(f"{status} {reason}: {message}")

    @property
    def absent(self) -> bool:
        """There is no such object (any more)."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """It is there already, or is not (any more) as the call took it to be."""
        return self.status == 409

    @property
    def passes(self) -> bool:
        """The same call may succeed later, without anybody changing anything."""
        return self.status in (0, 429) or self.status >= 500


class KubernetesApi:
    """An API server. Raises :class:`ApiError`, whatever goes wrong."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self.calls: dict[str, int] = {}
        """Calls made, by verb and kind, for the metrics."""

    @classmethod
    async def connect(cls) -> Self:
        """By KUBECONFIG, else as a pod's service account, else by ~/.kube/config."""
        configuration = Configuration()
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(client_configuration=configuration)
        configuration.connection_pool_maxsize = _CONNECTIONS
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def request(
        self, verb: str, path: str, body: Any = None, *, content: str = _JSON, query: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Any call.

        Raises:
            ApiError: with status 0 if there was no answer.
        """
        pairs = list((query or {}).items())
        headers = {"Accept": _JSON, "Content-Type": content}
        try:
            prepared = await self._client.param_serialize(
                verb, path, query_params=pairs, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = await self._client.call_api(*prepared, _request_timeout=_TIMEOUT_S)
            data = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(0, "Unreachable", f"{type(error).__name__}: {error}") from error
        try:
            answer: dict[str, Any] = json.loads(data) if data else {}
        except ValueError:
            answer = {"message": data[:300].decode(errors="replace")}
        if not 200 <= response.status < 300:
            raise ApiError(response.status, answer.get("reason") or str(response.reason), answer.get("message", ""))
        return answer

    async def create(self, manifest: Manifest) -> dict[str, Any]:
        """Make an object. ApiError.conflict: one by this name is there."""
        self._count("create", manifest["kind"])
        return await self.request("POST", _path(manifest), manifest, query={"fieldManager": names.FIELD_MANAGER})

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> dict[str, Any]:
        """Give an object these fields, and take away those given before that are not among them (server-side apply)."""
        self._count("apply" + (f" {subresource}" if subresource else ""), manifest["kind"])
        path = _path(manifest, manifest["metadata"]["name"], subresource)
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self.request("PATCH", path, manifest, content=_APPLY, query=query)

    async def replace(self, manifest: Manifest) -> dict[str, Any]:
        """Put an object in place of what is there. ApiError.conflict: it has changed since it was read."""
        self._count("update", manifest["kind"])
        return await self.request("PUT", _path(manifest, manifest["metadata"]["name"]), manifest)

    async def merge(self, manifest: Manifest) -> dict[str, Any]:
        """Patch an object by JSON merge."""
        self._count("patch", manifest["kind"])
        return await self.request("PATCH", _path(manifest, manifest["metadata"]["name"]), manifest, content=_MERGE)

    async def get(self, about: Manifest) -> dict[str, Any]:
        """The object of this kind and name."""
        self._count("get", about["kind"])
        return await self.request("GET", _path(about, about["metadata"]["name"]))

    async def delete(self, about: Manifest, *, uid: str, grace: int | None = None) -> None:
        """Delete an object, if it is still that one. Its being gone already is no error."""
        self._count("delete", about["kind"])
        options: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            await self.request("DELETE", _path(about, about["metadata"]["name"]), options)
        except ApiError as error:
            if not (error.absent or error.conflict):
                raise

    async def page(self, kind: Watched, namespace: str, after: str) -> dict[str, Any]:
        """A page of the list of the operator's objects of a kind; *after* is how the page before said to go on."""
        self._count("list", kind.kind)
        query: dict[str, Any] = {"labelSelector": _OURS, "limit": _PAGE}
        if after:
            query["continue"] = after
        return await self.request("GET", _collection(kind, namespace), query=query)

    async def watch(self, kind: Watched, namespace: str, version: str) -> AsyncIterator[dict[str, Any]]:
        """Changes to the operator's objects of a kind since a version, until the API server ends the stream.

        Raises:
            ApiError: if it does not begin, or breaks off.
        """
        self._count("watch", kind.kind)
        query = [
            ("labelSelector", _OURS),
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", random.randint(_WATCH_S, 2 * _WATCH_S)),
        ]
        try:
            prepared = await self._client.param_serialize(
                "GET",
                _collection(kind, namespace),
                query_params=query,
                header_params={"Accept": _JSON},
                auth_settings=["BearerToken"],
            )
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=2 * _WATCH_S + _TIMEOUT_S)
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
            finally:
                response.response.close()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ApiError(0, "Unreachable", f"{type(error).__name__}: {error}") from error

    async def serves(self, api_version: str, plural: str) -> bool:
        """Whether the cluster has such objects."""
        root = "/api" if "/" not in api_version else "/apis"
        try:
            found = await self.request("GET", f"{root}/{api_version}")
        except ApiError as error:
            if error.absent:
                return False
            raise
        return any(one["name"] == plural for one in found.get("resources", ()))

    def _count(self, verb: str, kind: str) -> None:
        name = f"{verb} {kind}"
        self.calls[name] = self.calls.get(name, 0) + 1


def _collection(kind: Watched, namespace: str) -> str:
    root = "/apis" if kind.group else "/api"
    where = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}/{kind.api_version}{where}/{kind.plural}"


def _path(manifest: Manifest, name: str = "", subresource: str = "") -> str:
    version, metadata = manifest["apiVersion"], manifest["metadata"]
    root = "/api" if "/" not in version else "/apis"
    parts = [root, version, "namespaces", metadata["namespace"], _PLURALS[manifest["kind"]], name, subresource]
    return "/".join(part for part in parts if part)


def job_reference(namespace: str, name: str) -> dict[str, Any]:
    """Names a RolloutJob for the calls above."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"namespace": namespace, "name": name}}


def pod_reference(namespace: str, name: str) -> dict[str, Any]:
    """Names a pod for the calls above."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name}}
