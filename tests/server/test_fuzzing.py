"""Bodies that no client should send, on every route, and what the server answers."""

from __future__ import annotations

import gzip
import json
import re
import resource
import socket
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
    *(
        "[]",
        "{}",
        "[null]",
        "[[]]",
        '["a", 1]',
        "[1e999]",
        '{"": null}',
        '{"type": 1}',
        '[{"type": "x"}]',
        '{"a": {"b": []}}',
    ),
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
ODD_TEXTS = (
    *(
        b"",
        b"x",
        b"-1",
        b"0",
        b"1.5",
        b"1e999",
        b"NaN",
        b"\xb2",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xe2\x80\xa8",
        b"[",
        b"}",
        b"*",
    ),
    *(b"a\tb", b"9223372036854775808", b"9" * 5000, b"x" * 20_000),
)
"""Values of headers."""
HEADERS = (
    *(
        f"X-Rollout-{name}"
        for name in ("Problem", "Trajectory", "Turn", "Purpose", "Step", "Priority", "Drafts", "Other")
    ),
    *("X-Rollout-Weight-Version", "X-Rollout-Deadline-Seconds", "X-Rollout-", "Idempotency-Key", "traceparent"),
    *(
        "Content-Type",
        "Content-Encoding",
        "Accept",
        "Accept-Encoding",
        "Expect",
        "Cookie",
        "Host",
        "Origin",
        "Range",
        "TE",
    ),
    *("X-Request-Id", "X-data-parallel-rank", "X-Session-ID", "X-Forwarded-For", "Authorization", "If-None-Match"),
)
CONTENT_TYPES = (
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "multipart/form-data; boundary=x"),
    *("application/json; charset=utf-16", "application/json;;;", "*/*", "application/octet-stream"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "OTHER")
UNKNOWN_PATHS = (
    "/",
    "//",
    "/v1",
    "/unknown",
    "/v1/completions/",
    "/%00",
    "/%ff",
    "/..",
    "/v1/models/%ff",
    "/?%ff",
    "*",
)
UPGRADE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
UNSCHEMATIC = {
    "/invocations": ("prompt", "messages", "input", "max_tokens", "model"),
    "/inference/v1/abort_requests": ("request_ids",),
}
"""Routes that read bodies without a schema → their fields."""


