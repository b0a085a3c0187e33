"""Restarted trainers receive the rollouts that were not released, and released ones are sampled again."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from typing import Any

import pytest
import redis

from rollout_api import (
    AsyncRolloutClient,
    FinishReason,
    RedisRefusedError,
    RequestRefusedError,
    Rollout,
    RolloutClient,
)
from rollout_api.client import result_reader, results
from tests.support.client_tests import PROMPTS, leave_steps, num_results
from tests.support.fake_job import FakeJob
from tests.support.waiting import wait_for

KILLED_TRAINER = """
import os, signal, sys
from rollout_api import RolloutClient
client = RolloutClient.connect(sys.argv[1], "default/math")
with client.step(5, [[1, 2, 3], [4, 5], [6]]) as step:
    for number, rollout in enumerate(step):
        print(rollout.rollout_id, flush=True)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_restarted_trainer_receives_the_same_rollouts(redis_url: str, job: FakeJob) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED_TRAINER, redis_url], stdout=subprocess.PIPE, text=True)
    requests = job.wait_for_requests(3)
    job.answer(requests[0])
    job.answer(requests[1])
    output, _ = killed.communicate(timeout=30)
    assert -signal.SIGKILL == killed.returncode
    assert 3 == len(output.split())
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        groups = client.generate(PROMPTS, step=5)
    received = [rollout.rollout_id for group in groups for rollout in group]
    assert set(output.split()) < set(received)
    assert sorted(job.sampled) == sorted(received)
    assert 6 == len(set(received)) == len(job.sampled)
    assert 0 == num_results(job)


async def test_step_object_can_be_opened_again(redis_url: str, job: FakeJob) -> None:
    with job.serving():
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
                assert {0, 1, 2} == {step.prompt_index(rollout) for rollout in rollouts}
            assert (6, 7, 7) == (len(rollouts), step.progress.done, step.progress.total)
            assert 0 == client.num_awaited
    assert 7 == len(job.sampled)
    assert 0 == num_results(job)


def test_cancelled_step_can_be_opened_again(client: RolloutClient, job: FakeJob) -> None:
    step = client.step(1, PROMPTS)
    with job.serving(lambda request: None), pytest.raises(ZeroDivisionError), step:
        job.wait_for_requests(3)
        step.cancel()
        next(iter(step))
        raise ZeroDivisionError
    with job.serving(), step:
        assert 6 == len(list(step))


async def test_results_are_held_when_a_step_ends_that_was_opened_before_theirs_was_left(
    redis_url: str, job: FakeJob
) -> None:
    with job.serving():
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            other = await client.step(6, PROMPTS).start()
            with pytest.raises(ZeroDivisionError):
                async with client.step(5, PROMPTS) as step:
                    await anext(aiter(step))
                    raise ZeroDivisionError
            assert 6 == len([rollout async for rollout in other])
            await other.end()
            async with client.step(5, PROMPTS) as step:
                assert 6 == len([rollout async for rollout in step])
    assert 12 == len(job.sampled)
    assert 0 == num_results(job)


async def test_results_are_dropped_when_a_step_ends_that_was_opened_after_theirs_was_left(
    redis_url: str, job: FakeJob
) -> None:
    with job.serving():
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            with pytest.raises(ZeroDivisionError):
                async with client.step(5, PROMPTS) as step:
                    await anext(aiter(step))
                    raise ZeroDivisionError
            await client.generate(PROMPTS, step=4)
            await asyncio.to_thread(wait_for, lambda: num_results(job) == 6)
            await client.generate(PROMPTS, step=6)
    assert 0 == num_results(job)


def test_two_open_steps_survive_a_restart(redis_url: str, job: FakeJob) -> None:
    leave_steps(redis_url, job, 1, 2)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=1)
        assert 6 == num_results(job)
        client.generate(PROMPTS, step=2)
    assert 12 == len(job.sampled)
    assert 0 == num_results(job)


def test_results_of_a_step_that_is_not_opened_again_are_released(
    redis_url: str, job: FakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutClient.connect(redis_url, job.name) as client:
        client.step(1, PROMPTS).start()
        for request in job.wait_for_requests(3):
            job.answer(request)
    with caplog.at_level(logging.INFO), job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=2)
    assert 0 == num_results(job)
    assert "which no step has opened" in caplog.text


def test_restarted_step_with_other_prompts_does_not_receive_old_rollouts(redis_url: str, job: FakeJob) -> None:
    leave_steps(redis_url, job, 1)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        [group] = client.generate([[9, 9]], step=1, n=4)
    assert 4 == len(group)
    assert 10 == len(job.sampled)


def test_step_whose_results_were_released_is_sampled_again(
    redis_url: str, job: FakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    suffixes = []
    for _ in range(3):
        with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
            groups = client.generate(PROMPTS, step=0)
        ids = [rollout.rollout_id.split("/")[1] for group in groups for rollout in group]
        assert [f"trainer:0:{index}" for index in (0, 0, 1, 1, 2, 2)] == [
            rollout_id.partition("-")[0] for rollout_id in ids
        ]
        suffixes.append({rollout_id.partition(".")[2] for rollout_id in ids})
    assert [{""}, {"r1"}, {"r2"}] == suffixes
    assert 18 == len(set(job.sampled)) == len(job.sampled)
    assert 0 == num_results(job)
    assert 2 == caplog.text.count("were received and released before")
    assert "refused" not in caplog.text


def test_restart_within_a_step_that_is_sampled_again_receives_the_same_rollouts(redis_url: str, job: FakeJob) -> None:
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        client.generate(PROMPTS, step=5)
    with job.serving():
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_TRAINER, redis_url],
            stdout=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    assert -signal.SIGKILL == killed.returncode
    wait_for(lambda: num_results(job) == 6)
    with job.serving(), RolloutClient.connect(redis_url, job.name) as client, client.step(5, PROMPTS) as step:
        assert [2, 2, 2] == step.group_sizes
        rollouts = list(step)
        assert [0, 0, 1, 1, 2, 2] == sorted(step.prompt_index(rollout) for rollout in rollouts)
    assert set(killed.stdout.split()) < {rollout.rollout_id for rollout in rollouts}
    assert 6 == len({rollout.rollout_id for rollout in rollouts})
    assert 12 == len(job.sampled)
    assert 0 == num_results(job)


