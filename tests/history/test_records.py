"""A record in a history's log: what is written comes back, anything else is refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.history.records import HistoryRecord, RecordError, decode_record, encode_record

records = st.builds(
    HistoryRecord,
    rollout_id=st.text(max_size=40),
    run=st.text(max_size=40),
    weight_version=st.integers(0, 2**31),
    generation=st.integers(0, 2**31),
    tokens=st.lists(st.integers(0, 2**32 - 2), max_size=50).map(lambda ids: np.array(ids, dtype=np.uint32)),
    finish_reason=st.sampled_from(["stop", "length"]),
)


def as_plain(record: HistoryRecord) -> dict[str, object]:
    return vars(record) | {"tokens": record.tokens.tolist()}


@given(records)
def test_what_is_encoded_comes_back(record: HistoryRecord) -> None:
    assert as_plain(record) == as_plain(decode_record(encode_record(record)))


@given(st.binary(max_size=100))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(data)


@given(records, st.integers(0, 6), st.sampled_from([None, -1, "x", b"abc", [], {}]))
def test_a_damaged_field_is_refused_or_changes_nothing_else(record: HistoryRecord, at: int, other: object) -> None:
    body = msgpack.unpackb(encode_record(record))
    body[at] = other
    try:
        read = decode_record(msgpack.packb(body))
    except RecordError:
        return
    whole = as_plain(record)
    differing = [name for name, value in as_plain(read).items() if whole[name] != value]
    assert len(differing) <= 1


@pytest.mark.parametrize(
    ("at", "other", "says"),
    [(6, b"\xff\xff\xff\xff", "token id 4294967295"), (4, 2**63, "generation"), (4, -1, "generation")],
)
def test_what_the_index_would_refuse_is_refused_here(at: int, other: object, says: str) -> None:
    whole = HistoryRecord("r", "run", 1, 1, np.array([1, 2], dtype=np.uint32), "stop")
    body = msgpack.unpackb(encode_record(whole))
    body[at] = other
    with pytest.raises(RecordError, match=says):
        decode_record(msgpack.packb(body))
