"""Which groups of a step are taken when not all are wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import FinishReason, Groups, InvalidRequestError, Rollout, RolloutClient, RolloutRequest, WeightSpan
from rollout_api.client.groups import GroupCollector, GroupOrder
from tests.support.client_tests import PROMPTS
from tests.support.fake_job import FakeJob


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

    with job.serving(answer), client.step(0, PROMPTS) as step:
        groups = step.collect(min_complete_groups=1, order="in_order")
    assert {0} == groups.complete.keys()
    assert 2 in groups.surplus
    with (
        pytest.raises(InvalidRequestError, match="order: 'fifo' is not one of ready_first, in_order"),
        client.step(1) as step,
    ):
        step.collect(1, order="fifo")
