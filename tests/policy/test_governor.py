from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.budgets import Allowance
from rollout_worker.policy.governor import Governor


def allowance(rollouts: int, budget: int, survival: float = 0.0) -> Allowance:
    return Allowance(np.full(rollouts, budget), np.full(rollouts, survival), np.zeros(rollouts))


def begun(rollouts: int, **settings: float) -> Governor:
    governor = Governor(**settings)
    for row in range(rollouts):
        governor.open(row)
    return governor


def drafted(allowed: Allowance, probability: float) -> npt.NDArray[np.int64]:
    """How long drafts get whose every token is equally probable."""
    lengths = []
    for budget, survival in zip(allowed.budgets.tolist(), allowed.min_survivals.tolist(), strict=True):
        length = 0
        while length < budget and probability ** (length + 1) >= survival:
            length += 1
        lengths.append(length)
    return np.array(lengths)


def expected(lengths: npt.NDArray[np.int64], probability: float) -> npt.NDArray[np.float64]:
    return np.array([sum(probability**place for place in range(1, length + 1)) for length in lengths.tolist()])


def step(governor: Governor, allowed: Allowance, promised: float, shares: Sequence[float]) -> npt.NDArray[np.int64]:
    """One step whose drafts have so much of what they promise accepted; tokens drafted."""
    rows = np.arange(len(allowed.budgets))
    lengths = drafted(governor.limit(rows, allowed), promised)
    hoped = expected(lengths, promised)
    accepted = np.round(np.array(shares) * hoped).astype(np.int64)
    governor.verified(rows, said=accepted + 1, drafted=lengths, expected=hoped, accepted=accepted)
    return lengths


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
    governor = begun(rollouts, exploration=exploration)
    allowed, nothing = allowance(rollouts, budget, survival), [0.0] * rollouts
    for _ in range(6000 // rollouts + 200):
        step(governor, allowed, promised, nothing)
    later = sum(int(step(governor, allowed, promised, nothing).sum()) for _ in range(2000))
    assert later <= exploration * 2000 * rollouts + 16 * (exploration > 0)
    assert (later > 0) == (exploration > 0)


def test_a_rollout_whose_drafts_pass_is_drafted_for_as_before_beside_one_whose_do_not() -> None:
    governor, allowed = begun(2), allowance(2, 8, 0.2)
    for _ in range(600):
        step(governor, allowed, 0.9, [1.0, 0.0])
    good, bad = drafted(governor.limit(np.arange(2), allowed), 0.9).tolist()
    assert 8 == good
    assert bad <= 1


def test_who_comes_into_the_row_of_another_begins_anew() -> None:
    governor, allowed = begun(2), allowance(2, 8, 0.2)
    for _ in range(600):
        step(governor, allowed, 0.9, [1.0, 0.0])
    governor.open(1)
    assert [8, 8] == drafted(governor.limit(np.arange(2), allowed), 0.9).tolist()


def test_what_keeps_its_promise_is_left_alone() -> None:
    governor, allowed = begun(2), allowance(2, 8, 0.2)
    for _ in range(1000):
        assert [8, 8] == step(governor, allowed, 0.95, [1.0, 1.0]).tolist()
    left = governor.limit(np.arange(2), allowed)
    assert [8, 8] == left.budgets.tolist()
    assert [0.2, 0.2] == left.min_survivals.tolist()


def test_drafting_that_loses_time_stops_and_begins_again_when_it_would_gain() -> None:
    governor, allowed, passes = begun(8), allowance(8, 4), [1.0] * 8
    for _ in range(30):
        step(governor, allowed, 0.5, passes)
        governor.timed(without=0.01, extra=0.003, saved=0.001)
    assert governor.stopped
    total = 0
    for _ in range(2000):
        total += int(step(governor, allowed, 0.5, passes).sum())
        governor.explored_one(without=0.01, gain=0.00002, drafting=0.0001)  # of each of eight
    assert governor.stopped
    assert 0 < total <= 0.006 * 2000 * 8
    for _ in range(4000):
        step(governor, allowed, 0.5, passes)
        governor.explored_one(without=0.01, gain=0.00004, drafting=0.0001)
    assert not governor.stopped
    assert 8 * 4 == governor.limit(np.arange(8), allowed).budgets.sum()


def test_steps_that_differ_by_chance_stop_nothing_and_a_small_loss_does_in_the_long_run() -> None:
    random = np.random.default_rng(0)
    for loss, stopped in ((0.0, False), (0.05, True)):
        governor, allowed = begun(4), allowance(4, 4)
        for _ in range(3000):
            step(governor, allowed, 0.5, [1.0] * 4)
            governor.timed(without=0.01, extra=0.01 * (0.3 * random.standard_normal() + loss), saved=0.0)
            if governor.stopped:
                break
        assert stopped == governor.stopped


@given(
    drafted=st.lists(st.integers(0, 16), min_size=1, max_size=8),
    gain=st.floats(-1, 1),
)
def test_drafts_that_are_together_not_worth_verifying_are_not_but_for_one_that_explores(
    drafted: list[int], gain: float
) -> None:
    governor, rows, tokens = begun(len(drafted)), np.arange(len(drafted)), np.array(drafted)
    some = [place for place, length in enumerate(drafted) if length]
    explored = said = 0
    for _ in range(400):
        governor.limit(rows, allowance(len(drafted), 16))
        kept = governor.keep(rows, tokens, gain).tolist()
        if gain > 0:
            assert some == kept
            return
        assert len(kept) <= 1
        assert set(kept) <= set(some)
        verified = np.zeros_like(tokens)
        verified[kept] = tokens[kept]
        explored, said = explored + int(verified.sum()), said + len(drafted)
        none = np.zeros_like(tokens)
        governor.verified(rows, said=none + 1, drafted=verified, expected=none.astype(float), accepted=none)
    assert explored <= 0.005 * said + 16


def test_it_does_not_flicker_where_gain_and_loss_are_about_even() -> None:
    governor, allowed = begun(4), allowance(4, 4)
    for number in range(5000):
        step(governor, allowed, 0.5, [1.0] * 4)
        governor.timed(without=0.01, extra=0.001, saved=0.001 * (1.5 if number // 10 % 2 else 0.5))
    assert governor.stops <= 3


def test_one_slow_step_stops_nothing() -> None:
    governor, allowed = begun(1), allowance(1, 4)
    for number in range(500):
        step(governor, allowed, 0.5, [1.0])
        governor.timed(without=0.01, extra=1.0 if number == 250 else 0.0005, saved=0.002)
    assert not governor.stopped
    assert [4] == governor.limit(np.arange(1), allowed).budgets.tolist()
