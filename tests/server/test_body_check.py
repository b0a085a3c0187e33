"""What the server refuses in bodies and headers, and how it says so."""

from __future__ import annotations

import asyncio
import json
import math
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from rollout_server import body_check
from rollout_server.body_check import BodyCheckMiddleware, BodyError, checked_body, read_body
from tests.support.served_job import MODEL_NAME, ServedJob

MAX_CHARACTERS = 100
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "one two"}]}


@pytest.mark.parametrize(
    ("body", "parameter", "message"),
    [
        ("5", None, "body: it must be a JSON object, but is a number"),
        ("null", None, "but is null"),
        ("[[[", None, "body: it is no JSON"),
        ("[" * 100_000, None, "nested more than 100 deep"),
        ('{"a":' + "[" * 200 + "]" * 200 + "}", "a", "nested more than 100 deep"),
        ('{"tools": [' + '{"a":' * 200 + "1" + "}" * 200 + "]}", "tools", "nested more than 100 deep"),
        ('{"structured_outputs": 1e999}', "structured_outputs", "must be a JSON object, but is a number"),
        ('{"a": {"b": [1, 1e999]}}', "a.b[1]", "the number is not finite"),
        ('{"request_ids": [5]}', "request_ids", "must be a list of texts"),
        ('{"a": NaN}', "a", "the number is not finite"),
        ('{"weight_version": 18446744073709551616}', "weight_version", "more than 64 bits"),
        ('{"token_ids": [1, -9223372036854775809]}', "token_ids[1]", "more than 64 bits"),
        ('{"a": ["\\ud83d"]}', "a[0]", "unpaired surrogate"),
        ('{"a": {"\\ud83d": 1}}', "a", "unpaired surrogate"),
        (json.dumps({"prompt": ["a", "b" * 101]}), "prompt[1]", "101 characters, but a prompt has at most 100"),
        (
            json.dumps({"messages": [{"content": [{"text": "b" * 101}]}]}),
            "messages[0].content[0].text",
            "101 characters",
        ),
        (json.dumps({"prompt": ["a"] * 5000}), "prompt", "at most 4096 prompts"),
        *(
            (json.dumps({name: value, "tool_choice": "required"}), name, "bytes, but at most 65536 can be compiled")
            for name, value in [
                ("structured_outputs", {"regex": "a" * 70_000}),
                ("response_format", {"json_schema": {"schema": {"enum": ["a" * 70_000]}}}),
                ("text", {"format": {"schema": {"enum": ["a" * 70_000]}}}),
                ("tools", [{"function": {"description": "a" * 70_000}}]),
            ]
        ),
        ('{"chat_template_kwargs": {"padding": "max_length"}}', "chat_template_kwargs.padding", "of the tokenizer"),
        ('{"chat_template_kwargs": {"tokenize": true}}', "chat_template_kwargs.tokenize", "of the tokenizer"),
    ],
)
def test_what_cannot_be_processed_is_named(body: str, parameter: str | None, message: str) -> None:
    with pytest.raises(BodyError) as caught:
        checked_body(body.encode(), MAX_CHARACTERS)
    assert parameter == caught.value.parameter
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"a": [1, 2.5, None, True, "x"], "b": {"c": [2**64 - 1, -(2**63)]}},
        {"messages": [{"content": [{"image_url": {"url": "data:image/png;base64," + "A" * 200}}]}]},
        {"prompt": list(range(5000))},
        {"tools": [{"function": {"parameters": {"enum": [2**64], "maximum": 2**64}}}], "metadata": {"a": -(2**70)}},
        {"chat_template_kwargs": {"enable_thinking": False, "add_generation_prompt": True, "anything": [1]}},
    ],
)
def test_other_bodies_are_not_changed(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    assert body == checked_body(body, MAX_CHARACTERS)


def test_a_body_with_too_many_values_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_check, "_MAX_VALUES", 10)
    with pytest.raises(BodyError, match="more than 10 values"):
        checked_body(b'{"a": [' + b"[]," * 20 + b"1]}", MAX_CHARACTERS)
    monkeypatch.setattr(body_check, "_MAX_CONTAINERS", 5)
    with pytest.raises(BodyError, match="more than 5 objects and lists"):
        checked_body(b'{"a": [{}, {}, {}, {}]}', MAX_CHARACTERS)
    text = json.dumps({"a": ',,[{"\\' * 20}).encode()
    assert text == checked_body(text, MAX_CHARACTERS)


async def test_a_body_may_arrive_in_parts() -> None:
    def receiving(*messages: Message) -> Receive:
        waiting = list(messages)

        async def receive() -> Message:
            return waiting.pop(0)

        return receive

    first = {"type": "http.request", "body": b"a", "more_body": True}
    assert b"ab" == await read_body(receiving(first, {"type": "http.request", "body": b"b"}))
    assert await read_body(receiving(first, {"type": "http.disconnect"})) is None


