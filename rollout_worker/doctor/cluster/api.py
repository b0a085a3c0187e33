"""Reads objects of the Kubernetes API as plain dicts. Nothing is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_TIMEOUT_S = 10
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ClusterUnreachableError(RuntimeError):
    """The API server cannot be reached. The message says what to do."""


class ApiError(RuntimeError):
    """The API server has answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class ClusterApi:
    """A client with the rights of the current context of the kubeconfig, or in a pod of its ServiceAccount."""

    def __init__(self) -> None:
        """Read the access data; nothing is sent yet.

        Raises:
            ClusterUnreachableError: if there are none, or the package ``kubernetes`` is not installed.
        """
        try:
            from kubernetes import client, config
        except ImportError:
            raise ClusterUnreachableError(
                "the Python package kubernetes is not installed; install das-rollout[operator]"
            ) from None
        configuration = client.Configuration()
        configuration.retries = 0
        try:
            if (file := _kubeconfig()) is not None:
                config.load_kube_config(file, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except (config.ConfigException, OSError, ValueError) as failure:
            raise ClusterUnreachableError(
                f"there is no access to a cluster: {failure}; set KUBECONFIG, or run this in a pod"
            ) from None
        self._api = client.ApiClient(configuration)
        self.server = str(configuration.host)

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return an object or a list.

        Raises:
            ApiError: if the API server answers with an error.
            ClusterUnreachableError: if it does not answer.
        """
        return self._request("GET", path, query, None)

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """Return the objects of a list; see :meth:`get`."""
        found: list[dict[str, Any]] = self.get(path, **query)["items"]
        return found

    def review(self, kind: str, spec: dict[str, Any]) -> bool:
        """Return whether an access is allowed.

        Args:
            kind: SelfSubjectAccessReview or SubjectAccessReview.
            spec: what is asked.

        Raises:
            ApiError: if the API server answers with an error.
            ClusterUnreachableError: if it does not answer.
        """
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        answer = self._request("POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", {}, body)
        return bool(answer["status"]["allowed"])

    def _request(self, verb: str, path: str, query: dict[str, str], body: dict[str, Any] | None) -> dict[str, Any]:
        from urllib3.exceptions import HTTPError

        prepared = self._api.param_serialize(
            verb,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*prepared, _request_timeout=_TIMEOUT_S)
            data = response.read()
        except HTTPError as failure:
            raise ClusterUnreachableError(
                f"the API server {self.server} does not answer: {failure}; check the network, and the kubeconfig"
            ) from None
        if not 200 <= response.status < 300:
            raise ApiError(response.status, _message(data) or f"{response.status} {response.reason}")
        parsed: dict[str, Any] = json.loads(data)
        return parsed


def current_namespace() -> str:
    """Return the namespace of the kubeconfig's current context, or in a pod without one, that of the pod."""
    if (file := _kubeconfig()) is None:
        return _POD_NAMESPACE.read_text().strip()
    from kubernetes import config

    _, context = config.list_kube_config_contexts(file)
    return str(context["context"].get("namespace") or "default")


def _kubeconfig() -> str | None:
    """Return the files of the kubeconfig; None if none of them exists."""
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    return files if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)) else None


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace").strip()
