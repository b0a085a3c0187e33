"""The timeline of a job: what has run where and when, measurements over time, and what is running now."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import msgpack

from rollout_api.protocol.keys import MESSAGE_FIELD, TRACE_FIELD
from rollout_api.protocol.messages import CodecError
from rollout_api.protocol.timeline import EndedRollout, Measurement
from rollout_store.job.incoming import arrival_time
from rollout_store.job.limits import ENTRIES_PER_PAGE, MAX_MEASUREMENTS_BYTES, RUNNING_EXPIRY_S
from rollout_store.job.part import StorePart, as_text

_ARRIVAL_FIELD = b"a"
"""Field of an entry with the id of the request's entry in the stream of requests."""
_RANGES = 8
"""How often a job may grow by the factor e before its oldest measurements are trimmed."""


class RolloutProgress(NamedTuple):
    """How far a running rollout is."""

    request_id: str
    sample: int
    problem_id: str
    tokens: int
    """Number of response tokens so far."""
    max_tokens: int
    running_seconds: float
    """Seconds since the engine started it."""


class EndedEntry(NamedTuple):
    """An entry of the timeline."""

    entry_id: str
    rollout: EndedRollout
    trace: bytes
    """What :meth:`RequestTrace.unpack` needs."""


class TimelineStore(StorePart):
    """Reads the timeline, appends measurements, and exchanges what is running now."""

    # What has ended

    async def last_ended_id(self) -> str:
        """Return the id of the last entry, for continuing :meth:`ended` after it."""
        entries: Any = await self._client.xrevrange(self._keys.timeline, count=1)
        return as_text(entries[0][0]) if entries else "0-0"

    async def ended(self, after: str = "0-0", count: int = ENTRIES_PER_PAGE) -> list[EndedEntry]:
        """Return up to *count* rollouts that have ended, in order, beginning behind the entry *after*.

        Raises:
            CodecError: if an entry cannot be decoded.
        """
        entries: Any = await self._client.xrange(self._keys.timeline, f"({after}", count=count)
        return [
            EndedEntry(as_text(entry_id), _ended_rollout(entry_id, data), data.get(TRACE_FIELD.encode(), b""))
            for entry_id, data in entries
        ]

    async def all_ended(self) -> AsyncIterator[EndedRollout]:
        """Yield all rollouts that have ended and are not trimmed yet, in order.

        Raises:
            CodecError: if an entry cannot be decoded.
        """
        after = "0-0"
        while entries := await self.ended(after):
            for entry in entries:
                yield entry.rollout
            after = entries[-1].entry_id

    # Measurements

    async def first_measured_at(self) -> float | None:
        """Return the Unix time of the oldest measurement; None if there is none."""
        entries: Any = await self._client.xrange(self._keys.measurements, count=1)
        return arrival_time(as_text(entries[0][0])) if entries else None

    async def add_measurement(self, measurement: Measurement) -> int:
        """Append a measurement, and return its number of bytes. Its time becomes that of Redis."""
        packed = measurement.pack()
        most = _RANGES * resolution(len(packed))
        await self._client.xadd(self._keys.measurements, {MESSAGE_FIELD: packed}, maxlen=most, approximate=True)
        return len(packed)

    async def measurements(self) -> AsyncIterator[Measurement]:
        """Yield all measurements in order.

        Raises:
            CodecError: if one cannot be decoded.
        """
        after = "0-0"
        while True:
            entries: Any = await self._client.xrange(self._keys.measurements, f"({after}", count=ENTRIES_PER_PAGE)
            for entry_id, data in entries:
                after = as_text(entry_id)
                yield Measurement.unpack(data[MESSAGE_FIELD.encode()], arrival_time(after))
            if not entries:
                return

    async def last_measurements(self, count: int) -> list[Measurement]:
        """Return the last *count* measurements in order.

        Raises:
            CodecError: if one cannot be decoded.
        """
        entries: Any = await self._client.xrevrange(self._keys.measurements, count=count)
        return [
            Measurement.unpack(data[MESSAGE_FIELD.encode()], arrival_time(as_text(entry_id)))
            for entry_id, data in reversed(entries)
        ]

    # What is running now

    async def observe(self) -> None:
        """Let engines report their running rollouts with their heartbeats, for some seconds."""
        await self._client.set(self._keys.observed, "1", ex=RUNNING_EXPIRY_S)

    async def report_running(self, engine: str, rollouts: list[RolloutProgress]) -> None:
        """Publish the running rollouts of an observed engine."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hset(self._keys.running, engine, msgpack.packb(rollouts))
        pipeline.expire(self._keys.running, RUNNING_EXPIRY_S)
        await pipeline.execute()

    async def running(self) -> dict[str, list[RolloutProgress]]:
        """Return the running rollouts by engine id, as observed engines have reported them last."""
        reports: Any = await self._client.hgetall(self._keys.running)
        return {
            as_text(engine): [RolloutProgress(*values) for values in msgpack.unpackb(data)]
            for engine, data in reports.items()
        }


def resolution(num_bytes: int) -> int:
    """Return the resolution that keeps all measurements of a job within the limit of bytes.

    Two measurements should be apart by the age of the job divided by the resolution. With the shortest interval s, a
    job that has reached the age t has then made resolution · (1 + ln(t / (s · resolution))) measurements.

    Args:
        num_bytes: bytes of one measurement.
    """
    return max(1, math.floor(MAX_MEASUREMENTS_BYTES / _RANGES / max(1, num_bytes)))


def _ended_rollout(entry_id: bytes, data: Mapping[bytes, bytes]) -> EndedRollout:
    try:
        arrived_at, packed = arrival_time(as_text(data[_ARRIVAL_FIELD])), data[MESSAGE_FIELD.encode()]
    except (KeyError, ValueError) as error:
        raise CodecError(f"not an entry of a timeline: {type(error).__name__}: {error}") from None
    return EndedRollout.unpack(packed, arrived_at, arrival_time(as_text(entry_id)))
