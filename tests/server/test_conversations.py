"""Conversations that are recognised by their text, and continued from the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from rollout_api import FinishReason, Rollout, RolloutRequest
from rollout_api.client.server_records import TurnRecord
from rollout_server.conversations import ConversationText, continue_conversation
from tests.support.served_job import MODEL_NAME, ServedJob, serving

END = 0
"""The end of a message in these tests. Other tokens are words: 1 is "a", 2 is "b", 3 is "ab" and so on."""
WORDS = {1: "a", 2: "b", 3: "ab", 4: "ba", 5: "c"}
TEXT = ConversationText(lambda tokens: "".join(WORDS.get(token, "<end>") for token in tokens), frozenset({END}))
messages = st.lists(st.sampled_from(sorted(WORDS)), max_size=6)


def tokenized(tokens: list[int]) -> list[int]:
    """Return other tokens with the same text: the longest ones that fit."""
    text, found = "".join(WORDS[token] for token in tokens), []
    while text:
        token = 3 if text.startswith("ab") else 4 if text.startswith("ba") else {"a": 1, "b": 2, "c": 5}[text[0]]
        found.append(token)
        text = text[len(WORDS[token]) :]
    return found


@given(st.lists(st.tuples(messages, messages), min_size=1, max_size=4), messages)
def test_a_conversation_continues_from_its_sampled_tokens(
    turns: list[tuple[list[int], list[int]]], last: list[int]
) -> None:
    records: dict[str, TurnRecord] = {}
    sent: list[int] = []
    sampled: list[int] = []
    previous, num_known = "", 0
    for turn, (question, response) in enumerate(turns):
        prompt = [*sampled, *question, END]
        after = [*prompt, *response, END]
        record_id = TEXT.boundaries(after)[-1].record_id
        records[record_id] = TurnRecord(previous, after[num_known:], "t", turn, "p")
        previous, num_known, sampled = record_id, len(after), after
        sent += [*question, END, *tokenized(response), END]
    prompt = [*sent, *last, END]
    found = continue_conversation(prompt, TEXT.boundaries(prompt), records)
    assert found is not None
    assert [*sampled, *last, END] == found.token_ids
    assert (len(turns) - 1, len(sampled)) == (found.last_turn.turn, found.num_known)
    assert found.is_changed == (sampled != sent)
    # Without the first turn, nothing is known.
    del records[next(iter(records))]
    assert continue_conversation(prompt, TEXT.boundaries(prompt), records) is None


def test_a_prompt_with_another_text_is_not_changed() -> None:
    records = {TEXT.boundaries([1, END, 3, END])[-1].record_id: TurnRecord("", [1, END, 3, END], "t", 0, "p")}
    for prompt in ([1, END, 5, END], [2, END, 3, END], [1, 3, END], [5]):
        assert continue_conversation(prompt, TEXT.boundaries(prompt), records) is None


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
