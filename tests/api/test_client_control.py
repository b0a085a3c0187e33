"""What a trainer tells a job beside its prompts: weights, rewards and pauses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_api import (
    AsyncRolloutClient,
    InvalidRequestError,
    Pause,
    PauseError,
    PauseMode,
    Resume,
    Rewards,
    RolloutClient,
    RolloutClientError,
    RolloutId,
    TensorsInMemory,
    WeightsError,
    WeightUpdate,
    decode,
)
from rollout_api.client import open_request
from tests.support.fake_job import FakeJob
from tests.support.job_messages import request, rollout
from tests.support.waiting import wait_for


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def num_report_reads(job: FakeJob) -> int:
    """Return how often the engines' reports were read."""
    calls: Any = job.redis.info("commandstats")
    return int(calls.get("cmdstat_hgetall", {"calls": 0})["calls"])


def test_publishing_waits_for_all_engines(client: RolloutClient, job: FakeJob, weights: Path) -> None:
    job.report_engine("a", version=3)
    job.report_engine("b", version=3)
    job.report_engine("leaving", version=3, draining=True)
    job.redis.hset(job.keys.engines, "lost", b"\x80")

    def load() -> None:
        wait_for(lambda: bool(job.control_messages()))
        job.serve_once()
        job.report_engine("a", version=4)
        before = num_report_reads(job)
        wait_for(lambda: num_report_reads(job) >= before + 2)  # the client sees that one engine is still loading
        job.report_engine("b", version=3, failed={4: "no space left"})

    loading = threading.Thread(target=load)
    loading.start()
    published = client.publish_weights(4, weights)
    loading.join()
    assert (4, ["a"], {"b": "no space left"}) == (published.version, published.loaded, published.failed)
    with pytest.raises(WeightsError, match="version 4 is not served by all engines: b: no space left"):
        published.raise_if_failed()
    with pytest.raises(WeightsError, match=r"no engine could load weight version 5.*truncated") as error:
        job.report_engine("a", version=4, failed={5: "truncated"})
        job.report_engine("b", version=3, failed={5: "truncated"})
        with job.serving():
            client.publish_weights(5, weights)
    assert {"a": "truncated", "b": "truncated"} == error.value.failed


def test_weight_update_contains_uri_kind_mode_and_checksum(client: RolloutClient, job: FakeJob, weights: Path) -> None:
    client.publish_weights(1, weights, wait=False)
    client.publish_weights(2, "hf://x/y", kind="lora", mode="drain", sha256=None, wait=False)
    first, second = job.control_messages()
    assert isinstance(first, WeightUpdate)
    assert isinstance(second, WeightUpdate)
    assert (str(weights), 64) == (first.uri, len(first.sha256 or ""))
    assert ("lora", "drain", None) == (second.weights_kind, second.mode, second.sha256)


def test_invalid_weights_are_rejected(client: RolloutClient, job: FakeJob, weights: Path) -> None:
    job.report_engine("a", version=7)
    with pytest.raises(InvalidRequestError, match=r"older than 7.*publish restored weights as 8"):
        client.publish_weights(6, weights)
    with pytest.raises(WeightsError, match=r"is not a directory.*sha256 in hex, or None"):
        client.publish_weights(8, "/nowhere")
    with pytest.raises(InvalidRequestError, match="only be computed for a local directory"):
        client.publish_weights(8, "hf://x/y")
    with pytest.raises(InvalidRequestError, match="64 hexadecimal digits"):
        client.publish_weights(8, weights, sha256="abc")
    with pytest.raises(InvalidRequestError, match="'sideways' is not one of drain, recompute, keep"):
        client.publish_weights(8, weights, mode="sideways")
    assert [] == job.control_messages()
    with pytest.raises(WeightsError, match="not served after 1 s: no coordinator has adopted it"):
        client.publish_weights(8, weights, timeout=1)


def record_in_ledger(job: FakeJob, rollout_id: str) -> None:
    """Record that a rollout has finished, as the job does."""
    parsed = RolloutId.parse(rollout_id)
    job.redis.hset(job.keys.ledger(parsed.request_id), str(parsed.sample), b"")


def test_rewards_name_the_tokens_that_were_received(client: RolloutClient, job: FakeJob) -> None:
    with job.serving(), client.step(1, [[1, 2]]) as step:
        received = list(step)
    assert received
    client.report_rewards({rollout.rollout_id: 1.0 for rollout in received})
    [(_, fields)] = job.redis.xrange(job.keys.rewards)
    message = decode(fields[b"d"])
    assert isinstance(message, Rewards)
    assert {rollout.rollout_id: rollout.digest for rollout in received} == message.digests


