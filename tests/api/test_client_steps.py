"""Steps: requests are sent, and rollouts are routed to the step that requested them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollout_api import (
    AsyncRolloutClient,
    Cancel,
    FinishReason,
    InvalidRequestError,
    Prompt,
    Purpose,
    Rollout,
    RolloutClient,
    RolloutRequest,
    Sampling,
    StepProgress,
)
from rollout_api.client.prompts import SamplingOverrides
from tests.support.client_tests import PROMPTS, num_results, run
from tests.support.fake_job import FakeJob


def test_generate_returns_groups_in_the_order_of_the_prompts(client: RolloutClient, job: FakeJob) -> None:
    seen: list[StepProgress] = []
    threads: set[int] = set()

    def watch(progress: StepProgress) -> None:
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
    assert 0 == num_results(job)


def test_generate_returns_the_most_likely_tokens_at_each_position(client: RolloutClient, job: FakeJob) -> None:
    likely = [{1: -0.5, 7: -1.5}] * 3

    def answer(request: RolloutRequest) -> None:
        assert 2 == request.sampling.top_logprobs
        rollout = job.make_rollout(request, 0)
        job.keep(request, rollout.model_copy(update={"ranks": [1] * 3, "top_logprobs": likely}))
        job.delete_request(request)

    with job.serving(answer):
        [[rollout]] = client.generate([[1, 2]], step=0, n=1, top_logprobs=2)
    assert (likely, [1] * 3) == (rollout.top_logprobs, rollout.ranks)


def test_rollouts_are_yielded_in_the_order_in_which_they_finish(redis_url: str, job: FakeJob) -> None:
    async def trainer() -> list[tuple[int, int]]:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client, client.step(0, PROMPTS) as step:
            requests = await asyncio.to_thread(job.wait_for_requests, 3)
            order = []
            for index, sample in [(2, 1), (0, 0), (1, 1), (2, 0), (0, 1), (1, 0)]:
                job.answer(requests[index], [sample])
                rollout = await anext(aiter(step))
                order.append((step.prompt_index(rollout), rollout.token_ids[0] - 1))
            assert [] == [rollout async for rollout in step]
            return order

    assert [(2, 1), (0, 0), (1, 1), (2, 0), (0, 1), (1, 0)] == run(trainer())
    assert 0 == num_results(job)


def test_settings_of_a_prompt_are_sent_and_defaults_are_not(client: RolloutClient, job: FakeJob) -> None:
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


def test_bounds_of_weight_versions_are_sent_and_part_of_the_request_id(client: RolloutClient, job: FakeJob) -> None:
    with client.step(4, [[7], Prompt([7], min_weight_version=3, max_staleness=2)]) as step:
        requests = job.wait_for_requests(2)
        step.cancel()
    assert [(None, None), (3, 2)] == [(request.min_weight_version, request.max_staleness) for request in requests]
    hashes = [request.request_id.rpartition("-")[2] for request in requests]
    assert hashes[0] != hashes[1]


def test_every_sampling_setting_is_a_keyword() -> None:
    assert set(Sampling.model_fields) == set(SamplingOverrides.__annotations__)


def test_each_client_receives_its_own_rollouts(redis_url: str, job: FakeJob) -> None:
    async def trainer(name: str) -> list[list[Rollout]]:
        async with AsyncRolloutClient.connect(redis_url, job.name, name=name) as client:
            return await client.generate(PROMPTS, step=1)

    async def both() -> list[list[list[Rollout]]]:
        return await asyncio.gather(trainer("rank-0"), trainer("rank-1"))

    with job.serving():
        for name, groups in zip(("rank-0", "rank-1"), run(both()), strict=True):
            assert {f"{job.uid}/{name}:1"} == {r.rollout_id.rsplit(":", 1)[0] for group in groups for r in group}
    assert 12 == len(set(job.sampled)) == len(job.sampled)


def test_several_steps_may_be_open_at_once(redis_url: str, job: FakeJob) -> None:
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
            assert 6 == num_results(job)
            await earlier.end()
            assert 0 == num_results(job)

    run(trainer())


def test_training_and_evaluation_may_share_a_step_number(client: RolloutClient, job: FakeJob) -> None:
    with job.serving():
        client.generate(PROMPTS, step=1)
        client.generate(PROMPTS, step=1, purpose="eval")
    assert 12 == len(set(job.sampled)) == len(job.sampled)


def test_a_step_with_the_same_prompts_can_only_be_open_once(client: RolloutClient, job: FakeJob) -> None:
    with client.step(1, PROMPTS), pytest.raises(InvalidRequestError, match="step 1 with these prompts is open already"):
        client.generate(PROMPTS, step=1)


def test_cancelled_rollouts_return_partial_output(client: RolloutClient, job: FakeJob) -> None:
    def one_sample(request: RolloutRequest) -> None:
        if not job.answered.get(request.request_id):
            job.answer(request, [0])

    with job.serving(one_sample), client.step(0, PROMPTS) as step:
        rollouts = [next(iter(step))]
        step.cancel()
        rollouts += step
    assert 6 == len(rollouts)
    assert 3 <= sum(rollout.finish_reason is FinishReason.CANCELLED for rollout in rollouts) <= 5
    assert 0 == num_results(job)


def test_cancellation_that_overtook_its_request_is_repeated(client: RolloutClient, job: FakeJob) -> None:
    with client.step(0, PROMPTS) as step:
        job.wait_for_requests(3)
        step.cancel()
        [cancel] = job.control_messages()
        assert isinstance(cancel, Cancel)
        assert 3 == len(cancel.request_ids)
        job.redis.delete(job.keys.control)
        with job.serving(lambda request: None):
            assert {FinishReason.CANCELLED} == {rollout.finish_reason for rollout in step}


def test_collect_cancels_the_step_after_enough_complete_groups(client: RolloutClient, job: FakeJob) -> None:
    def answer(request: RolloutRequest) -> None:
        if request.prompt_token_ids != [6]:
            job.answer(request)
        elif not job.answered.get(request.request_id):
            job.answer(request, [0])

    with job.serving(answer), client.step(0, PROMPTS) as step:
        groups = step.collect(min_complete_groups=2)
    assert {0, 1} == groups.complete.keys()
    assert {2} == groups.partial.keys()
    complete, interrupted = groups.partial[2]
    assert (FinishReason.STOP, FinishReason.CANCELLED) == (complete.finish_reason, interrupted.finish_reason)
    rest = Prompt([6], weight_version=3).continue_from(interrupted)
    with client.step(1, [rest]) as step:
        [request] = job.wait_for_requests(1)
        step.cancel()
    assert request.prefix is not None
    assert interrupted.token_ids == request.prefix.token_ids
    assert (1, None) == (request.sampling.n, request.weight_version)
    with pytest.raises(InvalidRequestError, match="is complete"):
        Prompt([6]).continue_from(complete)


def test_step_left_early_cancels_and_drops_the_rest(
    client: RolloutClient, job: FakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    with client.step(0, PROMPTS) as step:
        requests = job.wait_for_requests(3)
        job.answer(requests[0])
        # The two samples of a prompt are two messages, which may arrive separately.
        for _ in zip(range(2), step, strict=False):
            pass
    assert [Cancel(request_ids=[request.request_id for request in requests[1:]])] == job.control_messages()
    assert "was left with 4 of 6 rollouts not received" in caplog.text
    job.answer(requests[1])
    assert 0 == num_results(job)


def test_deadline_is_sent_and_its_finish_reason_returned(client: RolloutClient, job: FakeJob) -> None:
    deadlines: list[float | None] = []

    def answer(request: RolloutRequest) -> None:
        deadlines.append(request.deadline_seconds)
        job.answer(request, length=0, finish_reason=FinishReason.DEADLINE)

    with job.serving(answer):
        [group] = client.generate([[1]], step=0, deadline_seconds=2.5)
    assert [2.5] == deadlines
    assert [(FinishReason.DEADLINE, [])] * 2 == [(rollout.finish_reason, rollout.token_ids) for rollout in group]
