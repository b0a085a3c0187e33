"""Requests of a job with two real engines, from the client to the history."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import psutil
import pytest
from openai import OpenAI

from rollout_api import AsyncRolloutClient, FinishReason, Prompt, RolloutId, encode
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest, WeightUpdate
from rollout_store.job import JobStore, RolloutProgress
from rollout_store.runtime.engine_metrics import ENGINE_METRICS, LABELED_ENGINE_METRICS
from rollout_worker.engine.engine import Engine
from tests.support.in_process_job import LiveJob, manifest
from tests.support.live_job_harness import (
    ENDLESS,
    JobHarness,
    assert_delivered_once,
    gather,
    prompt_index,
    prompts,
    wait_for_status,
)
from tests.support.reference_model import EOS, VOCABULARY, ReferenceDistribution
from tests.support.results_in_redis import kept_rollouts, num_kept, refusals
from tests.support.served_job import MODEL_NAME, serving
from tests.support.waiting import wait_for_async


def test_both_engines_answer_a_step_and_its_rollouts_reach_the_history(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        rollouts = await gather(client, 1, prompts(12))
        assert_delivered_once(running, rollouts, 48)
        assert 2 == len({rollout.engine for rollout in rollouts})
        assert {"stop", "length"} >= {str(rollout.finish_reason) for rollout in rollouts}
        assert all(0 < rollout.started_at <= rollout.finished_at for rollout in rollouts)
        status = await wait_for_status(
            client,
            lambda status: (48, 0, 0, 0) == tuple(status[name] for name in ("done", "waiting", "assigned", "requests")),
        )
        assert {"engine-0", "engine-1"} == {engine["name"] for engine in status["engines"]}

    job_harness.run(scenario)


def test_reported_rewards_are_read_back_as_pass_rates(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        rollouts = await gather(client, 1, prompts(3))
        await running.until(lambda: sum(running.in_history().values()) == 12)
        await client.report_rewards(
            {one.rollout_id: float(RolloutId.parse(one.rollout_id).sample < prompt_index(one)) for one in rollouts}
        )
        running.relay.drain()
        stats = await client.reward_stats(["p0", "p1", "p2"], generations=1)
        assert [(4, 4, share, share) for share in (0.0, 0.25, 0.5)] == [
            (one.num_rollouts, one.count, one.mean, one.pass_rate) for one in stats.values()
        ]

    job_harness.run(scenario)


def test_every_counter_of_an_engine_has_a_metric(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        reports = [worker.report for worker in running.workers.values()]
        counters = [report.counters for report in reports]
        await running.until(lambda: all("measured_timestamp_seconds" in each for each in counters))
        set_by_weight_updates = {"weights_gap_seconds", "weights_update_seconds"}
        of_engines_without_a_job = {"recorded_rollouts", "lost_rollouts"}
        expected = ENGINE_METRICS.keys() - set_by_weight_updates - of_engines_without_a_job
        assert [expected] * 2 == [each.keys() for each in counters]
        assert [LABELED_ENGINE_METRICS.keys()] * 2 == [report.labeled_counters.keys() for report in reports]

    job_harness.run(scenario)


def test_engines_on_one_machine_may_run_on_all_cores(engines: dict[str, Engine]) -> None:
    cores = [process for process in psutil.Process().children(recursive=True) if process.name() == "VLLM::EngineCore"]
    assert len(cores) >= len(engines)  # other tests may have engines as well
    for process in cores:
        # All threads of a process inherit the affinity of its main thread.
        assert os.sched_getaffinity(0) == set(process.cpu_affinity())


def test_engines_report_how_far_observed_rollouts_are(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        store = JobStore.connect(job_harness.url, running.keys)
        sampling = Sampling(n=8, max_tokens=480, allowed_token_ids=ENDLESS)
        async with client.step(1, prompts(20, sampling=sampling)) as step:

            async def progressing() -> list[RolloutProgress]:
                await store.timeline.observe()
                reported = [one for each in (await store.timeline.running()).values() for one in each]
                return reported if any(one.tokens for one in reported) else []

            progress = await wait_for_async(progressing)
            assert len(progress) == len({(one.request_id, one.sample) for one in progress})
            assert {one.problem_id for one in progress} <= {f"p{index}" for index in range(20)}
            assert {480} == {one.max_tokens for one in progress}
            assert all(0 <= one.tokens <= 480 and 0 < one.running_seconds < 60 for one in progress)
            await step.cancel()
            [_ async for _ in step]
        await store.close()

    job_harness.run(scenario)


def test_cancelled_and_overdue_rollouts_return_their_partial_output(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=8, max_tokens=480, allowed_token_ids=ENDLESS, logprobs=True)
        asked = prompts(20, sampling=sampling)
        async with client.step(1, asked) as step:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 8)
            await step.cancel()
            started = time.monotonic()
            rollouts = [rollout async for rollout in step]
        assert time.monotonic() - started < 5
        assert_delivered_once(running, rollouts, 160)
        assert FinishReason.CANCELLED in {rollout.finish_reason for rollout in rollouts}
        partial = [rollout for rollout in rollouts if rollout.token_ids and not rollout.finish_reason.complete]
        assert partial
        assert all(rollout.logprobs and rollout.weight_spans for rollout in partial)
        # A partial rollout can be continued in the next step.
        chosen = partial[0]
        prompt = asked[prompt_index(chosen)]
        (whole,) = await gather(client, 2, [prompt.continue_from(chosen)])
        assert chosen.token_ids == whole.token_ids[: len(chosen.token_ids)]
        assert 480 == len(whole.token_ids)
        assert whole.logprobs is not None
        reference = ReferenceDistribution(job_harness.models / "0")
        assert reference.max_error(list(prompt.token_ids), whole.token_ids, whole.logprobs, sampling) < 1e-3

        late = [Prompt(one.token_ids, one.problem_id, sampling, deadline_seconds=0.7) for one in asked]
        rollouts = await gather(client, 3, late)
        assert 160 == len({rollout.rollout_id for rollout in rollouts})
        assert FinishReason.DEADLINE in {rollout.finish_reason for rollout in rollouts}

    job_harness.run(scenario)


def test_invalid_requests_are_refused_with_a_reason_and_others_are_served(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        keys = running.keys

        def request(name: str, tokens: list[int], **more: Any) -> RolloutRequest:
            return RolloutRequest(
                job_uid=more.pop("uid", running.uid), request_id=name, prompt_token_ids=tokens, **more
            )

        invalid = [
            request("long", [1] * 500),
            request("megabyte", [1] * 260_000),
            request("unknown token", [VOCABULARY]),
            request("another job", [1], uid="another"),
        ]
        for each in invalid:
            running.redis.xadd(keys.requests, {"d": encode(each)})
        for garbage in (b"garbage", encode(WeightUpdate(weight_version=1, uri="/x"))):
            running.redis.xadd(keys.requests, {"d": garbage})
            running.redis.xadd(keys.control, {"d": garbage[:5]})
        assert 4 == len(await gather(client, 1, prompts(1)))
        await running.until(lambda: running.redis.xlen(keys.control) == 0)
        refused = list(refusals(running.redis, keys).values())
        for words in (
            "engine.maxModelLen",
            "spec.queue.maxRequestBytes",
            f"{VOCABULARY} is not a token of the model",
            "the request is for job another",
        ):
            assert any(words in reason for reason in refused), (words, refused)
        assert len(invalid) == len(refused)
        letters: Any = running.redis.xrange(keys.dead_letters)
        reasons = [letter[b"reason"].decode() for _, letter in letters]
        for words in ("msgpack", "a weights in place of a request"):
            assert any(words in reason for reason in reasons), (words, reasons)
        assert 4 == len(letters)
        await wait_for_status(client, lambda status: status["dead_letters"] == 4)
        assert 0 == running.redis.xlen(keys.requests)

    job_harness.run(scenario)


RAIN = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.slow
def test_responses_over_http_match_a_json_schema_or_call_a_required_tool(job_harness: JobHarness) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "rain", "schema": RAIN}}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": RAIN, "strict": True}}
    settings: Any = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "w1 w2 w3 w4"}],
        "n": 4,
        "max_tokens": 60,
    }

    def call(url: str) -> None:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as openai:
            create = openai.chat.completions.create
            for further in ({}, {"min_p": 0.05, "logit_bias": {"5": 0}}):
                for choice in create(**settings, response_format=schema, extra_body=further).choices:
                    assert isinstance(json.loads(choice.message.content)["rain"], bool)
            for choice in create(**settings, tools=[tool], tool_choice="required").choices:
                assert choice.message.tool_calls
                for tool_call in choice.message.tool_calls:
                    assert "weather" == tool_call.function.name
                    assert isinstance(json.loads(tool_call.function.arguments)["rain"], bool)
            texts = ["", "", "", ""]
            for part in create(**settings, response_format=schema, stream=True):
                for choice in part.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert [["rain"]] * 4 == [list(json.loads(text)) for text in texts]

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        arguments = [f"--chat-template={CHAT_TEMPLATE}", "--enable-auto-tool-choice", "--tool-call-parser=hermes"]
        with serving(running, job_harness.url, job_harness.models / "0", arguments) as url:
            await asyncio.to_thread(call, url)
        prompt = Prompt([1, 2, 3, 4], sampling=Sampling(n=8, max_tokens=60, structured_outputs={"json": RAIN}))
        accepted = step = 0
        while not accepted and step < 20:  # the responses are short, so that a single step may have no accepted drafts
            step += 1
            rollouts = await gather(client, step, [prompt])
            assert {FinishReason.STOP} == {rollout.finish_reason for rollout in rollouts}
            accepted = sum(rollout.num_accepted_tokens for rollout in rollouts)
        assert accepted
        assert 0 == running.redis.xlen(running.keys.dead_letters)

    job_harness.run(scenario)


def test_requests_are_identified_by_their_id(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        assert 4 == len(await gather(client, 1, prompts(1)))
        # The same prompt from another client is another request.
        async with AsyncRolloutClient.connect(job_harness.url, uid=running.uid, name="other") as other:
            assert 4 == len(await gather(other, 1, prompts(1)))
        # The same id with other settings is refused, and the first request continues.
        sampling = Sampling(n=2, max_tokens=300, allowed_token_ids=ENDLESS)
        first = RolloutRequest(
            job_uid=running.uid, request_id="twice", reply_to="nobody", prompt_token_ids=[1], sampling=sampling
        )
        second = first.model_copy(update={"sampling": sampling.model_copy(update={"n": 5})})
        for request in (first, second):
            running.redis.xadd(running.keys.requests, {"d": encode(request)})
        await running.until(lambda: num_kept(running.redis, running.keys, "nobody") == 2)
        assert "asks for another number of samples" in refusals(running.redis, running.keys)["twice"]
        rollouts = kept_rollouts(running.redis, running.keys, "nobody")
        assert all(rollout.finish_reason.complete for rollout in rollouts)
        await client.close()
        async with AsyncRolloutClient.connect(job_harness.url, uid=running.uid) as again:
            # A trainer that was reset to an earlier checkpoint repeats an answered request under another id.
            rollouts = await gather(again, 1, prompts(1))
        assert {".r1"} == {RolloutId.parse(rollout.rollout_id).request_id[-3:] for rollout in rollouts}
        assert {0, 1, 2, 3} == {RolloutId.parse(rollout.rollout_id).sample for rollout in rollouts}

    job_harness.run(scenario)


def test_turns_run_on_the_engine_that_has_their_prefix_cached(job_harness: JobHarness) -> None:
    observation = [3, 1, 4, 1, 5, 9, 2, 6]

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with client.step(1) as step:
            starts = [[(number + place) % EOS for place in range(280)] for number in range(6)]
            chats = [step.trajectory(start, problem_id=f"t{number}") for number, start in enumerate(starts)]
            engines: list[set[str]] = [set() for _ in chats]
            cached = []
            for turn in range(4):
                responses = await step.turn(chats, sampling={"max_tokens": 40, "allowed_token_ids": ENDLESS})
                for number, rollout in enumerate(responses):
                    engines[number].add(rollout.engine)
                    if turn:
                        cached.append(rollout.num_cached_tokens)
                for chat in chats:
                    chat.observe(observation)
        assert [1] * 6 == [len(names) for names in engines]
        assert 2 == len(set().union(*engines))
        assert min(cached) >= 128  # the block size of a CPU engine
        # Text of the environment is context, and does not count as sampled by the model.
        running.relay.drain()
        records = running.store.read({"t0": "-"})["t0"].records
        assert [40] * 4 == [len(record.tokens) for record in records]
        before, contexts = starts[0], [[]]
        for record in records[:-1]:
            before = [*before, *record.tokens.tolist(), *observation]
            contexts.append(before[-64:])
        assert contexts == [record.context.tolist() for record in records]

    job_harness.run(scenario)


@pytest.mark.slow
def test_a_client_that_does_not_read_delays_only_itself(job_harness: JobHarness) -> None:
    job = manifest(queue={"maxUnreadResults": "64Ki"})
    total = 640

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=16, max_tokens=100, allowed_token_ids=ENDLESS)
        keys, slow = running.keys, "slow"
        for index, prompt in enumerate(prompts(total // 16, sampling=sampling)):
            request = RolloutRequest(
                job_uid=running.uid,
                request_id=f"slow-{index}",
                reply_to=slow,
                prompt_token_ids=list(prompt.token_ids),
                sampling=sampling,
            )
            running.redis.xadd(keys.requests, {"d": encode(request)})
        await running.until(lambda: num_kept(running.redis, keys, slow) > 60)
        await wait_for_status(client, lambda status: status["slow_clients"] == [slow] and not status["assigned"])
        stopped_at = num_kept(running.redis, keys, slow)
        assert 8 == len(await gather(client, 1, prompts(2)))
        await asyncio.sleep(2)  # time in which further rollouts would be assigned and end
        assert stopped_at == num_kept(running.redis, keys, slow) < total
        assert int(running.redis.hget(keys.results_written, slow)) < 400_000
        async with AsyncRolloutClient.connect(job_harness.url, uid=running.uid, name=slow):
            await running.until(lambda: num_kept(running.redis, keys, slow) == total)

    job_harness.run(scenario, job=job)


def test_thousands_of_rollouts_that_end_at_once_leave_nothing_open(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with client.step(1, prompts(400, sampling=Sampling(n=16, max_tokens=400))) as step:
            await running.until(lambda: running.redis.xlen(running.keys.requests) == 400)
            await step.cancel()
            assert 6400 == len([rollout async for rollout in step])
        await asyncio.wait_for(client.close_job(), 10)
        await running.until_nothing_is_open()

    job_harness.run(scenario)


def test_groups_of_sixty_four_are_whole(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        asked = [list(prompt.token_ids) for prompt in prompts(4)]
        groups = await client.generate(asked, step=1, n=64, max_tokens=30)
        assert [64] * 4 == [len(group) for group in groups]
        assert_delivered_once(running, [rollout for group in groups for rollout in group], 256)

    job_harness.run(scenario)


@pytest.mark.nightly
def test_ten_thousand_short_requests_are_all_answered(job_harness: JobHarness) -> None:
    job = manifest(engine=manifest().spec.engine.model_dump(by_alias=True, mode="json") | {"maxNumSeqs": 64})

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        asked = [
            Prompt([index % EOS, index // EOS % EOS, index // EOS**2], sampling={"n": 1, "max_tokens": 8})
            for index in range(10_000)
        ]
        rollouts = await gather(client, 1, asked)
        assert 10_000 == len({rollout.rollout_id for rollout in rollouts})
        assert 0 == num_kept(running.redis, running.keys)

    job_harness.run(scenario, job=job, seconds=300)


def test_the_job_ends_when_it_is_closed_and_the_history_contains_its_rollouts(job_harness: JobHarness) -> None:
    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with client.step(1, prompts(8)) as step:
            received = 0
            async for _ in step:
                received += 1
                if received == 4:
                    await client.close_job()
        assert 32 == received
        await wait_for_status(client, lambda status: (status["state"], status["requests"]) == ("closing", 0))
        assert not running.tasks["coordinator"].done()  # the relay, which still has work, must not end
        running.relay.drain()
        await asyncio.wait_for(running.tasks["coordinator"], 10)
        assert b"closed" == running.redis.hget(running.keys.job, "state")

    job_harness.run(scenario)
