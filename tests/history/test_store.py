"""The history in a real Redis: idempotent appends, generations, the window, corrupt entries."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import numpy as np
import pytest
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.length_entries import pack_entry, rollout_key
from rollout_worker.history.connection import connect_history
from rollout_worker.history.lengths import NOTHING_KNOWN, ExpectedLengths
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import START, Appended, HistoryMismatchError, HistoryStore

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
    return [r.rollout_id for r in store.read({problem: START})[problem].records]


def test_an_append_is_read_back_and_leaves_its_length(store: HistoryStore, client: redis.Redis) -> None:
    assert store.append("p", record("a", generation=1, tokens=7), newest=1) == Appended.NEW
    found = store.read({"p": START})["p"].records
    assert [("a", 1, list(range(7)), "stop")] == [
        (r.rollout_id, r.generation, r.tokens.tolist(), r.finish_reason) for r in found
    ]
    assert {b"1": pack_entry("a", 7, cut_off=False)} == client.hgetall(KEYS.lengths("p"))


def test_a_rollout_appended_twice_is_one_rollout(store: HistoryStore) -> None:
    assert [store.append("p", record("a"), newest=1) for _ in range(2)] == [Appended.NEW, Appended.KNOWN]
    assert ids(store) == ["a"]


def test_appends_from_many_threads_are_each_there_once(store: HistoryStore, history_url: str) -> None:
    def write() -> None:
        mine = HistoryStore(connect_history(history_url), KEYS, window=3)
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
    assert {rollout_key(name) for name in kept} == {entry.key for entry in store.lengths("p")}
    assert store.append("p", record("late", 2), newest=5) == Appended.TOO_OLD
    assert kept == ids(store)


def test_a_window_counts_the_generations_in_which_the_problem_was_sampled(store: HistoryStore) -> None:
    """One that comes up once an epoch finds the epochs before, however many weight versions each of them has."""
    for epoch in range(5):
        store.append("p", record(f"p{epoch}", 100 * epoch + 7), newest=100 * epoch + 7)
        for generation in range(100 * epoch, 100 * epoch + 4):
            store.append("often", record(f"often{generation}", generation), newest=generation)
    assert ["p2", "p3", "p4"] == ids(store)
    assert ["often401", "often402", "often403"] == ids(store, "often")
    # nor is a problem's history gone when it comes up again after longer than ever
    store.append("p", record("p5", 9000), newest=9000)
    assert ["p3", "p4", "p5"] == ids(store)


def test_rollouts_stay_though_their_lengths_are_lost(store: HistoryStore, client: redis.Redis) -> None:
    for generation in (1, 2, 3):
        store.append("p", record(str(generation), generation), newest=generation)
        if generation == 1:
            store.compact("p")
    client.delete(KEYS.lengths("p"))
    store.append("p", record("4", 4), newest=4)
    assert ["2", "3", "4"] == ids(store)
    assert [4] == [entry.generation for entry in store.lengths("p")]


@pytest.mark.parametrize("name", ["nan", "inf", "1e9", "0x10", "-1", " 7", "77777.5", ""])
def test_fields_that_are_no_generation_take_no_place_in_a_window(
    store: HistoryStore, client: redis.Redis, name: str
) -> None:
    client.hset(KEYS.lengths("p"), name, "of another program")
    for generation in range(1, 6):
        assert Appended.NEW == store.append("p", record(str(generation), generation), newest=generation)
    assert ["3", "4", "5"] == ids(store)
    assert [3, 4, 5] == sorted(store.generations_of(["p"])["p"] or ())


def test_late_rollouts_enter_between_others_or_are_too_old(store: HistoryStore) -> None:
    for generation in (10, 20, 30, 40):
        store.append("p", record(str(generation), generation), newest=generation)
    assert Appended.TOO_OLD == store.append("p", record("15", 15), newest=40)
    assert Appended.NEW == store.append("p", record("20 too", 20), newest=40)
    assert Appended.NEW == store.append("p", record("35", 35), newest=40)
    assert {30, 35, 40} == set(store.generations_of(["p"])["p"] or ())
    assert {"30", "35", "40"} <= set(ids(store))


def test_what_lies_behind_the_horizon_leaves_too_but_for_two_generations(store: HistoryStore) -> None:
    store.set_horizon(10)
    for generation in (1, 2, 3):
        store.append("p", record(str(generation), generation), newest=generation)
    store.append("q", record("q", 3), newest=3)
    assert ["1", "2", "3"] == ids(store)
    store.append("p", record("50", 50), newest=50)
    assert ["3", "50"] == ids(store)
    store.append("p", record("52", 52), newest=52)
    store.append("p", record("53", 53), newest=53)
    assert ["50", "52", "53"] == ids(store)
    assert ["q"] == ids(store, "q")
    store.set_horizon(None)
    store.append("p", record("900", 900), newest=900)
    assert ["52", "53", "900"] == ids(store)


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
    assert {b"6", b"7", b"8"} == set(client.hkeys(KEYS.lengths("p")))


def test_rewards_are_read_with_the_log_where_they_are_asked_for(store: HistoryStore, client: redis.Redis) -> None:
    a, d = rollout_key("a"), rollout_key("d")
    for problem in ("p", "q"):
        store.append(problem, record("a"), newest=1)
        store.append(problem, record("d"), newest=1)
        store.reward(problem, {"a": 1.0, "unknown": 1.0, "b": math.nan, "c": 1e39})
        store.reward(problem, {"a": 0.5, "d": -2.0})
    slices = store.read({"p": START, "q": START, "none": START}, rewarded={"p", "none"})
    assert {"p": {a: 0.5, d: -2.0}, "q": None, "none": {}} == {name: part.rewards for name, part in slices.items()}
    assert {"p": 2, "q": 2, "none": 0} == {name: len(part.records) for name, part in slices.items()}
    assert {a: 0.5, d: -2.0} == store.rewards("p")


def test_another_tokenizers_history_is_refused(store: HistoryStore) -> None:
    store.open("fingerprint-a")
    store.open("fingerprint-a")
    with pytest.raises(HistoryMismatchError, match=r"default/math .* spec\.history\.name"):
        store.open("fingerprint-b")


def test_a_full_server_refuses_an_append_whole(redis_url: str) -> None:
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
    assert store.append("p", record("b"), newest=1) == Appended.NEW


def test_expected_lengths_are_of_the_problems_that_were_asked_for_and_nobody_waits_long_for_them(
    redis_url: str,
) -> None:
    client = redis.Redis.from_url(redis_url)
    store = HistoryStore(client, KEYS, window=3)
    for number, tokens in enumerate((10, 20)):
        store.append("known", record(str(number), tokens=tokens), newest=1)

    async def ask() -> None:
        lengths = ExpectedLengths(HistoryStore(connect_history(redis_url, timeout=0.2), KEYS, window=3))
        found = await lengths.of(["known", "new", "known"])
        assert {"known": 15.0, "new": 0.0} == {problem: stats.mean for problem, stats in found.items()}
        client.execute_command("CLIENT", "PAUSE", 3000, "ALL")
        began = time.monotonic()
        for _ in range(20):
            assert {"new": NOTHING_KNOWN, "known": NOTHING_KNOWN} == await lengths.of(["new", "known"])
        assert time.monotonic() - began < 2.5

    asyncio.run(ask())
