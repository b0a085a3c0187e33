"""The timeline of a job: when each rollout ran where, and measurements of the job over time.

Both are streams in Redis. If there are too many entries, the oldest ones are deleted.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import msgpack
from typing_extensions import Self

from rollout_api.protocol.messages import CodecError, Rollout, RolloutRequest

_REDIS_TIMES = 2
"""Number of fields at the end of an :class:`EndedRollout` that the stream knows."""


@dataclass(frozen=True)
class EndedRollout:
    """What the timeline keeps of a rollout that has ended."""

    request_id: str
    sample: int
    turn: int
    problem_id: str
    step: int | None
    """Training step of the request."""
    purpose: str
    """A :class:`~rollout_api.protocol.messages.Purpose`."""
    draft_mode: str
    """A :class:`~rollout_api.protocol.messages.DraftMode`."""
    finish_reason: str
    """A :class:`~rollout_api.protocol.messages.FinishReason`."""
    engine: str
    """Id of the engine that sampled the last token; '' if no engine did."""
    started_at: float
    """Unix time at which this engine started the rollout, by its clock; 0 without an engine."""
    prompt_tokens: int
    tokens: int
    """Number of response tokens."""
    oldest_version: int | None
    """Oldest weight version that sampled a token; None without tokens."""
    newest_version: int | None
    """Weight version that sampled the last token; None without tokens."""
    decoding_steps: int
    draft_tokens: int
    accepted_tokens: int
    draft_tokens_by_source: dict[str, int]
    accepted_tokens_by_source: dict[str, int]
    length_class: str = ""
    """The last length class of the rollout; '' if the draft policy determines none."""
    arrived_at: float = 0.0
    """Unix time at which the request arrived in Redis, by the clock of Redis."""
    finished_at: float = 0.0
    """Unix time at which the rollout ended, by the clock of Redis."""

    @classmethod
    def of(cls, request: RolloutRequest, rollout: Rollout, sample: int) -> Self:
        """Return what is kept of a rollout that ends now; the times of Redis follow from the stream that keeps it."""
        return cls(
            request.request_id,
            sample,
            request.turn,
            rollout.problem_id,
            request.step,
            request.purpose.value,
            request.draft_mode.value,
            rollout.finish_reason.value,
            rollout.engine,
            rollout.started_at,
            len(request.prompt_token_ids),
            rollout.num_tokens,
            rollout.oldest_weight_version,
            rollout.weight_version,
            rollout.num_decoding_steps,
            rollout.num_draft_tokens,
            rollout.num_accepted_tokens,
            rollout.draft_tokens_by_source,
            rollout.accepted_tokens_by_source,
            rollout.length_class,
        )

    @property
    def engine_name(self) -> str:
        """Name of the engine, which stays the same over its restarts."""
        return self.engine.rpartition("-")[0]

    def pack(self) -> bytes:
        """Encode the entry without the times of Redis."""
        packed: bytes = msgpack.packb(astuple(self)[:-_REDIS_TIMES])
        return packed

    @classmethod
    def unpack(cls, data: bytes, arrived_at: float, finished_at: float) -> Self:
        """Decode an entry; values that only a later release knows are ignored.

        The entries of releases without length classes have none.

        Raises:
            CodecError: if *data* is not an entry.
        """
        count = len(fields(cls)) - _REDIS_TIMES
        values = _unpack(data, count, optional=1)
        return replace(cls(*values), arrived_at=arrived_at, finished_at=finished_at)


@dataclass(frozen=True)
class EngineMeasurement:
    """One engine in a measurement; counters are those since it started."""

    name: str
    version: int
    """Weight version that it serves."""
    assigned: int
    """Number of assigned rollouts."""
    running: float
    """Number of rollouts that vLLM is decoding."""
    kv_cache_usage: float
    """Share of the KV cache that is in use."""
    tokens: float
    decoding_steps: float
    draft_tokens: float
    accepted_tokens: float
    drafting_seconds: float
    """Time that the drafter has taken."""
    timed_seconds: float
    """Duration of the measured steps."""
    timed_seconds_without_drafts: float
    """Predicted duration of the measured steps' tokens without drafts."""
    drafting_disabled: float
    """1 if the governor has disabled drafting, else 0."""
    drafting_stops: float
    """How often the governor has disabled drafting."""
    trial_tokens: float
    """Tokens of trials, which were drafted while drafting was disabled."""
    cost_base_seconds: float
    """Constant part of a verification step, by the cost model."""
    cost_token_seconds: float
    """Time per verified token, by the cost model."""
    weights_gap_seconds: float
    """Pause of decoding during the last weight update."""

    @classmethod
    def of(cls, name: str, version: int, assigned: int, counters: dict[str, float]) -> Self:
        """Return the measurement of an engine with these counters; those that it lacks are 0."""
        names = [one.name for one in fields(cls)][3:]
        return cls(name, version, assigned, *(counters.get(counter, 0.0) for counter in names))


@dataclass(frozen=True)
class Measurement:
    """The state of a job at one moment."""

    time: float
    """Unix time, by the clock of Redis."""
    state: str
    """``running``, ``paused`` or ``closing``."""
    weight_version: int
    """Weight version that the engines should serve."""
    requests: int
    """Number of open requests."""
    waiting: int
    """Rollouts that are not assigned to an engine."""
    assigned: int
    """Rollouts that are assigned to an engine and have not ended."""
    done: int
    """Rollouts that have ended."""
    tokens_per_second: float
    saved: float | None
    """Fraction of the decoding time that drafting has saved; None if it is unknown."""
    remaining_seconds: float | None
    """Estimated seconds until all open requests are answered; None if it is unknown."""
    unread_bytes: int
    """Bytes of the results that clients have not read."""
    engines: list[EngineMeasurement]

    def pack(self) -> bytes:
        """Encode the measurement without its time; floats are rounded to single precision."""
        packed: bytes = msgpack.packb(astuple(self)[1:], use_single_float=True)
        return packed

    @classmethod
    def unpack(cls, data: bytes, time: float) -> Self:
        """Decode a measurement that was made at *time*; values that only a later release knows are ignored.

        Raises:
            CodecError: if *data* is not a measurement.
        """
        values = _unpack(data, len(fields(cls)) - 1)
        count = len(fields(EngineMeasurement))
        values[-1] = [EngineMeasurement(*engine[:count]) for engine in values[-1]]
        return cls(time, *values)


def _unpack(data: bytes, count: int, *, optional: int = 0) -> list[Any]:
    """Return the first *count* values of an entry, the last of which may be missing if they are *optional*.

    Raises:
        CodecError: *data* has fewer values, or is something else.
    """
    try:
        values = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError(f"not an entry of a timeline: {error}") from None
    if not isinstance(values, list) or len(values) < count - optional:
        raise CodecError(f"not an entry of a timeline: {count - optional} values were expected")
    return values[:count]
