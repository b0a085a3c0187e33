"""Writes what docs/protocol.md says of messages, docs/protocol/schema.json and vectors.json from the models.

``python scripts/protocol_docs.py``; the text of docs/protocol.md outside the marked blocks is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import tempfile
from collections.abc import Callable
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
from pydantic.json_schema import models_json_schema

from rollout_api.protocol.messages import (
    MESSAGES,
    SCHEMA_VERSION,
    Broadcast,
    Cancel,
    Close,
    CodecError,
    Drafts,
    FinishReason,
    Message,
    Partial,
    Purpose,
    Refusal,
    Rewards,
    Rollout,
    RolloutRequest,
    TensorToCome,
    UpdateMode,
    WeightsKind,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
    problem_id_of,
)
from rollout_api.weights.checksum import checksum

ROOT = Path(__file__).parents[1] / "docs"
PAGE, SCHEMA, VECTORS = ROOT / "protocol.md", ROOT / "protocol" / "schema.json", ROOT / "protocol" / "vectors.json"

TOKENS = "bin: the ids as unsigned 32-bit little-endian integers, one after the other"
LOGPROBS = (
    "map {f, b}: f is 'f' (IEEE 754 binary32) or 'e' (binary16), b is bin: the values, little-endian, one after "
    "the other"
)
ON_THE_WIRE = {"token_ids": TOKENS, "prompt_token_ids": TOKENS, "logprobs": LOGPROBS}
NESTED = ("WeightSpan", "Sampling", "Broadcast", "TensorToCome")
EXAMPLE = RolloutRequest.model_validate(
    {
        "job_uid": "6f1c2e9a",
        "request_id": "demo-1",
        "reply_to": "demo",
        "prompt_token_ids": [1, 2, 3],
        "sampling": {"n": 2, "max_tokens": 16},
    }
)


# the schema


def schema() -> dict[str, Any]:
    """JSON Schema of every message, in the JSON form of test vectors; ``x-wire`` says what is packed on the wire."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in MESSAGES], by_alias=False, ref_template="#/$defs/{model}"
    )
    models = definitions["$defs"]
    for about in models.values():
        about.pop("x-kubernetes-validations", None)  # rules of the manifest that shares the model
    for model in MESSAGES:
        about = models[model.__name__]
        for name, packed in ON_THE_WIRE.items():
            if name in about["properties"]:
                about["properties"][name]["x-wire"] = packed
        about["properties"] = {"v": {"const": SCHEMA_VERSION, "type": "integer"}, **about["properties"]}
        # a prefix is a Partial within a request: it carries neither
        about["required"] = [*([] if model is Partial else ["v", "kind"]), *about.get("required", [])]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Messages of a rollout job, version {SCHEMA_VERSION}",
        "description": "Made by scripts/protocol_docs.py. See docs/protocol.md.",
        "oneOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in MESSAGES],
        "$defs": models,
    }


# the vectors


def _response(tokens: list[int], logprobs: list[float] | None = None) -> dict[str, Any]:
    return {"token_ids": tokens, "logprobs": logprobs, "spans": [WeightSpan(start=0, weight_version=17)]}


