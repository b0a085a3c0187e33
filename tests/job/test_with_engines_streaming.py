"""Rollouts whose tokens are streamed while two real engines sample them."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import httpx
import pytest

from rollout_api import AsyncRolloutClient, Prompt, RequestClient, Rollout
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial
from tests.support.in_process_job import LiveJob
from tests.support.live_job_harness import ENDLESS, JobHarness, assert_delivered_once
from tests.support.reference_model import ReferenceDistribution
from tests.support.responses import check_likely_tokens
from tests.support.served_job import MODEL_NAME, serving

pytestmark = pytest.mark.slow

PROMPT = [1, 2, 3, 4]
LENGTH = 300


class Received:
    """The tokens that a caller has received, by sample."""

    def __init__(self) -> None:
        self.parts: defaultdict[int, list[Partial]] = defaultdict(list)

    def __call__(self, sample: int, tokens: Partial) -> None:
        self.parts[sample].append(tokens)

    def num_tokens(self, sample: int) -> int:
        return sum(len(part.token_ids) for part in self.parts[sample])

    def assert_beginning_of(self, rollouts: list[Rollout]) -> None:
        """Check that the tokens, log-probabilities and versions are those with which the rollouts begin."""
        for sample, rollout in enumerate(rollouts):
            received = Partial.join(self.parts[sample])
            length = len(received.token_ids)
            assert rollout.token_ids[:length] == received.token_ids
            for name, values in rollout.logprob_fields().items():
                assert values[:length] == received.logprob_fields()[name]
            assert [span for span in rollout.weight_spans if span.start < length] == received.weight_spans


def endless(n: int = 2, **settings: Any) -> Prompt:
    """Return a prompt whose rollouts have LENGTH tokens."""
    fixed = {"n": n, "max_tokens": LENGTH, "logprobs": True, "allowed_token_ids": ENDLESS}
    return Prompt(PROMPT, sampling=Sampling.model_validate(fixed | settings))


def connect(job_harness: JobHarness, running: LiveJob) -> RequestClient:
    return RequestClient.connect(job_harness.url, uid=running.uid)


def test_tokens_arrive_while_they_are_sampled(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, _: AsyncRolloutClient) -> None:
        received = Received()
        async with connect(job_harness, running) as client:
            rollouts = await client.rollouts(endless(), on_tokens=received)
        received.assert_beginning_of(rollouts)
        for sample in range(2):
            # About one decoding step takes as long as the pause between two writes.
            assert 1 <= len(received.parts[sample][0].token_ids) < 50
            assert len(received.parts[sample]) >= 5
            assert received.num_tokens(sample) > LENGTH // 2
        assert_delivered_once(running, rollouts, 2)
        assert [] == list(running.redis.scan_iter("*:tokens:*"))

    job_harness.run(scenario)


def test_a_stream_over_http_continues_after_redis_was_full(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, _: AsyncRolloutClient) -> None:
        body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        with serving(running, job_harness.url, job_harness.models / "0") as url:
            async with (
                httpx.AsyncClient(timeout=60) as http,
                http.stream("POST", f"{url}/v1/completions", json=body) as reply,
            ):
                lines = reply.aiter_lines()
                assert (await anext(lines)).startswith("data: {")
                running.redis.config_set("maxmemory", 1)
                try:
                    await asyncio.sleep(3)
                finally:
                    running.redis.config_set("maxmemory", 0)
                chunks = [line.removeprefix("data: ") async for line in lines if line]
        assert "[DONE]" == chunks[-1]
        assert "length" == json.loads(chunks[-2])["choices"][0]["finish_reason"]
        await running.until(lambda: not running.redis.xlen(running.keys.requests))

    job_harness.run(scenario)


@pytest.mark.parametrize("end", ["is killed", "leaves", "loses its lease"])
def test_another_engine_continues_after_the_tokens_that_were_streamed(job_harness: JobHarness, end: str) -> None:
    async def scenario(running: LiveJob, _: AsyncRolloutClient) -> None:
        reference = ReferenceDistribution(job_harness.models / "0")
        received = Received()
        sampled_before = sum(engine.counters.tokens for engine in job_harness.engines.values())
        async with connect(job_harness, running) as client:
            task = asyncio.ensure_future(client.rollouts(endless(8, top_logprobs=2), on_tokens=received))
            await running.until(lambda: all(received.num_tokens(sample) > 20 for sample in range(8)))
            ending = running.workers["engine-0"]
            assert ending.running
            if end == "is killed":
                await running.kill("engine-0")
            elif end == "leaves":
                await running.drain("engine-0")
            else:
                # It goes on sampling, but can neither stream nor finish rollouts that were given to another engine.
                running.redis.delete(running.keys.lease(ending.engine_id))
            rollouts = await task
        sampled = sum(engine.counters.tokens for engine in job_harness.engines.values()) - sampled_before
        assert end != "leaves" or 8 * LENGTH == sampled  # no token was sampled twice
        received.assert_beginning_of(rollouts)
        assert_delivered_once(running, rollouts, 8)
        assert {LENGTH} == {len(rollout.token_ids) for rollout in rollouts}
        if end == "is killed":
            sampling = Sampling(top_logprobs=2, allowed_token_ids=ENDLESS)
            for rollout in rollouts:
                check_likely_tokens(reference, PROMPT, rollout.since(0), sampling)

    job_harness.run(scenario)


def test_a_process_that_joins_late_receives_all_tokens(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, _: AsyncRolloutClient) -> None:
        first, same_process, other_process = Received(), Received(), Received()
        async with connect(job_harness, running) as one, connect(job_harness, running) as another:
            tasks = [asyncio.ensure_future(one.rollouts(endless(), request_id="a", on_tokens=first))]
            await running.until(lambda: first.num_tokens(0) > 50)
            for client, received in ((one, same_process), (another, other_process)):
                tasks.append(asyncio.ensure_future(client.rollouts(endless(), request_id="a", on_tokens=received)))
            found = await asyncio.gather(*tasks)
        assert found[0] == found[1] == found[2]
        for received in (first, same_process, other_process):
            received.assert_beginning_of(found[0])
            assert received.num_tokens(0) > 50
        assert_delivered_once(running, found[0], 2)

    job_harness.run(scenario)


def test_rollouts_that_could_not_be_continued_are_not_streamed(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, _: AsyncRolloutClient) -> None:
        received = Received()
        sampling = Sampling(n=2, max_tokens=100, presence_penalty=0.5, allowed_token_ids=ENDLESS)
        async with connect(job_harness, running) as client:
            rollouts = await client.rollouts(Prompt(PROMPT, sampling=sampling), on_tokens=received)
        assert not received.parts
        assert [100, 100] == [len(rollout.token_ids) for rollout in rollouts]

    job_harness.run(scenario)


def test_a_stop_string_ends_a_rollout_that_is_streamed(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, _: AsyncRolloutClient) -> None:
        received = Received()
        sampling = Sampling(n=2, max_tokens=LENGTH, logprobs=True, allowed_token_ids=[5, 6], stop=["w5 w6 w5 w5 w6"])
        async with connect(job_harness, running) as client:
            rollouts = await client.rollouts(Prompt(PROMPT, sampling=sampling), on_tokens=received)
        received.assert_beginning_of(rollouts)
        for rollout in rollouts:
            if rollout.finish_reason == "stop":
                assert [5, 6, 5, 5, 6] == rollout.token_ids[-5:]

    job_harness.run(scenario)
