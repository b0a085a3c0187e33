"""The encoding of the timeline's entries."""

from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.protocol.messages import CodecError
from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement, Measurement

_NUMBERS = st.integers(0, 2**31)
_TIMES = st.floats(0, 2**32)
_VERSIONS = st.none() | _NUMBERS
_SINGLE = st.floats(0, 2**20, width=32)
ended_rollouts = st.builds(
    EndedRollout,
    **dict.fromkeys(("request_id", "problem_id", "purpose", "draft_mode", "finish_reason", "engine"), st.text()),
    length_class=st.text(),
    **dict.fromkeys(("sample", "turn", "prompt_tokens", "tokens"), _NUMBERS),
    **dict.fromkeys(("decoding_steps", "draft_tokens", "accepted_tokens"), _NUMBERS),
    **dict.fromkeys(
        ("draft_tokens_by_source", "accepted_tokens_by_source"), st.dictionaries(st.text(), _NUMBERS, max_size=4)
    ),
    **dict.fromkeys(("started_at", "arrived_at", "finished_at"), _TIMES),
    **dict.fromkeys(("step", "oldest_version", "newest_version"), _VERSIONS),
)
engine_measurements = st.builds(
    EngineMeasurement,
    name=st.text(),
    version=_NUMBERS,
    assigned=_NUMBERS,
    **dict.fromkeys((one.name for one in fields(EngineMeasurement) if one.type == "float"), _SINGLE),
)
measurements = st.builds(
    Measurement,
    time=_TIMES,
    state=st.text(),
    **dict.fromkeys(("weight_version", "requests", "waiting", "assigned", "done", "unread_bytes"), _NUMBERS),
    tokens_per_second=_SINGLE,
    saved=st.none() | _SINGLE,
    remaining_seconds=st.none() | _SINGLE,
    engines=st.lists(engine_measurements, max_size=3),
)


@given(ended_rollouts)
def test_an_ended_rollout_is_decoded_as_it_was_encoded(rollout: EndedRollout) -> None:
    assert rollout == EndedRollout.unpack(rollout.pack(), rollout.arrived_at, rollout.finished_at)


@given(measurements)
def test_a_measurement_is_decoded_as_it_was_encoded(measurement: Measurement) -> None:
    assert measurement == Measurement.unpack(measurement.pack(), measurement.time)


@given(ended_rollouts, measurements)
def test_values_of_a_later_release_are_ignored(rollout: EndedRollout, measurement: Measurement) -> None:
    later = msgpack.packb([*msgpack.unpackb(rollout.pack()), "later", 1])
    assert rollout == EndedRollout.unpack(later, rollout.arrived_at, rollout.finished_at)
    *values, engines = msgpack.unpackb(measurement.pack())
    later = msgpack.packb([*values, [[*engine, "later"] for engine in engines], "later"], use_single_float=True)
    assert measurement == Measurement.unpack(later, measurement.time)


@given(ended_rollouts)
def test_rollouts_of_an_earlier_release_have_no_length_class(rollout: EndedRollout) -> None:
    earlier = msgpack.packb(msgpack.unpackb(rollout.pack())[:-1])
    read = EndedRollout.unpack(earlier, rollout.arrived_at, rollout.finished_at)
    assert replace(rollout, length_class="") == read


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb("text"), msgpack.packb([1, 2])])
def test_what_is_no_entry_is_rejected(data: bytes) -> None:
    with pytest.raises(CodecError, match="not an entry of a timeline"):
        EndedRollout.unpack(data, 0.0, 0.0)
    with pytest.raises(CodecError, match="not an entry of a timeline"):
        Measurement.unpack(data, 0.0)


def test_the_name_of_an_engine_is_its_id_without_the_last_part() -> None:
    rollout = EndedRollout(
        "r", 0, 0, "p", None, "train", "history", "stop", "job-worker-0-1a2b3c4d", *[0.0] * 8, {}, {}
    )
    assert "job-worker-0" == rollout.engine_name
    assert "" == replace(rollout, engine="").engine_name
