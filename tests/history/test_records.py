"""Encoding of records: they are decoded unchanged, and everything else is rejected."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.protocol.history_encoding import DRAFT_SOURCES, encode_draft_sources
from rollout_store.history.records import (
    BLOCK_COMPRESSION_LEVEL,
    RECORD_VERSION,
    HistoryRecord,
    RecordError,
    decode_record,
    decode_records,
    encode_record,
    encode_records,
)

token_ids = st.lists(st.integers(0, 2**32 - 2), max_size=50).map(lambda ids: np.array(ids, dtype=np.uint32))
records = st.builds(
    HistoryRecord,
    rollout_id=st.text(max_size=40),
    run=st.text(max_size=40),
    weight_version=st.integers(0, 2**31),
    generation=st.integers(0, 2**31),
    tokens=token_ids,
    finish_reason=st.sampled_from(["stop", "length"]),
    context=token_ids,
    step=st.integers(-1, 2**31),
)
codes = st.integers(0, len(DRAFT_SOURCES))


@st.composite
def records_with_sources(draw: st.DrawFn) -> HistoryRecord:
    record = draw(records)
    count = len(record.tokens)
    return replace(record, draft_sources=bytes(draw(st.lists(codes, min_size=count, max_size=count))))


any_records = st.one_of(records, records_with_sources())


def as_dict(record: HistoryRecord) -> dict[str, object]:
    return vars(record) | {"tokens": record.tokens.tolist(), "context": record.context.tolist()}


@given(any_records)
def test_record_is_decoded_unchanged(record: HistoryRecord) -> None:
    read = decode_record(encode_record(record))
    assert as_dict(record) == as_dict(read)
    assert (np.uint32, np.uint32) == (read.tokens.dtype, read.context.dtype)


@given(st.lists(any_records, min_size=1, max_size=8), st.sampled_from([1, BLOCK_COMPRESSION_LEVEL]))
def test_records_of_a_block_are_decoded_in_order(together: list[HistoryRecord], level: int) -> None:
    read = decode_records(encode_records(together, level=level))
    assert [as_dict(record) for record in together] == [as_dict(record) for record in read]


def test_a_stored_record_can_be_decoded() -> None:
    """Histories outlive releases: if this fails, the encoding needs a new version, and this one stays readable."""
    read = decode_record(
        bytes.fromhex(
            "01f9b3069828b52ffd203de90100270000009b91a96a6f622f722f302f3092a36a6f62019103910692a473746f700191029103910204"
            "02910207000000ffff0000feffffff04000500000a"
        )
    )
    expected = {
        "rollout_id": "job/r/0/0",
        "run": "job",
        "weight_version": 3,
        "generation": 6,
        "tokens": [7, 65535, 2**32 - 2],
        "finish_reason": "stop",
        "context": [4, 5],
        "step": 2,
        "draft_sources": b"\0\2\2",
    }
    assert expected == as_dict(read)


@given(st.lists(any_records, min_size=1, max_size=4), st.data())
def test_every_changed_or_missing_byte_is_detected(together: list[HistoryRecord], data: st.DataObject) -> None:
    whole = encode_records(together)
    at = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.integers(1, 255))
    for damaged in (whole[:at] + bytes([whole[at] ^ other]) + whole[at + 1 :], whole[:at]):
        with pytest.raises(RecordError):
            decode_records(damaged)


def encode_columns(columns: object, body: bytes) -> bytes:
    """Return arbitrary columns as another program might write them, with a correct checksum."""
    meta = msgpack.packb(columns)
    content = zstandard.ZstdCompressor().compress(struct.pack("<I", len(meta)) + meta + body)
    return struct.pack("<BI", RECORD_VERSION, zlib.crc32(content)) + content


COLUMNS: list[object] = [["r"], ["run", 1], [1], [1], ["stop", 1], [-1], [2], [0], 2, 2, [1]]
SOURCES_OF_TWO = encode_draft_sources(b"\2\2")


@pytest.mark.parametrize(
    ("at", "other", "expected_error"),
    [
        (0, ["r", "s"], "lengths"),
        (0, [7], "not a string"),
        (0, None, "column"),
        (1, ["run", 2], "run of equal"),
        (1, ["run", -1], "run of equal"),
        (2, ["one"], "not an integer"),
        (3, [2**63], "generation"),
        (3, [-1], "generation"),
        (3, [2**60], "generation"),
        (6, [-2], "negative"),
        (6, [3], "do not match"),
        (7, [1], "do not match"),
        (8, 3, "column"),
        (8, 4, "do not match"),
        (10, [0], "do not match"),
        (10, [-1], "negative"),
        (10, None, "column"),
    ],
)
def test_inconsistent_columns_are_rejected(at: int, other: object, expected_error: str) -> None:
    body = np.array([1, 2], dtype="<u2").tobytes() + SOURCES_OF_TWO
    read = decode_record(encode_columns(COLUMNS, body))
    assert ([1, 2], b"\2\2") == (read.tokens.tolist(), read.draft_sources)
    with pytest.raises(RecordError, match=expected_error):
        decode_record(encode_columns([*COLUMNS[:at], other, *COLUMNS[at + 1 :]], body))


def test_draft_sources_of_another_number_of_tokens_are_rejected() -> None:
    body = np.array([1, 2], dtype="<u2").tobytes() + encode_draft_sources(b"\2\2\0\0")[:1]
    assert b"\2\2" == decode_record(encode_columns(COLUMNS, body)).draft_sources
    with pytest.raises(RecordError, match="draft sources do not match"):
        decode_record(encode_columns(COLUMNS, body[:-1] + encode_draft_sources(b"\2\2\2")))


def test_reserved_token_id_is_rejected() -> None:
    with pytest.raises(RecordError, match="token id 4294967295"):
        decode_record(encode_columns([*COLUMNS[:6], [1], [0], 4, 2, [0]], b"\xff\xff\xff\xff"))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(data)
