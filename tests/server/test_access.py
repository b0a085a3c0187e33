"""Bearer tokens, and limits of what may be in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from rollout_server.access import AccessMiddleware, Tokens, TokensError
from tests.support.served_job import MODEL_NAME, ServedJob, serving

ALICE, BOB = "alice-has-a-long-token", "bob-has-a-long-token"
BODY = {"model": MODEL_NAME, "prompt": "one"}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "alice").write_text(ALICE + "\n")
    (tmp_path / "bob").write_text(BOB)
    (tmp_path / "..data").mkdir()
    return tmp_path


@pytest.fixture
def server(job: ServedJob, redis_url: str, model: Path, tokens: Path) -> Iterator[str]:
    with serving(
        job,
        redis_url,
        model,
        wrap=lambda app: AccessMiddleware(app, Tokens.read(tokens), max_requests=2, max_body_bytes=1000),
    ) as url:
        yield url


def post(server: str, token: str, key: str = "", n: int = 1) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if key:
        headers["Idempotency-Key"] = key
    return httpx.post(f"{server}/v1/completions", headers=headers, timeout=20, json={**BODY, "n": n})


def test_requests_need_a_token(server: str, job: ServedJob) -> None:
    for token in ("", "other", ALICE[:-1], ALICE + "x"):
        reply = post(server, token)
        assert 401 == reply.status_code
        assert "Authorization: Bearer TOKEN" in reply.json()["error"]["message"]
    assert 401 == httpx.get(f"{server}/v1/models", headers={"Authorization": f"Basic {ALICE}"}).status_code
    assert 200 == httpx.get(f"{server}/health").status_code
    assert [] == job.requests()
    with job.serving(lambda request: job.answer_text(request, "two")):
        assert ["two"] == [choice["text"] for choice in post(server, ALICE).json()["choices"]]


def test_a_token_may_have_a_limited_number_of_requests_in_progress(server: str, job: ServedJob) -> None:
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(post, server, ALICE) for _ in range(2)]
        job.wait_for_requests(2)
        refused = post(server, ALICE)
        assert (429, "1") == (refused.status_code, refused.headers["Retry-After"])
        assert "2 requests in progress" in refused.json()["error"]["message"]
        other = pool.submit(post, server, BOB)
        for request in job.wait_for_requests(3):
            job.answer_text(request, "two")
        assert [200] * 3 == [reply.result(timeout=20).status_code for reply in (*running, other)]
    with job.serving(lambda request: job.answer_text(request, "two")):
        assert 200 == post(server, ALICE).status_code


@pytest.fixture
def limited(job: ServedJob, redis_url: str, model: Path, tokens: Path) -> Iterator[str]:
    """A server that limits the tokens of prompts and responses in progress."""
    wrap = partial(AccessMiddleware, tokens=Tokens.read(tokens), max_model_tokens=40)
    with serving(job, redis_url, model, wrap=wrap) as url:
        yield url


def ask(server: str, token: str, max_tokens: int, **fields: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    body = {**BODY, "max_tokens": max_tokens, **fields}
    return httpx.post(f"{server}/v1/completions", headers=headers, json=body, timeout=20)


def sample(server: str, token: str, max_tokens: int) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": max_tokens}}
    return httpx.post(f"{server}/generate", headers=headers, json=body, timeout=20)


@pytest.mark.parametrize("call", [ask, sample])
def test_a_token_may_have_a_limited_number_of_model_tokens_in_progress(
    limited: str, job: ServedJob, call: Callable[[str, str, int], httpx.Response]
) -> None:
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(call, limited, ALICE, 30)
        job.wait_for_requests(1)
        refused = call(limited, ALICE, 20)
        assert (429, "1") == (refused.status_code, refused.headers["Retry-After"])
        assert "40 tokens" in refused.json()["error"]["message"]
        if call is ask:
            streamed = ask(limited, ALICE, 20, stream=True)
            assert (429, "1") == (streamed.status_code, streamed.headers["Retry-After"])
            assert "40 tokens" in streamed.json()["error"]["message"]
        others = [pool.submit(call, limited, ALICE, 5), pool.submit(call, limited, BOB, 30)]
        for request in job.wait_for_requests(3):
            job.answer_text(request, "two")
        assert [200] * 3 == [reply.result(timeout=20).status_code for reply in (running, *others)]
    with job.serving(lambda request: job.answer_text(request, "two")):
        assert 200 == call(limited, ALICE, 30).status_code


@pytest.mark.parametrize("fields", [{"max_tokens": 50}, {"n": 3}, {"prompt": ["one", "two", "one two"]}])
def test_a_request_that_always_exceeds_the_limit_is_invalid(
    limited: str, job: ServedJob, fields: dict[str, object]
) -> None:
    refused = ask(limited, ALICE, **{"max_tokens": 15, **fields})
    assert 400 == refused.status_code
    assert "at most 40 tokens" in refused.json()["error"]["message"]
    # Nothing stays reserved.
    with job.serving(lambda request: job.answer_text(request, "two")):
        assert 200 == ask(limited, ALICE, 30).status_code


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_has_a_limited_size(server: str, job: ServedJob, announced: bool) -> None:
    body = b'{"prompt": "' + b"x" * 1000 + b'"}'
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ALICE}", "Idempotency-Key": "a"}
    content = body if announced else iter([body])
    reply = httpx.post(f"{server}/v1/completions", content=content, headers=headers)
    assert 413 == reply.status_code
    assert "at most 1000 bytes" in reply.json()["error"]["message"]
    assert [] == job.requests()
    assert not job.redis.exists(job.keys.idempotency("a"))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokensError, match="has no files"):
        Tokens.read(tmp_path)
    (tmp_path / "carol").write_text("short")
    with pytest.raises(TokensError, match="carol must have at least 16 characters"):
        Tokens.read(tmp_path)
    with pytest.raises(TokensError, match="cannot be read"):
        Tokens.read(tmp_path / "missing")


def test_a_job_without_room_answers_429(redis_url: str, model: Path) -> None:
    job = ServedJob(redis_url, model, max_rollouts=2)
    wrap = partial(AccessMiddleware, tokens=Tokens())
    with serving(job, redis_url, model, wrap=wrap) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, server, "", key="a", n=2)
        [request] = job.wait_for_requests(1)
        refused = post(server, "")
        assert (429, "1") == (refused.status_code, refused.headers["Retry-After"])
        assert "open rollouts" in refused.json()["error"]["message"]
        # A call that is repeated needs no room.
        job.redis.hset(job.keys.ledger(request.request_id), "n", 2)
        repeated = pool.submit(post, server, "", key="a", n=2)
        time.sleep(0.5)
        job.answer_text(request, "two")
        assert [200, 200] == [reply.result(timeout=20).status_code for reply in (running, repeated)]
