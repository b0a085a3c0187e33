"""Groups of rollouts: which ones a step takes, and the queue that keeps them in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import (
    AsyncGroupQueue,
    AsyncRolloutClient,
    FinishReason,
    Groups,
    InvalidRequestError,
    Prompt,
    Rewards,
    Rollout,
    RolloutClient,
    RolloutClientError,
    RolloutRequest,
    WeightSpan,
    WeightUpdate,
    encode,
)
from rollout_api.client.groups import GroupCollector, GroupOrder
from tests.support.client_tests import num_results, run
from tests.support.fake_job import VOCABULARY, FakeJob

PROMPTS = [[1], [2], [3], [4], [5], [6]]


def position(request: RolloutRequest) -> int:
    """Return the position of a request's prompt in PROMPTS."""
    return request.prompt_token_ids[0] - 1


class QueueHarness:
    """A job that answers only what the test tells it to, and a queue for its client."""

    def __init__(self, job: FakeJob, client: AsyncRolloutClient) -> None:
        self.job, self.client = job, client

    async def requests(self, num: int) -> list[RolloutRequest]:
        """Wait until there are *num* open requests, and return them in the order of their prompts."""
        return sorted(await asyncio.to_thread(self.job.wait_for_requests, num), key=position)

    async def answer(self, *positions: int, versions: Sequence[int] = (0, 0), **options: Any) -> None:
        """Answer the requests for the prompts at *positions*; *versions* are those of the two samples."""
        await self.requests(1)
        for request in sorted(self.job.requests(), key=lambda one: (*positions, position(one)).index(position(one))):
            if position(request) not in positions:
                continue
            for sample, version in enumerate(versions):
                rollout = self.job.make_rollout(request, sample, **options)
                spans = [WeightSpan(start=0, weight_version=version)]
                self.job.keep(request, rollout.model_copy(update={"weight_spans": spans}))
            self.job.delete_request(request)

    def publish(self, version: int) -> None:
        """Publish weights, as far as clients can see."""
        self.job.publish_status(weight_version=version)
        update = WeightUpdate(weight_version=version, uri="/w") if version else None
        if update is not None:
            self.job.redis.hset(self.job.keys.weights, "full", encode(update))


@asynccontextmanager
async def queue_harness(redis_url: str, job: FakeJob) -> AsyncIterator[QueueHarness]:
    async with AsyncRolloutClient.connect(redis_url, job.name) as client:
        harness = QueueHarness(job, client)
        harness.publish(0)
        yield harness


def numbers(groups: Sequence[Any]) -> list[int]:
    return [group.number for group in groups]


async def test_finished_groups_are_taken_and_others_requested_in_their_place(redis_url: str, job: FakeJob) -> None:
    async with queue_harness(redis_url, job) as harness:
        async with harness.client.group_queue(PROMPTS, max_in_flight=3, first_step=10) as queue:
            assert [0, 1, 2] == [position(request) for request in await harness.requests(3)]
            await harness.answer(1)
            [group] = await queue.take(1)
            assert (11, [2]) == (group.number, group.prompt.token_ids)
            assert [[1, 1, 1], [2, 2, 2]] == [rollout.token_ids for rollout in group.rollouts]
            assert group.rewards is None
            await harness.answer(0, 2)
            assert [10, 12] == numbers(await queue.take(2))
            assert [3, 4, 5] == [position(request) for request in await harness.requests(3)]
            await harness.answer(3, 4, 5)
            # There are no more prompts.
            assert [13, 14, 15] == numbers(await queue.take(9))
            assert [] == await queue.take(1)
        assert 0 == num_results(harness.job)


async def test_groups_can_be_taken_in_the_order_of_their_prompts(redis_url: str, job: FakeJob) -> None:
    async with (
        queue_harness(redis_url, job) as harness,
        harness.client.group_queue(PROMPTS, max_in_flight=3, order="in_order") as queue,
    ):
        await harness.requests(3)
        await harness.answer(2, 1)
        first = asyncio.ensure_future(queue.take(2))
        await asyncio.sleep(0.3)
        assert not first.done()
        await harness.answer(0)
        assert [0, 1] == numbers(await first)
        assert [2] == numbers(await queue.take(1))


