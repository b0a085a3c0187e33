"""The history in a real Redis: idempotent appends, generations, the window, corrupt entries."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollout_api.keys import HistoryKeys
from rollout_worker.history.connection import connect
from rollout_worker.history.lengths import MeanLengths
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import START, Appended, HistoryMismatchError, HistoryStore

KEYS = HistoryKeys("default", "math")


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return connect(redis_url)


@pytest.fixture
def store(client: redis.Redis) -> HistoryStore:
    return HistoryStore(client, KEYS, window=3)


def record(rollout_id: str, generation: int = 1, tokens: int = 5) -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(tokens, dtype=np.uint32), "stop")


def ids(store: HistoryStore, problem: str = "p") -> list[str]:
    return [r.rollout_id for r in store.read({problem: START})[problem].records]


def test_an_append_is_read_back_and_leaves_its_length(store: HistoryStore, client: redis.Redis) -> None:
    assert store.append("p", record("a", generation=1, tokens=7), newest=1) == Appended.NEW
    found = store.read({"p": START})["p"].records
    assert [("a", 1, list(range(7)), "stop")] == [
        (r.rollout_id, r.generation, r.tokens.tolist(), r.finish_reason) for r in found
    ]
    assert client.hgetall(KEYS.lengths("p")) == {b"a": b"1 7 stop"}


def test_a_rollout_appended_twice_is_one_rollout(store: HistoryStore) -> None:
    assert [store.append("p", record("a"), newest=1) for _ in range(2)] == [Appended.NEW, Appended.KNOWN]
    assert ids(store) == ["a"]


def test_appends_from_many_threads_are_each_there_once(store: HistoryStore, redis_url: str) -> None:
    def write() -> None:
        mine = HistoryStore(connect(redis_url), KEYS, window=3)
        for number in range(50):
            mine.append("p", record(str(number)), newest=1)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, range(50))) == sorted(ids(store))


def test_a_run_publishes_each_version_once_and_runs_share_the_count(store: HistoryStore) -> None:
    assert [store.publish("run", 0), store.publish("run", 0), store.publish("run", 1)] == [1, 1, 2]
    # a second job that counts from 0 again is newer, not older
    assert [store.publish("other", 0), store.publish("run", 1)] == [3, 2]
    assert store.generation() == 3


def test_what_leaves_the_window_is_trimmed_with_its_lengths(store: HistoryStore, client: redis.Redis) -> None:
    for generation in range(1, 6):
        for sample in range(2):
            store.append("p", record(f"{generation}-{sample}", generation), newest=generation)
    kept = [f"{generation}-{sample}" for generation in (3, 4, 5) for sample in range(2)]
    assert kept == ids(store)
    assert set(kept) == {key.decode() for key in client.hkeys(KEYS.lengths("p"))}
    assert store.append("p", record("late", 2), newest=5) == Appended.TOO_OLD
    assert kept == ids(store)


def test_reading_goes_on_where_it_stopped(store: HistoryStore) -> None:
    for number in range(5):
        store.append("p", record(str(number)), newest=1)
    first = store.read({"p": START}, count=3)["p"]
    rest = store.read({"p": first.cursor}, count=3)["p"]
    assert [[r.rollout_id for r in part.records] for part in (first, rest)] == [["0", "1", "2"], ["3", "4"]]
    assert store.read({"p": rest.cursor})["p"].records == []


def test_a_corrupt_entry_is_skipped_and_named(store: HistoryStore, client: redis.Redis) -> None:
    store.append("p", record("a"), newest=1)
    client.xadd(KEYS.log("p"), {"d": b"\xff garbage", "g": "nonsense", "i": "x"})
    client.xadd(KEYS.log("p"), {"surprise": 1})
    store.append("p", record("b"), newest=1)
    found = store.read({"p": START})["p"]
    assert [r.rollout_id for r in found.records] == ["a", "b"]
    assert [corrupt.problem for corrupt in found.corrupt] == ["p", "p"]
    # trimming passes over what it does not know
    for generation in range(2, 9):
        store.append("p", record(f"g{generation}", generation), newest=generation)
    assert ["g6", "g7", "g8"] == ids(store)
    assert {b"g6", b"g7", b"g8"} == set(client.hkeys(KEYS.lengths("p")))


def test_another_tokenizers_history_is_refused(store: HistoryStore) -> None:
    store.open("fingerprint-a")
    store.open("fingerprint-a")
    with pytest.raises(HistoryMismatchError, match=r"default/math .* spec\.history\.name"):
        store.open("fingerprint-b")


def test_a_full_server_refuses_an_append_whole(store: HistoryStore, client: redis.Redis) -> None:
    store.append("p", record("a"), newest=1)
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            store.append("p", record("b"), newest=1)
    finally:
        client.config_set("maxmemory", 0)
    assert ids(store) == ["a"]
    assert store.append("p", record("b"), newest=1) == Appended.NEW


def test_mean_lengths_are_of_the_problems_that_were_asked_for_whatever_redis_does(
    store: HistoryStore, redis_url: str, client: redis.Redis
) -> None:
    for number, tokens in enumerate((10, 20)):
        store.append("known", record(str(number), tokens=tokens), newest=1)

    async def ask() -> None:
        hasty = redis.asyncio.Redis.from_url(redis_url, socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
        lengths = MeanLengths(hasty, KEYS)
        assert {"known": 15.0, "new": 0.0} == await lengths.of(["known", "new", "known"])
        client.execute_command("CLIENT", "PAUSE", 500, "ALL")
        assert {"new": 0.0, "known": 15.0} == await lengths.of(["new", "known"])
        await hasty.aclose()

    asyncio.run(ask())