def test_only_released_requests_are_sampled_again(
    redis_url: str, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer was killed while it released the results of a step."""
    monkeypatch.setattr(results, "REQUESTS_PER_BATCH", 1)
    release = results.run_async

    async def release_once(*args: Any) -> None:
        await release(*args)
        raise redis.ResponseError("the trainer is killed")

    with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
        with pytest.raises(RedisRefusedError, match="release results"), client.step(1, PROMPTS) as step:
            assert 6 == len(list(step))
            monkeypatch.setattr(results, "run_async", release_once)
        monkeypatch.setattr(results, "run_async", release)
        assert 4 == num_results(job)
        groups = client.generate(PROMPTS, step=1)
    ids = [rollout.rollout_id for group in groups for rollout in group]
    assert [True, True, False, False, False, False] == [".r1/" in rollout_id for rollout_id in ids]
    assert 8 == len(job.sampled)
    assert 0 == num_results(job)


def test_requests_that_were_never_admitted_are_sampled_again(redis_url: str, job: FakeJob) -> None:
    """The trainer has left a step before the job has read its requests."""
    with RolloutClient.connect(redis_url, job.name) as client:
        with client.step(1, PROMPTS):
            job.wait_for_requests(3)
        with job.serving():
            groups = client.generate(PROMPTS, step=1)
    assert [2, 2, 2] == [len(group) for group in groups]
    assert 6 == len(job.sampled)
    assert {FinishReason.STOP} == {rollout.finish_reason for group in groups for rollout in group}
    assert [] == job.requests()


def test_process_whose_results_another_one_has_released_is_told(
    redis_url: str, job: FakeJob, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_reader, "_CHECK_INTERVAL_S", 0.2)
    with client.step(1, PROMPTS) as step:
        requests = job.wait_for_requests(3)
        with RolloutClient.connect(redis_url, job.name) as other, other.step(1, PROMPTS):
            job.wait_for_requests(6)
            # The other process leaves its step early.
        with (
            job.serving(),
            pytest.raises(RequestRefusedError, match=r"connected as 'trainer'.*each trainer rank its own"),
        ):
            list(step)
    assert 0 == num_results(job)
    assert 3 == len(requests)


def test_two_processes_with_the_same_name_receive_the_same_rollouts(
    redis_url: str, job: FakeJob, client: RolloutClient
) -> None:
    with (
        RolloutClient.connect(redis_url, job.name) as other,
        client.step(1, PROMPTS) as one,
        other.step(1, PROMPTS) as two,
        job.serving(),
    ):
        assert {rollout.rollout_id for rollout in one} == {rollout.rollout_id for rollout in two}
    assert 6 == len(job.sampled)


def test_request_of_which_results_are_lost_is_refused(redis_url: str, job: FakeJob) -> None:
    leave_steps(redis_url, job, 1)
    [damaged] = [key for key in job.redis.keys(job.keys.results("*")) if b":1:0-" in key]
    job.redis.hdel(damaged, "0")
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


def test_turns_whose_results_were_released_are_sampled_again(redis_url: str, job: FakeJob) -> None:
    for attempt in range(3):
        with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
            step = client.step(0).start()
            trajectory = step.trajectory([1, 2])
            [first] = step.turn([trajectory])
            trajectory.observe([9])
            step.turn([trajectory])
            assert (".r1/" in first.rollout_id) is (attempt > 0)
            assert 8 == len(trajectory.context) - 1
            step.end(release=attempt != 1)
    assert 4 == len(job.sampled)
    assert 0 == num_results(job)


async def test_awaited_rollouts_are_counted_through_errors_cancellations_and_repetitions(
    redis_url: str, job: FakeJob
) -> None:
    async with AsyncRolloutClient.connect(redis_url, job.name) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.step(0, PROMPTS):
                await asyncio.to_thread(job.wait_for_requests, 3)
                await asyncio.to_thread(wait_for, lambda: client.num_awaited == 6)
                raise ZeroDivisionError
        assert 0 == client.num_awaited
        with job.serving():
            await client.generate(PROMPTS, step=0)
        assert 0 == client.num_awaited
        async with client.step(1, PROMPTS) as step:
            await asyncio.to_thread(job.wait_for_requests, 3)
            await step.cancel()
            assert 6 == client.num_awaited
        assert 0 == client.num_awaited
    async with AsyncRolloutClient.connect(redis_url, job.name) as client:
        with job.serving():
            await client.generate(PROMPTS, step=0)
        assert 0 == client.num_awaited


def test_a_restarted_trainer_knows_the_newest_step(redis_url: str, job: FakeJob) -> None:
    """Requests of steps that are newer than all others are sent without a look at what there is."""
    for step, newest in [(3, b"3"), (4, b"4"), (2, b"4"), (4, b"4")]:
        with job.serving(), RolloutClient.connect(redis_url, job.name) as client:
            assert 6 == sum(map(len, client.generate(PROMPTS, step=step)))
        assert newest == job.redis.hget(job.keys.newest_steps, "trainer")
    assert 4 * 6 == len(set(job.sampled))
