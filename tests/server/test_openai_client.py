"""OpenAI's client, unmodified, with the server of a job."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai as openai_package
import pytest
from openai import AsyncOpenAI, OpenAI

from rollout_api import FinishReason, Purpose, RolloutRequest
from rollout_api.protocol.history_encoding import encode_draft_sources
from rollout_server.server import ServerArgumentError
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.served_job import MODEL_NAME, ServedJob, answering, serving, while_calling
from tests.support.waiting import wait_for

TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
MESSAGES: Any = [{"role": "user", "content": "one two"}]
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a_completion_is_a_rollout(openai: OpenAI, job: ServedJob) -> None:
    found: list[RolloutRequest] = []
    completion = while_calling(
        lambda: openai.completions.create(model=MODEL_NAME, prompt="one two", max_tokens=9, temperature=0.5),
        answering(job, "three four", end=FinishReason.LENGTH, found=found),
    )
    assert "three four" == completion.choices[0].text
    assert "length" == completion.choices[0].finish_reason
    [request] = found
    assert job.tokens("one two") == request.prompt_token_ids
    assert (1, 9, 0.5) == (request.sampling.n, request.sampling.max_tokens, request.sampling.temperature)
    assert completion.usage is not None
    assert len(job.tokens("three four")) == completion.usage.completion_tokens


def test_settings_that_a_request_omits_are_the_jobs(openai: OpenAI, job: ServedJob) -> None:
    found: list[RolloutRequest] = []
    while_calling(
        lambda: openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES), answering(job, "x", found=found)
    )
    # One response is the default of the API, whatever the job's number of rollouts.
    assert (1, 64, 1.0) == (
        found[0].sampling.n,
        found[0].sampling.max_tokens,
        found[0].sampling.temperature,
    )
    assert "seed" not in found[0].sampling.model_fields_set


def test_a_chat_completion_has_the_models_template_and_the_behavior_log_probabilities(
    openai: OpenAI, job: ServedJob
) -> None:
    found: list[RolloutRequest] = []
    completion = while_calling(
        lambda: openai.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, n=2, logprobs=True, extra_body={"return_token_ids": True}
        ),
        answering(job, "three", "four five", found=found),
    )
    assert "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n" == job.text(found[0].prompt_token_ids)
    assert (2, True) == (found[0].sampling.n, found[0].sampling.logprobs)
    assert ["three", "four five"] == [choice.message.content for choice in completion.choices]
    for sample, choice in enumerate(completion.choices):
        expected = job.rollout(found[0], sample, ["three", "four five"][sample])
        assert "stop" == choice.finish_reason
        assert expected.token_ids == choice.token_ids  # type: ignore[attr-defined]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert expected.logprobs == [entry.logprob for entry in choice.logprobs.content]
    assert found[0].prompt_token_ids == completion.prompt_token_ids  # type: ignore[attr-defined]


def test_a_chat_completion_has_the_most_likely_tokens_at_each_position(openai: OpenAI, job: ServedJob) -> None:
    completion = while_calling(
        lambda: openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, logprobs=True, top_logprobs=2),
        answering(job, "three four"),
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    tokens = [*job.tokens("three four"), job.tokenizer.eos_token_id]
    assert len(tokens) == len(logprobs.content)
    for entry, token in zip(logprobs.content, tokens, strict=True):
        assert [job.text([token]), job.text([token + 1])] == [likely.token for likely in entry.top_logprobs]
        assert [entry.logprob, entry.logprob - 1] == [likely.logprob for likely in entry.top_logprobs]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_the_most_likely_tokens_at_each_position(
    openai: OpenAI, job: ServedJob, *, stream: bool
) -> None:
    def answer() -> None:
        [request] = job.wait_for_requests(1)
        assert (True, 3) == (request.sampling.logprobs, request.sampling.top_logprobs)
        if stream:
            job.stream_text(request, 0, "three")
            time.sleep(0.5)
        job.answer_text(request, "three four", end=FinishReason.LENGTH)

    def call() -> list[dict[str, float]]:
        reply: Any = openai.completions.create(model=MODEL_NAME, prompt="one", logprobs=3, stream=stream)
        parts = [part.choices[0].logprobs for part in (reply if stream else [reply])]
        return [likely for part in parts if part is not None for likely in part.top_logprobs]

    found = while_calling(call, answer)
    expected = []
    for index, token in enumerate(job.tokens("three four")):
        logprob = -0.25 * (1 + index % 4)
        expected.append({job.text([token + number]): logprob - number for number in range(3)})
    assert expected == found


def test_fewer_likely_tokens_are_returned_where_fewer_can_be_sampled(openai: OpenAI, job: ServedJob) -> None:
    def answer() -> None:
        [request] = job.wait_for_requests(1)
        rollout = job.rollout(request, 0, "three four", FinishReason.LENGTH)
        assert rollout.top_logprobs is not None
        first, *rest = rollout.top_logprobs
        likely = [{rollout.token_ids[0]: -0.25}, *rest]
        assert first.keys() > likely[0].keys()
        job.keep(request, rollout.model_copy(update={"top_logprobs": likely}))
        job.delete_request(request)

    completion = while_calling(lambda: openai.completions.create(model=MODEL_NAME, prompt="one", logprobs=2), answer)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.top_logprobs is not None
    assert [1, *[2] * (len(job.tokens("three four")) - 1)] == [
        len(likely) for likely in completion.choices[0].logprobs.top_logprobs
    ]


def test_tokens_can_be_the_prompt(openai: OpenAI, job: ServedJob) -> None:
    found: list[RolloutRequest] = []

    def answer() -> None:
        found.extend(job.wait_for_requests(2))
        for request in found:
            job.answer_text(request, job.text(request.prompt_token_ids))

    prompts = [job.tokens("one"), job.tokens("two three")]
    completion = while_calling(lambda: openai.completions.create(model=MODEL_NAME, prompt=prompts), answer)
    assert prompts == [request.prompt_token_ids for request in found]
    assert ["one", "two three"] == [choice.text for choice in completion.choices]


def test_text_is_streamed_while_it_is_sampled(openai: OpenAI, job: ServedJob) -> None:
    stream = openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True, logprobs=True)
    [request] = job.wait_for_requests(1)
    assert request.stream
    chunks = iter(stream)

    def next_text() -> str:
        while not (text := next(chunks).choices[0].delta.content):
            pass
        return text

    job.stream_text(request, 0, "one two")
    assert "one two" == next_text()
    job.stream_text(request, 0, " three", after="one two")
    assert " three" == next_text()
    job.answer_text(request, "one two three four")
    rest = [chunk.choices[0] for chunk in chunks]
    assert " four" == "".join(choice.delta.content or "" for choice in rest)
    assert "stop" == rest[-1].finish_reason


def test_the_asynchronous_client_streams_several_samples(server: str, job: ServedJob) -> None:
    async def texts() -> dict[int, str]:
        found = {0: "", 1: ""}
        async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            stream = await client.completions.create(model=MODEL_NAME, prompt="one", n=2, stream=True)
            [request] = await asyncio.to_thread(job.wait_for_requests, 1)
            job.stream_text(request, 1, "four")
            job.answer_text(request, "two three", "four five")
            async for chunk in stream:
                for choice in chunk.choices:
                    found[choice.index] += choice.text
        return found

    assert {0: "two three", 1: "four five"} == asyncio.run(texts())


def test_a_stop_string_is_cut_off(openai: OpenAI, job: ServedJob) -> None:
    completion = while_calling(
        lambda: openai.completions.create(model=MODEL_NAME, prompt="one", stop=["four"]),
        lambda: _answer_without_end_token(job, "two three four"),
    )
    assert ("two three ", "stop") == (completion.choices[0].text, completion.choices[0].finish_reason)


def _answer_without_end_token(job: ServedJob, text: str) -> None:
    [request] = job.wait_for_requests(1)
    assert ["four"] == request.sampling.stop
    rollout = job.rollout(request, 0, text, FinishReason.LENGTH).model_copy(update={"finish_reason": FinishReason.STOP})
    job.keep(request, rollout)
    job.delete_request(request)


def test_end_tokens_of_the_model_can_be_ignored(openai: OpenAI, job: ServedJob) -> None:
    """A response that a stop string has ended may end with such a token, which is then part of the text."""
    end = job.text([job.tokenizer.eos_token_id])

    def answer() -> None:
        [request] = job.wait_for_requests(1)
        assert request.sampling.ignore_eos
        tokens = [*job.tokens("two"), job.tokenizer.eos_token_id, *job.tokens(" three"), job.tokenizer.eos_token_id]
        rollout = job.rollout(request, 0, "two").model_copy(
            update={"token_ids": tokens, "logprobs": [-0.5] * len(tokens)}
        )
        job.keep(request, rollout)
        job.delete_request(request)

    completion = while_calling(
        lambda: openai.completions.create(
            model=MODEL_NAME,
            prompt="one",
            stop=[f" three{end}"],
            extra_body={
                "ignore_eos": True,
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
                "spaces_between_special_tokens": False,
            },
        ),
        answer,
    )
    assert (f"two{end} three{end}", "stop") == (completion.choices[0].text, completion.choices[0].finish_reason)


def test_tools_are_called(openai: OpenAI, job: ServedJob) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    completion = while_calling(
        lambda: openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, tools=[WEATHER_TOOL]),
        answering(job, text),
    )
    assert "tool_calls" == completion.choices[0].finish_reason
    [call] = completion.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert ("weather", {"city": "Oslo"}) == (call.function.name, json.loads(call.function.arguments))


def test_headers_and_extra_arguments_describe_the_rollouts(openai: OpenAI, job: ServedJob) -> None:
    found: list[RolloutRequest] = []
    response = while_calling(
        lambda: openai.completions.with_raw_response.create(
            model=MODEL_NAME,
            prompt="one",
            extra_headers={
                "X-Rollout-Problem": "p7",
                "X-Rollout-Step": "5",
                "X-Rollout-Purpose": "train",
                "traceparent": TRACE,
            },
            extra_body={"vllm_xargs": {"rollout_purpose": "eval", "rollout_trajectory": "t", "rollout_turn": 2}},
        ),
        answering(job, "x", found=found),
    )
    [request] = found
    assert ("p7", 5, Purpose.EVAL) == (request.problem_id, request.step, request.purpose)
    assert ("t", 2, TRACE) == (request.trajectory_id, request.turn, request.traceparent)
    assert f"{job.uid}/{request.request_id}" == response.headers["X-Rollout-Request-Ids"]


@pytest.mark.parametrize(
    ("settings", "parameter", "message"),
    [
        ({"logprobs": 21}, "logprobs", "max allowed: 20"),
        ({"logprobs": -1}, "logprobs", "max allowed: 20"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs", "max allowed: 20"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs", "max allowed: 20"),
        ({"extra_headers": {"X-Rollout-Step": "x"}}, "X-Rollout-Step", "'x' is not an integer"),
        ({"extra_headers": {"X-Rollout-Probelm": "x"}}, "X-Rollout-Probelm", "known are problem"),
        ({"extra_body": {"vllm_xargs": {"rollout_step": 1.5}}}, "vllm_xargs.rollout_step", "1.5 is not an integer"),
        ({"extra_headers": {"X-Rollout-Drafts": "no"}}, "X-Rollout-Drafts", "one of history, own_text, off"),
        ({"max_tokens": 300}, "max_tokens", "300"),
        ({"temperature": -1}, "temperature", "non-negative"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "regex", "unclosed group"),
        ({"extra_body": {"guided_grammar": "root ::= missing"}}, "grammar", "missing"),
        ({"extra_body": {"guided_json": {"type": 5}}}, "", "type must be a string"),
        ({"extra_body": {"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}}, "", "one kind"),
    ],
)
def test_what_the_job_cannot_do_is_an_error_that_names_the_field(
    openai: OpenAI, job: ServedJob, settings: Any, parameter: str, message: str
) -> None:
    with pytest.raises(openai_package.BadRequestError, match=message) as error:
        openai.completions.create(model=MODEL_NAME, prompt="one", **settings)
    assert parameter in (error.value.param or "") or parameter in str(error.value)
    assert [] == job.requests()


@pytest.mark.parametrize(
    ("path", "field", "place"),
    [
        ("/v1/completions", {"stop": ["a", "%"]}, "stop[1]"),
        ("/v1/completions", {"vllm_xargs": {"rollout_problem": "%"}}, "vllm_xargs.rollout_problem"),
        ("/v1/completions", {"vllm_xargs": {"rollout_trajectory": "%"}}, "vllm_xargs.rollout_trajectory"),
        ("/v1/completions", {"prompt": "%"}, "prompt"),
        ("/v1/completions", {"vllm_xargs": {"%": 1}}, "vllm_xargs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "%"}]}, "messages[0].content"),
        ("/inference/v1/generate", {"sampling_params": {"stop": ["%"]}}, "sampling_params.stop[0]"),
        ("/generate", {"text": "%"}, "text"),
        ("/tokenize", {"prompt": "%"}, "prompt"),
    ],
)
def test_a_text_that_is_not_unicode_is_refused_by_its_field(
    server: str, job: ServedJob, path: str, field: dict[str, Any], place: str
) -> None:
    whole = {"model": MODEL_NAME, "prompt": "\U0001f600", "messages": MESSAGES, "token_ids": [1], **field}
    body = json.dumps(whole).replace("%", "\\ud83d")
    reply = httpx.post(f"{server}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert 400 == reply.status_code, reply.text
    assert reply.json()["error"]["message"].startswith(f"{place}: the text has an unpaired surrogate")
    assert [] == job.requests()


def test_a_header_in_utf_8_names_the_same_problem_as_the_body(server: str, job: ServedJob) -> None:
    found: list[RolloutRequest] = []
    body = {"model": MODEL_NAME, "prompt": "one"}
    settings: list[dict[str, Any]] = [
        {"json": body, "headers": {b"X-Rollout-Problem": "日本".encode()}},
        {"json": {**body, "vllm_xargs": {"rollout_problem": "日本"}}},
        {"json": body, "headers": {b"X-Rollout-Problem": "é".encode("latin-1")}},
    ]
    with httpx.Client(base_url=server, timeout=30) as client:
        for one in settings:
            reply = while_calling(
                lambda one=one: client.post("/v1/completions", **one), answering(job, "x", found=found)
            )
            assert 200 == reply.status_code, reply.text
    assert ["日本", "日本", "é"] == [request.problem_id for request in found]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 256}),
        ("/v1/completions", {"prompt": [5] * 256, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "%" * 240}]}),
        ("/inference/v1/generate", {"token_ids": [5] * 256, "sampling_params": {}}),
        ("/generate", {"input_ids": [5] * 256, "sampling_params": {"max_new_tokens": 1}}),
    ],
)
def test_a_prompt_that_leaves_no_room_for_a_response_is_refused(
    server: str, job: ServedJob, path: str, body: dict[str, Any]
) -> None:
    if path != "/generate":
        body = {"model": MODEL_NAME, **body}
    if "messages" in body:
        excess = len(job.tokens(chat_text(body["messages"]))) - 256
        body = {**body, "messages": [{"role": "user", "content": "%" * (240 - excess)}]}
    reply = httpx.post(f"{server}{path}", json=body, timeout=30)
    assert 400 == reply.status_code
    assert "256" in reply.json()["error"]["message"]
    assert "maxModelLen" in reply.json()["error"]["message"]
    assert [] == job.requests()


def chat_text(messages: list[dict[str, str]]) -> str:
    """Return what the template of the model renders."""
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages) + (
        "<|im_start|>assistant\n"
    )


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}},
            {"json": json.dumps(SCHEMA)},
        ),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"extra_body": {"structured_outputs": {"regex": ""}}}, {"regex": ""}),
        (
            {"extra_body": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}},
            {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
        ),
        ({"extra_body": {"guided_choice": ["a", "b"], "guided_regex": None}}, {"grammar": 'root ::= "a" | "b"'}),
        ({"extra_body": {"guided_json": SCHEMA}}, {"json": json.dumps(SCHEMA)}),
    ],
)
def test_structured_outputs_are_those_of_the_request(
    openai: OpenAI, job: ServedJob, settings: Any, expected: dict[str, Any]
) -> None:
    found: list[RolloutRequest] = []
    for call in (
        lambda: openai.completions.create(model=MODEL_NAME, prompt="one", **_in_body(settings)),
        lambda: openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **settings),
    ):
        while_calling(call, answering(job, "two", found=found))
    assert [expected, expected] == [request.sampling.structured_outputs for request in found]


@pytest.mark.parametrize(
    "extra_args",
    [{}, {"reasoning_parser": "qwen3"}, {"structured_outputs_config": {"reasoning_parser": "qwen3"}}],
    ids=["no parser", "parser", "parser in a configuration"],
)
def test_structured_outputs_follow_the_reasoning_or_are_refused(
    job: ServedJob, redis_url: str, model: Path, extra_args: dict[str, Any]
) -> None:
    """Engines without a parser would apply them to the first token, which the server takes for reasoning."""
    found: list[RolloutRequest] = []
    engine = {**SMALL_CPU_ENGINE, "extraArgs": extra_args}
    with (
        serving(job, redis_url, model, ["--reasoning-parser=qwen3"], engine=engine) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        create = client.chat.completions.create
        constrained: Any = {"model": MODEL_NAME, "response_format": {"type": "json_object"}}
        if extra_args:
            completion = while_calling(
                lambda: create(messages=MESSAGES, **constrained), answering(job, "<think>one</think>{}", found=found)
            )
            assert "{}" == completion.choices[0].message.content
        else:
            with pytest.raises(
                openai_package.BadRequestError, match=r"set reasoning_parser in .*spec.engine.extraArgs"
            ):
                create(messages=MESSAGES, **constrained)
            for call in (
                lambda: create(model=MODEL_NAME, messages=MESSAGES),
                lambda: client.completions.create(
                    model=MODEL_NAME, prompt="one", extra_body={"structured_outputs": {"json_object": True}}
                ),
            ):
                while_calling(call, answering(job, "{}", found=found))
            assert [{}, {"json_object": True}] == [request.sampling.structured_outputs for request in found]


def _in_body(settings: dict[str, Any]) -> dict[str, Any]:
    return settings if "extra_body" in settings else {"extra_body": settings}


def test_a_required_tool_constrains_the_response(openai: OpenAI, job: ServedJob) -> None:
    found: list[RolloutRequest] = []
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    completion = while_calling(
        lambda: openai.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, tools=[WEATHER_TOOL], tool_choice="required"
        ),
        answering(job, text, found=found),
    )
    assert "weather" in str(found[0].sampling.structured_outputs["structural_tag"])
    [call] = completion.choices[0].message.tool_calls or []
    assert "function" == call.type
    assert ("weather", {"city": "Oslo"}) == (call.function.name, json.loads(call.function.arguments))


def test_a_stream_that_is_refused_has_the_status_of_the_error(openai: OpenAI, job: ServedJob) -> None:
    settings: dict[str, Any] = {"stream": True, "extra_headers": {"X-Rollout-Step": "x"}}
    with pytest.raises(openai_package.BadRequestError, match="'x' is not an integer") as error:
        openai.completions.create(model=MODEL_NAME, prompt="one", **settings)
    assert "X-Rollout-Step" == error.value.param
    with pytest.raises(openai_package.BadRequestError, match="'x' is not an integer"):
        openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **settings)
    assert [] == job.requests()


def test_an_unknown_model_is_not_found(openai: OpenAI) -> None:
    with pytest.raises(openai_package.NotFoundError, match="other"):
        openai.completions.create(model="other", prompt="one")


@pytest.mark.parametrize(
    ("refused", "error"), [(False, openai_package.InternalServerError), (True, openai_package.BadRequestError)]
)
def test_a_rollout_that_fails_is_an_error_with_its_reason(
    openai: OpenAI, job: ServedJob, *, refused: bool, error: type[openai_package.APIStatusError]
) -> None:
    """OpenAI's client repeats requests that fail with a status of 500 or more."""

    def fail() -> None:
        [request] = job.wait_for_requests(1)
        job.fail(request, "minP does not work", refused=refused)

    with pytest.raises(error, match="minP does not work"):
        while_calling(lambda: openai.completions.create(model=MODEL_NAME, prompt="one"), fail)


