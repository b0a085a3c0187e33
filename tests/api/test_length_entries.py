"""Encoding of lengths in a history: entries are decoded unchanged, and malformed ones are skipped and reported."""

from __future__ import annotations

import logging
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.protocol.history_encoding import (
    ENTRY_BYTES,
    KEY_BYTES,
    LengthEntry,
    pack_entry,
    pack_recent,
    rollout_key,
    unpack_entries,
    unpack_recent,
)

lengths = st.integers(0, 2**31 - 1)
rewards = st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False)
rollouts = st.tuples(st.text(max_size=20), lengths, st.booleans(), rewards)


@given(st.dictionaries(st.integers(0, 2**53 - 1), st.lists(rollouts, max_size=5), max_size=5))
def test_entries_are_decoded_with_the_oldest_generation_first(
    generations: dict[int, list[tuple[str, int, bool, float | None]]],
) -> None:
    stored = {
        str(generation).encode(): b"".join(pack_entry(*rollout) for rollout in rollouts)
        for generation, rollouts in generations.items()
    }
    expected = [
        LengthEntry(rollout_key(rollout_id), generation, length, cut_off, reward)
        for generation in sorted(generations)
        for rollout_id, length, cut_off, reward in generations[generation]
    ]
    assert expected == unpack_entries(stored)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), lengths, st.booleans())))
def test_recent_lengths_are_decoded_in_order(entries: list[tuple[int, int, bool]]) -> None:
    assert entries == unpack_recent(pack_recent(*entry) for entry in entries)


def test_entry_has_the_documented_layout() -> None:
    entry = pack_entry("job/request/0/0", 300, True, 0.5)
    assert (16, 8) == (ENTRY_BYTES, KEY_BYTES)
    assert rollout_key("job/request/0/0") + bytes([0x59, 0x02, 0, 0]) + struct.pack("<f", 0.5) == entry
    assert bytes([7, 0, 0, 0, 0x58, 0x02, 0, 0]) == pack_recent(7, 300, False)


def test_keys_of_rollouts_are_distinct() -> None:
    ids = [f"uid/request-{request}/{sample}/0" for request in range(50) for sample in range(20)]
    assert len(ids) == len({rollout_key(one) for one in ids})


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        (b"3", pack_entry("a", 1, False)[:-1]),
        (b"-3", pack_entry("a", 1, False)),
        (b"uid/request/0/0", b"3 120 stop"),
        (b"", pack_entry("a", 1, False)),
        (b"9" * 5000, pack_entry("a", 1, False)),
    ],
)
def test_malformed_generation_is_skipped_and_reported(
    field: bytes, entries: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read = unpack_entries({field: entries, b"4": pack_entry("b", 9, True)})
    assert [(4, 9, True)] == [(entry.generation, entry.length, entry.cut_off) for entry in read]
    assert ["1 of 2 generations"] == [record.message[:18] for record in caplog.records]


def test_malformed_recent_length_is_skipped_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read = unpack_recent([pack_recent(1, 5, False), b"short", pack_recent(2, 6, True)])
    assert [(1, 5, False), (2, 6, True)] == read
    assert ["1 of the latest rollouts' lengths"] == [record.message[:33] for record in caplog.records]
