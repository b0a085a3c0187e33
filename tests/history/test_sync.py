"""The background thread that keeps an index up to date, against a real Redis and a real index."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from rollout_api.keys import HistoryKeys
from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.history.connection import connect
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore
from rollout_worker.history.sync import HistorySync

KEYS = HistoryKeys("default", "math")


@pytest.fixture
def store(redis_url: str) -> HistoryStore:
    return HistoryStore(connect(redis_url), KEYS, window=2)


@pytest.fixture
def index() -> SuffixIndex:
    return SuffixIndex()


@pytest.fixture
def sync(redis_url: str, index: SuffixIndex) -> Iterator[HistorySync]:
    syncing = HistorySync(HistoryStore(connect(redis_url), KEYS, window=2), index)
    syncing.start()
    yield syncing
    syncing.stop()


def append(store: HistoryStore, problem: str, rollout_id: str, generation: int) -> None:
    tokens = np.arange(10, dtype=np.uint32)
    store.append(problem, HistoryRecord(rollout_id, "run", generation, generation, tokens, "stop"), newest=generation)


def eventually(condition: Callable[[], bool], timeout: float = 10) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_announced_problems_are_loaded_and_others_are_not(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync
) -> None:
    for problem in ("p", "q"):
        append(store, problem, f"{problem}1", 1)
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    assert index.rollouts("p") == ["p1"]
    assert index.rollouts("q") == []


def test_more_than_one_batch_is_loaded_before_it_is_ready(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync
) -> None:
    for number in range(1100):
        append(store, "p", str(number), 1)
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    assert len(index.rollouts("p")) == 1100
    assert sync.counters.rollouts == 1100


def test_new_rollouts_arrive_by_themselves(store: HistoryStore, index: SuffixIndex, sync: HistorySync) -> None:
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    append(store, "p", "later", 1)
    assert eventually(lambda: index.rollouts("p") == ["later"])


def test_what_leaves_the_window_is_dropped(store: HistoryStore, index: SuffixIndex, sync: HistorySync) -> None:
    append(store, "p", "old", 1)
    append(store, "p", "new", 2)
    sync.announce(["p"], 2)
    assert sync.wait_ready(10)
    assert index.rollouts("p") == ["old", "new"]
    sync.announce(["p"], 3)
    assert eventually(lambda: index.rollouts("p") == ["new"])


def test_a_corrupt_record_is_counted_and_the_rest_is_loaded(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    append(store, "p", "a", 1)
    redis.Redis.from_url(redis_url).xadd(KEYS.log("p"), {"i": "bad", "g": 1, "d": b"\x93\x01"})
    append(store, "p", "b", 1)
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    assert index.rollouts("p") == ["a", "b"]
    assert (sync.counters.rollouts, sync.counters.corrupt) == (2, 1)
    assert "corrupt record of problem p" in caplog.text


def test_a_server_that_goes_and_comes_back_is_only_a_delay(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    server = EmbeddedRedis(tmp_path, keep_open=lock)
    url = server.start()
    pid = int(redis.Redis.from_url(url).info()["process_id"])
    index = SuffixIndex()
    store = HistoryStore(connect(url), KEYS, window=2)
    append(store, "p", "a", 1)
    sync = HistorySync(store, index)
    sync.start()
    try:
        sync.announce(["p"], 1)
        assert sync.wait_ready(10)
        os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: sync.counters.failures > 0, timeout=20)
        os.kill(pid, signal.SIGCONT)
        append(HistoryStore(connect(url), KEYS, window=2), "p", "b", 1)
        assert eventually(lambda: index.rollouts("p") == ["a", "b"], timeout=20)
    finally:
        os.kill(pid, signal.SIGCONT)
        sync.stop()
        server.stop()
        os.close(lock)
