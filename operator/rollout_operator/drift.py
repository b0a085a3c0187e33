"""Whether an object is still as the operator made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differs(wanted: Any, there: Any) -> bool:
    """Whether *there* lacks something of *wanted*; what others or the API server added does not count.

    The API server leaves out what is empty.
    """
    if there is None and wanted in ([], {}, "", None):
        return False
    if isinstance(wanted, Mapping):
        if not isinstance(there, Mapping):
            return True
        return any(differs(value, there.get(name)) for name, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(there, Sequence) or len(wanted) != len(there):
            return True
        return any(differs(one, other) for one, other in zip(wanted, there, strict=True))
    return bool(wanted != there)
