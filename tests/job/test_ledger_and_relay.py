"""Finishing a rollout: once in the ledger, once in the history, whatever is killed in between."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest
import redis

from rollout_api.keys import HistoryKeys, MessageKeys
from rollout_api.messages import FinishReason, Purpose, Rollout, WeightSpan, encode
from rollout_worker.history.connection import connect
from rollout_worker.history.store import START, HistoryStore
from rollout_worker.job.ledger import Ledger
from rollout_worker.job.relay import Relay

JOB = MessageKeys("uid")
HISTORY = HistoryKeys("default", "math")


def rollout(sample: int, *, purpose: Purpose = Purpose.TRAIN, version: int = 1) -> Rollout:
    return Rollout(
        rollout_id=f"uid/r/{sample}/0",
        problem_id="p",
        purpose=purpose,
        token_ids=[sample] * 5,
        spans=[WeightSpan(start=0, weight_version=version)],
        finish_reason=FinishReason.STOP,
        drafted=4,
        accepted=3,
        reward=0.5,
    )


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return connect(redis_url)


@pytest.fixture
def ledger(client: redis.Redis) -> Ledger:
    return Ledger(client, JOB)


@pytest.fixture
def store(client: redis.Redis) -> HistoryStore:
    return HistoryStore(client, HISTORY, window=4)


@pytest.fixture
def relay(client: redis.Redis, store: HistoryStore) -> Relay:
    return Relay(client, JOB, store)


def in_history(store: HistoryStore) -> list[str]:
    return [record.rollout_id for record in store.read({"p": START})["p"].records]


def test_a_finished_rollout_reaches_ledger_and_history(ledger: Ledger, relay: Relay, store: HistoryStore) -> None:
    assert ledger.finish(rollout(0))
    assert ledger.waiting() == 1
    relay.drain()
    assert ledger.waiting() == 0
    assert in_history(store) == ["uid/r/0/0"]
    (entry,) = ledger.done().values()
    assert (
        entry.length,
        entry.finish_reason,
        entry.weight_version,
        entry.drafted,
        entry.accepted,
        entry.reward,
    ) == (5, "stop", 1, 4, 3, 0.5)


def test_finishing_twice_is_finishing_once(ledger: Ledger, relay: Relay, store: HistoryStore) -> None:
    assert [ledger.finish(rollout(0)) for _ in range(2)] == [True, False]
    relay.drain()
    assert not ledger.finish(rollout(0))
    relay.drain()
    assert in_history(store) == ["uid/r/0/0"]


def test_evaluation_rollouts_never_enter_the_history(ledger: Ledger, relay: Relay, store: HistoryStore) -> None:
    assert ledger.finish(rollout(0, purpose=Purpose.EVAL))
    relay.drain()
    assert in_history(store) == []
    assert len(ledger.done()) == 1


def test_an_entry_carried_before_the_relay_died_is_not_carried_twice(
    ledger: Ledger, relay: Relay, store: HistoryStore, client: redis.Redis
) -> None:
    ledger.finish(rollout(0))
    entries = client.xrange(JOB.outbox)
    relay.drain()
    # as if it had been killed after the append and before the entry was deleted
    client.xadd(JOB.outbox, entries[0][1])
    relay.drain()
    assert in_history(store) == ["uid/r/0/0"]


@pytest.mark.parametrize("data", [b"garbage", b"", encode(rollout(1))[:-3]])
def test_what_cannot_be_read_goes_to_the_dead_letters_and_the_rest_goes_on(
    ledger: Ledger, relay: Relay, store: HistoryStore, client: redis.Redis, data: bytes
) -> None:
    client.xadd(JOB.outbox, {"d": data})
    ledger.finish(rollout(0))
    relay.drain()
    assert in_history(store) == ["uid/r/0/0"]
    ((_, letter),) = client.xrange(JOB.dead)
    assert data == letter[b"d"]
    assert letter[b"reason"]
    assert relay.dead == 1


def test_a_full_server_loses_nothing(ledger: Ledger, relay: Relay, store: HistoryStore, client: redis.Redis) -> None:
    ledger.finish(rollout(0))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            ledger.finish(rollout(1))
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            relay.drain()
    finally:
        client.config_set("maxmemory", 0)
    assert ledger.finish(rollout(1))
    relay.drain()
    assert in_history(store) == ["uid/r/0/0", "uid/r/1/0"]


def test_the_message_plane_is_not_deleted_while_rollouts_wait(
    ledger: Ledger, relay: Relay, client: redis.Redis
) -> None:
    ledger.finish(rollout(0))
    with pytest.raises(RuntimeError, match="1 rollouts"):
        ledger.forget()
    relay.drain()
    ledger.forget()
    assert client.keys("rollout:*") == []


ROLLOUTS = 60


def work(url: str, stop_after: int) -> None:
    """Finish and relay rollouts; killed by itself before a certain command is sent to Redis."""
    client = connect(url)
    sent = 0
    execute = client.execute_command

    def counting(*args: object, **options: object) -> object:
        nonlocal sent
        sent += 1
        if sent == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(*args, **options)

    client.execute_command = counting  # type: ignore[method-assign]
    ledger = Ledger(client, JOB)
    relay = Relay(client, JOB, HistoryStore(client, HISTORY, window=4))
    done = ledger.done()
    for sample in range(ROLLOUTS):
        if (one := rollout(sample)).rollout_id not in done:
            ledger.finish(one)
            if sample % 7 == 0:
                relay.drain()
    relay.drain()


@pytest.fixture
def spawn() -> Iterator[multiprocessing.context.ForkContext]:
    yield multiprocessing.get_context("fork")


def test_killed_between_any_two_commands_nothing_is_lost_and_nothing_is_there_twice(
    redis_url: str, store: HistoryStore, ledger: Ledger, spawn: multiprocessing.context.ForkContext
) -> None:
    kills = 0
    for stop_after in [*range(1, 40), 0]:
        process = spawn.Process(target=work, args=(redis_url, stop_after))
        process.start()
        process.join(30)
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
    expected = sorted(f"uid/r/{sample}/0" for sample in range(ROLLOUTS))
    assert expected == sorted(in_history(store))
    assert expected == sorted(ledger.done())
    assert kills >= 10