def messages() -> dict[str, Message]:
    """A message of each kind, by name; some kinds in several shapes."""
    prefix = Partial(**_response([5, 4_294_967_294], [-0.5, -2.0]))
    return {
        "request: the least": RolloutRequest(job_uid="6f1c2e9a", request_id="r", prompt_token_ids=[1]),
        "request: the example of the page": EXAMPLE,
        "request: every field": RolloutRequest.model_validate(
            {
                "job_uid": "6f1c2e9a",
                "request_id": "rank-0:17:3",
                "reply_to": "rank-0",
                "problem_id": "gsm8k/42",
                "prompt_token_ids": [1, 65_536, 151_643],
                "sampling": {
                    "n": 1,
                    "temperature": 0.5,
                    "top_p": 0.75,
                    "top_k": 20,
                    "max_tokens": 32,
                    "min_tokens": 1,
                    "stop": ["\n\n", "–"],
                    "stop_token_ids": [2],
                    "logit_bias": {"7": -1.5},
                    "logprobs": True,
                    "seed": 1,
                },
                "purpose": Purpose.EVAL,
                "priority": -3,
                "deadline_seconds": 1.5,
                "weight_version": 17,
                "trajectory_id": "rank-0:17:t0",
                "turn": 1,
                "prefix": prefix,
                "drafts": Drafts.OWN_TEXT,
                "draft_budget": 4,
                "half_logprobs": True,
            }
        ),
        "rollout: stopped": Rollout(
            rollout_id="6f1c2e9a/demo-1/0/0",
            problem_id=problem_id_of([1, 2, 3]),
            **_response([9, 8, 2], [-0.25, -1.0, -0.0625]),
            finish_reason=FinishReason.STOP,
            steps=2,
            drafted=4,
            accepted=1,
            engine="worker-0/1",
            cached_tokens=2,
            started_at=1_700_000_000.5,
            finished_at=1_700_000_001.25,
        ),
        "rollout: weights changed under it": Rollout(
            rollout_id="6f1c2e9a/demo-1/1/0",
            problem_id=problem_id_of([1, 2, 3]),
            token_ids=[9, 8, 2],
            spans=[WeightSpan(start=0, weight_version=17), WeightSpan(start=2, weight_version=18)],
            finish_reason=FinishReason.LENGTH,
        ),
        "rollout: cancelled before it began": Rollout(
            rollout_id="6f1c2e9a/demo-1/1/0",
            problem_id=problem_id_of([1, 2, 3]),
            token_ids=[],
            spans=[],
            finish_reason=FinishReason.CANCELLED,
        ),
        "partial": prefix,
        "refusal": Refusal(request_id="demo-1", reason="a prompt of 5000 tokens exceeds engine.maxModelLen 4096"),
        "weights: full": WeightUpdate(weight_version=18, uri="/weights/step-18", sha256="0" * 64),
        "weights: broadcast": WeightUpdate(
            weight_version=20,
            uri="nccl://10.0.0.7:29500",
            broadcast=Broadcast(
                group="a1b2",
                ranks={"engine-0-6ecaac90": 1, "engine-1-463c4e58": 3},
                world_size=5,
                tensors=[TensorToCome(name="model.norm.weight", dtype="bfloat16", shape=[4096])],
            ),
        ),
        "weights: lora": WeightUpdate(
            weight_version=19, uri="/weights/lora-19", weights=WeightsKind.LORA, mode=UpdateMode.KEEP
        ),
        "cancel": Cancel(request_ids=["demo-1", "demo-2"]),
        "rewards": Rewards(rewards={"6f1c2e9a/demo-1/0/0": 1.0, "6f1c2e9a/demo-1/1/0": -0.5}),
        "close": Close(),
    }


def invalid() -> dict[str, tuple[str, bytes]]:
    """Bytes that are no message, by name: the class of the reason, and the bytes."""
    least = {"v": 1, "kind": "request", "job_uid": "j", "request_id": "r", "prompt_token_ids": b"\1\0\0\0"}
    partial = {"v": 1, "kind": "partial", "token_ids": b"\1\0\0\0", "spans": [{"start": 0, "weight_version": 0}]}

    def packed(body: Any) -> bytes:
        return bytes(msgpack.packb(body))

    return {
        "nothing": ("not msgpack", b""),
        "cut short": ("not msgpack", packed(least)[:-2]),
        "bytes behind the end": ("not msgpack", packed(least) + b"\0"),
        "JSON": ("not msgpack", b'{"v": 1, "kind": "close"}'),
        "a list": ("not a map", packed([1, 2])),
        "no version": ("version", packed({"kind": "close"})),
        "a later version": ("version", packed({"v": 2, "kind": "close"})),
        "no kind": ("kind", packed({"v": 1})),
        "an unknown kind": ("kind", packed({"v": 1, "kind": "gossip"})),
        "a field is missing": ("field", packed({"v": 1, "kind": "refusal", "request_id": "r"})),
        "a field is unknown": ("field", packed({**least, "colour": "red"})),
        "a number is out of range": ("field", packed({**least, "priority": 2**31})),
        "a number is not finite": ("field", packed({"v": 1, "kind": "rewards", "rewards": {"r": float("inf")}})),
        "a token id is reserved": ("field", packed({**least, "prompt_token_ids": b"\xff\xff\xff\xff"})),
        "no prompt": ("field", packed({**least, "prompt_token_ids": b""})),
        "a client's name with a slash": ("field", packed({**least, "reply_to": "a/b"})),
        "a turn without a trajectory": ("field", packed({**least, "turn": 1, "problem_id": "p"})),
        "tokens without a span": ("field", packed({**partial, "spans": []})),
        "more logprobs than tokens": ("field", packed({**partial, "logprobs": {"f": "f", "b": b"\0" * 8}})),
        "tokens that are not packed": ("packing", packed({**least, "prompt_token_ids": [1, 2, 300]})),
        "half a token": ("packing", packed({**least, "prompt_token_ids": b"\1\0"})),
        "logprobs in another format": ("packing", packed({**partial, "logprobs": {"f": "d", "b": b"\0" * 8}})),
        "logprobs that are cut short": ("packing", packed({**partial, "logprobs": {"f": "f", "b": b"\0" * 3}})),
    }


