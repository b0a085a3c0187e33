"""Invalid prompts, refused requests and unreadable results."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rollout_api import (
    FinishReason,
    InvalidRequestError,
    Partial,
    Prompt,
    RequestRefusedError,
    Rollout,
    RolloutClient,
    RolloutRequest,
    RolloutsFailedError,
    UnreadableResultError,
    WeightSpan,
)
from tests.support.client_tests import PROMPTS, num_results
from tests.support.fake_job import VOCABULARY, FakeJob
from tests.support.waiting import wait_for

OUT_OF_VOCABULARY = Partial(token_ids=[VOCABULARY], weight_spans=[WeightSpan(start=0, weight_version=0)])


@pytest.mark.parametrize(
    ("prompt", "expected_error"),
    [
        ([], "step 3, prompt 1: no token ids"),
        ([1, VOCABULARY], "prompt 1: token id 1000 at position 1 is not in the vocabulary of das/tiny, which has 1000"),
        ([1, -1], "token id -1 at position 1"),
        ([1.5], "token ids must be a sequence of integers"),
        ("text", "token ids must be a sequence of integers"),
        ([1] * 200, "200 prompt tokens and max_tokens = 64 exceed the job's 256"),
        (Prompt([1], sampling={"temperature": -1}), r"prompt 1: sampling\.temperature"),
        (Prompt([1], sampling={"colour": 1}), r"prompt 1: sampling\.colour"),
        (
            Prompt([1], sampling={"temprature": 1}),
            r"prompt 1: sampling\.temprature: unknown field; did you mean temperature\?",
        ),
        (Prompt([1], sampling={"n": 2000}), "allows at most 1500 open rollouts"),
        (Prompt([1], sampling={"min_tokens": 65}), r"sampling\.min_tokens"),
        (
            Prompt([1], sampling={"stop_token_ids": [VOCABULARY]}),
            r"sampling\.stop_token_ids: token id 1000 is not in the vocabulary of",
        ),
        (
            Prompt([1], sampling={"logit_bias": {-1: 1.0}}),
            r"sampling\.logit_bias: token id -1 is not in the vocabulary of",
        ),
        (
            Prompt([1], sampling={"n": 1}, prefix=OUT_OF_VOCABULARY),
            r"prompt 1: prefix: token id 1000 at position 0 is not in the vocabulary of",
        ),
        (Prompt([1], priority=2**40), "prompt 1: priority"),
        (Prompt([1], problem_id="p" * 300), "prompt 1: problem_id"),
        (Prompt([1], sampling={"stop": ["x" * 5000]}), r"has \d+ bytes, but the job allows at most 4096"),
    ],
)
def test_invalid_prompt_is_rejected_before_anything_is_sent(redis_url: str, prompt: Any, expected_error: str) -> None:
    job = FakeJob(redis_url, max_rollouts=1500)
    with (
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(InvalidRequestError, match=expected_error),
        client.step(3, [[1], prompt]),
    ):
        pass
    assert [] == job.requests()


def test_token_ids_may_be_arrays(client: RolloutClient, job: FakeJob) -> None:
    numpy = pytest.importorskip("numpy")
    with job.serving():
        [group] = client.generate(numpy.array([[1, 2, 3]]), step=0)
    assert 2 == len(group)


def test_refusals_are_raised_after_the_other_rollouts(client: RolloutClient, job: FakeJob) -> None:
    def refuse_two(request: RolloutRequest) -> None:
        if request.prompt_token_ids == [1, 2, 3]:
            job.answer(request)
            return
        job.refuse(request, "not today")

    rollouts: list[Rollout] = []
    with (
        job.serving(refuse_two),
        pytest.raises(RequestRefusedError, match=r"refused 2 requests.*not today") as refused,
        client.step(0, PROMPTS) as step,
    ):
        rollouts.extend(step)
    assert 2 == len(rollouts)
    assert 2 == len(refused.value.refusals)
    assert all(reason == "not today" for reason in refused.value.refusals.values())
    with job.serving():  # a refused request may be sent again
        assert 6 == sum(map(len, client.generate(PROMPTS, step=0)))


def fail_the_second_sample(job: FakeJob, request: RolloutRequest) -> None:
    job.answer(request, [0])
    job.answer(request, [1], length=0, finish_reason=FinishReason.FAILED)


def test_failed_rollouts_are_an_error_that_has_the_others(client: RolloutClient, job: FakeJob) -> None:
    with (
        job.serving(partial(fail_the_second_sample, job)),
        pytest.raises(RolloutsFailedError, match=r"3 rollouts of 6 failed: .*allow_failed") as failed,
    ):
        client.generate(PROMPTS, step=0)
    assert [[FinishReason.STOP, FinishReason.FAILED]] * 3 == [
        [rollout.finish_reason for rollout in group] for group in failed.value.groups
    ]
    assert 3 == len(failed.value.failures)
    wait_for(lambda: num_results(job) == 0)


def test_failed_rollouts_are_returned_if_they_are_allowed(client: RolloutClient, job: FakeJob) -> None:
    with job.serving(partial(fail_the_second_sample, job)):
        groups = client.generate(PROMPTS, step=0, allow_failed=True)
    assert [[FinishReason.STOP, FinishReason.FAILED]] * 3 == [
        [rollout.finish_reason for rollout in group] for group in groups
    ]


def test_unreadable_result_does_not_lose_the_others(client: RolloutClient, job: FakeJob) -> None:
    rollouts: list[Rollout] = []
    with (
        pytest.raises(UnreadableResultError, match=r"1 result could not be read: .*, sample 0"),
        client.step(0, PROMPTS) as step,
    ):
        broken, *others = job.wait_for_requests(3)
        job.keep_bytes(broken, 0, b"rubbish")
        job.answer(broken, [1])
        for request in others:
            job.answer(request)
        rollouts.extend(step)
    assert 5 == len(rollouts)
    assert 6 == num_results(job)
