"""Encoded messages keep their bytes, so that trainers and jobs of different versions understand each other."""

from __future__ import annotations

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
BYTES = {
    "smallest request": (
        "85a17601a46b696e64a772657175657374a76a6f625f756964a83666316332653961aa726571756573745f6964a172b070726f6d"
        "70745f746f6b656e5f696473c40401000000"
    ),
    "request with many fields": (
        "8da17601a46b696e64a772657175657374a76a6f625f756964a83666316332653961aa726571756573745f6964ab72616e6b2d30"
        "3a31373a33a87265706c795f746fa672616e6b2d30aa70726f626c656d5f6964a867736d386b2f3432b070726f6d70745f746f6b"
        "656e5f696473c40c0100000000000100feffffffa873616d706c696e6786a16e01ab74656d7065726174757265cb3fe000000000"
        "0000aa6d61785f746f6b656e7320a473746f7091a3e28093aa6c6f6769745f6269617381a137cbbff8000000000000a473656564"
        "01a7707572706f7365a46576616cad7472616a6563746f72795f6964a27430a47475726e01a670726566697883a9746f6b656e5f"
        "696473c4080500000007000000a86c6f6770726f627382a166a166a162c408000000bf000000c0ac7765696768745f7370616e73"
        "9182a5737461727400ae7765696768745f76657273696f6e11aa64726166745f6d6f6465a86f776e5f74657874"
    ),
    "rollout": (
        "8ca17601a46b696e64a7726f6c6c6f7574a9746f6b656e5f696473c40c090000000800000002000000a86c6f6770726f627382a1"
        "66a166a162c40c000080be000080bf000080bdac7765696768745f7370616e739282a5737461727400ae7765696768745f766572"
        "73696f6e1182a5737461727402ae7765696768745f76657273696f6e12aa726f6c6c6f75745f6964b336663163326539612f6465"
        "6d6f2d312f302f30aa70726f626c656d5f6964d92062333061336331353964376538313933353539613432613834663166636165"
        "31ad66696e6973685f726561736f6ea473746f70b26e756d5f6465636f64696e675f737465707302b06e756d5f64726166745f74"
        "6f6b656e7304b36e756d5f61636365707465645f746f6b656e7301ab66696e69736865645f6174cb41d954fc40500000"
    ),
    "rollout with routed experts": (
        "88a17601a46b696e64a7726f6c6c6f7574a9746f6b656e5f696473c40409000000ac7765696768745f7370616e739182a5737461"
        "727400ae7765696768745f76657273696f6e11aa726f6c6c6f75745f6964b336663163326539612f64656d6f2d312f302f30aa70"
        "726f626c656d5f6964a170ad66696e6973685f726561736f6ea66c656e677468ae726f757465645f6578706572747383a5736861"
        "706593030102a56474797065a575696e7438a464617461c406000102030405"
    ),
    "partial": (
        "85a17601a46b696e64a77061727469616ca9746f6b656e5f696473c4080500000007000000a86c6f6770726f627382a166a166a1"
        "62c408000000bf000000c0ac7765696768745f7370616e739182a5737461727400ae7765696768745f76657273696f6e11"
    ),
    "partial with likely tokens": (
        "87a17601a46b696e64a77061727469616ca9746f6b656e5f696473c4080500000007000000a572616e6b73c40801000000030000"
        "00ac746f705f6c6f6770726f627383a16ec4080200000001000000a174c40c050000000900000008000000a17082a166a166a162"
        "c40c000000bf000080bf000080beae6b6570745f746f6b656e5f69647382a16ec4080300000000000000a174c40c050000000900"
        "00000b000000ac7765696768745f7370616e739182a5737461727400ae7765696768745f76657273696f6e11"
    ),
    "refusal": (
        "84a17601a46b696e64a77265667573616caa726571756573745f6964a664656d6f2d31a6726561736f6eb67468652070726f6d70"
        "7420697320746f6f206c6f6e67"
    ),
    "full weights": (
        "85a17601a46b696e64a777656967687473ae7765696768745f76657273696f6e12a3757269b02f776569676874732f737465702d"
        "3138a6736861323536d9403030303030303030303030303030303030303030303030303030303030303030303030303030303030"
        "3030303030303030303030303030303030303030303030"
    ),
    "LoRA adapter": (
        "86a17601a46b696e64a777656967687473ae7765696768745f76657273696f6e13a3757269b02f776569676874732f6c6f72612d"
        "3139ac776569676874735f6b696e64a46c6f7261a46d6f6465a46b656570"
    ),
    "cancellation": "83a17601a46b696e64a663616e63656cab726571756573745f69647392a664656d6f2d31a664656d6f2d32",
    "rewards": (
        "83a17601a46b696e64a772657761726473a77265776172647382b336663163326539612f64656d6f2d312f302f30cb3ff0000000"
        "000000b336663163326539612f64656d6f2d312f312f30cbbfe0000000000000"
    ),
    "pause": "83a17601a46b696e64a57061757365a46d6f6465a477616974",
    "close": "82a17601a46b696e64a5636c6f7365",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_keeps_its_bytes(name: str) -> None:
    assert BYTES[name] == encode(MESSAGES[name]).hex()
    assert MESSAGES[name] == decode(bytes.fromhex(BYTES[name]))


def test_log_probabilities_can_have_half_the_bytes() -> None:
    packed = msgpack.unpackb(encode(MESSAGES["rollout"], half_logprobs=True))["logprobs"]
    assert {"f": "e", "b": bytes.fromhex("00b400bc00ac")} == packed


@pytest.mark.parametrize("name", ["smallest request", "rollout", "close"])
def test_fields_of_a_later_version_are_ignored(name: str) -> None:
    later = {**msgpack.unpackb(bytes.fromhex(BYTES[name])), "color": "red"}
    assert MESSAGES[name] == decode(msgpack.packb(later))


def test_the_id_of_a_problem_is_a_hash_of_its_prompt() -> None:
    assert "07fd4721fe17d7a13682c537b5d9e607" == problem_id_of([0, 1, 4_294_967_294])


def test_the_checksum_of_weights_covers_names_and_contents(tmp_path: Path) -> None:
    for name, content in {"b.safetensors": b"two", "a.safetensors": b"one", "notes.txt": b"ignored"}.items():
        (tmp_path / name).write_bytes(content)
    assert "46eedee2f6c9918a4e30c4ec7a908c96485f872754b99e123617ac16c81cee7a" == checksum(tmp_path)
