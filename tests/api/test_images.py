"""Prompts with images, which a client stores in Redis apart from its requests."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from rollout_api import InvalidRequestError, Prompt, RolloutClient, RolloutRequest, problem_id_of
from rollout_api.client import request_queue, stored_images
from rollout_api.protocol.keys import IMAGE_RETENTION_S
from tests.support.fake_job import FakeJob
from tests.support.waiting import wait_for

RED, BLUE = b"a red image", b"a blue image"
RED_HASH, BLUE_HASH = (sha256(image).hexdigest() for image in (RED, BLUE))


def test_images_are_stored_by_their_hashes_before_the_requests_that_name_them(
    client: RolloutClient, job: FakeJob
) -> None:
    seen: list[RolloutRequest] = []
    found: list[list[Any]] = []

    def answer(request: RolloutRequest) -> None:
        seen.append(request)
        found.append([job.redis.get(job.keys.image(digest)) for digest in request.images])
        job.answer(request)

    prompts = [Prompt([1], images=[RED, bytearray(BLUE), RED]), Prompt([1], images=[BLUE]), Prompt([1])]
    with job.serving(answer), client.step(0, prompts) as step:
        assert 6 == len(list(step))
    assert [[RED, BLUE, RED], [BLUE], []] == found
    assert [[RED_HASH, BLUE_HASH, RED_HASH], [BLUE_HASH], []] == [request.images for request in seen]
    assert 0 < job.redis.ttl(job.keys.image(RED_HASH)) <= IMAGE_RETENTION_S
    hashes = [request.images for request in seen]
    assert [problem_id_of([1], images) for images in hashes] == [request.problem for request in seen]
    assert 3 == len({request.problem for request in seen})


def test_images_are_kept_as_long_as_their_requests_are_open(
    client: RolloutClient, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "IMAGE_REFRESH_S", 0.05)
    key = job.keys.image(RED_HASH)
    with client.step(0, [Prompt([1], images=[RED])]) as step:
        [request] = job.wait_for_requests(1)
        job.redis.expire(key, 60)
        wait_for(lambda: job.redis.ttl(key) > 60)
        job.redis.delete(key)
        wait_for(lambda: job.redis.get(key) == RED)
        job.answer(request)
        list(step)
    job.redis.delete(key)
    with job.serving(), client.step(1, [[1]]) as step:
        list(step)
    assert not job.redis.exists(key)


def test_requests_wait_until_images_that_nobody_needs_make_room(
    client: RolloutClient, job: FakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_queue, "_IMAGE_RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(stored_images, "MAX_STORED_REQUESTS", 1)
    first, second, third, fourth = (letter * 853 for letter in (b"1", b"2", b"3", b"4"))
    with job.serving(), client.step(0, [Prompt([1], images=[first, second])]) as step:
        list(step)
    keys = {image: job.keys.image(sha256(image).hexdigest()) for image in (first, second, third, fourth)}

    def is_needed(image: bytes, seconds_ago: int) -> None:
        job.redis.expire(keys[image], IMAGE_RETENTION_S - seconds_ago)
        for member, score in job.redis.zrange(job.keys.images, 0, -1, withscores=True):
            job.redis.zadd(job.keys.images, {member: score - 1500})

    with client.step(1, [Prompt([1], images=[third, fourth]), Prompt([2])]) as step:
        wait_for(lambda: "spec.queue.maxImageBytes" in caplog.text)
        assert not any(request.images for request in job.requests())
        assert [True, True, True, False] == [bool(job.redis.exists(key)) for key in keys.values()]
        is_needed(second, 300)
        is_needed(first, 1200)
        with job.serving():
            assert 4 == len(list(step))
    assert [False, True, True, True] == [bool(job.redis.exists(key)) for key in keys.values()]
    assert 3 * 1365 == int(job.redis.get(job.keys.image_bytes) or 0)
    # Images that have expired, or that Redis has lost, are counted until there is no room.
    for key in keys.values():
        job.redis.delete(key)
    for member in job.redis.zrange(job.keys.images, 0, -1):
        job.redis.zadd(job.keys.images, {member: 0})
    with job.serving(), client.step(2, [Prompt([1], images=[first, fourth])]) as step:
        assert 2 == len(list(step))
    assert 3 * 1365 == int(job.redis.get(job.keys.image_bytes) or 0)


def test_the_images_of_a_trajectory_follow_its_turns(client: RolloutClient, job: FakeJob) -> None:
    seen: list[RolloutRequest] = []

    def answer(request: RolloutRequest) -> None:
        seen.append(request)
        job.answer(request)

    with job.serving(answer), client.step(0) as step:
        trajectory = step.trajectory([1, 2], images=[RED])
        step.turn([trajectory])
        trajectory.observe([9], images=[BLUE])
        step.turn([trajectory])
    assert [[RED_HASH], [RED_HASH, BLUE_HASH]] == [request.images for request in seen]
    assert {problem_id_of([1, 2], [RED_HASH])} == {request.problem for request in seen}


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([(0, 1)], "1 image_positions for 2 images"),
        ([(0, 2), (1, 1)], "in order, separate"),
        ([(2, 1), (0, 1)], "in order, separate"),
        ([(0, 1), (3, 2)], "within the prompt"),
        ([(0, 1), (2, 0)], "image_positions"),
    ],
)
def test_positions_of_images_are_checked(
    client: RolloutClient, job: FakeJob, positions: list[tuple[int, int]], message: str
) -> None:
    prompts = [Prompt([1, 2, 3, 4], images=[RED, BLUE], image_positions=positions)]
    with pytest.raises(InvalidRequestError, match=message), client.step(0, prompts):
        pass
    with client.step(0, [Prompt([1, 2, 3, 4], images=[RED, BLUE], image_positions=[(0, 2), (2, 2)])]) as step:
        [request] = job.wait_for_requests(1)
        job.answer(request)
        list(step)
    assert [(0, 2), (2, 2)] == request.image_positions


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([b"x" * 4097], r"prompt 0: its images have 4097 bytes.* at most 4096 \(spec.queue.maxImageBytes\)"),
        ([b"x" * 3000, b"y" * 3000], "6000 bytes"),
        ([RED, b""], "image 1 is empty"),
        (["cat.png"], "image 0 is str; pass the bytes"),
        (RED, r"pass \[image\]"),
    ],
)
def test_images_that_cannot_be_sent_are_named(client: RolloutClient, job: FakeJob, images: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message), client.step(0, [Prompt([1], images=images)]):
        pass
    assert [] == job.requests()


def test_a_job_of_an_earlier_version_gets_no_images(redis_url: str, job: FakeJob) -> None:
    """It would ignore them, and sample from another distribution."""
    job.redis.hdel(job.keys.job, "max_image_bytes")
    with RolloutClient.connect(redis_url, job.name) as client:
        with (
            pytest.raises(InvalidRequestError, match="supports no images"),
            client.step(0, [Prompt([1], images=[RED])]),
        ):
            pass
        with job.serving(), client.step(0, [[1]]) as step:
            assert 2 == len(list(step))
