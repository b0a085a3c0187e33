"""The page, the schema and the test vectors of the protocol agree with the code."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis

from rollout_api import CodecError, decode, encode, problem_id_of
from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_api.protocol.messages import MESSAGES
from rollout_api.weights.checksum import checksum
from scripts import protocol_docs
from tests.support.fake_job import FakeJob

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "docs" / "protocol" / "vectors.json").read_text())
SCHEMA = json.loads((ROOT / "docs" / "protocol" / "schema.json").read_text())
KINDS = {model.model_fields["kind"].default: model for model in MESSAGES}
REASONS = {
    "not msgpack": r"^not valid msgpack: ",
    "not a map": r"^a message must be a map",
    "version": r"^unsupported schema version ",
    "kind": r"^unknown message kind",
    "field": r"^(request|rollout|partial|refusal|weights|cancel|rewards|close): (?!malformed)",
    "packing": r"malformed field|not a multiple of 4|logprobs have the unknown format|different numbers of tokens",
}


def by_name(kind: str) -> list[Any]:
    return [pytest.param(vector, id=vector["name"]) for vector in VECTORS[kind]]


def test_generated_files_are_up_to_date() -> None:
    assert protocol_docs.as_json(protocol_docs.schema()) == protocol_docs.SCHEMA.read_text()
    assert protocol_docs.as_json(protocol_docs.vectors()) == protocol_docs.VECTORS.read_text()
    assert protocol_docs.document(protocol_docs.PAGE.read_text()) == protocol_docs.PAGE.read_text()


@pytest.mark.parametrize("vector", by_name("valid"))
def test_a_vector_is_encoded_and_decoded(vector: dict[str, Any]) -> None:
    body = {name: value for name, value in vector["json"].items() if name != "v"}
    message = KINDS[body["kind"]].model_validate(body)
    assert vector["hex"] == encode(message, half_logprobs=vector.get("half_logprobs", False)).hex()
    assert message == decode(bytes.fromhex(vector["hex"]))


@pytest.mark.parametrize("vector", by_name("valid"))
def test_the_schema_accepts_every_message(vector: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(vector["json"])


def test_the_schema_uses_the_names_of_the_wire_format() -> None:
    assert {"top_p", "max_tokens"} < SCHEMA["$defs"]["Sampling"]["properties"].keys()
    assert "uint" not in SCHEMA["$defs"]["Sampling"]["properties"]["logprobs"].get("x-wire", "")
    assert "little-endian" in SCHEMA["$defs"]["Rollout"]["properties"]["token_ids"]["x-wire"]
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert validator.is_valid({"v": 1, "kind": "close", "colour": "red"})
    assert not validator.is_valid({**VECTORS["valid"][0]["json"], "sampling": {"colour": "red"}})
    assert not validator.is_valid({"v": 2, "kind": "close"})


@pytest.mark.parametrize("vector", by_name("unknown_fields"))
def test_unknown_fields_are_ignored(vector: dict[str, Any]) -> None:
    body = {name: value for name, value in vector["json"].items() if name != "v"}
    assert KINDS[body["kind"]].model_validate(body) == decode(bytes.fromhex(vector["hex"]))


@pytest.mark.parametrize("vector", by_name("invalid"))
def test_an_invalid_vector_is_rejected_with_its_error(vector: dict[str, Any]) -> None:
    with pytest.raises(CodecError) as rejected:
        decode(bytes.fromhex(vector["hex"]))
    assert re.search(REASONS[vector["reason"]], str(rejected.value))
    assert vector["error"] == str(rejected.value)


def test_every_kind_and_reason_has_a_vector() -> None:
    assert KINDS.keys() == {vector["json"]["kind"] for vector in VECTORS["valid"]}
    assert REASONS.keys() == {vector["reason"] for vector in VECTORS["invalid"]}


def test_hashes_agree_with_the_vectors(tmp_path: Path) -> None:
    for vector in VECTORS["problem_ids"]:
        assert vector["problem_id"] == problem_id_of(vector["prompt_token_ids"])
    [weights] = VECTORS["weights"]
    for name, content in weights["files"].items():
        (tmp_path / name).write_bytes(bytes.fromhex(content))
    assert weights["sha256"] == checksum(tmp_path)


def test_the_page_lists_every_key_that_a_client_uses() -> None:
    page, keys = protocol_docs.PAGE.read_text(), MessageKeys("<uid>")
    used = [keys.job, keys.requests, keys.control, keys.rewards, keys.results("<request id>")]
    used += [keys.result_updates("<client>"), keys.refusal("<request id>"), keys.unreleased("<client>")]
    used += [keys.results_written, keys.results_read, keys.newest_steps, keys.ledger("<request id>")]
    used += [keys.status, keys.engines, keys.lease("<engine>"), keys.dead_letters, job_uid_key("<namespace>/<name>")]
    assert [] == [key for key in used if f"`{key}`" not in page]


def test_the_example_runs(redis_url: str) -> None:
    """Run every command of the example in a shell; the job answers in between."""
    job = FakeJob(redis_url, uid=protocol_docs.EXAMPLE.job_uid, name="default/demo")
    text = protocol_docs.PAGE.read_text().partition("## An example")[2]
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    port = redis.Redis.from_url(redis_url).connection_pool.connection_kwargs["port"]
    password = redis.Redis.from_url(redis_url).connection_pool.connection_kwargs["password"]
    shell = {"PATH": "/usr/bin:/bin", "REDISCLI_AUTH": password}

    def run(*steps: str) -> str:
        script = "\n".join(["set -e", f'redis-cli() {{ command redis-cli -p {port} "$@"; }}', *steps])
        done = subprocess.run(["bash", "-c", script], env=shell, cwd=ROOT, capture_output=True, timeout=30)
        assert (0, b"") == (done.returncode, done.stderr)
        return done.stdout.decode(errors="replace")

    assert 7 == len(commands)
    assert protocol_docs.EXAMPLE.job_uid in run(*commands[:4])
    assert [protocol_docs.EXAMPLE] == job.requests()
    for request in job.requests():
        job.answer(request)
    assert "demo-1" in run(commands[4])
    assert "rollout" in run(commands[5])
    assert "1" == run(commands[6]).strip()
    assert not job.redis.exists(job.keys.results("demo-1"))