def vectors() -> dict[str, Any]:
    """Messages with their bytes, bytes that must be refused, and what is computed from token ids and from weights."""
    valid: list[dict[str, Any]] = []
    for name, message in messages().items():
        body = {"v": SCHEMA_VERSION, "kind": message.kind, **message.model_dump(mode="json", exclude_unset=True)}
        valid.append({"name": name, "json": body, "hex": encode(message).hex()})
        if getattr(message, "logprobs", None):
            half = encode(message, half_logprobs=True).hex()
            valid.append({"name": f"{name}, logprobs as float16", "json": body, "half_logprobs": True, "hex": half})
    refused = []
    for name, (reason, data) in invalid().items():
        try:
            decode(data)
        except CodecError as error:
            refused.append({"name": name, "reason": reason, "hex": data.hex(), "error": str(error)})
        else:
            raise AssertionError(f"{name} is a message")
    prompts = [[1], [1, 2, 3], [0, 4_294_967_294]]
    return {
        "version": SCHEMA_VERSION,
        "valid": valid,
        "invalid": refused,
        "problem_ids": [{"prompt_token_ids": prompt, "problem_id": problem_id_of(prompt)} for prompt in prompts],
        "weights": [_weights({"b.safetensors": b"two", "a.safetensors": b"one", "notes.txt": b"not read"})],
    }


def _weights(files: dict[str, bytes]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)
        return {"files": {name: data.hex() for name, data in files.items()}, "sha256": checksum(directory)}


# the page


def _type(about: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return _type(defs[name], defs) if "enum" in defs[name] else name
    if "anyOf" in about:
        return _type(next(one for one in about["anyOf"] if one.get("type") != "null"), defs)
    if "enum" in about:
        return " \\| ".join(f"`{value}`" for value in about["enum"])
    if about.get("type") == "array":
        return f"list of {_type(about['items'], defs)}"
    if about.get("type") == "object":
        return f"map of text to {_type(about['additionalProperties'], defs)}"
    kind = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text"}[about["type"]]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {about[name]}" for name, sign in signs.items() if name in about]
    if "maxLength" in about:
        bounds.append(f"at most {about['maxLength']} characters")
    if "pattern" in about:
        bounds.append(f"`{about['pattern']}`")
    return " ".join([kind, ", ".join(bounds)]).strip()


def _rows(model: dict[str, Any], defs: dict[str, Any]) -> list[str]:
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    for name, about in model["properties"].items():
        if name in ("v", "kind"):
            continue
        packed = {TOKENS: "packed token ids", LOGPROBS: "packed numbers"}.get(about.get("x-wire", ""))
        kind = packed or _type(about, defs)
        required = name in model.get("required", [])
        value = about.get("default")
        default = "**required**" if required else "" if value in (None, "") else f"`{json.dumps(value).strip(chr(34))}`"
        rows.append(f"| `{name}` | {kind} | {default} | {about.get('description', '')} |")
    return rows


def fields() -> str:
    """Tables of all messages."""
    defs = schema()["$defs"]
    parts: list[str] = []
    for model in MESSAGES:
        about = defs[model.__name__]
        title = f"### `{about['properties']['kind']['const']}` ({model.__name__})"
        parts += [title, "", _markdown(model.__doc__), ""]
        rows = _rows(about, defs)
        parts += [*rows, ""] if len(rows) > 2 else ["No fields.", ""]
    for name in NESTED:
        parts += [f"### {name}", "", _markdown(defs[name].get("description")), "", *_rows(defs[name], defs), ""]
    for values in (FinishReason, Purpose, Drafts, WeightsKind, UpdateMode):
        parts += [f"### {values.__name__}", "", _markdown(values.__doc__), "", "| value | |", "|---|---|"]
        parts += [f"| `{value}` | {meaning} |" for value, meaning in _meanings(values)] + [""]
    return "\n".join(parts).rstrip()


def _meanings(values: type[StrEnum]) -> list[tuple[str, str]]:
    """An enumeration's values with the text that stands below each in the source."""
    body = next(one.body for one in ast.parse(inspect.getsource(values)).body if isinstance(one, ast.ClassDef))
    texts = {
        one.targets[0].id: ast.literal_eval(after.value)
        for one, after in pairwise(body)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and isinstance(after, ast.Expr)
    }
    return [(value.value, _markdown(texts.get(value.name))) for value in values]


def _markdown(text: str | None) -> str:
    return (text or "").strip().replace("``", "`")


def example() -> str:
    """The request of the worked example, as a shell command."""
    return f"```console\n$ REQUEST={encode(EXAMPLE).hex()}\n```"


BLOCKS: dict[str, Callable[[], str]] = {"fields": fields, "example": example}


def document(page: str) -> str:
    """*page* with its marked blocks made anew."""
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name}: made by scripts/protocol_docs.py -->", f"<!-- /{name} -->"
        pattern = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"docs/protocol.md must have one block {begin!r}")
        before, after = pattern.split(page)
        page = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return page


def as_json(content: Any) -> str:
    """As the files are written."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.parent.mkdir(exist_ok=True)
    SCHEMA.write_text(as_json(schema()))
    VECTORS.write_text(as_json(vectors()))
    PAGE.write_text(document(PAGE.read_text()))
