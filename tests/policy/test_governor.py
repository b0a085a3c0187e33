from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.budgets import Allowance
from rollout_worker.policy.governor import Governor, Verified


def drafted(allowed: Allowance, probability: float) -> list[int]:
    """How long drafts get whose every token is equally probable."""
    lengths = []
    for budget, survival in zip(allowed.budgets, allowed.min_survivals, strict=True):
        length = 0
        while length < budget and probability ** (length + 1) >= survival:
            length += 1
        lengths.append(length)
    return lengths


def expected(length: int, probability: float) -> float:
    return sum(probability**place for place in range(1, length + 1))


def step(governor: Governor, keys: list[str], allowed: Allowance, promised: float, accepted_share: float) -> int:
    """One step whose drafts have so much of what they promise accepted; tokens drafted."""
    lengths = drafted(governor.limit(keys, allowed), promised)
    drafts = [
        Verified(key, length, expected(length, promised), round(accepted_share * expected(length, promised)))
        for key, length in zip(keys, lengths, strict=True)
    ]
    said = len(keys) + sum(one.accepted for one in drafts)
    governor.verified(drafts, said)
    return sum(lengths)


@settings(max_examples=15, deadline=None)
@given(
    rollouts=st.integers(1, 8),
    budget=st.integers(1, 16),
    survival=st.floats(0, 0.5),
    promised=st.floats(0.5, 1.0),
    exploration=st.sampled_from([0.005, 0.0]),
)
def test_where_nothing_is_accepted_drafts_soon_fall_to_what_explores(
    rollouts: int, budget: int, survival: float, promised: float, exploration: float
) -> None:
    governor = Governor(exploration=exploration)
    keys = [str(number) for number in range(rollouts)]
    allowed = Allowance([budget] * rollouts, [survival] * rollouts, [0.0] * rollouts)
    for _ in range(6000 // rollouts + 200):
        step(governor, keys, allowed, promised, 0.0)
    later = sum(step(governor, keys, allowed, promised, 0.0) for _ in range(2000))
    assert later <= exploration * 2000 * rollouts + 16 * (exploration > 0)
    assert (later > 0) == (exploration > 0)


def test_a_rollout_whose_drafts_pass_is_drafted_for_as_before_beside_one_whose_do_not() -> None:
    governor = Governor()
    keys, allowed = ["good", "bad"], Allowance([8, 8], [0.2, 0.2], [0.0] * 2)
    for _ in range(600):
        lengths = drafted(governor.limit(keys, allowed), 0.9)
        governor.verified(
            [
                Verified("good", lengths[0], expected(lengths[0], 0.9), lengths[0]),
                Verified("bad", lengths[1], expected(lengths[1], 0.9), 0),
            ],
            2 + lengths[0],
        )
    lengths = drafted(governor.limit(keys, allowed), 0.9)
    assert 8 == lengths[0]
    assert lengths[1] <= 1


def test_what_keeps_its_promise_is_left_alone() -> None:
    governor = Governor()
    keys, allowed = ["a", "b"], Allowance([8, 8], [0.2, 0.3], [0.0] * 2)
    for _ in range(1000):
        assert 2 * 8 == step(governor, keys, allowed, 0.95, 1.0)
    assert allowed == governor.limit(keys, allowed)


def test_drafting_that_loses_time_stops_and_begins_again_when_it_would_gain() -> None:
    governor = Governor()
    keys, allowed = [str(number) for number in range(8)], Allowance([4] * 8, [0.0] * 8, [0.0] * 8)
    for _ in range(30):
        step(governor, keys, allowed, 0.5, 1.0)
        governor.timed(without=0.01, extra=0.003, saved=0.001)
    assert governor.stopped
    total = 0
    for _ in range(2000):
        total += step(governor, keys, allowed, 0.5, 1.0)
        governor.timed(without=0.01, extra=0.0001, saved=0.00005)
    assert governor.stopped
    assert 0 < total <= 0.006 * 2000 * 8
    for _ in range(4000):
        step(governor, keys, allowed, 0.5, 1.0)
        governor.timed(without=0.01, extra=0.0001, saved=0.001)
    assert not governor.stopped
    assert 8 * 4 == sum(governor.limit(keys, allowed).budgets)


def test_it_does_not_flicker_where_gain_and_loss_are_about_even() -> None:
    governor = Governor()
    keys, allowed = ["a", "b", "c", "d"], Allowance([4] * 4, [0.0] * 4, [0.0] * 4)
    for number in range(5000):
        step(governor, keys, allowed, 0.5, 1.0)
        governor.timed(without=0.01, extra=0.001, saved=0.001 * (1.5 if number // 10 % 2 else 0.5))
    assert governor.stops <= 3


def test_one_slow_step_stops_nothing() -> None:
    governor = Governor()
    keys, allowed = ["a"], Allowance([4], [0.0], [0.0])
    for number in range(500):
        step(governor, keys, allowed, 0.5, 1.0)
        governor.timed(without=0.01, extra=1.0 if number == 250 else 0.0005, saved=0.002)
    assert not governor.stopped
    assert 4 == pytest.approx(governor.limit(keys, allowed).budgets[0])
