"""``Idempotency-Key``: a key belongs to one request, whichever server receives it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai as openai_package
import pytest
from openai import OpenAI

from rollout_server import idempotency
from tests.support.served_job import MODEL_NAME, ServedJob, answering, serving, while_calling
from tests.support.waiting import wait_for

KEY = {"Idempotency-Key": "a"}


@pytest.fixture
def other(job: ServedJob, redis_url: str, model: Path) -> Iterator[OpenAI]:
    """A client of another server of the job."""
    with (
        serving(job, redis_url, model) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client


def complete(client: OpenAI, prompt: Any = "one", headers: dict[str, str] = KEY, **settings: Any) -> str:
    completion = client.completions.create(model=MODEL_NAME, prompt=prompt, extra_headers=headers, **settings)
    text: str = completion.choices[0].text
    return text


def test_a_key_of_another_request_is_refused_by_every_server(openai: OpenAI, other: OpenAI, job: ServedJob) -> None:
    assert "two" == while_calling(lambda: complete(openai), answering(job, "two"))
    changes: list[dict[str, Any]] = [
        {"prompt": "two"},
        {"prompt": ["one", "two"]},
        {"temperature": 0.5},
        {"headers": {**KEY, "X-Rollout-Step": "5"}},
        {"stream": True, "prompt": "two"},
    ]
    for client in (openai, other):
        for change in changes:
            with pytest.raises(openai_package.UnprocessableEntityError, match="use another key") as error:
                complete(client, **change)
            assert "Idempotency-Key" == error.value.param
        with pytest.raises(openai_package.UnprocessableEntityError):
            client.chat.completions.create(
                model=MODEL_NAME, messages=[{"role": "user", "content": "one"}], extra_headers=KEY
            )
        assert "two" == complete(client)
    assert [] == job.requests()
    assert 1 == len(job.sampled)


def test_a_key_belongs_to_its_request_as_long_as_the_rollouts_are_kept(openai: OpenAI, job: ServedJob) -> None:
    def answer() -> None:
        [request] = job.wait_for_requests(1)
        with pytest.raises(openai_package.UnprocessableEntityError):
            complete(openai, "two")
        assert 600 < job.redis.ttl(job.keys.idempotency("a"))
        job.answer_text(request, "two")

    while_calling(lambda: complete(openai), answer)
    wait_for(lambda: job.redis.ttl(job.keys.idempotency("a")) <= 600)


def test_a_request_can_be_repeated_as_a_stream(openai: OpenAI, job: ServedJob) -> None:
    text = while_calling(lambda: complete(openai), answering(job, "two three"))
    stream = openai.completions.create(model=MODEL_NAME, prompt="one", stream=True, extra_headers=KEY)
    assert text == "".join(chunk.choices[0].text for chunk in stream)
    assert 1 == len(job.sampled)


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_request_leaves_its_key_free(openai: OpenAI, job: ServedJob, *, stream: bool) -> None:
    with pytest.raises(openai_package.BadRequestError):
        complete(openai, headers={**KEY, "X-Rollout-Step": "x"}, stream=stream)
    wait_for(lambda: not job.redis.exists(job.keys.idempotency("a")))
    assert "two" == while_calling(lambda: complete(openai), answering(job, "two"))


def test_a_request_whose_client_disconnects_keeps_its_key(server: str, openai: OpenAI, job: ServedJob) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server}/v1/completions", json={"model": MODEL_NAME, "prompt": "one"}, headers=KEY, timeout=1)
    [request] = job.wait_for_requests(1)
    with pytest.raises(openai_package.UnprocessableEntityError):
        complete(openai, "two")
    assert 600 < job.redis.ttl(job.keys.idempotency("a"))
    assert "two" == while_calling(lambda: complete(openai), lambda: job.answer_text(request, "two"))


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize(
    ("headers", "deadline"),
    [(KEY, 24 * 3600), ({**KEY, "X-Rollout-Deadline-Seconds": "60"}, 60), ({}, None)],
)
def test_a_request_ends_at_the_latest_when_its_key_does(
    server: str, job: ServedJob, path: str, headers: dict[str, str], deadline: int | None
) -> None:
    """Weights that its rollouts wait for may never come, and nobody cancels a request with a key."""
    body = {"model": MODEL_NAME, "prompt": "one"} if path == "/v1/completions" else {"text": "one"}
    pinned = {**headers, "X-Rollout-Weight-Version": "9"}

    def answer() -> None:
        [request] = job.wait_for_requests(1)
        assert (deadline, 9) == (request.deadline_seconds, request.weight_version)
        job.answer_text(request, "two")

    replied = while_calling(lambda: httpx.post(f"{server}{path}", json=body, headers=pinned, timeout=30), answer)
    assert 200 == replied.status_code


def test_other_requests_continue_while_a_large_body_is_compared(
    openai: OpenAI, job: ServedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, threading.Thread] = {}

    def fingerprint(target: str, headers: dict[str, str], body: bytes) -> bytes:
        threads[len(body) // 2**16] = threading.current_thread()
        return original(target, headers, body)

    original = idempotency.fingerprint
    monkeypatch.setattr(idempotency, "fingerprint", fingerprint)
    for number, user in enumerate(("small", "large" * 2**16)):
        key = {"Idempotency-Key": str(number)}
        while_calling(lambda key=key, user=user: complete(openai, headers=key, user=user), answering(job, "two"))
    assert [0, 5] == sorted(threads)
    assert threads[0] is not threads[5]


def test_a_key_of_another_sample_is_refused(server: str, job: ServedJob) -> None:
    def generate(tokens: list[int]) -> httpx.Response:
        return httpx.post(f"{server}/generate", json={"input_ids": tokens}, headers=KEY, timeout=30)

    first = while_calling(lambda: generate([1, 2]), answering(job, "two"))
    assert first.json()["text"] == generate([1, 2]).json()["text"]
    refused = generate([1, 3])
    assert (422, "Idempotency-Key") == (refused.status_code, refused.json()["error"]["param"])
    assert 1 == len(job.sampled)


def test_of_requests_that_arrive_at_once_one_gets_the_key(openai: OpenAI, other: OpenAI, job: ServedJob) -> None:
    def call(number: int) -> str:
        try:
            return complete((openai, other)[number % 2], f"number {number}")
        except openai_package.UnprocessableEntityError:
            return ""

    with job.serving(lambda request: job.answer_text(request, "two")), ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(call, range(16)))
    assert ["two"] == [text for text in texts if text]
    assert 1 == len(job.sampled)