class Schemas:
    """Bodies for the schemas of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._named = document["components"]["schemas"]
        self.routes: dict[str, Any] = {
            path: {"properties": {name: {} for name in names}} for path, names in UNSCHEMATIC.items()
        }
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
            name: self.value(value if isinstance(value, dict) else {}, depth - 1) for name, value in properties.items()
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
            self.add(path, body, 599, repr(error))
        else:
            self.add(path, body, reply.status_code, reply.text)

    def send_raw(self, route: str, head: bytes, body: bytes = b"", *, has_length: bool = True) -> None:
        """Send the request line and headers, then a body, and count the answer."""
        length = b"Content-Length: %d\r\n" % len(body) if has_length else b""
        host = b"" if b"\nHost:" in head else b"Host: x\r\n"
        url = self._client.base_url
        with socket.create_connection((url.host, url.port), timeout=20) as connection:
            connection.sendall(head + host + length + b"Connection: close\r\n\r\n" + body)
            answer = b""
            try:
                while part := connection.recv(2**16):
                    answer += part
            except ConnectionError:  # the server has not read all of the body
                pass
            except TimeoutError:
                answer = b"HTTP/1.1 599 \r\n\r\nno answer"
        start, _, text = answer.partition(b"\r\n\r\n")
        self.add(route, repr((head + body)[:200]), int(start.split(b" ", 2)[1]), text.decode("latin-1"))

    def add(self, route: str, request: str, status: int, text: str) -> None:
        """Count an answer."""
        if status < 300 and (found := re.search(r'"code": ?(5\d\d)', text)):  # in a response that is streamed
            status = int(found[1])
        self.counts.setdefault(route, Counter())[f"{status // 100}xx"] += 1
        # uvicorn answers what is no HTTP, and nothing else has a body that is empty.
        has_shape = not text or text == "Invalid HTTP request received." or _is_error(text)
        if status >= 500 or (status >= 400 and not has_shape):
            key = route, f"{status} {text[:200]}"
            self.wrong[key] = min(self.wrong.get(key, request), request, key=len)


def _is_error(text: str) -> bool:
    """Return whether a text is an error in the shape of OpenAI, or in Anthropic's or SGLang's on their routes."""
    try:
        reply = json.loads(text)
        if reply.get("success") is False:
            return bool(reply["message"])
        error = reply["error"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    is_complete = error.keys() >= {"type", "param", "code"} or reply.get("type") == "error"
    return bool(error["message"]) and is_complete


@pytest.mark.slow
def test_no_body_is_an_error_of_the_server(
    served: httpx.Client, record_property: Callable[[str, object], None]
) -> None:
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
    _check(answers, memory_before, record_property)


@pytest.mark.slow
def test_no_form_of_a_request_is_an_error_of_the_server(
    served: httpx.Client, record_property: Callable[[str, object], None]
) -> None:
    document, answers = served.get("/openapi.json").json(), Answers(served)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path, body in {
        "/v1/completions": _as_object({name: VALID[name] for name in ("model", "prompt", "max_tokens")}).encode(),
        "/v1/chat/completions": _as_object(
            {name: VALID[name] for name in ("model", "messages", "max_tokens")}
        ).encode(),
        "/generate": _as_object({"text": VALID["text"]}).encode(),
    }.items():
        line = f"POST {path} HTTP/1.1\r\n".encode()
        head = line + b"Content-Type: application/json\r\n"
        for name in HEADERS:
            for value in ODD_TEXTS:
                start = line if name == "Content-Type" else head
                answers.send_raw(f"header {name}", start + name.encode() + b": " + value + b"\r\n", body)
        form = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'
        for content_type in CONTENT_TYPES:
            for content in (body, form, b"a=1&b=%ff", b""):
                answers.send_raw("content type", line + f"Content-Type: {content_type}\r\n".encode(), content)
        for encoding in ("gzip", "deflate", "br", "identity", "gzip, gzip"):
            for content in (body, gzip.compress(body)):
                answers.send_raw("content encoding", head + f"Content-Encoding: {encoding}\r\n".encode(), content)
        text = body.decode()
        for content in (
            *(body + b"x", body + b"\0", body + body, b"\xef\xbb\xbf" + body, body.replace(b"two", b"\xff"), b""),
            *(text.encode(encoding) for encoding in ("utf-16", "utf-16-le", "utf-32")),
            *(text[:-1].encode() + b', "n": null, "n": 1, "n": [], "__class__": {}}', body.replace(b"two", b"t\nwo")),
        ):
            answers.send_raw("body", head, content)
        chunked = b"Transfer-Encoding: chunked\r\n"
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        for headers, content in (
            *(
                (chunked, chunks),
                (chunked, b"zz\r\n"),
                (chunked * 2, chunks),
                (chunked + b"Content-Length: 5\r\n", chunks),
            ),
            *((b"Transfer-Encoding: " + name + b"\r\n", chunks) for name in (b"gzip, chunked", b"gzip", b"identity")),
            *(
                (b"Content-Length: " + value + b"\r\n", body)
                for value in (b"-1", b"+5", b"5", b"\xb2", b"9" * 30, b"x")
            ),
            (b"Content-Length: 5\r\nContent-Length: 6\r\n", body),
        ):
            answers.send_raw("length", head + headers, content, has_length=False)
    del document["paths"]["/get_world_size"]  # it waits for an engine
    for path in (*document["paths"], *UNKNOWN_PATHS):
        for method in METHODS:
            answers.send_raw("method", f"{method} {path} HTTP/1.1\r\n".encode())
        answers.send_raw("web socket", f"GET {path} HTTP/1.1\r\n".encode() + UPGRADE)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            for name in (*names, "unknown"):
                for value in ("", "x", "-1", "1e999", "NaN", "true", "9" * 5000, "%00", "%ff", "%ED%A0%80", "[]"):
                    target = f"{method.upper()} {path}?{name}={value} HTTP/1.1\r\n".encode()
                    answers.send_raw("query", target + b"Content-Type: application/json\r\n", b"{}")
    assert served.get("/health").status_code == 200
    _check(answers, memory_before, record_property)


def _check(answers: Answers, memory_before: int, record_property: Callable[[str, object], None]) -> None:
    """Check that no answer says that the server has failed, and that memory has not grown, and record both."""
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before) / 1024
    report = {path: dict(counted) for path, counted in answers.counts.items()}
    record_property("answers", report)
    record_property("memory gained (MiB)", round(growth))
    assert not answers.wrong, "\n".join(
        f"{path}: {body[:300]}\n  {text}" for (path, text), body in answers.wrong.items()
    )
    assert growth < MAX_GROWTH_MIB
