"""The client against a real Redis; the job's side is written with plain commands (job_side.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
import redis
import redis.asyncio
from redis.commands.core import AsyncScript

from rollout_api import (
    AsyncRolloutClient,
    Cancel,
    Close,
    FinishReason,
    InvalidRequestError,
    JobChangedError,
    JobEndedError,
    JobNotFoundError,
    NameInUseError,
    Partial,
    Progress,
    Prompt,
    Purpose,
    RedisAwayError,
    RedisRefusedError,
    Refusal,
    RequestRefusedError,
    Rewards,
    Rollout,
    RolloutClient,
    RolloutClientError,
    RolloutRequest,
    Sampling,
    UnreadableResultError,
    VersionMismatchError,
    WeightsError,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.client.prompts import SamplingOverrides
from rollout_api.client.result_stream import MOST_UNREAD
from rollout_api.protocol.keys import TRAINER_GROUP, named
from rollout_worker.embedded_redis import EmbeddedRedis
from tests.support.job_side import VOCABULARY, JobSide, wait_until

PROMPTS = [[1, 2, 3], [4, 5], [6]]
BEYOND = Partial(token_ids=[VOCABULARY], spans=[WeightSpan(start=0, weight_version=0)])
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine; nothing here takes longer than half a minute."""
    return asyncio.run(asyncio.wait_for(work, 30))


def ids_of(job: JobSide, client: str = "trainer") -> list[bytes]:
    """Entries of rollouts in a client's result stream. (A refusal of a repetition may come late.)"""
    found = job.redis.xrange(job.keys.results(client))
    return [entry for entry, fields in found if isinstance(decode(fields[b"d"]), Rollout)]


def pending_of(job: JobSide, client: str = "trainer") -> int:
    return int(job.redis.xpending(job.keys.results(client), TRAINER_GROUP)["pending"])


def receive_and_end(redis_url: str, job: JobSide, *steps: int) -> None:
    """A trainer that ends when it has all rollouts of *steps*, of which it has acknowledged none."""
    with RolloutClient.connect(redis_url, job.name) as client:
        for step in steps:
            client.step(step, PROMPTS).start()
        for request in job.wait_for_requests(len(PROMPTS) * len(steps)):
            job.answer(request)
        wait_until(lambda: pending_of(job) == 2 * len(PROMPTS) * len(steps))


@pytest.fixture
def job(redis_url: str) -> JobSide:
    return JobSide(redis_url)


@pytest.fixture
def client(redis_url: str, job: JobSide) -> Iterator[RolloutClient]:
    with RolloutClient.connect(redis_url, job.name, patience=10) as connected:
        yield connected


# a whole step


def test_a_trainer_that_is_not_asynchronous_gets_its_groups_in_order(client: RolloutClient, job: JobSide) -> None:
    seen: list[Progress] = []
    threads: set[int] = set()

    def watch(progress: Progress) -> None:
        seen.append(progress)
        threads.add(threading.get_ident())

    with job.serving():
        groups = client.generate(PROMPTS, step=17, n=3, on_progress=watch)
    assert [[f"{job.uid}/trainer:17:{i}" for _ in range(3)] for i in range(3)] == [
        [rollout.rollout_id.rsplit("-", 1)[0] for rollout in group] for group in groups
    ]
    assert [[[s + 1] * 3 for s in range(3)]] * 3 == [[rollout.token_ids for rollout in group] for group in groups]
    assert {threading.get_ident()} == threads
    assert (9, 9, 27) == (seen[-1].done, seen[-1].total, seen[-1].tokens)
    assert 0 == len(ids_of(job))
    assert 0 == pending_of(job)


def test_results_are_streamed_in_the_order_in_which_they_end(redis_url: str, job: JobSide) -> None:
    async def trainer() -> list[tuple[int, int]]:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
            requests = await asyncio.to_thread(job.wait_for_requests, 3)
            order = []
            for index, sample in [(2, 1), (0, 0), (1, 1), (2, 0), (0, 1), (1, 0)]:
                job.answer(requests[index], [sample])
                rollout = await anext(aiter(step))
                order.append((step.index(rollout), rollout.token_ids[0] - 1))
            assert [] == [rollout async for rollout in step]
            return order

    assert [(2, 1), (0, 0), (1, 1), (2, 0), (0, 1), (1, 0)] == run(trainer())
    assert [] == ids_of(job)


def test_what_is_set_for_a_prompt_is_what_is_sent(client: RolloutClient, job: JobSide) -> None:
    prompt = Prompt(
        [7, 8],
        problem_id="p",
        sampling={"n": 1, "min_tokens": 50},
        purpose=Purpose.EVAL,
        priority=3,
        deadline_seconds=1.5,
        weight_version=2,
        half_logprobs=True,
    )
    with client.step(4, [prompt, [9]]) as step:
        requests = job.wait_for_requests(2)
        step.cancel()
    first, second = requests
    assert {"n": 1, "min_tokens": 50, "max_tokens": 64} == first.sampling.model_dump(exclude_unset=True)
    assert ("p", Purpose.EVAL, 3, 1.5, 2, True) == (
        first.problem_id,
        first.purpose,
        first.priority,
        first.deadline_seconds,
        first.weight_version,
        first.half_logprobs,
    )
    assert {} == second.sampling.model_dump(exclude_unset=True)
    assert {"job_uid", "request_id", "reply_to", "prompt_token_ids", "sampling", "step"} == second.model_fields_set - {
        "kind"
    }


def test_every_sampling_setting_can_be_given_as_a_keyword() -> None:
    assert set(Sampling.model_fields) == set(SamplingOverrides.__annotations__)


def test_two_clients_get_each_their_own(redis_url: str, job: JobSide) -> None:
    async def trainer(name: str) -> list[list[Rollout]]:
        async with AsyncRolloutClient.connect(redis_url, job.name, name=name) as client:
            return await client.generate(PROMPTS, step=1)

    async def both() -> list[list[list[Rollout]]]:
        return await asyncio.gather(trainer("rank-0"), trainer("rank-1"))

    with job.serving():
        for name, groups in zip(("rank-0", "rank-1"), run(both()), strict=True):
            assert {f"{job.uid}/{name}:1"} == {r.rollout_id.rsplit(":", 1)[0] for group in groups for r in group}
    assert 12 == len(set(job.sampled)) == len(job.sampled)