async def test_the_staleness_of_a_group_is_that_of_its_oldest_token(redis_url: str, job: FakeJob) -> None:
    async with (
        queue_harness(redis_url, job) as harness,
        harness.client.group_queue(PROMPTS[:2], max_in_flight=2) as queue,
    ):
        await harness.requests(2)
        harness.publish(7)
        await harness.answer(0, versions=(7, 5))
        [group] = await queue.take(1)
        assert (7, 2) == (group.newest_version, group.staleness)
        await harness.answer(1, versions=(7, 7))
        harness.publish(8)  # while the group waits
        assert [1] == [group.staleness for group in await queue.take(1)]


async def test_groups_that_are_too_stale_are_replaced(redis_url: str, job: FakeJob) -> None:
    async with queue_harness(redis_url, job) as harness:
        harness.publish(9)
        async with harness.client.group_queue(PROMPTS, max_in_flight=2, max_staleness=1) as queue:
            assert [1, 1] == [request.max_staleness for request in await harness.requests(2)]
            await harness.answer(0, versions=(9, 7))
            await harness.answer(1, versions=(8, 9))
            assert [1] == numbers(await queue.take(1))
            assert 1 == queue.num_stale
            assert [2, 3] == [position(request) for request in await harness.requests(2)]


async def test_prompts_with_bounds_of_their_own_keep_them(redis_url: str, job: FakeJob) -> None:
    async with queue_harness(redis_url, job) as harness:
        prompts = [Prompt([1], max_staleness=3), Prompt([2], weight_version=0)]
        async with harness.client.group_queue(prompts, max_in_flight=2, max_staleness=1):
            sent = await harness.requests(2)
        assert [(3, None), (None, 0)] == [(request.max_staleness, request.weight_version) for request in sent]


def by_prompt(prompt: Prompt, rollouts: list[Rollout]) -> list[float]:
    """Return different rewards for prompts with an odd token, and equal ones for others."""
    return [float(index * (prompt.token_ids[0] % 2)) for index in range(len(rollouts))]


async def by_prompt_later(prompt: Prompt, rollouts: list[Rollout]) -> list[float]:
    await asyncio.sleep(0.01)
    return by_prompt(prompt, rollouts)


@pytest.mark.parametrize("reward", [by_prompt, by_prompt_later])
async def test_dynamic_sampling_replaces_groups_with_equal_rewards(redis_url: str, job: FakeJob, reward: Any) -> None:
    async with queue_harness(redis_url, job) as harness:
        queue = harness.client.group_queue(PROMPTS, max_in_flight=2, reward=reward, dynamic_sampling=True)
        async with queue:
            await harness.requests(2)
            await harness.answer(1)
            # It is replaced although nobody takes groups at the moment.
            assert [0, 2] == [position(request) for request in await harness.requests(2)]
            await harness.answer(0, 2)
            groups = await queue.take(2)
            assert [0, 2] == numbers(groups)
            assert [[0.0, 1.0]] * 2 == [group.rewards for group in groups]
        assert 1 == queue.num_equal
        reported = [fields[b"d"] for _, fields in harness.job.redis.xrange(harness.job.keys.rewards)]
        assert 3 == len(reported)
        values = dict(zip((rollout.rollout_id for rollout in groups[0].rollouts), [0.0, 1.0], strict=True))
        digests = {rollout.rollout_id: rollout.digest for rollout in groups[0].rollouts}
        assert encode(Rewards(rewards=values, digests=digests)) in reported


async def test_groups_that_failed_are_replaced_until_too_many_fail(redis_url: str, job: FakeJob) -> None:
    async with (
        queue_harness(redis_url, job) as harness,
        harness.client.group_queue(([1] for _ in count()), max_in_flight=1) as queue,
    ):
        await harness.requests(1)
        await harness.answer(0, finish_reason=FinishReason.FAILED)
        await harness.answer(0)
        [group] = await queue.take(1)
        assert (1, 1) == (group.number, queue.num_failed)

        def fail(request: RolloutRequest) -> None:
            harness.job.answer(request, finish_reason=FinishReason.FAILED)

        with harness.job.serving(fail), pytest.raises(RolloutClientError, match="the last 16 groups have failed"):
            await queue.take(1)


