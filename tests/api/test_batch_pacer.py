"""Readers wait between two reads of a stream."""

from __future__ import annotations

import pytest

from rollout_api.redis_client.batch_pacer import BatchPacer


def pauses(rate: float, seconds: float = 5.0) -> list[float]:
    """Return the pauses of a reader that finds one message at a time, at this many per second."""
    pacer, now, found = BatchPacer(), 0.0, []
    while now < seconds:
        found.append(pacer.pause(1, now))
        now += 1 / rate
    return found


@pytest.mark.parametrize("rate", [1, 20, 150])
def test_few_messages_are_read_at_once(rate: float) -> None:
    assert {0.0} == set(pauses(rate))


def test_many_messages_are_read_in_batches() -> None:
    found = pauses(1000)
    assert {0.0} == set(found[:190])  # it takes some messages to see how many there are
    assert min(found[-1000:]) > 0


def test_batches_end_soon_after_the_messages() -> None:
    pacer = BatchPacer()
    assert pacer.pause(1000, 0.0) > 0
    assert pacer.pause(1, 0.1) > 0
    assert 0 == pacer.pause(1, 3.0)


def test_pauses_grow_with_the_number_of_messages_up_to_a_limit() -> None:
    found = []
    for num_found in (1, 5, 1000):
        pacer = BatchPacer()
        pacer.pause(1000, 0.0)
        found.append(pacer.pause(num_found, 0.01))
    assert found == sorted(set(found))
    assert found[-1] <= 0.02


def test_reads_that_find_nothing_do_not_pause() -> None:
    pacer = BatchPacer()
    pacer.pause(1000, 0.0)
    assert 0 == pacer.pause(0, 0.001)
