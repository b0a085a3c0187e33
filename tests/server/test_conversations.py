"""Conversations that are recognised by their messages, and continued from the tokens that were sampled."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

from rollout_api import FinishReason, RequestClient, Rollout, RolloutRequest
from rollout_server.conversations import Conversation, Conversations, PrefixSource, SampledTurn
from tests.server.conftest import TOOL_ARGUMENTS
from tests.support.fake_job import FakeJob
from tests.support.served_job import MODEL_NAME, ServedJob, serving

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SOURCES = ("X-Rollout-Prefix", "X-Rollout-Turn")


# Shapes of chat templates: what they write for messages, in tokens. Texts have tokens from 100 on.
SYSTEM, USER, ASSISTANT, TOOL_RESULT, END, OTHER_END, TOOLS, THINK = range(8)
END_TOKENS = frozenset({END, OTHER_END})


def words(text: str) -> list[int]:
    return [100 + ord(character) for character in text]


def chatml(messages: list[dict[str, Any]]) -> list[int]:
    """Each message ends, and reasoning is only written behind the last message of the user, as in Qwen3."""
    last_user = max(index for index, one in enumerate(messages) if one["role"] == "user")
    tokens = []
    for index, one in enumerate(messages):
        thought = [THINK, *words(one["reasoning"]), THINK] if one.get("reasoning") and index > last_user else []
        tokens += [
            {"user": USER, "tool": TOOL_RESULT}.get(one["role"], ASSISTANT),
            *thought,
            *words(one["content"]),
            END,
        ]
    return [*tokens, ASSISTANT]


def mistral(messages: list[dict[str, Any]]) -> list[int]:
    """Only responses end."""
    tokens = [SYSTEM]
    for one in messages:
        tokens += [*words(one["content"]), END] if one["role"] == "assistant" else [USER, *words(one["content"]), USER]
    return tokens


def mistral_with_tools(messages: list[dict[str, Any]]) -> list[int]:
    """Only responses end, and the tools are written in front of the last message of the user."""
    last = max(index for index, one in enumerate(messages) if one["role"] == "user")
    tools = [TOOLS, *words("a tool with parameters"), TOOLS]
    tokens = [SYSTEM]
    for index, one in enumerate(messages):
        if one["role"] == "assistant":
            tokens += [*words(one["content"]), END]
        else:
            tokens += [*(tools if index == last else []), USER, *words(one["content"]), USER]
    return tokens


def glm(messages: list[dict[str, Any]]) -> list[int]:
    """Responses end with the token that begins the next message."""
    tokens = [SYSTEM]
    for one in messages:
        begin = {"user": END, "tool": OTHER_END}.get(one["role"], ASSISTANT)
        tokens += [begin, *words(one["content"])]
    return [*tokens, ASSISTANT]


def deepseek(messages: list[dict[str, Any]]) -> list[int]:
    """A response with one tool call does not end, and one with several ends twice."""
    tokens = [SYSTEM]
    for one in messages:
        calls = len(one.get("tool_calls") or ())
        ends = {0: [END], 1: []}.get(calls, [END, *words("again"), END]) if one["role"] == "assistant" else []
        tokens += [{"user": USER, "tool": TOOL_RESULT}.get(one["role"], ASSISTANT), *words(one["content"]), *ends]
    return [*tokens, ASSISTANT]


class Chat:
    """A client and the turns that a job has sampled for it, without a server."""

    def __init__(self, conversations: Conversations, template: Callable[[list[dict[str, Any]]], list[int]]) -> None:
        self._conversations, self._template, self._count = conversations, template, 0

    async def ask(
        self, messages: list[dict[str, Any]], *replies: dict[str, Any], end: list[int], trajectory: str = ""
    ) -> tuple[PrefixSource, list[int], list[list[int]]]:
        """Return what is known of the messages, the prompt that is sampled, and the tokens of the replies to it."""
        conversation = Conversation(messages, trajectory_id=trajectory, token_ids=self._template(messages))
        source = await self._conversations.find(conversation)
        continuation = conversation.continuation
        prompt = list(conversation.token_ids) if continuation is None else continuation.token_ids
        responses = [
            [500 + len(reply["content"]), *words(reply["content"] + str(reply.get("reasoning"))), *end]
            for reply in replies
        ]
        rollouts: Any = [SimpleNamespace(token_ids=tokens, problem_id="p") for tokens in responses]
        conversation.sampled = SampledTurn(prompt, rollouts, "t", self._count)
        self._count += 1
        await self._conversations.record(conversation, dict(enumerate(replies)))
        return source, prompt, responses


@contextmanager
def chats(redis_url: str, template: Callable[[list[dict[str, Any]]], list[int]]) -> Iterator[Callable[..., Any]]:
    """Return a function that runs a coroutine function with a chat."""

    async def run(scenario: Callable[[Chat], Any]) -> None:
        async with RequestClient.connect(redis_url, FakeJob(redis_url).name) as client:
            await scenario(Chat(Conversations(client, END_TOKENS), template))

    yield lambda scenario: asyncio.run(run(scenario))


def reply(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("template", [chatml, mistral, glm])
def test_turns_continue_with_every_shape_of_template(
    redis_url: str, template: Callable[[list[dict[str, Any]]], list[int]], *, is_cut: bool
) -> None:
    async def scenario(chat: Chat) -> None:
        messages = [
            user("a long question"),
            reply("one", reasoning="I think"),
            user("two"),
            reply("three"),
            user("four"),
        ]
        end = [] if is_cut else [END]
        _, first, [response] = await chat.ask(messages[:1], messages[1], end=end)
        known = [*first, *response]
        for count in (3, 5):
            stripped = [{name: one[name] for name in ("role", "content")} for one in messages[:count]]
            source, prompt, responses = await chat.ask(stripped, *messages[count : count + 1], end=end)
            assert PrefixSource.RESTORED == source
            assert [*known, END] == prompt[: len(known) + 1] if is_cut else known == prompt[: len(known)]
            rest = prompt[len(known) + is_cut :]
            assert rest == template(stripped)[-len(rest) :]
            assert words(messages[count - 1]["content"]) == [token for token in rest if token >= 100]
            known = [*prompt, *(responses[0] if responses else [])]

    with chats(redis_url, template) as run:
        run(scenario)


@pytest.mark.parametrize(
    ("template", "calls", "is_edited"),
    [(mistral_with_tools, 0, False), (deepseek, 1, False), (deepseek, 1, True), (deepseek, 3, False)],
)
def test_a_turn_whose_end_is_unclear_is_unknown(
    redis_url: str, template: Callable[[list[dict[str, Any]]], list[int]], calls: int, *, is_edited: bool
) -> None:
    async def scenario(chat: Chat) -> None:
        called = reply("call", tool_calls=[{"id": f"c{n}", "function": {"name": "f"}} for n in range(calls)])
        results = [{"role": "tool", "content": f"result {n}", "tool_call_id": f"c{n}"} for n in range(calls)]
        messages = [user("a long question"), called, *results, user("two")]
        await chat.ask(messages[:1], called, end=[END])
        if is_edited:
            messages += [reply("edited"), user("three")]
        source, prompt, _ = await chat.ask(messages, end=[END])
        assert (PrefixSource.UNKNOWN, template(messages)) == (source, prompt)

    with chats(redis_url, template) as run:
        run(scenario)


def test_a_turn_that_several_responses_may_be_is_unknown(redis_url: str) -> None:
    async def scenario(chat: Chat) -> None:
        question = user("a long question")
        plain, thought = reply("42"), reply("42", reasoning="R2")
        await chat.ask([question], plain, thought, end=[END], trajectory="t")
        for sent, trajectory, expected in [
            (plain, "", PrefixSource.UNKNOWN),
            (plain, "t", PrefixSource.UNKNOWN),
            (thought, "t", PrefixSource.RESTORED),
        ]:
            source, prompt, _ = await chat.ask([question, sent, user("two")], end=[END], trajectory=trajectory)
            assert expected == source
            assert (source is PrefixSource.RESTORED) == (words("42R2") == prompt[19:23])
        ids = [reply("", tool_calls=[{"id": "f:0", "function": {"name": "f"}}], reasoning=each) for each in "ab"]
        await chat.ask([question], *ids, end=[END])
        result = {"role": "tool", "content": "cold", "tool_call_id": "f:0"}
        without = {name: ids[0][name] for name in ("role", "content", "tool_calls")}
        assert PrefixSource.UNKNOWN == (await chat.ask([question, without, result], end=[END]))[0]
        assert PrefixSource.RESTORED == (await chat.ask([question, ids[1], result], end=[END]))[0]

    with chats(redis_url, chatml) as run:
        run(scenario)


def test_results_of_tools_that_are_swapped_are_another_conversation(redis_url: str) -> None:
    async def scenario(chat: Chat) -> None:
        called = reply("call", tool_calls=[{"id": f"c{n}", "function": {"name": "f"}} for n in range(2)])
        results = [{"role": "tool", "content": "same", "tool_call_id": f"c{n}"} for n in range(2)]
        messages = [user("a long question"), called, *results]
        await chat.ask(messages[:1], called, end=[END])
        await chat.ask(messages, reply("done"), end=[END])
        swapped = [*messages[:2], *reversed(results), reply("done"), user("two")]
        source, prompt, _ = await chat.ask(swapped, end=[END])
        assert PrefixSource.RESTORED == source  # the first turn
        assert words("done") == [token for token in prompt if token >= 100][-7:-3]

    with chats(redis_url, chatml) as run:
        run(scenario)


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