def test_a_refused_request_is_an_error_with_the_reason(openai: OpenAI, job: ServedJob) -> None:
    def refuse() -> None:
        [request] = job.wait_for_requests(1)
        job.refuse(request, "no such version")

    with pytest.raises(openai_package.BadRequestError, match="no such version"):
        while_calling(lambda: openai.completions.create(model=MODEL_NAME, prompt="one"), refuse)


def test_a_job_that_has_ended_is_unavailable(openai: OpenAI, job: ServedJob) -> None:
    def end() -> None:
        job.wait_for_requests(1)
        job.set_state("failed", "the model was deleted")

    with pytest.raises(openai_package.InternalServerError, match="the model was deleted") as error:
        while_calling(lambda: openai.completions.create(model=MODEL_NAME, prompt="one"), end)
    assert 503 == error.value.status_code


def test_a_client_that_disconnects_cancels_its_request(server: str, job: ServedJob) -> None:
    def disconnect(**headers: str) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server}/v1/completions", json={"model": MODEL_NAME, "prompt": "one"}, headers=headers, timeout=1
            )

    disconnect()
    [request] = job.requests()
    wait_for(job.control_messages)
    assert [[request.request_id]] == [message.request_ids for message in job.control_messages()]  # type: ignore[union-attr]
    disconnect(**{"Idempotency-Key": "a"})  # its client will call again
    time.sleep(1)
    assert 1 == len(job.control_messages())


