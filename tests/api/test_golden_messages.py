"""Encoded messages keep their bytes, so that trainers and jobs of different versions understand each other."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import msgpack
import pytest

from rollout_api import (
    Cancel,
    Close,
    DraftMode,
    FinishReason,
    Partial,
    Pause,
    PauseMode,
    Purpose,
    Refusal,
    Rewards,
    Rollout,
    RolloutRequest,
    RoutedExperts,
    Sampling,
    UpdateMode,
    WeightsKind,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
    problem_id_of,
)
from rollout_api.protocol.messages import Message
from rollout_api.weights.checksum import checksum

_RESPONSE = Partial(token_ids=[5, 7], logprobs=[-0.5, -2.0], weight_spans=[WeightSpan(start=0, weight_version=17)])

MESSAGES: dict[str, Message] = {
    "smallest request": RolloutRequest(job_uid="6f1c2e9a", request_id="r", prompt_token_ids=[1]),
    "request with many fields": RolloutRequest(
        job_uid="6f1c2e9a",
        request_id="rank-0:17:3",
        reply_to="rank-0",
        problem_id="gsm8k/42",
        prompt_token_ids=[1, 65_536, 4_294_967_294],
        sampling=Sampling(n=1, temperature=0.5, max_tokens=32, stop=["–"], logit_bias={7: -1.5}, seed=1),
        purpose=Purpose.EVAL,
        trajectory_id="t0",
        turn=1,
        prefix=_RESPONSE,
        draft_mode=DraftMode.OWN_TEXT,
    ),
    "request with images": RolloutRequest(
        job_uid="6f1c2e9a", request_id="r", prompt_token_ids=[1, 9], images=["0" * 64, "f" * 64]
    ),
    "rollout": Rollout(
        rollout_id="6f1c2e9a/demo-1/0/0",
        problem_id=problem_id_of([1, 2, 3]),
        token_ids=[9, 8, 2],
        logprobs=[-0.25, -1.0, -0.0625],
        weight_spans=[WeightSpan(start=0, weight_version=17), WeightSpan(start=2, weight_version=18)],
        finish_reason=FinishReason.STOP,
        num_decoding_steps=2,
        num_draft_tokens=4,
        num_accepted_tokens=1,
        finished_at=1_700_000_001.25,
    ),
    "rollout with routed experts": Rollout(
        rollout_id="6f1c2e9a/demo-1/0/0",
        problem_id="p",
        token_ids=[9],
        weight_spans=[WeightSpan(start=0, weight_version=17)],
        finish_reason=FinishReason.LENGTH,
        routed_experts=RoutedExperts(shape=[3, 1, 2], dtype="uint8", data=bytes(range(6))),
    ),
    "partial": _RESPONSE,
    "partial with likely tokens": Partial(
        token_ids=[5, 7],
        ranks=[1, 3],
        top_logprobs=[{5: -0.5, 9: -1.0}, {8: -0.25}],
        kept_token_ids=[[5, 9, 11], []],
        weight_spans=[WeightSpan(start=0, weight_version=17)],
    ),
    "refusal": Refusal(request_id="demo-1", reason="the prompt is too long"),
    "full weights": WeightUpdate(weight_version=18, uri="/weights/step-18", sha256="0" * 64),
    "LoRA adapter": WeightUpdate(
        weight_version=19, uri="/weights/lora-19", weights_kind=WeightsKind.LORA, mode=UpdateMode.KEEP
    ),
    "cancellation": Cancel(request_ids=["demo-1", "demo-2"]),
    "rewards": Rewards(rewards={"6f1c2e9a/demo-1/0/0": 1.0, "6f1c2e9a/demo-1/1/0": -0.5}),
    "pause": Pause(mode=PauseMode.WAIT),
    "close": Close(),
}
DIGESTS = {
    "smallest request": "e8735ffb3a5071940f4daa2621684e2f",
    "request with many fields": "cefb85e9d72220bdb575deb9a85fb5dc",
    "request with images": "6cb0a75449570fe3d1ed6b9aab3486ae",
    "rollout": "2451570834d022ba6d48e9f31349a5ee",
    "rollout with routed experts": "74a175e53bd639d7663e3b631a4a0173",
    "partial": "9d7e540e4e7d10255c5a9702d3824b60",
    "partial with likely tokens": "0f0fa705ef39a86803a99aa7be8574ce",
    "refusal": "fd5509ca250e8a792d9882dae1a8902b",
    "full weights": "5e02708471bb9a99652f95bec4e4edc4",
    "LoRA adapter": "6074141afdddc57bd24adac04420a625",
    "cancellation": "8760a99c48343a0b7b7fe44571d1427c",
    "rewards": "5e31d70e0bedf01e37acfe20c2050e94",
    "pause": "f2d58439114d1d19bb4bd5b3cf88f279",
    "close": "2c29c5da87c923eda100c0b17f1fb60b",
}
"""The first half of the SHA-256 of each encoded message, in hex."""


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_keeps_its_bytes(name: str) -> None:
    encoded = encode(MESSAGES[name])
    assert DIGESTS[name] == sha256(encoded).hexdigest()[:32], msgpack.unpackb(encoded)
    assert MESSAGES[name] == decode(encoded)


def test_log_probabilities_can_have_half_the_bytes() -> None:
    packed = msgpack.unpackb(encode(MESSAGES["rollout"], half_logprobs=True))["logprobs"]
    assert {"f": "e", "b": bytes.fromhex("00b400bc00ac")} == packed


@pytest.mark.parametrize("name", ["smallest request", "rollout", "close"])
def test_fields_of_a_later_version_are_ignored(name: str) -> None:
    later = {**msgpack.unpackb(encode(MESSAGES[name])), "color": "red"}
    assert MESSAGES[name] == decode(msgpack.packb(later))


def test_the_id_of_a_problem_is_a_hash_of_its_prompt() -> None:
    assert "07fd4721fe17d7a13682c537b5d9e607" == problem_id_of([0, 1, 4_294_967_294])


def test_the_checksum_of_weights_covers_names_and_contents(tmp_path: Path) -> None:
    for name, content in {"b.safetensors": b"two", "a.safetensors": b"one", "notes.txt": b"ignored"}.items():
        (tmp_path / name).write_bytes(content)
    assert "46eedee2f6c9918a4e30c4ec7a908c96485f872754b99e123617ac16c81cee7a" == checksum(tmp_path)