async def test_an_interrupted_call_loses_no_group(redis_url: str, job: FakeJob) -> None:
    async with (
        queue_harness(redis_url, job) as harness,
        harness.client.group_queue(PROMPTS, max_in_flight=2) as queue,
    ):
        await harness.requests(2)
        await harness.answer(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.take(2), 1)
        await harness.answer(1)
        assert [0, 1] == numbers(await queue.take(2))


async def test_a_prompt_that_the_job_cannot_serve_is_an_error_once(redis_url: str, job: FakeJob) -> None:
    async with (
        queue_harness(redis_url, job) as harness,
        harness.client.group_queue([[1], [VOCABULARY], [3]], max_in_flight=1) as queue,
    ):
        await harness.answer(0)
        with pytest.raises(InvalidRequestError, match="step 1, prompt 0: token id 1000"):
            await queue.take(1)
        assert [0] == numbers(await queue.take(1))
        await harness.answer(2)
        assert [2] == numbers(await queue.take(1))


async def test_an_error_in_the_reward_function_is_raised(redis_url: str, job: FakeJob) -> None:
    async with queue_harness(redis_url, job) as harness:

        def broken(prompt: Prompt, rollouts: list[Rollout]) -> list[float]:
            return [0.0] if prompt.token_ids == [1] else [0.0, 1.0]

        async with harness.client.group_queue(PROMPTS, max_in_flight=2, reward=broken) as queue:
            await harness.requests(2)
            await harness.answer(0)
            with pytest.raises(InvalidRequestError, match="returned 1 rewards for 2 rollouts"):
                await queue.take(1)
            await harness.answer(1)
            assert [1] == numbers(await queue.take(1))


async def test_leaving_the_queue_cancels_what_is_in_flight(redis_url: str, job: FakeJob) -> None:
    async with queue_harness(redis_url, job) as harness:
        async with harness.client.group_queue(PROMPTS, max_in_flight=2) as queue:
            requests = await harness.requests(2)
        cancelled = {name for message in harness.job.control_messages() for name in message.request_ids}
        assert {request.request_id for request in requests} == cancelled
        assert 0 == queue.num_in_flight
        with pytest.raises(RolloutClientError, match="the queue is not open"):
            await queue.take(1)


def test_a_restarted_trainer_receives_the_groups_that_were_not_taken(redis_url: str, job: FakeJob) -> None:
    async def trainer(first: int, *, interrupted: bool) -> list[int]:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            queue: AsyncGroupQueue
            left = PROMPTS[first:]
            async with client.group_queue(left, max_in_flight=3, first_step=first, order="in_order") as queue:
                taken = await queue.take(1 if interrupted else 9)
                if interrupted:
                    raise KeyError("the trainer fails")
                return numbers(taken)

    with job.serving():
        with pytest.raises(KeyError):
            run(trainer(0, interrupted=True))
        assert [1, 2, 3, 4, 5] == run(trainer(1, interrupted=False))
    assert 2 * len(PROMPTS) == len(set(job.sampled)) == len(job.sampled)


def test_the_synchronous_client_has_the_same_queue(client: RolloutClient, job: FakeJob) -> None:
    with job.serving():
        options = {"max_in_flight": 2, "reward": by_prompt, "dynamic_sampling": True, "order": "in_order"}
        with client.group_queue(PROMPTS, **options) as queue:
            assert [0, 2] == numbers(queue.take(2))
            assert [4] == numbers(list(queue))
        assert (3, 0, 0, 0) == (queue.num_equal, queue.num_stale, queue.num_failed, queue.num_in_flight)


