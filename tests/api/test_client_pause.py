"""Pausing and resuming a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rollout_api import InvalidRequestError, Pause, PauseError, PauseMode, Resume, RolloutClient
from tests.support.fake_job import FakeJob
from tests.support.waiting import wait_for


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Run *action* in a thread while the block runs."""
    thread = threading.Thread(target=action)
    thread.start()
    yield
    thread.join()


def process_next(job: FakeJob, *, mode: str | None = None) -> None:
    """Wait for a control message and process it; *mode* replaces what it asks for."""
    wait_for(lambda: bool(job.control_messages()))
    if mode is None:
        job.serve_once()
        return
    [(entry, _)] = job.redis.xrange(job.keys.control)
    job.adopt_pause(mode, entry)


def test_pausing_and_resuming_wait_for_the_coordinator_and_all_engines(client: RolloutClient, job: FakeJob) -> None:
    job.report_engine("a", version=0)
    job.report_engine("b", version=0)
    job.report_engine("leaving", version=0, draining=True)
    paused = threading.Event()

    def follow() -> None:
        wait_for(lambda: bool(job.control_messages()))
        assert [Pause(mode=PauseMode.WAIT)] == job.control_messages()
        assert not paused.is_set()
        job.serve_once()
        job.report_engine("a", version=0, paused="wait")
        assert not paused.wait(0.3)
        job.report_engine("b", version=0, paused="wait")

    with meanwhile(follow):
        client.pause("wait")
        paused.set()

    def follow_back() -> None:
        wait_for(lambda: bool(job.control_messages()))
        assert [Resume()] == job.control_messages()
        job.serve_once()
        for engine in ("a", "b"):
            job.report_engine(engine, version=0)

    with meanwhile(follow_back):
        client.resume()


def test_a_message_that_redis_has_lost_is_sent_again(client: RolloutClient, job: FakeJob) -> None:
    def lose_and_process() -> None:
        wait_for(lambda: bool(job.control_messages()))
        job.redis.delete(job.keys.control)
        process_next(job)

    with meanwhile(lose_and_process):
        client.pause()


def test_a_change_by_another_client_at_the_same_time_is_an_error(client: RolloutClient, job: FakeJob) -> None:
    def override() -> None:
        for _ in range(2):
            process_next(job, mode="")

    with (
        meanwhile(override),
        pytest.raises(PauseError, match="another client has paused or resumed it"),
    ):
        client.pause()


def test_a_job_that_does_not_follow_is_an_error_that_says_who(client: RolloutClient, job: FakeJob) -> None:
    with pytest.raises(PauseError, match="not paused after 0 s: no coordinator has processed the message"):
        client.pause(timeout=0.1)
    job.report_engine("a", version=0)
    with job.serving(), pytest.raises(PauseError, match="not paused after 0 s: 1 engines have not followed: a"):
        client.pause(timeout=0.4)


def test_wrong_modes_are_refused(client: RolloutClient, job: FakeJob) -> None:
    with pytest.raises(InvalidRequestError, match="mode"):
        client.pause("abort")
    assert [] == job.control_messages()
