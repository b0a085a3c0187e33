"""The wire format: messages are decoded unchanged, and everything else is rejected with a reason."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import (
    Cancel,
    Close,
    CodecError,
    DraftMode,
    FinishReason,
    Partial,
    Pause,
    PauseMode,
    Purpose,
    Refusal,
    Resume,
    Rewards,
    Rollout,
    RolloutId,
    RolloutRequest,
    RoutedExperts,
    Sampling,
    UpdateMode,
    WeightsKind,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.length_stats import LengthClass
from rollout_api.protocol.history_encoding import (
    DRAFT_SOURCES,
    decode_draft_sources,
    encode_draft_sources,
    num_encoded_tokens,
)
from rollout_api.protocol.messages import (
    MESSAGES,
    InitWeightTransfer,
    Message,
    TransferStep,
    WeightTransfer,
)

token_ids = st.lists(st.integers(0, 2**32 - 2), max_size=50)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
identifiers = st.text(min_size=1, max_size=40)
clients = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
times = st.floats(0, 2e9)
infos = st.dictionaries(identifiers, st.integers(0, 9) | identifiers | st.lists(identifiers, max_size=3), max_size=3)


@st.composite
def responses(draw: st.DrawFn) -> dict[str, object]:
    tokens = draw(token_ids)
    later = draw(st.lists(st.builds(WeightSpan, start=st.integers(1, 100), weight_version=st.integers(0, 9))))
    first = [WeightSpan(start=0, weight_version=draw(st.integers(0, 9)))]

    def for_each_token(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=len(tokens), max_size=len(tokens))

    fields: dict[str, object] = {
        "token_ids": tokens,
        "logprobs": draw(st.none() | for_each_token(float32s)),
        "weight_spans": [*first, *later] if tokens or draw(st.booleans()) else [],
    }
    if draw(st.booleans()):
        fields["ranks"] = draw(for_each_token(st.integers(1, 2**32 - 1)))
        fields["top_logprobs"] = draw(for_each_token(st.dictionaries(st.integers(0, 2**32 - 2), float32s, max_size=3)))
    if draw(st.booleans()):
        fields["kept_token_ids"] = draw(for_each_token(st.lists(st.integers(0, 2**32 - 2), max_size=3)))
    if draw(st.booleans()):
        fields["prompt_logprobs"] = prompt = draw(st.lists(float32s, max_size=20))
        if draw(st.booleans()):
            fields["prompt_ranks"] = [draw(st.integers(1, 2**32 - 1)) for _ in prompt]
            fields["top_prompt_logprobs"] = [
                draw(st.dictionaries(st.integers(0, 2**32 - 2), float32s, max_size=2)) for _ in prompt
            ]
    return fields


partials = st.builds(lambda response: Partial(**response), responses())
samplings = st.builds(
    lambda fields: Sampling(**fields),
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 64),
            "temperature": st.floats(0, 2),
            "max_tokens": st.integers(1, 10_000),
            "stop": st.lists(identifiers, max_size=3),
            "logit_bias": st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
            "seed": st.none() | st.integers(0, 2**31 - 1),
            "structured_outputs": st.sampled_from(
                [{}, {"json": {"type": "object"}}, {"regex": "", "whitespace_pattern": " "}, {"json_object": True}]
            ),
        },
    ),
)


@st.composite
def requests(draw: st.DrawFn) -> RolloutRequest:
    trajectory_id = draw(st.none() | identifiers)
    fields: dict[str, object] = {
        "job_uid": draw(identifiers),
        "request_id": draw(identifiers),
        "prompt_token_ids": draw(st.lists(st.integers(0, 2**32 - 2), min_size=1, max_size=50)),
        "problem_id": draw(identifiers),
        "trajectory_id": trajectory_id,
        "turn": 0 if trajectory_id is None else draw(st.integers(0, 9)),
    }
    fields |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "reply_to": clients,
                "sampling": samplings,
                "purpose": st.sampled_from(Purpose),
                "priority": st.integers(-(2**31), 2**31 - 1),
                "deadline_seconds": st.none() | st.floats(0, 1e9, exclude_min=True),
                "prefix": st.none() | partials,
                "draft_mode": st.sampled_from(DraftMode),
                "draft_budget": st.none() | st.integers(0, 64),
                "half_logprobs": st.booleans(),
            },
        )
    )
    versions = st.integers(0, 2**40)
    fields |= draw(
        st.fixed_dictionaries({}, optional={"weight_version": st.none() | versions})
        | st.fixed_dictionaries({}, optional={"min_weight_version": versions, "max_staleness": versions})
    )
    return RolloutRequest.model_validate(fields)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    rollout_id = RolloutId("job", draw(identifiers), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
    response = draw(responses())
    count = len(response["token_ids"])
    codes = draw(st.none() | st.lists(st.integers(0, len(DRAFT_SOURCES)), min_size=count, max_size=count))
    return Rollout(
        rollout_id=str(rollout_id),
        problem_id=draw(identifiers),
        purpose=draw(st.sampled_from(Purpose)),
        **response,
        draft_sources=None if codes is None else encode_draft_sources(bytes(codes)),
        draft_tokens_by_source=draw(st.dictionaries(st.sampled_from(DRAFT_SOURCES), st.integers(0, 1000))),
        accepted_tokens_by_source=draw(st.dictionaries(st.sampled_from(DRAFT_SOURCES), st.integers(0, 1000))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        detail=draw(st.text(max_size=40)),
        num_decoding_steps=draw(st.integers(0, 1000)),
        num_draft_tokens=draw(st.integers(0, 1000)),
        num_accepted_tokens=draw(st.integers(0, 1000)),
        length_class=draw(st.sampled_from(["", *LengthClass])),
        engine=draw(st.text(max_size=20)),
        num_cached_tokens=draw(st.integers(0, 10_000)),
        started_at=draw(times),
        finished_at=draw(times),
        routed_experts=draw(st.none() | routed_experts()),
    )


@st.composite
def routed_experts(draw: st.DrawFn) -> RoutedExperts:
    shape = [draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    dtype: Literal["uint8", "uint16"] = draw(st.sampled_from(("uint8", "uint16")))
    size = math.prod(shape) * (1 if dtype == "uint8" else 2)
    return RoutedExperts(shape=shape, dtype=dtype, data=draw(st.binary(min_size=size, max_size=size)))


by_kind: dict[type[Message], st.SearchStrategy[Message]] = {
    RolloutRequest: requests(),
    Rollout: rollouts(),
    Partial: partials,
    Refusal: st.builds(Refusal, request_id=identifiers, reason=st.text(max_size=100)),
    WeightUpdate: st.builds(
        WeightUpdate,
        weight_version=st.integers(1, 2**40),
        uri=identifiers,
        weights_kind=st.sampled_from(WeightsKind),
        sha256=st.none() | st.from_regex("[0-9a-f]{64}", fullmatch=True),
        mode=st.sampled_from(UpdateMode),
    )
    | st.builds(
        WeightUpdate,
        weight_version=st.integers(1, 2**40),
        uri=identifiers,
        transfer=st.none()
        | st.builds(
            WeightTransfer,
            group=identifiers,
            engines=st.lists(identifiers, min_size=1, max_size=3),
            base=st.integers(0, 9),
            update_info=st.none() | infos,
        ),
    ),
    TransferStep: st.builds(
        TransferStep,
        step=st.sampled_from(["update", "finish", "abort"]),
        update_info=st.none() | infos,
        reason=identifiers,
    ),
    InitWeightTransfer: st.builds(
        InitWeightTransfer,
        group=identifiers,
        engines=st.dictionaries(identifiers, st.integers(1, 99), min_size=1, max_size=5),
        init_info=infos,
    ),
    Cancel: st.builds(Cancel, request_ids=st.lists(identifiers, min_size=1, max_size=5)),
    Rewards: st.builds(
        Rewards,
        rewards=st.dictionaries(identifiers, st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
    ),
    Pause: st.builds(Pause, mode=st.sampled_from(PauseMode)),
    Resume: st.just(Resume()),
    Close: st.just(Close()),
}
messages = st.one_of(*by_kind.values())


def test_every_kind_of_message_is_tested() -> None:
    assert set(MESSAGES) == by_kind.keys()


@given(messages)
def test_message_is_decoded_unchanged(message: Message) -> None:
    assert message == decode(encode(message))


@given(requests())
def test_fields_that_were_set_are_distinguished_from_defaults(request: RolloutRequest) -> None:
    back = decode(encode(request))
    assert isinstance(back, RolloutRequest)
    assert request.model_fields_set == back.model_fields_set - {"kind"}
    assert request.sampling.model_fields_set == back.sampling.model_fields_set


@given(messages, st.integers(0, 2**32), st.integers(0, 255))
def test_damaged_message_is_a_message_or_a_codec_error(message: Message, at: int, byte: int) -> None:
    data = bytearray(encode(message))
    data[at % len(data)] = byte
    for damaged in (bytes(data), bytes(data[: at % len(data)])):
        try:
            assert isinstance(decode(damaged), MESSAGES)
        except CodecError as error:
            assert str(error)


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=50))
def test_half_precision_logprobs_are_rounded(logprobs: list[float]) -> None:
    rollout = Rollout(
        rollout_id="j/r/0/0",
        problem_id="p",
        token_ids=[1] * len(logprobs),
        logprobs=logprobs,
        weight_spans=[WeightSpan(start=0, weight_version=0)],
        finish_reason=FinishReason.STOP,
    )
    back = decode(encode(rollout, half_logprobs=True))
    assert isinstance(back, Rollout)
    assert back.logprobs is not None
    assert all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(logprobs, back.logprobs, strict=True))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_codec_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)


@pytest.mark.parametrize(
    ("body", "expected_error"),
    [
        ([1, 2], "a message must be a map"),
        ({"v": 2, "kind": "rollout"}, "schema version 2"),
        ({"kind": "rollout"}, "schema version None"),
        ({"v": 1, "kind": "gossip"}, "unknown message kind"),
        ({"v": 1, "kind": "rollout"}, "rollout: token_ids: Field required"),
        ({"v": 1, "kind": "rollout", "token_ids": b"123"}, "not a multiple of 4"),
        ({"v": 1, "kind": "rollout", "token_ids": 5}, "malformed"),
        ({"v": 1, "kind": "rollout", "token_ids": [-1, 0, 0, 0]}, "malformed"),
        ({"v": 1, "kind": "request", "surprise": 1, "prompt_token_ids": b"\0\0\0\0"}, "request"),
        ({"v": 1, "kind": "partial", "token_ids": b"\0\0\0\0", "weight_spans": []}, "tokens without a weight span"),
        (
            {"v": 1, "kind": "partial", "token_ids": b"", "weight_spans": [{"start": 1, "weight_version": 0}]},
            "start at 0",
        ),
        (
            {"v": 1, "kind": "partial", "token_ids": b"", "logprobs": {"f": "d", "b": b""}, "weight_spans": []},
            "format 'd'",
        ),
        (
            {"v": 1, "kind": "partial", "token_ids": b"", "logprobs": {"f": "f", "b": b"123"}, "weight_spans": []},
            "malformed",
        ),
        ({"v": 1, "kind": "partial", "token_ids": b"", "logprobs": [0.5], "weight_spans": []}, "malformed"),
        (
            {
                "v": 1,
                "kind": "partial",
                "token_ids": b"",
                "top_logprobs": {"n": b"\1\0\0\0", "t": b"", "p": {"f": "f", "b": b""}},
                "weight_spans": [],
            },
            "1, 0 and 0",
        ),
        (
            {
                "v": 1,
                "kind": "partial",
                "token_ids": b"",
                "kept_token_ids": {"n": b"\1\0\0\0", "t": b"\1\0\0\0\2\0\0\0"},
                "weight_spans": [],
            },
            "kept_token_ids have different numbers of tokens: 1",
        ),
        ({"v": 1, "kind": "rewards", "rewards": {"a/b/0/0": float("nan")}}, "rewards"),
        ({"v": 1, "kind": "cancel", "request_ids": []}, "request_ids"),
        ({"v": 1, "kind": "weights", "weight_version": 1, "uri": "/w", "sha256": "xyz"}, "sha256"),
    ],
)
def test_error_says_what_is_wrong(body: object, expected_error: str) -> None:
    with pytest.raises(CodecError, match=expected_error):
        decode(msgpack.packb(body))


@pytest.mark.parametrize("depth", [100, 500, 1000, 100_000])
@pytest.mark.parametrize("kind", ["request", "partial", "rollout", "rewards", "cancel", "weights"])
@pytest.mark.parametrize("field", ["prefix", "sampling", "rewards", "weight_spans", "unknown"])
def test_nested_message_is_a_codec_error(depth: int, kind: str, field: str) -> None:
    beginning = msgpack.packb({"v": 1, "kind": kind, field: 0})[:-1]
    for one in (b"\x81" + msgpack.packb(field), b"\x91"):  # maps with the same key, and lists
        with pytest.raises(CodecError):
            decode(beginning + one * depth + b"\xc0")


@given(st.text(min_size=1).filter(lambda t: "/" not in t), identifiers, st.integers(0, 99), st.integers(0, 99))
def test_rollout_id_is_parsed_from_its_text(uid: str, request: str, sample: int, turn: int) -> None:
    assert RolloutId(uid, request, sample, turn) == RolloutId.parse(str(RolloutId(uid, request, sample, turn)))


@pytest.mark.parametrize(
    ("fields", "expected_error"),
    [
        ({"turn": 1, "problem_id": "p"}, "turn 1 needs a trajectory_id"),
        ({"turn": 1, "trajectory_id": "t"}, "turn 1 needs the problem_id"),
        ({"reply_to": "a/b"}, "reply_to"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"weight_version": 3, "min_weight_version": 2}, "weight_version excludes min_weight_version"),
        ({"weight_version": 3, "max_staleness": 0}, "weight_version excludes .* max_staleness"),
        ({"stream": True, "keep_seconds": 1, "max_staleness": 1}, "stream excludes max_staleness"),
    ],
)
def test_inconsistent_request_is_rejected(fields: dict[str, object], expected_error: str) -> None:
    with pytest.raises(ValueError, match=expected_error):
        RolloutRequest.model_validate({"job_uid": "j", "request_id": "r", "prompt_token_ids": [1], **fields})


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=6), st.data())
def test_a_response_that_is_split_can_be_joined(lengths: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Spans of alternating versions are cut where the response is cut, and joined again."""
    total = sum(length for length, _ in lengths)
    starts = [sum(length for length, _ in lengths[:index]) for index in range(len(lengths))]
    spans = [WeightSpan(start=start, weight_version=index) for index, start in enumerate(starts)]
    logprobs = [-float(index) for index in range(total)] if data.draw(st.booleans()) else None
    fields: dict[str, Any] = {}
    if data.draw(st.booleans()):
        fields["ranks"] = [1 + index for index in range(total)]
        fields["top_logprobs"] = [{index: -float(index)} for index in range(total)]
        fields["kept_token_ids"] = [[index, index + 1] for index in range(total)]
    if data.draw(st.booleans()):
        fields["prompt_logprobs"] = [-0.5, -0.25]
    whole = Partial(token_ids=list(range(total)), logprobs=logprobs, weight_spans=spans, **fields)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=5)))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, total], strict=True):
        rest = whole.since(start)
        assert whole.token_ids[start:] == rest.token_ids
        for_each_token = ("token_ids", "logprobs", "ranks", "top_logprobs", "kept_token_ids")
        cut = rest.model_dump() | {
            **{name: values[: end - start] for name in for_each_token if (values := getattr(rest, name)) is not None},
            "weight_spans": [span for span in rest.weight_spans if span.start < end - start],
        }
        parts.append(Partial.model_validate(cut))
    joined = Partial.join(parts)
    assert (whole.token_ids, whole.weight_spans) == (joined.token_ids, joined.weight_spans)
    assert whole.prompt_logprobs == joined.prompt_logprobs
    assert all(part.prompt_logprobs is None for part, start in zip(parts, [0, *cuts], strict=True) if start)
    if total:
        assert whole.logprobs == joined.logprobs
        assert (whole.ranks, whole.top_logprobs) == (joined.ranks, joined.top_logprobs)
        assert whole.kept_token_ids == joined.kept_token_ids


def test_the_history_receives_no_log_probabilities() -> None:
    fields: dict[str, Any] = {"logprobs": [-1.0], "prompt_logprobs": [-1.0, -2.0], "prompt_ranks": [1, 2]}
    request = RolloutRequest(job_uid="j", request_id="r", prompt_token_ids=[1, 2, 3])
    partial = Partial(token_ids=[1], weight_spans=[WeightSpan(start=0, weight_version=0)], **fields)
    rollout = Rollout.from_request(request, 0, partial, FinishReason.STOP)
    assert [-1.0, -2.0] == rollout.prompt_logprobs
    assert {"logprobs", "prompt_logprobs", "prompt_ranks"} == {
        name for name in fields if getattr(rollout.without_logprobs(), name) is None
    }


@given(routed_experts())
def test_routed_experts_have_a_form_in_json(experts: RoutedExperts) -> None:
    assert experts == RoutedExperts.model_validate_json(experts.model_dump_json())


def test_fields_of_the_prompt_have_equal_lengths() -> None:
    with pytest.raises(ValueError, match="fields about the prompt's tokens have different lengths"):
        Partial(token_ids=[], weight_spans=[], prompt_logprobs=[-1.0], prompt_ranks=[1, 2])


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
