"""Conversations that are recognised by their messages, and continued from the tokens that were sampled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from rollout_api import FinishReason, Rollout, RolloutRequest
from tests.server.conftest import TOOL_ARGUMENTS
from tests.support.served_job import MODEL_NAME, ServedJob, serving

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SOURCES = ("X-Rollout-Prefix", "X-Rollout-Turn")


def answer_in_single_characters(job: ServedJob, text: str, end: FinishReason) -> Callable[[RolloutRequest], None]:
    """Return a function that answers with tokens that differ from the tokenizer's for the same text."""

    def answer(request: RolloutRequest) -> None:
        rollout = job.rollout(request, 0, text, end)
        tokens = [token for character in text for token in job.tokens(character)]
        tokens += [job.tokenizer.eos_token_id] if end is FinishReason.STOP else []
        fields: Any = {"token_ids": tokens, "logprobs": None}
        job.keep(request, Rollout.model_validate(rollout.model_dump() | fields))
        job.delete_request(request)

    return answer


def test_a_turn_that_arrives_as_messages_continues_from_the_sampled_tokens_on_every_server(
    openai: OpenAI, job: ServedJob, redis_url: str, model: Path
) -> None:
    found: list[RolloutRequest] = []
    messages: list[Any] = [{"role": "user", "content": "one two"}]
    replies = [("three four", FinishReason.STOP), ("five six", FinishReason.LENGTH), ("seven", FinishReason.STOP)]
    headers: list[list[str | None]] = []
    with serving(job, redis_url, model) as other, OpenAI(base_url=f"{other}/v1", api_key="none") as second:
        for number, (text, end) in enumerate(replies):
            client = (openai, second)[number % 2]
            with ThreadPoolExecutor(1) as pool:
                reply = pool.submit(
                    client.chat.completions.with_raw_response.create, model=MODEL_NAME, messages=messages
                )
                [request] = job.wait_for_requests(1)
                answer_in_single_characters(job, text, end)(request)
                response = reply.result(timeout=30)
            found.append(request)
            headers.append([response.headers.get(name) for name in ("X-Rollout-Prefix", "X-Rollout-Turn")])
            content = response.parse().choices[0].message.content
            assert text == content
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    assert [["unknown", "0"], ["restored", "1"], ["restored", "2"]] == headers
    assert [0, 1, 2] == [request.turn for request in found]
    assert 1 == len({request.trajectory_id for request in found})
    assert 1 == len({request.problem for request in found})
    for before, after, (text, _) in zip(found, found[1:], replies, strict=False):
        sampled = [token for character in text for token in job.tokens(character)]
        assert sampled != job.tokens(text)
        beginning = [*before.prompt_token_ids, *sampled, job.tokenizer.eos_token_id]
        assert beginning == after.prompt_token_ids[: len(beginning)]
        assert "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n" == job.text(
            after.prompt_token_ids[len(beginning) :]
        )