async def test_the_bodies_of_all_requests_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_check, "_MAX_HELD_BYTES", 1000)
    in_progress: list[asyncio.Event] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        in_progress.append(asyncio.Event())
        await in_progress[-1].wait()
        await PlainTextResponse("ok")(scope, receive, send)

    transport = httpx.ASGITransport(BodyCheckMiddleware(app, MAX_CHARACTERS))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        body = json.dumps({"a": [1] * 150})
        assert 400 < len(body) < 500
        held = [asyncio.create_task(client.post("/", content=body)) for _ in range(2)]
        while len(in_progress) < 2:
            await asyncio.sleep(0)
        refused = await asyncio.wait_for(client.post("/", content=body), 10)
        assert 503 == refused.status_code
        assert "1000 bytes" in refused.json()["error"]["message"]
        empty = asyncio.create_task(client.post("/"))
        while len(in_progress) < 3:
            await asyncio.sleep(0)
        for _ in range(2):  # what was refused, or has ended, does not count
            in_progress[0].set()
            assert "ok" == (await held.pop(0)).text
            del in_progress[0]
            held.append(asyncio.create_task(client.post("/", content=body)))
            while len(in_progress) < 3:
                await asyncio.sleep(0)
        for event in in_progress:
            event.set()
        assert ["ok"] * 3 == [(await task).text for task in (*held, empty)]


def test_a_text_without_an_end_is_read_once() -> None:
    started = time.process_time()  # unlike the time of day, it does not depend on other processes
    with pytest.raises(BodyError, match="objects and lists"):
        checked_body(b"[" * 300_000 + b'"' + b'\\"' * 1_000_000, MAX_CHARACTERS)
    assert time.process_time() - started < 5


def test_places_of_values_need_no_memory() -> None:
    key = "k" * 2_000_000
    for values in (["", 1] * 1000, [{}] * 1000, [1.5, math.nan] * 1000):
        body = json.dumps({"vllm_xargs": {key: values}}).encode()
        tracemalloc.start()
        try:
            checked_body(body, MAX_CHARACTERS)
        except BodyError as error:
            assert "the number is not finite" in str(error)
            assert "vllm_xargs.kkk" in str(error)
            assert len(str(error)) < 400
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 20 * 2**20


@pytest.mark.parametrize("values", [[0.5] * 300_000, [{}] * 250_000, [[1.5, None]] * 100_000, ["a"] * 300_000])
async def test_other_requests_continue_while_a_body_is_checked(values: list[Any]) -> None:
    reached: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(await receive())

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps({"a": values}).encode()}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    check = BodyCheckMiddleware(app, MAX_CHARACTERS)({"type": "http", "method": "POST"}, receive, send)
    task = asyncio.create_task(check)
    for _ in range(2):
        await asyncio.sleep(0)
    assert not task.done()
    await task
    assert 1 == len(reached)


def test_the_tokenizer_gets_no_arguments_of_requests(server: str, job: ServedJob) -> None:
    padding = {"tokenize": True, "return_dict": True, "padding": "max_length", "max_length": 40_000_000}
    for path in ("/v1/chat/completions", "/tokenize", "/v1/chat/completions/render"):
        reply = httpx.post(f"{server}{path}", json=CHAT | {"chat_template_kwargs": padding}, timeout=30)
        assert 400 == reply.status_code, reply.text
        assert "chat_template_kwargs.max_length" == reply.json()["error"]["param"]
    assert [] == job.requests()


@pytest.mark.parametrize(
    ("path", "field"), [("/generate", "text"), ("/tokenize", "prompt"), ("/v1/completions", "prompt")]
)
def test_a_text_that_is_no_prompt_is_not_tokenized(server: str, path: str, field: str) -> None:
    body = {field: "one two three " * 700_000} | ({} if path == "/generate" else {"model": MODEL_NAME})
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        reply = pool.submit(httpx.post, f"{server}{path}", json=body, timeout=60)
        while not reply.done():
            assert httpx.get(f"{server}/health", timeout=5).status_code == 200
    assert 400 == reply.result().status_code, reply.result().text
    assert field == reply.result().json()["error"]["param"]
    assert "characters" in reply.result().json()["error"]["message"]
    assert time.monotonic() - started < 5


def test_schemas_may_have_any_integers(server: str, job: ServedJob) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**400, "enum": [2**64, 2**65]}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with job.serving(lambda request: job.answer_text(request, "two")):
        for fields in (
            {"tools": [tool]},
            {"tools": [tool], "tool_choice": "required"},
            {"response_format": form},
            {"structured_outputs": {"json": schema}},
            {"guided_json": schema},
            {"metadata": {"a": 2**64}, "documents": [{"a": str(2**64), "b": 2**64}]},
        ):
            reply = httpx.post(f"{server}/v1/chat/completions", json=CHAT | fields, timeout=30)
            assert reply.status_code in (200, 400), (fields, reply.text)
            assert "64 bits" not in reply.text


@pytest.mark.parametrize("name", ["Step", "Priority", "Turn", "Weight-Version"])
@pytest.mark.parametrize("value", [str(2**64), str(-(2**63) - 1), "1" * 5000, "1.5"])
def test_a_header_with_an_invalid_integer_is_named(server: str, name: str, value: str) -> None:
    reply = httpx.post(f"{server}/v1/chat/completions", json=CHAT, headers={f"X-Rollout-{name}": value}, timeout=30)
    assert 400 == reply.status_code, reply.text
    assert f"X-Rollout-{name}" == reply.json()["error"]["param"]


@pytest.mark.parametrize("rank", ["1", "-1", str(2**64), "1" * 5000, "x"])
def test_a_rank_that_the_job_has_not_is_no_error_of_the_server(server: str, job: ServedJob, rank: str) -> None:
    with job.serving(lambda request: job.answer_text(request, "two")):
        reply = httpx.post(
            f"{server}/v1/chat/completions", json=CHAT, headers={"X-data-parallel-rank": rank}, timeout=30
        )
    assert reply.status_code in (200, 400), reply.text