@pytest.mark.parametrize(
    ("options", "expected_error"),
    [
        ({"max_in_flight": 0}, "max_in_flight = 0"),
        ({"max_in_flight": 1, "max_staleness": -1}, "max_staleness = -1"),
        ({"max_in_flight": 1, "dynamic_sampling": True}, "dynamic_sampling .* pass a reward function"),
        ({"max_in_flight": 1, "order": "fifo"}, "order: 'fifo' is not one of ready_first, in_order"),
    ],
)
def test_arguments_are_checked(client: RolloutClient, options: dict[str, Any], expected_error: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected_error):
        client.group_queue(PROMPTS, **options)


def rollout(group: int, sample: int, finish_reason: FinishReason = FinishReason.STOP, length: int = 1) -> Rollout:
    return Rollout(
        rollout_id=f"job/{group}/{sample}/0",
        problem_id=str(group),
        token_ids=[1] * length,
        weight_spans=[WeightSpan(start=0, weight_version=0)],
        finish_reason=finish_reason,
    )


def collect(sizes: list[int], min_complete: int, order: GroupOrder, arrivals: list[tuple[int, Rollout]]) -> Groups:
    """Return what is collected until enough groups are complete; the rest of the step is cancelled."""
    collector = GroupCollector(sizes, min_complete, order)
    for group, arrived in arrivals:
        if collector.should_stop:
            arrived = arrived.model_copy(update={"finish_reason": FinishReason.CANCELLED})
        collector.add(group, arrived)
    return collector.groups()


def test_in_order_waits_for_the_first_groups_and_sets_others_aside() -> None:
    arrivals = [(2, rollout(2, 0)), (1, rollout(1, 0)), (3, rollout(3, 0)), (0, rollout(0, 0)), (4, rollout(4, 0))]
    ready_first = collect([1] * 5, 2, GroupOrder.READY_FIRST, arrivals)
    assert {1, 2} == ready_first.complete.keys()
    assert {} == ready_first.surplus
    in_order = collect([1] * 5, 2, GroupOrder.IN_ORDER, arrivals)
    assert {0, 1} == in_order.complete.keys()
    assert {2, 3} == in_order.surplus.keys()
    assert {4} == in_order.partial.keys()
    assert [0, 1, 2, 3, 4] == [int(group[0].problem_id) for group in in_order.in_order()]


def test_in_order_passes_over_groups_that_have_ended_incompletely() -> None:
    arrivals = [
        (0, rollout(0, 0)),
        (0, rollout(0, 1, FinishReason.FAILED)),
        (1, rollout(1, 1)),
        (2, rollout(2, 0)),
        (1, rollout(1, 0)),
        (2, rollout(2, 1)),
    ]
    groups = collect([2, 2, 2], 1, GroupOrder.IN_ORDER, arrivals)
    assert {1} == groups.complete.keys()
    assert {0, 2} == groups.partial.keys()


@given(st.permutations(range(12)), st.integers(1, 6))
def test_only_ready_first_prefers_groups_that_finish_early(finished: list[int], min_complete: int) -> None:
    arrivals = [(group, rollout(group, 0)) for group in finished]
    assert (
        set(finished[:min_complete])
        == collect([1] * 12, min_complete, GroupOrder.READY_FIRST, arrivals).complete.keys()
    )
    assert set(range(min_complete)) == collect([1] * 12, min_complete, GroupOrder.IN_ORDER, arrivals).complete.keys()


def test_a_step_is_collected_in_the_order_of_its_prompts(client: RolloutClient, job: FakeJob) -> None:
    def answer(request: RolloutRequest) -> None:
        # The last prompt is answered first, and the first one only then.
        if request.prompt_token_ids == PROMPTS[2] or len(job.answered):
            job.answer(request)

    with job.serving(answer), client.step(0, PROMPTS[:3]) as step:
        groups = step.collect(min_complete_groups=1, order="in_order")
    assert {0} == groups.complete.keys()
    assert 2 in groups.surplus
    with (
        pytest.raises(InvalidRequestError, match="order: 'fifo' is not one of ready_first, in_order"),
        client.step(1) as step,
    ):
        step.collect(1, order="fifo")
