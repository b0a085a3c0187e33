"""Multi-turn trajectories."""

from __future__ import annotations

import pytest

from rollout_api import (
    InvalidRequestError,
    RequestRefusedError,
    RolloutClient,
    RolloutClientError,
    RolloutRequest,
)
from tests.support.client_tests import num_results
from tests.support.fake_job import VOCABULARY, FakeJob


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
