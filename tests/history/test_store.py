"""A history in a real Redis: idempotent appends, generations, the window and corrupt entries."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import numpy as np
import pytest
import redis

from rollout_api.protocol.history_encoding import pack_entry, rollout_key
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.records import START, HistoryRecord
from rollout_store.history.store import (
    LENGTH_LOOKUP_RETENTION_S,
    NO_LENGTH_STATS,
    AppendResult,
    HistoryStore,
    LengthLookup,
)

KEYS = HistoryKeys("default", "math")


@pytest.fixture
def client(history_url: str) -> redis.Redis:
    return connect_history(history_url)


@pytest.fixture
def store(client: redis.Redis) -> HistoryStore:
    return HistoryStore(client, KEYS, window=3)


def record(rollout_id: str, generation: int = 1, tokens: int = 5) -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(tokens, dtype=np.uint32), "stop")


def ids(store: HistoryStore, problem: str = "p") -> list[str]:
    """Return the ids of a problem's rollouts."""
    return [r.rollout_id for r in store.read({problem: START})[problem].records]


def test_appended_rollout_is_read_back_and_its_length_recorded(store: HistoryStore, client: redis.Redis) -> None:
    assert store.append("p", record("a", generation=1, tokens=7), newest=1) == AppendResult.APPENDED
    found = store.read({"p": START})["p"].records
    assert [("a", 1, list(range(7)), "stop")] == [
        (r.rollout_id, r.generation, r.tokens.tolist(), r.finish_reason) for r in found
    ]
    assert {b"1": pack_entry("a", 7, cut_off=False)} == client.hgetall(KEYS.lengths("p"))


def test_concurrent_appends_are_each_stored_once(store: HistoryStore, history_url: str) -> None:
    def write() -> None:
        own_store = HistoryStore(connect_history(history_url), KEYS, window=3)
        for number in range(50):
            own_store.append("p", record(str(number)), newest=1)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, range(50))) == sorted(ids(store))


def test_each_version_of_a_run_has_one_generation_and_runs_share_the_count(store: HistoryStore) -> None:
    assert [1, 1, 2] == [store.metadata.publish("run", version) for version in (0, 0, 1)]
    # Version 0 of a later job is newer than all versions before it.
    assert [3, 2] == [store.metadata.publish("other", 0), store.metadata.publish("run", 1)]
    assert store.metadata.generation() == 3


def test_rollouts_outside_the_window_are_deleted_with_their_lengths(store: HistoryStore) -> None:
    for generation in range(1, 6):
        for sample in range(2):
            store.append("p", record(f"{generation}-{sample}", generation), newest=generation)
    kept = [f"{generation}-{sample}" for generation in (3, 4, 5) for sample in range(2)]
    assert kept == ids(store)
    assert {rollout_key(name) for name in kept} == {entry.key for entry in store.statistics.length_entries("p")}
    assert store.append("p", record("late", 2), newest=5) == AppendResult.TOO_OLD
    assert kept == ids(store)


def test_window_counts_generations_in_which_the_problem_was_sampled(store: HistoryStore) -> None:
    """A problem sampled once per epoch keeps earlier epochs, however many weight versions each of them has."""
    for epoch in range(5):
        store.append("p", record(f"p{epoch}", 100 * epoch + 7), newest=100 * epoch + 7)
        for generation in range(100 * epoch, 100 * epoch + 4):
            store.append("often", record(f"often{generation}", generation), newest=generation)
    assert ["p2", "p3", "p4"] == ids(store)
    assert ["often401", "often402", "often403"] == ids(store, "often")
    # This also holds if the problem is sampled again after a much longer time.
    store.append("p", record("p5", 9000), newest=9000)
    assert ["p3", "p4", "p5"] == ids(store)


def test_rollouts_are_kept_if_their_lengths_are_lost(store: HistoryStore, client: redis.Redis) -> None:
    for generation in (1, 2, 3):
        store.append("p", record(str(generation), generation), newest=generation)
        if generation == 1:
            MaintenanceOperations(store).compact("p")
    client.delete(KEYS.lengths("p"))
    store.append("p", record("4", 4), newest=4)
    assert ["2", "3", "4"] == ids(store)
    assert [4] == [entry.generation for entry in store.statistics.length_entries("p")]


