"""Rollouts are recorded in a thread; a history that fails costs rollouts, never a step."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.store import HistoryStore
from rollout_store.history.sync import HistorySync
from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.drop_in.recorder import FinishedRollout, IndexHistory, RedisHistory, RolloutRecorder

KEYS = HistoryKeys("default", "drop-in")
TIMEOUT_S = 60


def rollout(number: int, problem: str = "p", version: int = 1) -> FinishedRollout:
    """Return a finished rollout."""
    tokens = np.arange(number, number + 8, dtype=np.uint32)
    return FinishedRollout(f"rollout {number}", problem, version, tokens, "stop", b"")


def record_all(recorder: RolloutRecorder, rollouts: list[FinishedRollout]) -> None:
    """Record rollouts, and wait until they are."""
    recorder.start()
    recorder.begin_version(1)
    recorder.use("p")
    for each in rollouts:
        recorder.record(each)
    recorder.stop(TIMEOUT_S)


def test_rollouts_are_kept_in_the_index_within_their_window() -> None:
    index = SuffixIndex()
    generations: list[int] = []
    record_all(
        RolloutRecorder(IndexHistory(index, window=2), generations.append),
        [rollout(10 * version, version=version) for version in (1, 2, 3)],
    )
    index.wait_idle()
    assert generations == [1]
    assert sorted(index.rollouts("p")) == ["rollout 20", "rollout 30"]


class Engine:
    """What an engine has to record and read rollouts."""

    def __init__(self, url: str, tokenizer: str, run: str) -> None:
        self.index = SuffixIndex()
        store = HistoryStore(connect_history(url), KEYS, window=16)
        self.sync = HistorySync(store, self.index)
        self.generations: list[int] = []
        self.recorder = RolloutRecorder(RedisHistory(store, self.sync, run, tokenizer), self.generations.append)
        self.sync.start()

    def close(self) -> None:
        """End the threads."""
        self.sync.stop()


def test_an_engine_drafts_from_what_another_one_has_sampled(redis_url: str) -> None:
    first, second = Engine(redis_url, "tokenizer", "a"), Engine(redis_url, "tokenizer", "b")
    record_all(first.recorder, [rollout(1), rollout(2)])
    record_all(second.recorder, [])
    assert second.sync.wait_ready(TIMEOUT_S)
    assert second.sync.counters.rollouts == 2
    assert (first.generations, second.generations) == ([1], [2])
    for engine in (first, second):
        engine.close()


def test_engines_of_a_run_agree_on_generations(redis_url: str) -> None:
    engines = [Engine(redis_url, "tokenizer", "run") for _ in range(2)]
    for engine in engines:
        record_all(engine.recorder, [])
        engine.close()
    assert [engine.generations for engine in engines] == [[1], [1]]


def test_nothing_is_drafted_from_a_history_of_another_tokenizer(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Engine(redis_url, "tokenizer", "a"), Engine(redis_url, "another", "b")
    record_all(first.recorder, [rollout(1)])
    record_all(second.recorder, [rollout(2)])
    assert "another tokenizer" in caplog.text
    assert second.recorder.counters.lost == 1
    assert second.sync.counters.rollouts == 0
    for engine in (first, second):
        engine.close()


def test_rollouts_are_lost_rather_than_waited_for() -> None:
    """The thread is stopped in the middle of a write, as by a server that does not answer."""
    release = threading.Event()

    class StuckHistory(IndexHistory):
        def use(self, problems: object) -> None:
            release.wait()

    recorder = RolloutRecorder(StuckHistory(SuffixIndex(), window=2), lambda _: None)
    recorder.start()
    recorder.use("p")
    for number in range(5000):
        recorder.record(rollout(number))
    assert 5000 - 4096 - 256 <= recorder.counters.lost < 5000
    release.set()
    recorder.stop(TIMEOUT_S)
