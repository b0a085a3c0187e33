"""A client of the Kubernetes API that works on plain dicts."""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client

MERGE_PATCH = "application/merge-patch+json"
_TIMEOUT_S = 30


class RawApi:
    """Sends requests, and returns the parsed responses."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    def request(
        self,
        verb: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Send a request.

        Raises:
            ApiException: if the API server answers with an error.
        """
        headers = {"Accept": "application/json", "Content-Type": content_type}
        prepared = self._api.param_serialize(
            verb,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        response = self._api.call_api(*prepared, _request_timeout=_TIMEOUT_S)
        data = response.read()
        if not 200 <= response.status < 300:
            raise client.ApiException(http_resp=response)
        parsed: dict[str, Any] = json.loads(data)
        return parsed

    def list_objects(self, path: str) -> list[dict[str, Any]]:
        """Return the objects of a collection."""
        items: list[dict[str, Any]] = self.request("GET", path)["items"]
        return items

    def patch(self, path: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Change an object by a merge patch."""
        return self.request("PATCH", path, changes, content_type=MERGE_PATCH)