def test_several_steps_are_open_at_once(redis_url: str, job: JobSide) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            earlier = await client.step(1, PROMPTS).start()
            later = await client.step(2, PROMPTS).start()
            requests = await asyncio.to_thread(job.wait_for_requests, 6)
            for request in reversed(requests):
                job.answer(request)
            assert 6 == len([rollout async for rollout in earlier])
            assert 6 == len([rollout async for rollout in later])
            await later.end()
            assert 6 == pending_of(job)
            await earlier.end()
            assert 0 == pending_of(job)
            assert [] == ids_of(job)

    run(trainer())


def test_training_and_evaluation_share_a_step_number(client: RolloutClient, job: JobSide) -> None:
    with job.serving():
        client.generate(PROMPTS, step=1)
        client.generate(PROMPTS, step=1, purpose="eval")
        with pytest.raises(InvalidRequestError, match=r"step 1 with these prompts has ended.*count the step up"):
            client.generate(PROMPTS, step=1)


# restarts

TRAINER = """
import os, signal, sys
from rollout_api import RolloutClient
client = RolloutClient.connect(sys.argv[1], "default/math")
with client.step(5, [[1, 2, 3], [4, 5], [6]]) as step:
    for number, rollout in enumerate(step):
        print(rollout.rollout_id, flush=True)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_killed_within_a_step_gets_the_same_rollouts_again(redis_url: str, job: JobSide) -> None:
    killed = subprocess.Popen([sys.executable, "-c", TRAINER, redis_url], stdout=subprocess.PIPE, text=True)
    requests = job.wait_for_requests(3)
    job.answer(requests[0])
    job.answer(requests[1])
    out, _ = killed.communicate(timeout=30)
    assert -signal.SIGKILL == killed.returncode
    assert 3 == len(out.split())
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        groups = client.generate(PROMPTS, step=5)
    got = [rollout.rollout_id for group in groups for rollout in group]
    assert set(out.split()) < set(got)
    assert sorted(job.sampled) == sorted(got)
    assert 6 == len(set(got)) == len(job.sampled)
    assert [] == ids_of(job)


def test_a_step_left_by_an_error_is_opened_again_with_its_rollouts(client: RolloutClient, job: JobSide) -> None:
    first: list[Rollout] = []
    with job.serving():
        with pytest.raises(ZeroDivisionError), client.step(1, PROMPTS) as step:
            for rollout in step:
                first.append(rollout)
                if len(first) == 2:
                    raise ZeroDivisionError
        again = client.generate(PROMPTS, step=1)
    assert 6 == len(job.sampled)
    assert all(rollout in [r for group in again for r in group] for rollout in first)


def test_the_same_step_object_is_opened_again(redis_url: str, job: JobSide) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            step = client.step(1, PROMPTS)
            with pytest.raises(ZeroDivisionError):
                async with step:
                    await step.turn([step.trajectory([7])])
                    await anext(aiter(step))
                    raise ZeroDivisionError
            async with step:
                await step.turn([step.trajectory([7])])
                rollouts = [rollout async for rollout in step]
                assert {0, 1, 2} == {step.index(rollout) for rollout in rollouts}
            assert (6, 7, 7) == (len(rollouts), step.progress.done, step.progress.total)
            assert 0 == client.results.awaited

    with job.serving():
        run(trainer())
    assert 7 == len(job.sampled)
    assert [] == ids_of(job)


def test_a_step_that_was_cancelled_is_opened_again(client: RolloutClient, job: JobSide) -> None:
    step = client.step(1, PROMPTS)
    with job.serving(lambda request: None), pytest.raises(ZeroDivisionError), step:
        job.wait_for_requests(3)
        step.cancel()
        next(iter(step))
        raise ZeroDivisionError
    with job.serving(), step:
        assert 6 == len(list(step))


def test_results_are_held_while_a_step_that_was_open_beside_theirs_ends(redis_url: str, job: JobSide) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            beside = await client.step(6, PROMPTS).start()
            with pytest.raises(ZeroDivisionError):
                async with client.step(5, PROMPTS) as step:
                    await anext(aiter(step))
                    raise ZeroDivisionError
            assert 6 == len([rollout async for rollout in beside])
            await beside.end()
            async with client.step(5, PROMPTS) as step:
                assert 6 == len([rollout async for rollout in step])

    with job.serving():
        run(trainer())
    assert 12 == len(job.sampled)
    assert [] == ids_of(job)


def test_results_are_dropped_when_a_step_ends_that_was_opened_after_theirs_was_left(
    redis_url: str, job: JobSide
) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            with pytest.raises(ZeroDivisionError):
                async with client.step(5, PROMPTS) as step:
                    await anext(aiter(step))
                    raise ZeroDivisionError
            await client.generate(PROMPTS, step=4)
            await asyncio.to_thread(wait_until, lambda: pending_of(job) == 6)
            await client.generate(PROMPTS, step=6)

    with job.serving():
        run(trainer())
    assert [] == ids_of(job)


def test_two_open_steps_survive_a_restart_opened_one_after_the_other(redis_url: str, job: JobSide) -> None:
    receive_and_end(redis_url, job, 1, 2)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=1)
        assert 6 == pending_of(job)
        client.generate(PROMPTS, step=2)
    assert 12 == len(job.sampled)
    assert [] == ids_of(job)


def test_results_of_a_step_that_nobody_opens_again_are_dropped(
    redis_url: str, job: JobSide, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutClient.connect(redis_url, job.name) as client:
        client.step(1, PROMPTS).start()
        for request in job.wait_for_requests(3):
            job.answer(request)
    with caplog.at_level(logging.INFO), job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=2)
    assert [] == ids_of(job)
    assert "no step asks any more" in caplog.text


def test_a_restarted_step_with_other_prompts_does_not_get_the_rollouts_of_the_old_ones(
    redis_url: str, job: JobSide
) -> None:
    receive_and_end(redis_url, job, 1)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        [group] = client.generate([[9, 9]], step=1, n=4)
    assert 4 == len(group)
    assert 10 == len(job.sampled)


def test_a_second_process_of_the_same_name_is_told(
    redis_url: str, job: JobSide, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NameInUseError, match=r"'trainer'.*each trainer rank a name of its own"):
        RolloutClient.connect(redis_url, job.name)


def test_a_process_whose_name_was_taken_over_reads_no_more(client: RolloutClient, job: JobSide) -> None:
    """It stood still for longer than its hold on the name lasts, and another one came."""
    with pytest.raises(NameInUseError, match="host/process elsewhere/1"), client.step(0, PROMPTS) as step:
        requests = job.wait_for_requests(3)
        job.redis.set(job.keys.client("trainer"), "elsewhere/1/token")
        time.sleep(2.5)
        job.answer(requests[0])
        list(step)
    assert 0 == pending_of(job)


# a trainer that goes back to an earlier checkpoint


def test_a_step_that_an_earlier_trainer_acknowledged_is_sampled_anew(
    redis_url: str, job: JobSide, caplog: pytest.LogCaptureFixture
) -> None:
    suffixes = []
    for _ in range(3):
        with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
            groups = client.generate(PROMPTS, step=0)
            with pytest.raises(InvalidRequestError, match="has ended"):
                client.generate(PROMPTS, step=0)
        ids = [rollout.rollout_id.split("/")[1] for group in groups for rollout in group]
        assert [f"trainer:0:{index}" for index in (0, 0, 1, 1, 2, 2)] == [one.partition("-")[0] for one in ids]
        suffixes.append({one.partition(".")[2] for one in ids})
    assert [{""}, {"r1"}, {"r2"}] == suffixes
    assert 18 == len(set(job.sampled)) == len(job.sampled)
    assert [] == ids_of(job)
    assert 2 == caplog.text.count("received by an earlier trainer")
    assert "refused" not in caplog.text


def test_a_trainer_killed_within_a_step_that_is_sampled_anew_gets_the_same_rollouts_again(
    redis_url: str, job: JobSide
) -> None:
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=5)
    with job.serving():
        killed = subprocess.run(
            [sys.executable, "-c", TRAINER, redis_url], stdout=subprocess.PIPE, text=True, timeout=30, check=False
        )
    assert -signal.SIGKILL == killed.returncode
    wait_until(lambda: len(ids_of(job)) == 6)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client, client.step(5, PROMPTS) as step:
        assert [2, 2, 2] == step.sizes
        rollouts = list(step)
        assert [0, 0, 1, 1, 2, 2] == sorted(step.index(rollout) for rollout in rollouts)
    assert set(killed.stdout.split()) < {rollout.rollout_id for rollout in rollouts}
    assert 6 == len({rollout.rollout_id for rollout in rollouts})
    assert 12 == len(job.sampled)
    assert [] == ids_of(job)


def test_only_what_was_acknowledged_is_sampled_anew(redis_url: str, job: JobSide) -> None:
    stream = job.keys.results("trainer")
    receive_and_end(redis_url, job, 1)
    job.redis.xdel(stream, *ids_of(job)[:2])  # all of the first request
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        groups = client.generate(PROMPTS, step=1)
    ids = [rollout.rollout_id for group in groups for rollout in group]
    assert [True, True, False, False, False, False] == [".r1/" in one for one in ids]
    assert 8 == len(job.sampled)


def test_a_request_whose_answers_are_there_in_part_is_not_sampled_anew(redis_url: str, job: JobSide) -> None:
    receive_and_end(redis_url, job, 1)
    job.redis.xdel(job.keys.results("trainer"), ids_of(job)[0])
    rollouts: list[Rollout] = []
    with (
        job.serving(),
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(RequestRefusedError, match=r"refused 1 request: trainer:1:0-\w+: it was answered before"),
        client.step(1, PROMPTS) as step,
    ):
        rollouts.extend(step)
    assert 5 == len(rollouts)
    assert 6 == len(job.sampled)


def test_turns_that_an_earlier_trainer_acknowledged_are_sampled_anew(redis_url: str, job: JobSide) -> None:
    for attempt in range(3):
        with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
            step = client.step(0).start()
            one = step.trajectory([1, 2])
            [first] = step.turn([one])
            one.observe([9])
            step.turn([one])
            assert (".r1/" in first.rollout_id) is (attempt > 0)
            assert 8 == len(one.context) - 1
            step.end(acknowledge=attempt != 1)
    assert 4 == len(job.sampled)
    assert [] == ids_of(job)


def test_a_cancelled_step_samples_nothing_anew(redis_url: str, job: JobSide) -> None:
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=0)
    with RolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        step.cancel()
        with job.serving():
            assert [] == list(step)
    assert 6 == len(job.sampled)
    assert [] == job.requests()


def test_room_is_counted_right_through_errors_cancellations_and_new_ids(redis_url: str, job: JobSide) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            with pytest.raises(ZeroDivisionError):
                async with client.step(0, PROMPTS):
                    await asyncio.to_thread(job.wait_for_requests, 3)
                    await asyncio.to_thread(wait_until, lambda: client.results.awaited == 6)
                    raise ZeroDivisionError
            assert 0 == client.results.awaited
            with job.serving():
                await client.generate(PROMPTS, step=0)
            assert 0 == client.results.awaited
            async with client.step(1, PROMPTS) as step:
                await asyncio.to_thread(job.wait_for_requests, 3)
                await step.cancel()
                assert 6 == client.results.awaited
            assert 0 == client.results.awaited
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            with job.serving():
                await client.generate(PROMPTS, step=0)
            assert 0 == client.results.awaited

    run(trainer())


def test_steps_that_ended_long_ago_are_forgotten(
    client: RolloutClient, job: JobSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_api.client.async_client._ENDED_STEPS_KEPT", 2)
    with job.serving():
        for step in (1, 2, 3, 1):
            client.generate(PROMPTS, step=step)
        with pytest.raises(InvalidRequestError, match="has ended"):
            client.generate(PROMPTS, step=3)


def test_a_turn_of_a_cancelled_step_is_not_waited_for(client: RolloutClient, job: JobSide) -> None:
    with client.step(0) as step:
        step.cancel()
        with pytest.raises(RolloutClientError, match="was cancelled before this turn was sent"):
            step.turn([step.trajectory([1])])


# acknowledgement


def test_an_acknowledgement_trims_behind_the_slowest_group(client: RolloutClient, job: JobSide) -> None:
    stream = job.keys.results("trainer")
    job.redis.xgroup_create(stream, "auditor", id="0")
    with job.serving():
        client.generate(PROMPTS, step=1)
    assert 6 == len(ids_of(job))
    [(_, entries)] = job.redis.xreadgroup("auditor", "a", {stream: ">"}, count=4)
    job.redis.xack(stream, "auditor", *[entry for entry, _ in entries[:3]])
    with job.serving():
        client.generate(PROMPTS, step=2)
    left = ids_of(job)
    assert entries[3][0] == left[0]
    assert 3 + 6 == len(left)


def test_many_results_are_acknowledged(client: RolloutClient, job: JobSide) -> None:
    with job.serving():
        groups = client.generate([[i % 900 + 1, i // 900] for i in range(1200)], step=1, n=2)
    assert 2400 == sum(map(len, groups))
    assert [] == ids_of(job)
    assert 0 == pending_of(job)


def test_what_is_acknowledged_behind_what_is_held_is_deleted(redis_url: str, job: JobSide) -> None:
    """A trainer that goes back to an earlier step holds the results of later ones for long."""
    stream = job.keys.results("trainer")
    receive_and_end(redis_url, job, 9)
    held = ids_of(job)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=1)
        assert held == ids_of(job)
        job.redis.xgroup_create(stream, "auditor", id="0")
        with client.step(2, PROMPTS) as step:
            assert 6 == len(list(step))
            later = ids_of(job)[6:]
            job.redis.xreadgroup("auditor", "a", {stream: ">"}, count=10)
            job.redis.xack(stream, "auditor", *held[1:], later[0], later[2])
        # later[1] and later[3] are pending in the other group, later[4] and later[5] have not been delivered to it
        assert [*held, later[1], *later[3:]] == ids_of(job)


def test_an_acknowledgement_that_fails_leaves_no_request_in_halves(
    redis_url: str, job: JobSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_api.client.result_stream._ACKNOWLEDGED_AT_ONCE", 3)
    call = AsyncScript.__call__
    calls: list[int] = []

    async def fail_after_the_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["keys"] == [job.keys.results("trainer")]:
            calls.append(1)
            if len(calls) > 1:
                raise redis.ConnectionError("away")
        return await call(self, *args, **kwargs)

    with job.serving(), RolloutClient.connect(redis_url, job.name, patience=0.5) as client:
        monkeypatch.setattr(AsyncScript, "__call__", fail_after_the_first)
        with pytest.raises(RedisAwayError, match="acknowledge results"), client.step(1, PROMPTS) as step:
            first = list(step)
        monkeypatch.setattr(AsyncScript, "__call__", call)
        assert 4 == pending_of(job)
        left = {entry.decode() for entry in ids_of(job)}
        assert 4 == len(left)
        again = client.generate(PROMPTS, step=1)
    both = {rollout.rollout_id for rollout in first} & {rollout.rollout_id for group in again for rollout in group}
    assert 4 == len(both)
    assert [2, 2, 2] == [len(group) for group in again]
    assert [] == ids_of(job)


# back-pressure


def test_a_slow_consumer_is_not_read_ahead_for(redis_url: str, job: JobSide) -> None:
    count = 2 * MOST_UNREAD

    async def trainer() -> None:
        async with (
            AsyncRolloutClient.connect(redis_url, job.name) as client,
            client.step(0, [Prompt([1], sampling={"n": count})]) as step,
        ):
            [request] = await asyncio.to_thread(job.wait_for_requests, 1)
            await asyncio.to_thread(job.answer, request)
            async with asyncio.timeout(10):
                while step.unread < MOST_UNREAD:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)  # in which it could read on
            assert MOST_UNREAD <= step.unread <= MOST_UNREAD + 64
            assert pending_of(job) <= MOST_UNREAD + 64
            assert set(range(count)) == {int(r.rollout_id.split("/")[2]) async for r in step}

    run(trainer())


def test_a_step_that_is_read_is_not_held_up_by_one_that_is_not(redis_url: str, job: JobSide) -> None:
    count = MOST_UNREAD + 200

    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            unread = await client.step(0, [Prompt([1], sampling={"n": count})]).start()
            async with client.step(1, [[2]]) as step:
                requests = await asyncio.to_thread(job.wait_for_requests, 2)
                await asyncio.to_thread(job.answer, requests[0])
                job.answer(requests[1])
                assert 2 == len([rollout async for rollout in step])
            assert unread.unread <= MOST_UNREAD + 64
            assert count == len({rollout.rollout_id async for rollout in unread})
            await unread.end()

    run(trainer())
    assert [] == ids_of(job)


def test_requests_wait_while_the_job_has_as_many_as_it_takes(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    job = JobSide(redis_url, max_rollouts=10)
    job.say(waiting=10)
    with RolloutClient.connect(redis_url, job.name) as client:
        wait_until(lambda: client.status.get("waiting") == 10)
        with client.step(0, [[i] for i in range(1, 21)]) as step:
            wait_until(lambda: "as many as it takes" in caplog.text)
            assert [] == job.requests()  # by its own count alone it would send five
            with job.serving():
                assert 40 == len(list(step))


def test_a_full_redis_is_waited_for(
    redis_url: str, client: RolloutClient, job: JobSide, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as full:
        full.enter_context(job.full())
        with client.step(0, PROMPTS) as step:
            wait_until(lambda: "out of memory" in caplog.text)
            assert 0 == len(job.requests())
            full.close()
            with job.serving():
                assert 6 == len(list(step))


def test_a_full_redis_does_not_keep_a_step_from_its_end(redis_url: str, job: JobSide) -> None:
    """To acknowledge is what makes room again."""

    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            answered = await client.step(0, PROMPTS).start()
            requests = await asyncio.to_thread(job.wait_for_requests, 3)
            job.answer(requests[0])
            await anext(aiter(answered))
            with job.full():
                async with client.step(1, PROMPTS):
                    await asyncio.sleep(0.2)  # it waits for room to send its requests
                await answered.end()
                assert [] == ids_of(job)
                assert 0 == pending_of(job)

    run(trainer())
    cancelled = [set(cancel.request_ids) for cancel in job.control() if isinstance(cancel, Cancel)]
    assert [3, 2] == [len(ids) for ids in cancelled]
    assert cancelled[1] == {request.request_id for request in job.requests()}


def test_a_step_can_be_cancelled_while_redis_is_full(redis_url: str, job: JobSide) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
            await step.cancel()
            assert [] == [rollout async for rollout in step]

    with job.full():
        run(trainer())
    assert [] == job.requests()


def test_a_trainer_is_started_again_while_redis_is_full(redis_url: str, job: JobSide) -> None:
    async def trainer() -> None:
        async with AsyncRolloutClient.connect(redis_url, job.name):
            job.redis.delete(job.keys.client("trainer"))
            await asyncio.to_thread(wait_until, lambda: job.redis.exists(job.keys.client("trainer")))

    with job.full():
        run(trainer())
        run(trainer())


# lost replies, lost servers


def test_a_request_whose_reply_was_lost_is_one_request(
    client: RolloutClient, job: JobSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after Redis has executed the command, as a network does."""
    whole = redis.asyncio.client.Pipeline.execute
    broken: list[int] = []

    async def break_once(self: Any, raise_on_error: bool = True) -> list[Any]:
        sends = any(args[0][0] == "XADD" for args in self.command_stack)
        replies = await whole(self, raise_on_error)
        if sends and not broken:
            broken.append(1)
            raise redis.ConnectionError("the reply was lost")
        return replies

    monkeypatch.setattr(redis.asyncio.client.Pipeline, "execute", break_once)
    with client.step(0, PROMPTS) as step:
        wait_until(lambda: len(job.requests()) == 6)
        with job.serving():
            assert 6 == len(list(step))
    assert 6 == len(job.sampled)


