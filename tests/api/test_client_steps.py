"""Steps: prompts become requests, and rollouts are routed to the step, or the trajectory, that requested them."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from rollout_api import (
    AsyncRolloutClient,
    Cancel,
    FinishReason,
    InvalidRequestError,
    Partial,
    Prompt,
    Purpose,
    RequestRefusedError,
    Rollout,
    RolloutClient,
    RolloutClientError,
    RolloutRequest,
    RolloutsFailedError,
    Sampling,
    StepProgress,
    UnreadableResultError,
    WeightSpan,
)
from rollout_api.client.prompts import SamplingOverrides
from tests.support.client_tests import PROMPTS, num_results, run
from tests.support.fake_job import VOCABULARY, FakeJob
from tests.support.waiting import wait_for


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


async def test_several_steps_may_be_open_at_once(redis_url: str, job: FakeJob) -> None:
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
        *(
            (Prompt([1], sampling={"structured_outputs": given}), rf"sampling\.structured_outputs.*{error}")
            for given, error in [
                ({"guided_json": {}}, "guided_json is unknown; known are json"),
                ({"whitespace_pattern": " "}, "has no constraint; set exactly one of json"),
                ({"regex": "a", "choice": ["a"]}, "has regex and choice; set exactly one"),
                ({"regex": 1}, "regex must be a text"),
                ({"grammar": " "}, "grammar must be a text"),
                ({"choice": []}, "choice must be a list of texts with at least one"),
                ({"choice": ["a", 1]}, "choice must be a list of texts"),
                ({"choice": ["\ud83d"]}, ""),
                ({"regex": "\ud83d"}, ""),
                ({"json_object": False}, "json_object must be true"),
                ({"json": "{"}, "json must be a JSON object, or the text of one"),
                ({"json": [1]}, "json must be a JSON object"),
                ({"json": "[" * 100_000}, "json must be a JSON object"),
                ({"json": {"a": float("nan")}}, "finite"),
                ({"structural_tag": "x"}, "structural_tag must be a JSON object"),
                ({"regex": "é" * 40_000}, "regex has 80000 bytes, but at most 65536 can be compiled"),
                ({"json": {"enum": ["x" * 70_000]}}, "json has 70014 bytes, but at most 65536"),
                ({"choice": ["x" * 40_000] * 2}, "choice has 80007 bytes, but at most 65536"),
            ]
        ),
        (
            Prompt([1], sampling={"structured_outputs": {"choice": ["x" * 5000]}}),
            r"has \d+ bytes, but the job allows at most 4096",
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


def test_trajectory_masks_the_environments_tokens(client: RolloutClient, job: FakeJob) -> None:
    with job.serving(), client.step(0) as step:
        both = [step.trajectory([1, 2], problem_id="maze"), step.trajectory([1, 2], problem_id="maze")]
        first = step.turn(both, sampling={"logprobs": True})
        both[0].observe([50, 51])
        [second] = step.turn([both[0]])
        sent = {(rollout.problem_id, rollout.rollout_id.rsplit("/", 1)[1]) for rollout in [*first, second]}
    assert {("maze", "0"), ("maze", "1")} == sent
    trajectory = both[0]
    assert [1, 1, 1, 50, 51, 1, 1, 1] == trajectory.response_token_ids
    assert [1, 1, 1, 0, 0, 1, 1, 1] == trajectory.mask
    assert [-0.5] * 3 + [0.0] * 2 + [-0.5] * 3 == trajectory.logprobs
    assert [1, 2, *trajectory.response_token_ids] == trajectory.context
    assert 3 == len(job.sampled)
    assert 0 == num_results(job)


def test_a_trajectory_without_log_probabilities_has_none(client: RolloutClient, job: FakeJob) -> None:
    """A log-probability of 0.0 would mean that the model was certain."""

    def answer(request: RolloutRequest) -> None:
        rollout = job.make_rollout(request, 0)
        job.keep(request, rollout.model_copy(update={"logprobs": None}) if request.turn else rollout)
        job.delete_request(request)

    with job.serving(answer), client.step(0) as step:
        trajectory = step.trajectory([1, 2])
        step.turn([trajectory])
        trajectory.observe([9])
        assert [-0.5] * 3 + [0.0] == trajectory.logprobs
        step.turn([trajectory])
        trajectory.observe([9])
        assert trajectory.logprobs is None
    assert 8 == len(trajectory.mask) == len(trajectory.response_token_ids)


def test_turns_name_their_trajectory(client: RolloutClient, job: FakeJob) -> None:
    seen: list[RolloutRequest] = []

    def answer(request: RolloutRequest) -> None:
        seen.append(request)
        job.answer(request)

    with job.serving(answer), client.step(2) as step:
        trajectory = step.trajectory([1, 2])
        step.turn([trajectory])
        trajectory.observe([9])
        step.turn([trajectory])
    assert ["trainer:2:t0"] * 2 == [request.trajectory_id for request in seen]
    assert [0, 1] == [request.turn for request in seen]
    assert [[1, 2], [1, 2, 1, 1, 1, 9]] == [request.prompt_token_ids for request in seen]
    assert seen[0].problem == seen[1].problem
    assert [1, 1] == [request.sampling.n for request in seen]


def test_refused_turn_is_an_error(client: RolloutClient, job: FakeJob) -> None:
    def refuse(request: RolloutRequest) -> None:
        job.refuse(request, "no")

    with job.serving(refuse), client.step(0) as step, pytest.raises(RequestRefusedError, match="no"):
        step.turn([step.trajectory([1])])
    with client.step(1) as step, pytest.raises(InvalidRequestError, match="trajectory trainer:1:t0, turn 0"):
        step.turn([step.trajectory([VOCABULARY])])


def test_turn_of_a_cancelled_step_is_not_awaited(client: RolloutClient, job: FakeJob) -> None:
    with client.step(0) as step:
        step.cancel()
        with pytest.raises(RolloutClientError, match="was cancelled before this turn was sent"):
            step.turn([step.trajectory([1])])
