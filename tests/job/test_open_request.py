"""Predicted lengths of the rollouts of a request."""

from __future__ import annotations

from rollout_api.length_stats import LengthStats
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest
from rollout_head.coordinator.open_requests import OpenRequest, SiblingGroups, SiblingLengths
from rollout_store.history.remaining_length import estimate_remaining_work

SHORT = LengthStats.from_lengths([(0, 10, False)] * 8)


def opened(**settings: object) -> OpenRequest:
    sampling = Sampling.model_validate({"n": 4, "max_tokens": 100, **settings})
    request = RolloutRequest(job_uid="u", request_id="r", prompt_token_ids=[1], sampling=sampling)
    return OpenRequest("1-0", request, 1, None, SiblingLengths(SHORT))


def remaining(request: OpenRequest) -> float:
    return estimate_remaining_work(request.remaining_work(rate=1.0, now=0.0)).total_tokens


def test_rollouts_are_expected_to_be_as_long_as_earlier_ones() -> None:
    assert 10 == opened().predicted_length
    assert 40 == remaining(opened())


def test_rollouts_that_no_end_token_ends_are_expected_to_reach_the_limit() -> None:
    assert 100 == opened(ignore_eos=True).predicted_length
    assert 400 == remaining(opened(ignore_eos=True))


def test_rollouts_that_may_end_before_the_limit_are_expected_to_be_as_long_as_earlier_ones() -> None:
    for settings in ({"stop": ["x"]}, {"stop_token_ids": [3]}):
        assert 10 == opened(ignore_eos=True, **settings).predicted_length


def test_siblings_share_the_newest_history_and_statistics_until_one_ends() -> None:
    first, second = opened(), opened()
    second.lengths = SiblingLengths(LengthStats.from_lengths([(0, 30, False)] * 8))
    groups = SiblingGroups()
    groups.add(first)
    groups.add(second)
    assert 30 == first.predicted_length == second.predicted_length
    unknown = opened()
    unknown.lengths = SiblingLengths()  # as if the history could not be read
    groups.add(unknown)
    assert 30 == unknown.predicted_length
    first.lengths.append(50)
    assert (30 + 30 + 50) / 3 == second.predicted_length
    first.lengths.append(50)
    stats = second.lengths.stats
    assert stats is first.lengths.stats
    assert 200 == remaining(second)
    second.lengths.append(80)
    assert stats is not first.lengths.stats
