"""Connecting to a job, and jobs that end, fail or are replaced."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from rollout_api import (
    AsyncRolloutClient,
    Close,
    InvalidRequestError,
    JobChangedError,
    JobEndedError,
    JobNotFoundError,
    Prompt,
    RedisRefusedError,
    RedisUnreachableError,
    Rollout,
    RolloutClient,
    RolloutClientError,
    Sampling,
    VersionMismatchError,
)
from rollout_api.client import job_state
from rollout_api.ports import free_port
from rollout_api.protocol.keys import job_uid_key
from rollout_api.redis_client import retry
from tests.support.client_tests import PROMPTS, leave_steps
from tests.support.fake_job import VOCABULARY, FakeJob
from tests.support.waiting import wait_for


def test_missing_job_is_reported_with_existing_jobs(redis_url: str, job: FakeJob) -> None:
    with pytest.raises(JobNotFoundError, match=r"job default/chess did not appear.*default/math"):
        RolloutClient.connect(redis_url, "chess", timeout=0.5)


def test_client_waits_for_the_job_to_appear(redis_url: str) -> None:
    threading.Timer(0.7, lambda: FakeJob(redis_url)).start()
    with RolloutClient.connect(redis_url, "math", timeout=10) as client:
        assert ("uid-1", "default/math", VOCABULARY) == (client.job.uid, client.job.name, client.job.vocabulary)


@pytest.mark.parametrize(
    ("version", "expected_error"), [(2, "upgrade das-rollout in the trainer"), (0, "upgrade the job")]
)
def test_version_mismatch_says_which_side_to_upgrade(
    redis_url: str, job: FakeJob, version: int, expected_error: str
) -> None:
    job.redis.hset(job.keys.job, "version", version)
    with pytest.raises(VersionMismatchError, match=expected_error):
        RolloutClient.connect(redis_url, job.name)


def test_a_job_of_an_earlier_version_gets_no_setting_that_it_does_not_know(redis_url: str, job: FakeJob) -> None:
    """It would not answer the request. HTTP servers set everything explicitly."""
    stored: Any = job.redis.hget(job.keys.job, "sampling")
    known = json.loads(stored)
    del known["structured_outputs"], known["min_p"]
    job.redis.hset(job.keys.job, "sampling", json.dumps(known))
    with RolloutClient.connect(redis_url, job.name) as client:
        for sampling in ({"structured_outputs": {"regex": "a"}}, Sampling(structured_outputs={"regex": "a"})):
            message = "prompt 0: the version of the job does not support sampling.structured_outputs; upgrade the job's"
            with (
                pytest.raises(InvalidRequestError, match=message),
                client.step(0, [Prompt([1], sampling=sampling)]),
            ):
                pass
        defaults = Sampling(min_p=0.0, temperature=0.5, min_tokens=2)
        with client.step(0, [Prompt([1], sampling=defaults)]):
            [request] = job.wait_for_requests(1)
        assert {"temperature", "min_tokens", "max_tokens"} == request.sampling.model_fields_set
        assert (0.5, 2, 64) == (request.sampling.temperature, request.sampling.min_tokens, request.sampling.max_tokens)


def test_replaced_job_is_an_error(client: RolloutClient, job: FakeJob, redis_url: str) -> None:
    with pytest.raises(JobChangedError, match="uid uid-2, was uid-1"), client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        FakeJob(redis_url, uid="uid-2")
        list(step)


def test_failed_job_is_an_error_after_its_last_rollouts(client: RolloutClient, job: FakeJob) -> None:
    rollouts: list[Rollout] = []
    with pytest.raises(JobEndedError, match="is failed: no GPU is left"), client.step(0, PROMPTS) as step:
        job.answer(job.wait_for_requests(3)[0])
        job.set_state("failed", "no GPU is left")
        rollouts.extend(step)
    assert 2 == len(rollouts)


def test_deleted_job_is_an_error(client: RolloutClient, job: FakeJob) -> None:
    with pytest.raises(JobEndedError, match="gone from Redis"), client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        job.redis.delete(*job.redis.keys("rollout:{uid-1}:*"))
        list(step)


def test_a_job_that_redis_has_lost_is_no_error_if_its_coordinator_publishes_it_again(
    client: RolloutClient, job: FakeJob, redis_url: str
) -> None:
    with client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        job.redis.delete(*job.redis.keys("rollout:{uid-1}:job"), *job.redis.keys("rollout:{uid-1}:status"))
        time.sleep(2.5)  # the client reads the job's state each second
        again = FakeJob(redis_url)
        for request in again.wait_for_requests(3):
            again.answer(request)
        assert 6 == len(list(step))


def test_closed_job_is_no_error_if_everything_was_answered(client: RolloutClient, job: FakeJob) -> None:
    with client.step(0, PROMPTS) as step:
        for request in job.wait_for_requests(3):
            job.answer(request)
        job.set_state()
        job.publish_status(waiting=1)
        wait_for(lambda: client.status.get("waiting") == 1)  # it has seen the end at the same time
        assert 6 == len(list(step))


def test_close_job_sends_close_and_rejects_new_steps(client: RolloutClient, job: FakeJob) -> None:
    client.close_job()
    assert [Close()] == job.control_messages()
    with pytest.raises(InvalidRequestError, match="has closed the job"):
        client.generate(PROMPTS, step=0)


def test_connecting_to_an_ended_job_is_an_error(redis_url: str, job: FakeJob) -> None:
    job.set_state()
    with pytest.raises(JobEndedError, match="is closed"):
        RolloutClient.connect(redis_url, job.name, timeout=0.5)


def test_missing_coordinator_is_logged_and_awaited(
    redis_url: str, job: FakeJob, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_state, "_COORDINATOR_GRACE_S", 0.5)
    with RolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        wait_for(lambda: "has had no coordinator" in caplog.text)
        with job.serving():
            assert 6 == len(list(step))
    assert "the requests for 6 rollouts are kept in Redis" in caplog.text


def test_results_of_an_ended_job_can_be_received(redis_url: str, job: FakeJob) -> None:
    leave_steps(redis_url, job, 1)
    job.set_state("failed", "no GPU is left")
    with RolloutClient.connect(redis_url, job.name) as client:
        with pytest.raises(JobEndedError, match="no GPU is left"):
            client.generate([[7]], step=2)
        assert 6 == sum(map(len, client.generate(PROMPTS, step=1)))
    with pytest.raises(JobEndedError, match="no GPU is left"):
        RolloutClient.connect(redis_url, job.name, timeout=0.5)


def test_settings_of_an_existing_redis_client_are_copied(redis_url: str, job: FakeJob) -> None:
    for existing in (
        redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=0.3),
        redis.asyncio.Redis.from_url(redis_url, decode_responses=True, socket_timeout=0.3),
    ):
        assert "password" in existing.connection_pool.connection_kwargs
        with (
            RolloutClient.connect(existing, job.name) as client,
            client.step(len(job.sampled), [[1]]) as step,
        ):
            time.sleep(0.5)  # the read of results blocks for longer than the socket_timeout of the existing client
            with job.serving():
                assert 2 == len(list(step))


def test_settings_in_a_url_do_not_break_the_client(redis_url: str, job: FakeJob) -> None:
    url = f"{redis_url}?decode_responses=true&socket_timeout=0.1&protocol=3"
    with job.serving(), RolloutClient.connect(url, job.name) as client:
        assert 2 == len(client.generate([[1]], step=0)[0])


@pytest.mark.parametrize(
    ("target", "expected_error"),
    [
        ("http://:secret@x", "this value, which is not shown, is not a Redis URL"),
        (17, "settings of a builtins.int cannot be copied"),
        (redis.sentinel.Sentinel([("x", 1)]).slave_for("m"), "create one with master_for"),
        (redis.Redis(redis_connect_func=print), "redis_connect_func of your client cannot be copied"),
    ],
)
def test_unsupported_redis_targets_are_rejected(target: Any, expected_error: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected_error):
        AsyncRolloutClient.connect(target, "default/math")


def test_wrong_password_is_an_error_at_once(redis_url: str) -> None:
    address = redis_url.rpartition("@")[2]
    with pytest.raises(RedisRefusedError, match="correct the user name or password"):
        RolloutClient.connect(f"redis://:wrong@{address}", "default/math")


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "redis.invalid:6379"])
def test_a_wrong_address_is_an_error_that_says_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_CONNECTION_S", 1.0)
    started = time.monotonic()
    with pytest.raises(RedisUnreachableError, match="Is the address correct") as error:
        RolloutClient.connect(f"redis://{address.format(port=free_port())}/0", "default/math")
    assert "Open the same step again" not in str(error.value)
    assert 1.0 <= time.monotonic() - started < 10.0


def test_a_closed_client_says_that_it_is_closed(redis_url: str, job: FakeJob) -> None:
    client = RolloutClient.connect(redis_url, job.name)
    client.close()
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: client.generate(PROMPTS, step=0),
        lambda: client.step(0, PROMPTS).start(),
        lambda: client.publish_weights(1, "/weights"),
        lambda: client.report_rewards({}),
        lambda: client.job,
    ]
    for call in calls:
        with pytest.raises(RolloutClientError, match="the client is closed; connect another one"):
            call()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "trainer"),
        ({"RANK": "0"}, "trainer"),
        ({"RANK": "3", "SLURM_PROCID": "0"}, "trainer-3"),
        ({"SLURM_PROCID": "2"}, "trainer-2"),
    ],
)
def test_the_default_name_differs_between_ranks(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for variable in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert expected == AsyncRolloutClient.connect("redis://localhost:6379/0", "default/math").name


async def test_more_steps_than_connections_may_be_open_at_once(redis_url: str, job: FakeJob) -> None:
    """redis-py refuses to open more than 100 connections."""

    with job.serving():
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            groups = await asyncio.gather(*(client.generate([[1 + step]], step=step) for step in range(300)))
    assert [2] * 300 == [len(group) for [group] in groups]


def test_invalid_arguments_of_connect_are_rejected() -> None:
    url = "redis://localhost"
    with pytest.raises(InvalidRequestError, match="but not both"):
        AsyncRolloutClient.connect(url)
    with pytest.raises(InvalidRequestError, match="client name"):
        AsyncRolloutClient.connect(url, "a/b", name="rank 0")


def test_job_is_found_by_its_uid(redis_url: str, job: FakeJob) -> None:
    job.redis.delete(job_uid_key(job.name))
    with job.serving(), RolloutClient.connect(redis_url, uid=job.uid) as client:
        assert 2 == len(client.generate([[1]], step=0)[0])