def test_a_changed_conversation_is_a_new_one(openai: OpenAI, job: ServedJob) -> None:
    def answer(request: RolloutRequest) -> None:
        job.answer_text(request, "three")

    def ask(*contents: str) -> list[str | None]:
        messages: Any = [
            {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)
        ]
        reply = openai.chat.completions.with_raw_response.create(model=MODEL_NAME, messages=messages)
        return [reply.headers.get(name) for name in ("X-Rollout-Prefix", "X-Rollout-Turn")]

    with job.serving(answer):
        assert ["unknown", "0"] == ask("one")
        assert ["sampled", "1"] == ask("one", "three", "two")
        assert ["unknown", "0"] == ask("one", "four", "two")
        assert ["unknown", "0"] == ask("two", "three", "two")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def reformatted(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a client sends it that parses the arguments and drops what it does not know."""
    calls = [
        {**one, "function": {**one["function"], "arguments": json.dumps(json.loads(one["function"]["arguments"]))}}
        for one in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": message.get("content"), **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        call("weather", '{"city": "Oslo"}'),
        call("weather", '{"a":1}'),
        call("weather", '{"a": "\\u00e9"}'),
        call("weather", '{"a": "é"}'),
        call("weather", '{"a": 1e3}'),
        call("weather", '{"b": 1, "a": 2}'),
        call("weather", "{}"),
        "  " + call("weather", '{"a": [1.5, null]}') + "\n ",
        "one two " + call("weather", '{"a": 1}'),
        call("weather", '{"a": 1}') + "\n" + call("weather", '{"a": 2}'),
        "  three four \n",
        "<tool_call>broken",
    ],
)
def test_a_turn_is_known_however_the_template_renders_it(
    server: str, job: ServedJob, text: str, *, stream: bool
) -> None:
    found: list[RolloutRequest] = []

    def answer(request: RolloutRequest) -> None:
        found.append(request)
        answer_in_single_characters(job, text, FinishReason.STOP)(request)

    messages: list[Any] = [{"role": "user", "content": "one two"}]
    with job.serving(answer), OpenAI(base_url=f"{server}/v1", api_key="none", timeout=30) as client:
        if stream:
            reply = client.chat.completions.create(model=MODEL_NAME, messages=messages, tools=[TOOL], stream=True)
            message = joined(reply)
        else:
            completion = client.chat.completions.create(model=MODEL_NAME, messages=messages, tools=[TOOL])
            message = completion.choices[0].message.model_dump()
        calls = message.get("tool_calls") or ()
        messages += [
            reformatted(message),
            *({"role": "tool", "tool_call_id": one["id"], "content": "cold"} for one in calls),
            {"role": "user", "content": "go on"},
        ]
        second = client.chat.completions.with_raw_response.create(model=MODEL_NAME, messages=messages, tools=[TOOL])
    assert ["restored", "1"] == [second.headers.get(name) for name in SOURCES]
    sampled = [*(token for character in text for token in job.tokens(character)), job.tokenizer.eos_token_id]
    beginning = [*found[0].prompt_token_ids, *sampled]
    assert beginning == found[1].prompt_token_ids[: len(beginning)]
    assert job.text(found[1].prompt_token_ids[len(beginning) :]).startswith("\n<|im_start|>")


def joined(stream: Any) -> dict[str, Any]:
    """Return the message of a stream."""
    content, calls = "", {}
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                one = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {"arguments": ""}})
                one["function"]["name"] = part.function.name or one["function"].get("name")
                one["function"]["arguments"] += part.function.arguments or ""
    return {"content": content, "tool_calls": list(calls.values())}


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_response_that_was_cut_inside_a_character_is_known(openai: OpenAI, job: ServedJob, *, is_cut: bool) -> None:
    tokens = job.tokens("one \U0001f600")
    assert len(tokens) > 4
    found: list[RolloutRequest] = []

    def answer(request: RolloutRequest) -> None:
        found.append(request)
        rollout = job.rollout(request, 0, "x", FinishReason.LENGTH)
        fields: Any = {"token_ids": tokens[:-1] if is_cut else tokens, "logprobs": None}
        job.keep(request, Rollout.model_validate(rollout.model_dump() | fields))
        job.delete_request(request)

    messages: list[Any] = [{"role": "user", "content": "one two"}]
    with job.serving(answer):
        content = openai.chat.completions.create(model=MODEL_NAME, messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
        second = openai.chat.completions.with_raw_response.create(model=MODEL_NAME, messages=messages)
    assert "1" == second.headers["X-Rollout-Turn"]
    beginning = [*found[0].prompt_token_ids, *(tokens[:-1] if is_cut else tokens), job.tokenizer.eos_token_id]
    assert beginning == found[1].prompt_token_ids[: len(beginning)]


def test_responses_with_the_same_content_are_told_apart(job: ServedJob, redis_url: str, model: Path) -> None:
    """Clients that drop the reasoning send the same messages. The ids of tool calls and trajectories differ."""
    arguments = [*TOOL_ARGUMENTS, "--reasoning-parser=qwen3"]
    found: list[RolloutRequest] = []
    thoughts = itertools.cycle(["<think>one", "<think>two", "<think>end", "<think>end"])
    action = ""

    def answer(request: RolloutRequest) -> None:
        found.append(request)
        job.answer_text(request, f"{next(thoughts)}</think>{action}")

    question = {"role": "user", "content": "one two"}
    with (
        serving(job, redis_url, model, arguments) as url,
        job.serving(answer),
        OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30) as client,
    ):

        def ask(*messages: Any, **headers: str) -> Any:
            reply = client.chat.completions.with_raw_response.create(
                model=MODEL_NAME, messages=[question, *messages], tools=[TOOL], extra_headers=headers
            )
            return reply.parse().choices[0].message.model_dump(), reply.headers["X-Rollout-Prefix"]

        def second_turns(kind: str) -> list[Any]:
            nonlocal action
            action = {"calls": call("weather", "{}"), "none": "three", "trajectory": "four"}[kind]
            trajectories = [{"X-Rollout-Trajectory": name} if kind == "trajectory" else {} for name in ("a", "b")]
            firsts = [ask(**headers)[0] for headers in trajectories]
            assert firsts[0]["content"] == firsts[1]["content"]
            del found[:]
            sources = [
                ask(reformatted(first), {"role": "user", "content": "go on"}, **headers)[1]
                for first, headers in zip(firsts, trajectories, strict=True)
            ]
            return [
                (source, thought in job.text(request.prompt_token_ids))
                for source, request, thought in zip(sources, found, ("<think>one", "<think>two"), strict=True)
            ]

        assert [("restored", True)] * 2 == second_turns("calls")
        assert ["unknown"] * 2 == [source for source, _ in second_turns("none")]
        assert [("restored", True)] * 2 == second_turns("trajectory")