def test_other_endpoints(server: str, job: ServedJob) -> None:
    with httpx.Client(base_url=server) as client:
        assert 200 == client.get("/health").status_code
        assert [MODEL_NAME] == [entry["id"] for entry in client.get("/v1/models").json()["data"]]
        assert 256 == client.get("/v1/models").json()["data"][0]["max_model_len"]
        reply = client.post("/tokenize", json={"model": MODEL_NAME, "prompt": "one two"})
        assert job.tokens("one two") == reply.json()["tokens"]
        reply = client.post("/detokenize", json={"model": MODEL_NAME, "tokens": job.tokens("one two")})
        assert "one two" == reply.json()["prompt"]


@pytest.mark.parametrize("logprobs", [0, 1])
def test_tokens_in_and_out_without_text(server: str, job: ServedJob, logprobs: int) -> None:
    def generate() -> dict[str, Any]:
        body = {
            "model": MODEL_NAME,
            "token_ids": job.tokens("one"),
            "sampling_params": {"max_tokens": 5, "logprobs": logprobs},
        }
        reply = httpx.post(f"{server}/inference/v1/generate", json=body, timeout=30)
        assert 200 == reply.status_code, reply.text
        parsed: dict[str, Any] = reply.json()
        return parsed

    reply = while_calling(generate, answering(job, "two three"))
    [choice] = reply["choices"]
    tokens = [*job.tokens("two three"), job.tokenizer.eos_token_id]
    assert tokens == choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert [(token, -0.25 * (1 + index)) for index, token in enumerate(tokens)] == [
        (entry["token_id"], entry["logprob"]) for entry in content
    ]
    assert [[token] for token in tokens] == [[one["token_id"] for one in entry["top_logprobs"]] for entry in content]