def test_rewards_of_received_rollouts_that_redis_has_lost_are_sent(client: RolloutClient, job: FakeJob) -> None:
    with job.serving(), client.step(1, [[1, 2]]) as step:
        received = list(step)
    job.redis.delete(job.keys.ledger(RolloutId.parse(received[0].rollout_id).request_id))
    client.report_rewards({rollout.rollout_id: 1.0 for rollout in received})
    assert 1 == job.redis.xlen(job.keys.rewards)


def test_the_digests_of_rollouts_received_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_request, "_MAX_DIGESTS", 2)
    requests = open_request.OpenRequests(open_request.Leftovers("t"))
    first, second, third = (rollout(request(n=3), sample) for sample in range(3))
    for received in (first, second, first, third):
        requests.note_received(received)
    assert [first.rollout_id, third.rollout_id] == list(requests.digests)


def test_rewards_are_validated_and_sent(client: RolloutClient, job: FakeJob) -> None:
    rewards = {f"{job.uid}/trainer:0:{i}/0/0": i / 2 for i in range(1500)}
    for rollout_id in rewards:
        record_in_ledger(job, rollout_id)
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
        ({"x/r/0/0": 1.0}, "is not a rollout of job"),
        ({"?": 1.0}, "not a rollout id"),
        ({**rewards, f"{job.uid}/trainer:0:0/1/0": 1.0}, "does not know uid-1/trainer:0:0/1/0; pass the ids"),
        ({f"{job.uid}/trainer:{i}/0/0": 1.0 for i in range(3)}, "does not know uid-1/trainer:0/0/0 and 2 more"),
    ]
    for mapping, expected_error in wrong:
        with pytest.raises(InvalidRequestError, match=expected_error):
            client.report_rewards(mapping)
    assert 2 == job.redis.xlen(job.keys.rewards)


def test_rewards_of_received_rollouts_are_not_looked_up(client: RolloutClient, job: FakeJob) -> None:
    with job.serving():
        [group] = client.generate([[1, 2]], step=0)
        with client.step(1) as step:
            trajectory = step.trajectory([1, 2])
            step.turn([trajectory])
    client.report_rewards(dict.fromkeys([*(rollout.rollout_id for rollout in group), *trajectory.rollout_ids], 1.0))
    assert 1 == job.redis.xlen(job.keys.rewards)


class RecordedTensors(TensorsInMemory):
    """Tensors that record what the trainer's other processes are told instead of a publication."""

    def __init__(self) -> None:
        super().__init__({"a": torch.zeros(2)}, host="127.0.0.1")
        self.aborted: list[str] = []

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)


def test_other_processes_of_a_trainer_are_told_why_nothing_is_published(client: RolloutClient, job: FakeJob) -> None:
    weights = RecordedTensors()
    with pytest.raises(WeightsError, match="the job has no engine"):
        client.publish_weights(1, weights)
    with pytest.raises(InvalidRequestError, match="mode"):
        client.publish_weights(1, weights, mode="later")
    with pytest.raises(InvalidRequestError, match="need wait=True"):
        client.publish_weights(1, weights, wait=False)
    assert 3 == len(weights.aborted)
    assert "the job has no engine" in weights.aborted[0]


def test_they_are_told_that_the_client_is_not_connected(redis_url: str, job: FakeJob) -> None:
    weights = RecordedTensors()
    unconnected = AsyncRolloutClient.connect(redis_url, job.name)
    with pytest.raises(RolloutClientError):
        asyncio.run(unconnected.publish_weights(1, weights))
    assert 1 == len(weights.aborted)


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


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"can_sleep": False}, "a cannot sleep; set spec.engine.extraArgs: {enable_sleep_mode: true}"),
        ({}, "the version of a cannot sleep; upgrade the job's image"),
    ],
)
def test_engines_that_cannot_sleep_are_named(
    client: RolloutClient, job: FakeJob, report: dict[str, bool], message: str
) -> None:
    job.report_engine("a", version=0, **report)
    with pytest.raises(PauseError, match=message):
        client.sleep()
    assert [] == job.control_messages()


def test_wrong_modes_are_refused(client: RolloutClient, job: FakeJob) -> None:
    with pytest.raises(InvalidRequestError, match="mode"):
        client.pause("abort")
    assert [] == job.control_messages()
