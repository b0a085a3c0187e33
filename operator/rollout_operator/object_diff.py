"""Decides whether an existing object has to be applied again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_operator.names import CONTENT_HASH_ANNOTATION


def is_outdated(desired: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    """Return whether an object has to be applied again.

    An object with the hash of its content is compared by it. Its replicas and its restarts may then be changed by
    others, for example by an autoscaler.
    """
    expected = desired["metadata"].get("annotations", {}).get(CONTENT_HASH_ANNOTATION)
    if expected is None:
        return needs_apply(desired, actual)
    return bool(expected != actual["metadata"].get("annotations", {}).get(CONTENT_HASH_ANNOTATION))


def needs_apply(desired: Any, actual: Any) -> bool:
    """Return whether *actual* differs from *desired* in a field of *desired*.

    Fields that only *actual* has were set by others or by the API server and are ignored. The API server omits empty
    fields, so an empty desired value equals a missing one.
    """
    if actual is None and desired in ([], {}, "", None):
        return False
    if isinstance(desired, Mapping):
        if not isinstance(actual, Mapping):
            return True
        return any(needs_apply(value, actual.get(name)) for name, value in desired.items())
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        if not isinstance(actual, Sequence) or len(desired) != len(actual):
            return True
        return any(needs_apply(one, other) for one, other in zip(desired, actual, strict=True))
    return bool(desired != actual)
