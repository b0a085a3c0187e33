"""Events through which engines tell the coordinator that a rollout ended or was returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class RolloutEvent:
    """A rollout has ended, or an engine has returned it."""

    request_id: str
    sample: int
    returned_by: str | None = None
    """Id of the engine that returned the rollout unfinished; None if the rollout has ended."""
    length: int | None = None
    """Number of response tokens; None if it is not known, as for a rollout whose event was missed."""
    measurement: bytes = b""
    """What the canary test measures of the rollout; empty if it is not part of the test."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes]) -> Self:
        """Decode an entry of the event stream."""
        return cls(
            fields[b"r"].decode(),
            int(fields[b"s"]),
            returned_by=fields[b"e"].decode() if b"x" in fields else None,
            length=int(fields[b"l"]) if b"l" in fields else None,
            measurement=fields.get(b"c", b""),
        )
