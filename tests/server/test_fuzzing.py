"""Bodies that no client should send, on every route, and what the server answers."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollout_server import trainer_api
from tests.support.served_job import MODEL_NAME, ServedJob, serving

NUM_BODIES = 80
"""Number of bodies for each route."""
MAX_GROWTH_MIB = 256
"""How much memory the process of the server and the test may gain while all bodies are processed."""
ODD = (
    *("null", "true", "0", "-1", "1.5", "1e999", "-1e999", "NaN", "9223372036854775808", "18446744073709551616"),
    *("1" * 5000, '""', '"x"', '"\\ud83d"', '"\\u0000"', '"' + "a" * 5000 + '"'),
    *("[]", "{}", "[null]", "[[]]", '["a", 1]', "[1e999]", '{"": null}', '{"type": 1}', '[{"type": "x"}]', '{"a": {"b": []}}'),
    *("[" * 200 + "]" * 200, '{"a":' * 200 + "1" + "}" * 200, "[" * 100_000, '{"a":' * 100_000),
)
"""JSON texts that are valid for few fields. Some are not JSON at all."""
VALID: Mapping[str, str] = {
    "model": json.dumps(MODEL_NAME),
    "messages": '[{"role": "user", "content": "one two"}]',
    "prompt": '"one two"',
    "input": '"one two"',
    "text": '"one two"',
    "token_ids": "[1, 2]",
    "tokens": "[1, 2]",
    "max_tokens": "4",
    "sampling_params": "{}",
    "query": '"one"',
    "items": '["two"]',
    "tools": '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]',
}
"""Field → a value that most routes accept."""
VALID_ON = {"/v1/chat/completions/batch": {"messages": '[[{"role": "user", "content": "one"}]]'}}
"""Route → fields with other types than on other routes."""
OTHERS = {
    "structured_outputs": '{"regex": "a+"}',
    "guided_regex": '"a+"',
    "guided_json": '{"type": "object"}',
    "guided_choice": '["a", "b"]',
    "vllm_xargs": '{"rollout_step": 18446744073709551616}',
    "chat_template_kwargs": '{"padding": "max_length", "max_length": 4000000, "tokenize": true}',
    "stream": "true",
}
"""Fields that are not in the schema of each route, but that some code reads."""
UNSCHEMATIC = {
    "/invocations": ("prompt", "messages", "input", "max_tokens", "model"),
    "/inference/v1/abort_requests": ("request_ids",),
}
"""Routes that read bodies without a schema → their fields."""


class Schemas:
    """Bodies for the schemas of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._named = document["components"]["schemas"]
        self.routes: dict[str, Any] = {path: {"properties": dict.fromkeys(names, {})} for path, names in UNSCHEMATIC.items()}
        for path, methods in document["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" in content:
                self.routes[path] = content["application/json"]["schema"]

    def body(self, path: str) -> st.SearchStrategy[str]:
        """Return bodies for a route: most are valid but for one to three fields."""
        return st.one_of(*[_body(self, path, self._resolved(one)) for one in self._alternatives(self.routes[path])])

    def _resolved(self, schema: Any) -> Any:
        while "$ref" in schema:
            schema = self._named[schema["$ref"].rpartition("/")[2]]
        return schema

    def _alternatives(self, schema: Any) -> list[Any]:
        schema = self._resolved(schema)
        return schema.get("anyOf") or schema.get("oneOf") or [schema]

    def value(self, schema: Any, depth: int) -> st.SearchStrategy[str]:
        """Return values of a schema, and some that are not."""
        if not depth:
            return _odd()
        return st.one_of(*[self._one_value(self._resolved(one), depth) for one in self._alternatives(schema)], _odd())

    def _one_value(self, schema: Any, depth: int) -> st.SearchStrategy[str]:
        if "enum" in schema or "const" in schema:
            return st.sampled_from([json.dumps(value) for value in schema.get("enum", [schema.get("const")])])
        match schema.get("type"):
            case "string":
                return st.sampled_from(['"x"', '"one two"', '"("', '"{}"', '"data:image/png;base64,AAAA"'])
            case "integer" | "number":
                return st.sampled_from(["0", "1", "2", "4", "-1", "0.5"])
            case "boolean":
                return st.sampled_from(["true", "false"])
            case "array":
                items = self.value(schema.get("items", {}), depth - 1)
                return st.lists(items, max_size=2).map(lambda values: f"[{','.join(values)}]")
            case "object":
                return self._fields(schema, depth)
        return _odd()

    def _fields(self, schema: Any, depth: int) -> st.SearchStrategy[str]:
        properties = schema.get("properties") or {"x": schema.get("additionalProperties") or {}}
        required = schema.get("required", ())
        one = {
            name: self.value(value if isinstance(value, dict) else {}, depth - 1)
            for name, value in properties.items()
        }
        mandatory = {name: value for name, value in one.items() if name in required}
        optional = {name: value for name, value in one.items() if name not in mandatory} if len(one) < 4 else {}
        return st.fixed_dictionaries(mandatory, optional=optional).map(_as_object)


@st.composite
def _body(draw: st.DrawFn, schemas: Schemas, path: str, schema: Any) -> str:
    if not draw(st.integers(0, 15)):
        return draw(_odd())
    properties = schema.get("properties", {})
    fields = {name: VALID[name] for name in schema.get("required", list(properties)[1:]) if name in VALID}
    fields |= VALID_ON.get(path, {})
    fields |= {"model": VALID["model"]} if "model" in properties else {}
    for name in draw(st.lists(st.sampled_from([*properties, *OTHERS]), min_size=0, max_size=3, unique=True)):
        values = [_odd(), schemas.value(properties[name], 3)] if name in properties else [_odd()]
        fields[name] = draw(st.one_of(*values, *([st.just(OTHERS[name])] if name in OTHERS else [])))
    return _as_object(fields)


def _odd() -> st.SearchStrategy[str]:
    return st.sampled_from(ODD)


def _as_object(fields: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}"


_FEW = settings(
    max_examples=NUM_BODIES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def served(job: ServedJob, redis_url: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of a server whose job answers every request, but has no engines that could load weights."""
    monkeypatch.setattr(trainer_api, "PUBLISH_TIMEOUT_S", 0.02)
    monkeypatch.setattr(trainer_api, "_JOIN_TIMEOUT_S", 0.02)
    monkeypatch.setattr("rollout_server.sglang_api.PUBLISH_TIMEOUT_S", 0.02)
    arguments = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    with (
        serving(job, redis_url, model, arguments) as url,
        job.serving(lambda request: job.answer_text(request, "two")),
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        yield client


class Answers:
    """What a server has answered."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.counts: dict[str, Counter[str]] = {}
        """Route → class of statuses → number of answers."""
        self.wrong: dict[tuple[str, str], str] = {}
        """Route, and an answer that says that the server has failed, or lacks OpenAI's shape → the shortest body."""

    def send(self, path: str, body: str) -> None:
        """Send a body, and count the answer."""
        try:
            reply = self._client.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
        except httpx.TransportError as error:
            status, text = 599, repr(error)
        else:
            status, text = reply.status_code, reply.text
            if status < 300 and '"code":500' in text.replace(" ", ""):  # in a response that is streamed
                status = 500
        self.counts.setdefault(path, Counter())[f"{status // 100}xx"] += 1
        # 501 says that a job cannot do what is asked for.
        if (status >= 500 and status != 501) or (status >= 400 and not _is_error(text)):
            key = path, f"{status} {text[:200]}"
            self.wrong[key] = min(self.wrong.get(key, body), body, key=len)


def _is_error(text: str) -> bool:
    """Return whether a text is an error in the shape of OpenAI, or in Anthropic's."""
    try:
        reply = json.loads(text)
        error = reply["error"]
    except (ValueError, LookupError, TypeError):
        return False
    is_complete = error.keys() >= {"type", "param", "code"} or reply.get("type") == "error"
    return bool(error["message"]) and is_complete


@pytest.mark.slow
def test_no_body_is_an_error_of_the_server(served: httpx.Client, record_property: Callable[[str, object], None]) -> None:
    schemas, answers = Schemas(served.get("/openapi.json").json()), Answers(served)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in sorted(schemas.routes):
        bodies = schemas.body(path)

        @given(st.data())
        @_FEW
        def send(data: st.DataObject) -> None:
            answers.send(path, data.draw(bodies))  # noqa: B023  # it is called within the loop

        send()
        assert served.get("/health").status_code == 200
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before) / 1024
    report = {path: dict(counted) for path, counted in answers.counts.items()}
    record_property("answers", report)
    record_property("memory gained (MiB)", round(growth))
    print(json.dumps(report, indent=1), f"{growth:.0f} MiB")
    assert not answers.wrong, "\n".join(f"{path}: {body[:300]}\n  {text}" for (path, text), body in answers.wrong.items())
    assert growth < MAX_GROWTH_MIB