def test_kept_tokens_have_vllms_form(server: str, job: ServedJob) -> None:
    """As in vLLM, they are requested for all requests: here in the job's manifest."""

    def answer() -> None:
        [request] = job.wait_for_requests(1)
        sampling = request.sampling.model_copy(update={"kept_tokens": True})
        job.answer_text(request.model_copy(update={"sampling": sampling}), "two three")

    def call() -> dict[str, Any]:
        body = {"model": MODEL_NAME, "token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "top_k": 9}}
        parsed: dict[str, Any] = httpx.post(f"{server}/inference/v1/generate", json=body, timeout=30).json()
        return parsed

    [choice] = while_calling(call, answer)["choices"]
    tokens = choice["token_ids"]
    expected = [list(range(token, token + 1 + index % 3)) for index, token in enumerate(tokens)]
    assert expected == choice["sampling_mask"]


@pytest.mark.parametrize("start", [0, 2])
def test_routed_experts_have_vllms_form(server: str, job: ServedJob, start: int) -> None:
    """As in vLLM, they are returned if the job returns them for all requests."""

    def answer() -> None:
        [request] = job.wait_for_requests(1)
        job.keep(request, job.experts(request, job.rollout(request, 0, "two three")))
        job.delete_request(request)

    def call() -> dict[str, Any]:
        sampling = {"max_tokens": 5, "routed_experts_prompt_start": start}
        body = {"model": MODEL_NAME, "token_ids": [1, 2, 3], "sampling_params": sampling}
        parsed: dict[str, Any] = httpx.post(f"{server}/inference/v1/generate", json=body, timeout=30).json()
        return parsed

    [choice] = while_calling(call, answer)["choices"]
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert [[[position, 300]] * 2 for position in range(start, 3 + len(choice["token_ids"]) - 1)] == rows.tolist()


def test_metrics_of_drafts_have_vllms_form(job: ServedJob, redis_url: str, model: Path) -> None:
    def answer() -> None:
        [request] = job.wait_for_requests(1)
        rollout = job.rollout(request, 0, "one two three four five six")
        # One step without an accepted token, one with two of them, and then steps with none.
        codes = bytes([0, 1, 2]).ljust(rollout.num_tokens, b"\0")
        counts = {"num_decoding_steps": rollout.num_tokens - 2, "num_draft_tokens": 5, "num_accepted_tokens": 2}
        job.keep(request, rollout.model_copy(update={"draft_sources": encode_draft_sources(codes), **counts}))
        job.delete_request(request)

    arguments = ["--per-request-spec-decode-metrics", "summary"]
    with (
        serving(job, redis_url, model, arguments, speculation={"maxDraftTokens": 4}) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):

        def ask(**options: Any) -> Any:
            return client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **options)

        response = while_calling(ask, answer)
        *_, last = while_calling(lambda: list(ask(stream=True, stream_options={"include_usage": True})), answer)
    num_steps = response.usage.completion_tokens - 2
    for metrics in (response.metrics["speculative_decoding"], last.metrics["speculative_decoding"]):
        assert [num_steps - 1, 0, 1, 0, 0] == metrics["acceptance_histogram"]
        assert (2, 5, num_steps) == tuple(
            metrics[name] for name in ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
        )
        assert pytest.approx(0.4) == metrics["draft_acceptance_rate"]


