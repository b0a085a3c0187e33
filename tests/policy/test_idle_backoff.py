from __future__ import annotations

from itertools import groupby

from rollout_worker.policy.idle_backoff import IdleBackoff


def sleeps(rests: IdleBackoff, steps: int, *, drafted: bool) -> int:
    slept = 0
    for _ in range(steps):
        if rests.sleeps():
            slept += 1
        else:
            rests.looked(drafted)
    return slept


def test_who_drafts_is_always_awake() -> None:
    assert 0 == sleeps(IdleBackoff(), 1000, drafted=True)


def test_where_nothing_is_drafted_it_sleeps_longer_and_longer_and_looks_for_two_steps_between() -> None:
    rests, steps = IdleBackoff(), []
    for _ in range(200):
        steps.append(rests.sleeps())
        if not steps[-1]:
            rests.looked(False)
    runs = [(asleep, len(list(some))) for asleep, some in groupby(steps)][:-1]
    assert [4] + [2] * (len(runs) // 2) == [length for asleep, length in runs if not asleep][: 1 + len(runs) // 2]
    assert [2, 4, 8, 16, 16] == [length for asleep, length in runs if asleep][:5]


def test_it_is_awake_within_16_steps_and_stays_so_once_something_is_drafted() -> None:
    rests = IdleBackoff()
    sleeps(rests, 1000, drafted=False)
    assert sleeps(rests, 20, drafted=True) <= 16
    assert 0 == sleeps(rests, 1000, drafted=True)
