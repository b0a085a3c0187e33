"""The token without which a process does not serve ``/status`` and ``/metrics``, if it has one."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import Self

TOKEN_VARIABLE = "ROLLOUT_STATUS_TOKEN"  # noqa: S105  # the name of a variable
"""Environment variable with the token."""
HASH_VARIABLE = "ROLLOUT_STATUS_TOKEN_SHA256"
"""Environment variable with the SHA-256 hash of the token, for a process that only has to check it."""
OPEN_PAGES = frozenset({"/healthz", "/readyz"})
"""Pages that need no token, because kubelets read them."""
UNAUTHORIZED_HEADERS = {"WWW-Authenticate": 'Bearer realm="das-rollout"'}
"""Headers of the response to a request without the token."""
UNAUTHORIZED_TEXT = (
    "This page requires the header 'Authorization: Bearer TOKEN', with the token of ROLLOUT_STATUS_TOKEN, or on "
    "Kubernetes with that of the Secret statusToken.existingSecret of the chart's values.\n"
)
"""Body of this response."""
_MIN_CHARACTERS = 32
"""Shorter tokens could be guessed from their hash, which everyone who may read pods sees."""


class StatusTokenError(ValueError):
    """The environment does not contain a usable token."""


@dataclass(frozen=True)
class StatusToken:
    """A token, or only its hash."""

    value: str = ""
    """The token; empty if there is none, or if only its hash is known."""
    sha256: str = ""
    """Its hash in hexadecimal digits; empty if there is no token, so that every request is permitted."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Return the token of a process.

        Args:
            environment: replaces the environment of this process.

        Raises:
            StatusTokenError: if the token is too short, or if the hash is malformed.
        """
        environment = os.environ if environment is None else environment
        # Secrets often end with a newline, which Prometheus ignores, too.
        if value := environment.get(TOKEN_VARIABLE, "").strip():
            if len(value) < _MIN_CHARACTERS:
                raise StatusTokenError(f"{TOKEN_VARIABLE} must have at least {_MIN_CHARACTERS} characters")
            return cls(value, _sha256(value))
        sha256 = environment.get(HASH_VARIABLE, "").strip()
        if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):
            raise StatusTokenError(f"{HASH_VARIABLE} must be a SHA-256 hash in 64 hexadecimal digits")
        return cls("", sha256)

    def permits(self, path: str, authorization: str | None) -> bool:
        """Return whether a request may be answered.

        Args:
            path: the page.
            authorization: the request's header ``Authorization``.
        """
        if not self.sha256 or path in OPEN_PAGES:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        # The hashes are compared in constant time, so that the duration of an answer says nothing about the token.
        return hmac.compare_digest(_sha256(token.strip()), self.sha256) and scheme.lower() == "bearer"

    def headers(self) -> dict[str, str]:
        """Return the headers of a request that needs the token."""
        return {"Authorization": f"Bearer {self.value}"} if self.value else {}


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()