def test_a_delivery_whose_reply_was_lost_is_read_again(
    client: RolloutClient, job: JobSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = redis.asyncio.Redis.xreadgroup
    broken: list[int] = []

    async def break_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = await read(self, *args, **kwargs)
        if reply and not broken:
            broken.append(len(reply[0][1]))
            raise redis.ConnectionError("the reply was lost")
        return reply

    monkeypatch.setattr(redis.asyncio.Redis, "xreadgroup", break_once)
    with job.serving():
        assert [2, 2, 2] == [len(group) for group in client.generate(PROMPTS, step=0)]
    assert broken[0] > 0


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A Redis that a test may stop: its URL, and the process in a list of one."""
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    embedded = EmbeddedRedis(tmp_path, keep_open=lock)
    url = embedded.start()
    embedded.stop()
    processes = [start_again(tmp_path)]
    wait_until(lambda: answers(url))
    yield url, processes
    processes[0].kill()
    processes[0].wait()
    os.close(lock)


def start_again(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["redis-server", str(directory / "redis.conf"), "--appendfsync", "always"])


def answers(url: str) -> bool:
    try:
        return bool(redis.Redis.from_url(url).ping())
    except redis.ConnectionError:
        return False


@contextmanager
def somebody_else(url: str) -> Iterator[None]:
    """Answers at the address of a Redis that is away, as a proxy does for a service that has no server now."""
    asked: list[bytes] = []

    class NoRedis(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline())
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

    with Server((urlsplit(url).hostname or "", urlsplit(url).port or 0), NoRedis) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()
    assert asked


@pytest.mark.parametrize("meanwhile", [lambda _: nullcontext(), somebody_else])
def test_a_restart_of_redis_is_waited_out(
    own_server: tuple[str, list[subprocess.Popen[bytes]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    meanwhile: Callable[[str], AbstractContextManager[None]],
) -> None:
    url, processes = own_server
    job = JobSide(url)
    with RolloutClient.connect(url, job.name, patience=20) as client, client.step(3, PROMPTS) as step:
        requests = job.wait_for_requests(3)
        job.answer(requests[0])
        rollouts = [next(iter(step))]
        processes[0].kill()
        processes[0].wait()
        with meanwhile(url):
            time.sleep(1.0)
        processes[0] = start_again(tmp_path)
        with job.serving():
            rollouts += step
    assert 6 == len({rollout.rollout_id for rollout in rollouts}) == len(rollouts)
    assert 6 == len(job.sampled)
    assert "does not answer" in caplog.text


def test_requests_that_redis_lost_are_sent_again(
    own_server: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    """An append-only file that is written once a second loses what came after: the last requests, say."""
    url, processes = own_server
    job = JobSide(url)
    with RolloutClient.connect(url, job.name, patience=20) as client, client.step(3, PROMPTS) as step:
        job.wait_for_requests(3)
        job.redis.delete(job.keys.requests)
        processes[0].kill()
        processes[0].wait()
        processes[0] = start_again(tmp_path)
        with job.serving():
            assert 6 == len(list(step))


def test_lost_requests_are_sent_again_to_a_job_that_is_full(redis_url: str) -> None:
    job = JobSide(redis_url, max_rollouts=6)
    with RolloutClient.connect(redis_url, job.name) as client, client.step(3, PROMPTS) as step:
        job.wait_for_requests(3)
        job.redis.delete(job.keys.requests)
        job.interrupt()
        job.wait_for_requests(3)
        with job.serving():
            assert 6 == len(list(step))


def test_lost_requests_of_a_cancelled_step_are_sent_again(client: RolloutClient, job: JobSide) -> None:
    """The job does not know what it is to cancel, and would never answer."""
    with client.step(3, PROMPTS) as step:
        job.wait_for_requests(3)
        step.cancel()
        job.redis.delete(job.keys.requests, job.keys.control)
        job.interrupt()
        job.wait_for_requests(3)
        with job.serving(lambda request: None):
            assert {FinishReason.CANCELLED} == {rollout.finish_reason for rollout in step}


def test_a_redis_that_stays_away_is_an_error_and_the_step_can_be_opened_again(
    own_server: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    url, processes = own_server
    job = JobSide(url)
    with RolloutClient.connect(url, job.name, patience=1.0) as client:
        with (
            pytest.raises(RedisAwayError, match=r"has been away for .* is it running"),
            client.step(3, PROMPTS) as step,
        ):
            job.wait_for_requests(3)
            processes[0].kill()
            processes[0].wait()
            list(step)
        processes[0] = start_again(tmp_path)
        wait_until(lambda: answers(url))
        with job.serving():
            assert [2, 2, 2] == [len(group) for group in client.generate(PROMPTS, step=3)]


# what cannot be served


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "step 3, prompt 1: no token ids"),
        ([1, VOCABULARY], "prompt 1: token id 1000 at position 1 is none of das/tiny, which has 1000"),
        ([1, -1], "token id -1 at position 1"),
        ([1.5], "token ids must be a sequence of integers"),
        ("text", "token ids must be a sequence of integers"),
        ([1] * 200, "200 prompt tokens and max_tokens = 64 exceed the job's 256"),
        (Prompt([1], sampling={"temperature": -1}), r"prompt 1: sampling\.temperature"),
        (Prompt([1], sampling={"colour": 1}), r"prompt 1: sampling\.colour"),
        (Prompt([1], sampling={"n": 2000}), "takes 1500 rollouts at once"),
        (Prompt([1], sampling={"min_tokens": 65}), r"sampling\.min_tokens"),
        (Prompt([1], sampling={"stop_token_ids": [VOCABULARY]}), r"sampling\.stop_token_ids: token id 1000 is none of"),
        (Prompt([1], sampling={"logit_bias": {-1: 1.0}}), r"sampling\.logit_bias: token id -1 is none of"),
        (Prompt([1], sampling={"n": 1}, prefix=BEYOND), r"prompt 1: prefix: token id 1000 at position 0 is none of"),
        (Prompt([1], priority=2**40), "prompt 1: priority"),
        (Prompt([1], problem_id="p" * 300), "prompt 1: problem_id"),
        (Prompt([1], sampling={"stop": ["x" * 5000]}), "bytes as encoded, but the job takes 4096"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(redis_url: str, prompt: Any, says: str) -> None:
    job = JobSide(redis_url, max_rollouts=1500)
    with (
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(InvalidRequestError, match=says),
        client.step(3, [[1], prompt]),
    ):
        pass
    assert [] == job.requests()


def test_arrays_of_token_ids_are_taken(client: RolloutClient, job: JobSide) -> None:
    numpy = pytest.importorskip("numpy")
    with job.serving():
        [group] = client.generate(numpy.array([[1, 2, 3]]), step=0)
    assert 2 == len(group)


def test_refusals_are_listed_after_the_rest_has_come(client: RolloutClient, job: JobSide) -> None:
    def refuse_two(request: RolloutRequest) -> None:
        if request.prompt_token_ids == [1, 2, 3]:
            job.answer(request)
            return
        job.reply(request.reply_to, Refusal(request_id=request.request_id, reason="too good"))
        job.forget(request)

    rollouts: list[Rollout] = []
    with (
        job.serving(refuse_two),
        pytest.raises(RequestRefusedError, match=r"refused 2 requests.*too good") as refused,
        client.step(0, PROMPTS) as step,
    ):
        rollouts.extend(step)
    assert 2 == len(rollouts)
    assert 2 == len(refused.value.refusals)
    assert all(reason == "too good" for reason in refused.value.refusals.values())
    with job.serving():  # asked again, and no longer refused
        assert 6 == sum(map(len, client.generate(PROMPTS, step=0)))


@pytest.mark.parametrize("readable_id", [True, False])
def test_a_result_that_cannot_be_read_does_not_lose_the_others(
    client: RolloutClient, job: JobSide, readable_id: bool
) -> None:
    rollouts: list[Rollout] = []
    with pytest.raises(UnreadableResultError, match="dead letters"), client.step(0, PROMPTS) as step:
        requests = job.wait_for_requests(3)
        broken = job.rollout(requests[0], 0)
        data = encode(broken).replace(b"finish_reason", b"finish_treason") if readable_id else b"rubbish"
        for request in requests:
            job.answer(request, [0, 1] if request is not requests[0] else [1])
        wait_until(lambda: pending_of(job) == 5)
        job.redis.xadd(job.keys.results("trainer"), {"d": data})
        job.answered[requests[0].request_id] = 2
        rollouts.extend(step)
    assert 5 == len(rollouts)
    [(_, letter)] = job.redis.xrange(job.keys.dead)
    assert data == letter[b"d"]
    assert letter[b"reason"]
    assert 5 == pending_of(job)


# the job changes or ends


def test_a_job_that_is_not_there_is_named_with_those_that_are(redis_url: str, job: JobSide) -> None:
    with pytest.raises(JobNotFoundError, match=r"job default/chess did not appear.*default/math"):
        RolloutClient.connect(redis_url, "chess", timeout=0.5)


def test_a_job_that_appears_later_is_waited_for(redis_url: str) -> None:
    threading.Timer(0.7, lambda: JobSide(redis_url)).start()
    with RolloutClient.connect(redis_url, "math", timeout=10) as client:
        assert ("uid-1", "default/math", VOCABULARY) == (client.job.uid, client.job.name, client.job.vocabulary)


@pytest.mark.parametrize(("version", "says"), [(2, "upgrade das-rollout in the trainer"), (0, "upgrade the job")])
def test_another_version_of_the_protocol_says_which_side_to_upgrade(
    redis_url: str, job: JobSide, version: int, says: str
) -> None:
    job.redis.hset(job.keys.job, "version", version)
    with pytest.raises(VersionMismatchError, match=says):
        RolloutClient.connect(redis_url, job.name)


def test_another_job_under_the_name_ends_the_wait(client: RolloutClient, job: JobSide, redis_url: str) -> None:
    with pytest.raises(JobChangedError, match="uid uid-2, was uid-1"), client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        JobSide(redis_url, uid="uid-2")
        list(step)


def test_a_job_that_fails_ends_the_wait_after_what_it_had_answered(client: RolloutClient, job: JobSide) -> None:
    rollouts: list[Rollout] = []
    with pytest.raises(JobEndedError, match="is failed: no GPU is left"), client.step(0, PROMPTS) as step:
        job.answer(job.wait_for_requests(3)[0])
        job.end("failed", "no GPU is left")
        rollouts.extend(step)
    assert 2 == len(rollouts)


def test_a_job_that_is_deleted_ends_the_wait(client: RolloutClient, job: JobSide) -> None:
    with pytest.raises(JobEndedError, match="gone from Redis"), client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        job.redis.delete(*job.redis.keys("rollout:{uid-1}:*"))
        list(step)


def test_a_job_that_closes_with_everything_answered_is_no_error(client: RolloutClient, job: JobSide) -> None:
    with client.step(0, PROMPTS) as step:
        for request in job.wait_for_requests(3):
            job.answer(request)
        job.end()
        time.sleep(1.5)
        assert 6 == len(list(step))


def test_closing(client: RolloutClient, job: JobSide) -> None:
    client.close_job()
    assert [Close()] == job.control()
    with pytest.raises(InvalidRequestError, match="has closed the job"):
        client.generate(PROMPTS, step=0)


def test_a_job_that_has_ended_is_said_when_connecting(redis_url: str, job: JobSide) -> None:
    job.end()
    with pytest.raises(JobEndedError, match="is closed"):
        RolloutClient.connect(redis_url, job.name, timeout=0.5)


def test_no_coordinator_is_said_and_waited_for(
    client: RolloutClient, job: JobSide, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_api.client.async_client._COORDINATOR_GRACE_S", 0.5)
    progress: list[Progress] = []
    with client.step(0, PROMPTS, on_progress=progress.append) as step:
        job.wait_for_requests(3)
        wait_until(lambda: "has had no coordinator" in caplog.text)
        with job.serving():
            assert 6 == len(list(step))
    assert "6 rollouts are kept in Redis" in caplog.text


# ending early


def test_cancelled_rollouts_come_back_with_what_there_is(client: RolloutClient, job: JobSide) -> None:
    def one_sample(request: RolloutRequest) -> None:
        if not job.answered.get(request.request_id):
            job.answer(request, [0])

    with job.serving(one_sample), client.step(0, PROMPTS) as step:
        rollouts = [next(iter(step))]
        step.cancel()
        rollouts += step
    assert 6 == len(rollouts)
    assert 3 <= sum(rollout.finish_reason is FinishReason.CANCELLED for rollout in rollouts) <= 5
    assert [] == ids_of(job)


def test_a_cancellation_that_overtook_its_request_is_repeated(client: RolloutClient, job: JobSide) -> None:
    with client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        step.cancel()
        [cancel] = job.control()
        assert isinstance(cancel, Cancel)
        assert 3 == len(cancel.request_ids)
        job.redis.delete(job.keys.control)
        with job.serving(lambda request: None):
            assert {FinishReason.CANCELLED} == {rollout.finish_reason for rollout in step}


def test_enough_groups_end_the_step(client: RolloutClient, job: JobSide) -> None:
    def answer(request: RolloutRequest) -> None:
        if request.prompt_token_ids != [6]:
            job.answer(request)
        elif not job.answered.get(request.request_id):
            job.answer(request, [0])

    with job.serving(answer), client.step(0, PROMPTS) as step:
        groups = step.collect(at_least=2)
    assert {0, 1} == groups.complete.keys()
    assert {2} == groups.partial.keys()
    done, broken_off = groups.partial[2]
    assert (FinishReason.STOP, FinishReason.CANCELLED) == (done.finish_reason, broken_off.finish_reason)
    rest = Prompt([6], weight_version=3).continue_from(broken_off)
    with client.step(1, [rest]) as step:
        [request] = job.wait_for_requests(1)
        step.cancel()
    assert request.prefix is not None
    assert broken_off.token_ids == request.prefix.token_ids
    assert (1, None) == (request.sampling.n, request.weight_version)
    with pytest.raises(InvalidRequestError, match="ended by itself"):
        Prompt([6]).continue_from(done)


def test_a_step_left_early_cancels_and_drops_the_rest(
    client: RolloutClient, job: JobSide, caplog: pytest.LogCaptureFixture
) -> None:
    with client.step(0, PROMPTS) as step:
        requests = job.wait_for_requests(3)
        job.answer(requests[0])
        # the samples of one prompt are two messages, which need not come together
        for _ in zip(range(2), step, strict=False):
            pass
    assert [Cancel(request_ids=[request.request_id for request in requests[1:]])] == job.control()
    assert "was left with 4 of 6 rollouts not received" in caplog.text
    job.answer(requests[1])
    wait_until(lambda: ids_of(job) == [])


def test_a_deadline_is_passed_on_and_comes_back(client: RolloutClient, job: JobSide) -> None:
    deadlines: list[float | None] = []

    def answer(request: RolloutRequest) -> None:
        deadlines.append(request.deadline_seconds)
        job.answer(request, length=0, finish_reason=FinishReason.DEADLINE)

    with job.serving(answer):
        [group] = client.generate([[1]], step=0, deadline_seconds=2.5)
    assert [2.5] == deadlines
    assert [(FinishReason.DEADLINE, [])] * 2 == [(rollout.finish_reason, rollout.token_ids) for rollout in group]


# trajectories


def test_a_trajectory_keeps_who_said_what(client: RolloutClient, job: JobSide) -> None:
    with job.serving(), client.step(0) as step:
        both = [step.trajectory([1, 2], problem_id="maze"), step.trajectory([1, 2], problem_id="maze")]
        first = step.turn(both, sampling={"logprobs": True})
        both[0].observe([50, 51])
        [second] = step.turn([both[0]])
        sent = {(rollout.problem_id, rollout.rollout_id.rsplit("/", 1)[1]) for rollout in [*first, second]}
    assert {("maze", "0"), ("maze", "1")} == sent
    one = both[0]
    assert [1, 1, 1, 50, 51, 1, 1, 1] == one.response_token_ids
    assert [1, 1, 1, 0, 0, 1, 1, 1] == one.mask
    assert [-0.5] * 3 + [0.0] * 2 + [-0.5] * 3 == one.logprobs
    assert [1, 2, *one.response_token_ids] == one.context
    assert 3 == len(job.sampled)
    assert [] == ids_of(job)


def test_turns_say_which_trajectory_they_are_of(client: RolloutClient, job: JobSide) -> None:
    seen: list[RolloutRequest] = []

    def answer(request: RolloutRequest) -> None:
        seen.append(request)
        job.answer(request)

    with job.serving(answer), client.step(2) as step:
        one = step.trajectory([1, 2])
        step.turn([one])
        one.observe([9])
        step.turn([one])
    assert ["trainer:2:t0"] * 2 == [request.trajectory_id for request in seen]
    assert [0, 1] == [request.turn for request in seen]
    assert [[1, 2], [1, 2, 1, 1, 1, 9]] == [request.prompt_token_ids for request in seen]
    assert seen[0].problem == seen[1].problem
    assert [1, 1] == [request.sampling.n for request in seen]


def test_turns_answered_before_a_restart_are_not_sampled_again(redis_url: str, job: JobSide) -> None:
    for attempt in range(2):
        with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
            step = client.step(0).start()
            one = step.trajectory([1, 2])
            step.turn([one])
            one.observe([9])
            step.turn([one])
            assert 8 == len(one.context) - 1
            if attempt:
                step.end()
    assert 2 == len(job.sampled)
    assert [] == ids_of(job)


def test_a_refused_turn_is_an_error(client: RolloutClient, job: JobSide) -> None:
    def refuse(request: RolloutRequest) -> None:
        job.reply(request.reply_to, Refusal(request_id=request.request_id, reason="no"))
        job.redis.delete(job.keys.requests)

    with job.serving(refuse), client.step(0) as step, pytest.raises(RequestRefusedError, match="no"):
        step.turn([step.trajectory([1])])
    with client.step(1) as step, pytest.raises(InvalidRequestError, match="trajectory trainer:1:t0, turn 0"):
        step.turn([step.trajectory([VOCABULARY])])


# weights and rewards


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_weights_are_waited_for(client: RolloutClient, job: JobSide, weights: Path) -> None:
    job.engine("a", version=3)
    job.engine("b", version=3)
    job.engine("leaving", version=3, draining=True)
    job.redis.hset(job.keys.engines, "lost", b"\x80")

    def load() -> None:
        wait_until(lambda: bool(job.control()))
        job.serve_once()
        job.engine("a", version=4)
        time.sleep(0.5)
        job.engine("b", version=3, failed={4: "no space left"})

    loading = threading.Thread(target=load)
    loading.start()
    published = client.publish_weights(4, weights)
    loading.join()
    assert (4, ["a"], {"b": "no space left"}) == (published.version, published.loaded, published.failed)
    with pytest.raises(WeightsError, match=r"no engine could load weight version 5.*truncated") as error:
        job.engine("a", version=4, failed={5: "truncated"})
        job.engine("b", version=3, failed={5: "truncated"})
        with job.serving():
            client.publish_weights(5, weights)
    assert {"a": "truncated", "b": "truncated"} == error.value.failed


def test_what_is_published_says_where_and_what(client: RolloutClient, job: JobSide, weights: Path) -> None:
    client.publish_weights(1, weights, wait=False)
    client.publish_weights(2, "hf://x/y", kind="lora", mode="drain", sha256=None, wait=False)
    first, second = job.control()
    assert isinstance(first, WeightUpdate)
    assert isinstance(second, WeightUpdate)
    assert (str(weights), 64) == (first.uri, len(first.sha256 or ""))
    assert ("lora", "drain", None) == (second.weights, second.mode, second.sha256)


def test_weights_that_cannot_be_published(client: RolloutClient, job: JobSide, weights: Path, tmp_path: Path) -> None:
    job.engine("a", version=7)
    with pytest.raises(InvalidRequestError, match=r"older than 7.*publish restored weights as 8"):
        client.publish_weights(6, weights)
    with pytest.raises(WeightsError, match=r"no directory.*sha256 in hex, or None"):
        client.publish_weights(8, "/nowhere")
    with pytest.raises(InvalidRequestError, match="local directory only"):
        client.publish_weights(8, "hf://x/y")
    with pytest.raises(InvalidRequestError, match="64 hexadecimal digits"):
        client.publish_weights(8, weights, sha256="abc")
    with pytest.raises(InvalidRequestError, match="'sideways' is none of drain, recompute, keep"):
        client.publish_weights(8, weights, mode="sideways")
    assert [] == job.control()
    with pytest.raises(WeightsError, match="not served after 1 s: no coordinator has taken it up"):
        client.publish_weights(8, weights, timeout=1)


def test_rewards_are_sent_and_checked(client: RolloutClient, job: JobSide) -> None:
    rewards = {f"{job.uid}/trainer:0:{i}/0/0": i / 2 for i in range(1500)}
    client.report_rewards(rewards)
    sent: dict[str, float] = {}
    for _, fields in job.redis.xrange(job.keys.rewards):
        message = decode(fields[b"d"])
        assert isinstance(message, Rewards)
        sent |= message.rewards
    assert rewards == sent
    assert 2 == job.redis.xlen(job.keys.rewards)
    wrong = [
        ({f"{job.uid}/r/0/0": float("nan")}, "finite"),
        ({"x/r/0/0": 1.0}, "no rollout of job"),
        ({"?": 1.0}, "not a rollout id"),
    ]
    for mapping, says in wrong:
        with pytest.raises(InvalidRequestError, match=says):
            client.report_rewards(mapping)


# connections


def test_the_settings_of_an_existing_client_are_taken_over(redis_url: str, job: JobSide) -> None:
    for existing in (
        redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=0.3),
        redis.asyncio.Redis.from_url(redis_url, decode_responses=True, socket_timeout=0.3),
    ):
        assert "password" in existing.connection_pool.connection_kwargs
        with job.serving(), RolloutClient.connect(existing, job.name) as client:
            time.sleep(1.2)  # longer than its socket_timeout
            assert 2 == len(client.generate([[1]], step=len(job.sampled))[0])


def test_settings_in_a_url_do_not_break_the_client(redis_url: str, job: JobSide) -> None:
    url = f"{redis_url}?decode_responses=true&socket_timeout=0.1&protocol=3"
    with job.serving(), RolloutClient.connect(url, job.name) as client:
        assert 2 == len(client.generate([[1]], step=0)[0])


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://:secret@x", r"'http://\*\*\*@x' is no Redis URL"),
        (17, "builtins.int cannot be taken over"),
        (redis.sentinel.Sentinel([("x", 1)]).slave_for("m"), "make one by master_for"),
        (redis.Redis(redis_connect_func=print), "redis_connect_func of your client cannot be taken over"),
    ],
)
def test_connections_that_cannot_be_taken_over(target: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        AsyncRolloutClient.connect(target, "default/math")


def test_a_wrong_password_is_said_at_once(redis_url: str) -> None:
    address = redis_url.rpartition("@")[2]
    with pytest.raises(RedisRefusedError, match="correct the user name or password"):
        RolloutClient.connect(f"redis://:wrong@{address}", "default/math")


def test_arguments_that_do_not_fit() -> None:
    url = "redis://localhost"
    with pytest.raises(InvalidRequestError, match="but not both"):
        AsyncRolloutClient.connect(url)
    with pytest.raises(InvalidRequestError, match="client name"):
        AsyncRolloutClient.connect(url, "a/b", name="rank 0")


def test_a_job_is_found_by_its_uid(redis_url: str, job: JobSide) -> None:
    job.redis.delete(named(job.name))
    with job.serving(), RolloutClient.connect(redis_url, uid=job.uid) as client:
        assert 2 == len(client.generate([[1]], step=0)[0])