@pytest.mark.parametrize("name", ["nan", "inf", "1e9", "0x10", "-1", " 7", "77777.5", ""])
def test_fields_that_are_not_generations_do_not_count_in_the_window(
    store: HistoryStore, client: redis.Redis, name: str
) -> None:
    client.hset(KEYS.lengths("p"), name, "written by another program")
    for generation in range(1, 6):
        assert AppendResult.APPENDED == store.append("p", record(str(generation), generation), newest=generation)
    assert ["3", "4", "5"] == ids(store)
    assert [3, 4, 5] == sorted(store.catalog.generations(["p"])["p"] or ())


def test_corrupt_entry_is_skipped_and_reported(store: HistoryStore, client: redis.Redis) -> None:
    store.append("p", record("a"), newest=1)
    client.xadd(KEYS.log("p"), {"d": b"\xff garbage", "g": "nonsense", "i": "x"})
    client.xadd(KEYS.log("p"), {"surprise": 1})
    store.append("p", record("b"), newest=1)
    found = store.read({"p": START})["p"]
    assert [r.rollout_id for r in found.records] == ["a", "b"]
    assert [corrupt.problem_id for corrupt in found.corrupt] == ["p", "p"]
    # Trimming ignores these entries, too.
    for generation in range(2, 9):
        store.append("p", record(f"g{generation}", generation), newest=generation)
    assert ["g6", "g7", "g8"] == ids(store)
    assert {b"6", b"7", b"8"} == set(client.hkeys(KEYS.lengths("p")))


def test_rewards_are_read_with_the_log_on_request(store: HistoryStore) -> None:
    a, d = rollout_key("a"), rollout_key("d")
    for problem in ("p", "q"):
        store.append(problem, record("a"), newest=1)
        store.append(problem, record("d"), newest=1)
        store.set_rewards(problem, {"a": 1.0, "unknown": 1.0, "b": math.nan, "c": 1e39})
        store.set_rewards(problem, {"a": 0.5, "d": -2.0})
    slices = store.read({"p": START, "q": START, "none": START}, with_rewards={"p", "none"})
    assert {"p": {a: 0.5, d: -2.0}, "q": None, "none": {}} == {name: part.rewards for name, part in slices.items()}
    assert {"p": 2, "q": 2, "none": 0} == {name: len(part.records) for name, part in slices.items()}
    assert {a: 0.5, d: -2.0} == store.statistics.rewards("p")


def test_append_to_a_full_server_has_no_effect(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    store = HistoryStore(client, KEYS, window=3)
    store.append("p", record("a"), newest=1)
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            store.append("p", record("b"), newest=1)
    finally:
        client.config_set("maxmemory", 0)
    assert ids(store) == ["a"]
    assert store.append("p", record("b"), newest=1) == AppendResult.APPENDED


async def test_length_lookup_keeps_statistics_for_a_while(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    store = HistoryStore(client, KEYS, window=3)
    store.append("p", record("0", tokens=10), newest=1)

    lengths = LengthLookup(store)
    first = (await lengths.fetch(["p"]))["p"]
    store.append("p", record("1", tokens=20), newest=1)
    assert first is (await lengths.fetch(["p", "q"]))["p"]
    await asyncio.sleep(LENGTH_LOOKUP_RETENTION_S + 0.1)
    assert 15.0 == (await lengths.fetch(["p"]))["p"].mean


async def test_length_lookup_returns_empty_statistics_if_redis_does_not_answer(
    redis_url: str,
) -> None:
    client = redis.Redis.from_url(redis_url)
    store = HistoryStore(client, KEYS, window=3)
    for number, tokens in enumerate((10, 20)):
        store.append("known", record(str(number), tokens=tokens), newest=1)

    impatient = HistoryStore(connect_history(redis_url, timeout=0.2), KEYS, window=3)
    found = await LengthLookup(impatient).fetch(["known", "new", "known"])
    assert {"known": 15.0, "new": 0.0} == {problem: stats.mean for problem, stats in found.items()}
    lengths = LengthLookup(impatient)
    client.execute_command("CLIENT", "PAUSE", 3000, "ALL")
    started = time.monotonic()
    for _ in range(20):
        assert {"new": NO_LENGTH_STATS, "known": NO_LENGTH_STATS} == await lengths.fetch(["new", "known"])
    assert time.monotonic() - started < 2.5
