"""Steps of drafting are skipped while there is nothing to draft."""

from __future__ import annotations

from itertools import groupby

from rollout_worker.policy.controller import IdleBackoff


def count_skipped(backoff: IdleBackoff, steps: int, *, drafted: bool) -> int:
    skipped = 0
    for _ in range(steps):
        if backoff.skip_step():
            skipped += 1
        else:
            backoff.record_step(drafted)
    return skipped


def test_no_step_is_skipped_while_something_is_drafted() -> None:
    assert 0 == count_skipped(IdleBackoff(), 1000, drafted=True)


def test_series_of_skipped_steps_double_up_to_16_with_two_steps_between_them() -> None:
    backoff, steps = IdleBackoff(), []
    for _ in range(200):
        steps.append(backoff.skip_step())
        if not steps[-1]:
            backoff.record_step(False)
    series = [(skipped, len(list(group))) for skipped, group in groupby(steps)][:-1]
    active = [length for skipped, length in series if not skipped]
    assert [4] + [2] * (len(active) - 1) == active
    assert [2, 4, 8, 16, 16] == [length for skipped, length in series if skipped][:5]


def test_drafts_are_noticed_within_16_steps_and_end_the_skipping() -> None:
    backoff = IdleBackoff()
    count_skipped(backoff, 1000, drafted=False)
    assert count_skipped(backoff, 20, drafted=True) <= 16
    assert 0 == count_skipped(backoff, 1000, drafted=True)
