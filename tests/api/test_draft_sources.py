"""The encoding of the sources of draft tokens."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.protocol.history_encoding import (
    DRAFT_SOURCES,
    decode_draft_sources,
    encode_draft_sources,
    num_encoded_tokens,
)
from rollout_api.protocol.messages import FinishReason, Rollout, WeightSpan

codes = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 100)), max_size=30).map(
    lambda runs: b"".join(bytes([code]) * length for code, length in runs)
)


@given(codes)
def test_codes_are_decoded_unchanged_and_equal_neighbors_share_a_byte(tokens: bytes) -> None:
    encoded = encode_draft_sources(tokens)
    assert tokens == decode_draft_sources(encoded)
    assert len(tokens) == num_encoded_tokens(encoded)
    assert sum(-(-len(list(run)) // 32) for _, run in groupby(tokens)) == len(encoded)


@given(st.binary(max_size=50))
def test_all_bytes_can_be_decoded(encoded: bytes) -> None:
    assert num_encoded_tokens(encoded) == len(decode_draft_sources(encoded))


def test_the_encoding_is_as_described() -> None:
    assert bytes([0 << 3 | 0, 2 << 3 | 1, 31 << 3 | 4, 0 << 3 | 4]) == encode_draft_sources(
        bytes([0, 1, 1, 1]) + bytes([4] * 33)
    )


def rollout(draft_sources: bytes | None) -> Rollout:
    return Rollout(
        rollout_id="uid/r/0/0",
        problem_id="p",
        token_ids=[7, 8, 9, 7, 8, 9],
        weight_spans=[WeightSpan(start=0, weight_version=1)],
        finish_reason=FinishReason.STOP,
        draft_sources=draft_sources,
    )


def test_a_rollout_names_the_source_of_each_token() -> None:
    expected = [None, *DRAFT_SOURCES, None]
    assert expected == rollout(encode_draft_sources(bytes([0, 1, 2, 3, 4, 5]))).token_sources
    assert [None] * 6 == rollout(None).token_sources


def test_draft_sources_of_another_number_of_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="draft sources of 5 tokens for 6 tokens"):
        rollout(encode_draft_sources(bytes(5)))
