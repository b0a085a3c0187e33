"""The wire format: everything that is encoded comes back, anything else is refused with a reason."""

from __future__ import annotations

import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import (
    CodecError,
    FinishReason,
    Purpose,
    Rollout,
    RolloutId,
    RolloutRequest,
    Sampling,
    WeightSpan,
    decode,
    encode,
    problem_id_of,
)

token_ids = st.lists(st.integers(0, 2**32 - 2), max_size=50)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
identifiers = st.text(min_size=1, max_size=40)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    tokens = draw(token_ids)
    with_logprobs = draw(st.booleans())
    later = draw(st.lists(st.builds(WeightSpan, start=st.integers(1, 100), weight_version=st.integers(0, 9))))
    return Rollout(
        rollout_id=str(RolloutId("job", draw(identifiers), draw(st.integers(0, 9)), draw(st.integers(0, 9)))),
        problem_id=draw(identifiers),
        purpose=draw(st.sampled_from(Purpose)),
        token_ids=tokens,
        logprobs=[draw(float32s) for _ in tokens] if with_logprobs else None,
        spans=[WeightSpan(start=0, weight_version=draw(st.integers(0, 9))), *later],
        finish_reason=draw(st.sampled_from(FinishReason)),
        drafted=draw(st.integers(0, 1000)),
        accepted=draw(st.integers(0, 1000)),
        reward=draw(st.none() | st.floats(0, 1)),
    )


requests = st.builds(
    RolloutRequest,
    job_uid=identifiers,
    request_id=identifiers,
    problem_id=identifiers,
    prompt_token_ids=st.lists(st.integers(0, 2**32 - 2), min_size=1, max_size=50),
    sampling=st.builds(
        Sampling, n=st.integers(1, 64), temperature=st.floats(0, 2), stop=st.lists(identifiers, max_size=3)
    ),
    purpose=st.sampled_from(Purpose),
    draft_budget=st.none() | st.integers(0, 64),
)


@given(rollouts() | requests)
def test_what_is_encoded_comes_back(message: Rollout | RolloutRequest) -> None:
    assert message == decode(encode(message))


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=50))
def test_half_precision_logprobs_are_rounded_not_lost(logprobs: list[float]) -> None:
    rollout = Rollout(
        rollout_id="j/r/0/0",
        problem_id="p",
        token_ids=[1] * len(logprobs),
        logprobs=logprobs,
        spans=[WeightSpan(start=0, weight_version=0)],
        finish_reason=FinishReason.STOP,
    )
    back = decode(encode(rollout, half_logprobs=True))
    assert isinstance(back, Rollout)
    assert back.logprobs is not None
    assert all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(logprobs, back.logprobs, strict=True))


def test_a_token_takes_four_bytes_and_a_half_logprob_two() -> None:
    rollout = Rollout(
        rollout_id="j/r/0/0",
        problem_id="p",
        token_ids=[100_000] * 4096,
        logprobs=[-0.5] * 4096,
        spans=[WeightSpan(start=0, weight_version=0)],
        finish_reason=FinishReason.STOP,
    )
    assert 4096 * 6 <= len(encode(rollout, half_logprobs=True)) < 4096 * 6 + 200


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused_with_a_codec_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([1, 2], "a message is a map"),
        ({"v": 2, "kind": "rollout"}, "schema version 2"),
        ({"v": 1, "kind": "gossip"}, "unknown kind"),
        ({"v": 1, "kind": "rollout"}, "rollout_id"),
        ({"v": 1, "kind": "rollout", "token_ids": b"123"}, "no whole number"),
        ({"v": 1, "kind": "rollout", "token_ids": 5}, "malformed"),
        ({"v": 1, "kind": "rollout", "token_ids": [-1, 0, 0, 0]}, "malformed"),
        ({"v": 1, "kind": "request", "surprise": 1, "prompt_token_ids": b"\0\0\0\0"}, "request"),
    ],
)
def test_refusals_say_why(body: object, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(msgpack.packb(body))


@given(st.text(min_size=1).filter(lambda t: "/" not in t), identifiers, st.integers(0, 99), st.integers(0, 99))
def test_a_rollout_id_can_be_read_back(uid: str, request: str, sample: int, turn: int) -> None:
    assert RolloutId(uid, request, sample, turn) == RolloutId.parse(str(RolloutId(uid, request, sample, turn)))


def test_problem_ids_are_stable_and_differ() -> None:
    assert problem_id_of([1, 2, 3]) == "b30a3c159d7e8193559a42a84f1fcae1"
    assert problem_id_of([1, 2, 3]) != problem_id_of([1, 2, 3, 0])