@pytest.mark.parametrize(
    ("level", "speculation", "advice"),
    [("detailed", {}, "use summary"), ("summary", {"policy": "off"}, "remove the option")],
)
def test_metrics_that_a_job_does_not_have_are_refused(
    job: ServedJob, redis_url: str, model: Path, level: str, speculation: dict[str, str], advice: str
) -> None:
    arguments = [f"--per-request-spec-decode-metrics={level}"]
    with (
        pytest.raises(ServerArgumentError, match=advice),
        serving(job, redis_url, model, arguments, speculation=speculation),
    ):
        pass


def _expected_prompt_logprobs(job: ServedJob, prompt: str, count: int) -> list[dict[str, float] | None]:
    """Return the log-probabilities of a prompt's tokens, by token id, as the fake job computes them."""
    tokens = job.tokens(prompt)[1:]
    return [
        None,
        *(
            {str(token + number): -0.5 * (1 + index) - number for number in range(max(1, count))}
            for index, token in enumerate(tokens)
        ),
    ]


def _values(positions: Any) -> list[dict[str, float] | None]:
    return [
        position if position is None else {token: one["logprob"] for token, one in position.items()}
        for position in positions
    ]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("api", ["completions", "chat", "tokens"])
def test_log_probabilities_of_the_prompt_have_vllms_shape(server: str, job: ServedJob, api: str, count: int) -> None:
    prompt = "one two three"
    found: list[RolloutRequest] = []

    def call() -> dict[str, Any]:
        paths = {
            "completions": ("/v1/completions", {"prompt": prompt, "prompt_logprobs": count}),
            "chat": ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": count}),
            "tokens": (
                "/inference/v1/generate",
                {"token_ids": job.tokens(prompt), "sampling_params": {"max_tokens": 5, "prompt_logprobs": count}},
            ),
        }
        path, body = paths[api]
        reply = httpx.post(f"{server}{path}", json={"model": MODEL_NAME, **body}, timeout=30)
        assert 200 == reply.status_code, reply.text
        parsed: dict[str, Any] = reply.json()
        return parsed

    reply = while_calling(call, answering(job, "four", found=found))
    assert (True, count) == (found[0].sampling.prompt_logprobs, found[0].sampling.top_prompt_logprobs)
    positions = (reply["choices"][0] if api == "completions" else reply)["prompt_logprobs"]
    assert _expected_prompt_logprobs(job, job.text(found[0].prompt_token_ids), count) == _values(positions)
    if count:
        assert {1, 2} == {one["rank"] for position in positions[1:] for one in position.values()}


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_log_probabilities(openai: OpenAI, job: ServedJob, *, stream: bool) -> None:
    def answer() -> None:
        [request] = job.wait_for_requests(1)
        if stream:
            job.stream_text(request, 0, "three")
            time.sleep(0.5)
        job.answer_text(request, "three four", end=FinishReason.LENGTH)

    def call() -> list[Any]:
        reply: Any = openai.completions.create(
            model=MODEL_NAME, prompt="one two", echo=True, logprobs=1, max_tokens=4, stream=stream
        )
        return [part.choices[0] for part in (reply if stream else [reply])]

    choices = while_calling(call, answer)
    assert "one twothree four" == "".join(choice.text for choice in choices)
    prompt, response = job.tokens("one two"), job.tokens("three four")
    expected = [None, *(-0.5 * (1 + index) for index in range(len(prompt) - 1))]
    expected += [-0.25 * (1 + index % 4) for index in range(len(response))]
    found = [value for choice in choices if choice.logprobs is not None for value in choice.logprobs.token_logprobs]
    assert expected == found


def test_a_streamed_completion_with_log_probabilities_of_the_prompt_is_refused(openai: OpenAI, job: ServedJob) -> None:
    """vLLM's server refuses it itself."""
    with pytest.raises(openai_package.BadRequestError, match="prompt_logprobs"):
        openai.completions.create(model=MODEL_NAME, prompt="one", stream=True, extra_body={"prompt_logprobs": 1})
    assert [] == job.requests()


def test_many_calls_at_once(openai: OpenAI, job: ServedJob) -> None:
    """Each gets the answer to its own prompt."""

    def call(number: int) -> str:
        return openai.completions.create(model=MODEL_NAME, prompt=f"number {number}", max_tokens=20).choices[0].text

    def answer(request: RolloutRequest) -> None:
        job.answer_text(request, job.text(request.prompt_token_ids).removeprefix("number "))

    with job.serving(answer), ThreadPoolExecutor(32) as pool:
        assert [str(number) for number in range(200)] == list(pool.map(call, range(200)))
