"""Rollouts are recorded in a thread; a history that fails costs rollouts, never a step."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.known_lengths import KnownLengths
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_store.history.sync import HistorySync
from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.drop_in.recorder import FinishedRollout, IndexHistory, RedisHistory, RolloutRecorder, Version
from tests.support.redis_servers import Server
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import wait_for

KEYS = HistoryKeys("default", "drop-in")
TIMEOUT_S = 60


def rollout(number: int, problem: str = "p", version: int = 1) -> FinishedRollout:
    """Return a finished rollout."""
    tokens = np.arange(number, number + 8, dtype=np.uint32)
    return FinishedRollout(f"rollout {number}", problem, Version(version), tokens, "stop", b"")


def record_all(recorder: RolloutRecorder, rollouts: list[FinishedRollout]) -> None:
    """Record rollouts, and wait until they are."""
    recorder.start()
    recorder.begin_version(Version(1))
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
    assert generations[-1] == 3
    assert sorted(index.rollouts("p")) == ["rollout 20", "rollout 30"]


def test_the_lengths_of_an_engine_without_a_server_follow_its_index() -> None:
    lengths = KnownLengths()
    cut_off = rollout(1, version=2)._replace(rollout_id="cut off", finish_reason="length")
    record_all(
        RolloutRecorder(IndexHistory(SuffixIndex(), window=2, lengths=lengths), lambda _: None),
        [*(rollout(10 * version, version=version) for version in (1, 2, 3)), cut_off, rollout(1, "q")],
    )
    assert lengths.of_problem("p") == LengthStats.from_lengths([(2, 8, False), (2, 8, True), (3, 8, False)])
    assert lengths.of_problem("q").count == 1
    assert lengths.overall().count == 5


def test_the_lengths_of_an_evicted_problem_are_forgotten() -> None:
    index, lengths = SuffixIndex(max_bytes=1 << 20), KnownLengths()
    tokens = np.random.default_rng(0).integers(0, 50_000, 60_000).astype(np.uint32)
    history = IndexHistory(index, window=2, lengths=lengths)
    for number in range(8):
        long = rollout(number, f"p{number}")._replace(tokens=tokens)
        history.add([(1, long)])
        index.wait_idle()
        history.add([])
    known = {f"p{number}": lengths.of_problem(f"p{number}").count for number in range(8)}
    assert known == {problem: len(index.rollouts(problem)) for problem in known}
    assert 0 < sum(known.values()) == lengths.overall().count < 8


class Engine:
    """What an engine has to record and read rollouts."""

    def __init__(self, url: str, tokenizer: str, run: str) -> None:
        self.index = SuffixIndex()
        store = HistoryStore(connect_history(url), KEYS, window=16)
        self.sync = HistorySync(store, self.index)
        self.generations: list[int] = []
        shared = RedisHistory(store, self.sync, run, tokenizer)
        self.recorder = RolloutRecorder(IndexHistory(self.index, 16), self.generations.append, shared)
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


def test_engines_of_a_run_agree_on_the_generations_of_named_steps(redis_url: str) -> None:
    engines = []
    for steps in ([7, 8], [8, 9], [9]):
        engines.append(engine := Engine(redis_url, "tokenizer", "run"))
        engine.recorder.start()
        for step in steps:
            engine.recorder.begin_version(Version(step, is_step=True))
        engine.recorder.stop(TIMEOUT_S)
        engine.close()
    assert [engine.generations[-1] for engine in engines] == [2, 3, 3]


@pytest.mark.parametrize("first_step", [1, 60])
def test_a_training_that_begins_with_an_old_step_of_its_run_is_recorded(redis_url: str, first_step: int) -> None:
    def train(names: str, *steps: int) -> Engine:
        engine = Engine(redis_url, "tokenizer", "run #a")
        engine.recorder.start()
        for step in steps:
            version = Version(step, is_step=True)
            engine.recorder.begin_version(version)
            engine.recorder.record(rollout(step)._replace(rollout_id=f"{names} {step}", version=version))
        engine.recorder.stop(TIMEOUT_S)
        engine.close()
        return engine

    train("before", *range(1, 101))
    engines = [train(name, first_step, first_step + 1) for name in ("one engine", "another of the same training")]
    engines.append(train("after a restart", first_step + 1, first_step + 2))
    assert [engine.recorder.counters.lost for engine in engines] == [0, 0, 0]
    assert [engine.generations[-1] for engine in engines] == [102, 102, 103]


def test_a_run_that_names_no_steps_goes_on_after_a_restart(redis_url: str) -> None:
    first = Engine(redis_url, "tokenizer", "run")
    record_all(first.recorder, [rollout(number, version=number) for number in range(1, 20)])
    first.sync.store.metadata.publish("7", 50)  # a version of another run
    second = Engine(redis_url, "tokenizer", "run")
    record_all(second.recorder, [rollout(100, version=1), rollout(101, version=2)])
    assert second.recorder.counters.lost == 0
    assert [generations_of(redis_url)[f"rollout {number}"] for number in (19, 100, 101)] == [19, 19, 21]


def generations_of(url: str, problem: str = "p") -> dict[str, int]:
    """Return the generation of each rollout in the history, by its id."""
    return {record.rollout_id: record.generation for record in records_of(url, problem)}


def records_of(url: str, problem: str = "p") -> list[HistoryRecord]:
    """Return the rollouts in the history."""
    store = HistoryStore.for_all_generations(connect_history(url), KEYS)
    return [record for log_slice in store.read_all(problem) for record in log_slice.records]


def test_an_engine_of_another_tokenizer_keeps_its_rollouts_in_its_memory(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Engine(redis_url, "tokenizer", "a")
    record_all(first.recorder, [rollout(1)])
    first.close()
    first.sync.store.save_drafter_state(b"what engines of the other tokenizer have learned")
    (stored,) = records_of(redis_url)
    keys = set(connect_history(redis_url).keys())
    second = Engine(redis_url, "another", "b")
    record_all(second.recorder, [rollout(2), rollout(3)])
    second.index.wait_idle()
    assert caplog.text.count("another tokenizer") == 1
    assert "drafter state" not in caplog.text
    assert (second.recorder.counters.recorded, second.recorder.counters.lost) == (2, 0)
    assert sorted(second.index.rollouts("p")) == ["rollout 2", "rollout 3"]
    second.close()
    assert [record.rollout_id for record in records_of(redis_url)] == [stored.rollout_id]
    assert set(connect_history(redis_url).keys()) == keys


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server without a disk, which is empty after a restart."""
    with Server(tmp_path / "redis") as server:
        yield server


def recorded(engine: Engine) -> int:
    """Return how many rollouts of an engine were recorded."""
    return engine.recorder.counters.recorded


def test_rollouts_are_recorded_when_a_server_is_back(server: Server) -> None:
    engine = Engine(server.url, "tokenizer", "run")
    engine.recorder.start()
    engine.recorder.begin_version(Version(1))
    engine.recorder.record(rollout(1))
    wait_for(lambda: recorded(engine) == 1, TIMEOUT_S)
    server.kill()
    engine.recorder.use("p")
    engine.recorder.record(rollout(2))
    wait_for(lambda: engine.recorder.counters.last_failure, TIMEOUT_S)
    server.start()
    wait_for(lambda: recorded(engine) == 2, TIMEOUT_S)
    assert engine.recorder.counters.lost == 0
    engine.recorder.stop(TIMEOUT_S)
    engine.close()


def test_an_empty_server_gets_the_history_anew(server: Server) -> None:
    """The engines of a run agree on generations there, too, and read what is recorded from then on."""
    second_step = Version(2, is_step=True)
    first, second = (Engine(server.url, "tokenizer", "run") for _ in range(2))
    for engine in (first, second):
        engine.recorder.start()
        engine.recorder.begin_version(Version(1, is_step=True))
        engine.recorder.begin_version(second_step)
        engine.recorder.use("p")
    first.recorder.record(rollout(1)._replace(version=second_step))
    for engine in (first, second):
        wait_for(lambda engine=engine: engine.sync.counters.rollouts == 1, TIMEOUT_S)
    server.restart()
    first.recorder.record(rollout(2)._replace(version=second_step))
    wait_for(lambda: recorded(first) == 2, TIMEOUT_S)
    second.recorder.record(rollout(3)._replace(version=second_step))
    for engine in (first, second):
        wait_for(lambda engine=engine: len(engine.index.rollouts("p")) == 3, TIMEOUT_S)
        engine.recorder.stop(TIMEOUT_S)
        engine.close()
    generations = generations_of(server.url)
    assert generations["rollout 2"] == generations["rollout 3"] > 2
    info = HistoryStore.for_all_generations(connect_history(server.url), KEYS).metadata.info()
    assert info is not None
    assert (info.tokenizer, info.generation) == ("tokenizer", generations["rollout 3"])


def test_nothing_is_read_from_a_server_that_is_replaced_by_one_with_the_history_of_another_tokenizer(
    server: Server, tmp_path: Path
) -> None:
    first = Engine(server.url, "tokenizer", "run")
    first.recorder.start()
    first.recorder.begin_version(Version(1))
    first.recorder.use("p")
    first.recorder.record(rollout(1))
    wait_for(lambda: first.sync.counters.rollouts == 1, TIMEOUT_S)
    with Server(tmp_path / "other") as other:
        second = Engine(other.url, "another", "run")
        record_all(second.recorder, [rollout(2)])
        second.close()
        other.raw_client().save()
        server.kill()
        shutil.copy(other.directory / "dump.rdb", server.directory)
        server.start()
    wait_for(
        lambda: first.sync.counters.rollouts > 1 or "another tokenizer" in first.sync.counters.last_failure, TIMEOUT_S
    )
    assert first.sync.counters.rollouts == 1
    first.recorder.record(rollout(3))
    first.recorder.stop(TIMEOUT_S)
    first.index.wait_idle()
    assert len(first.index.rollouts("p")) == 2
    assert [record.rollout_id for record in records_of(server.url)] == ["rollout 2"]


def test_a_full_server_loses_rollouts_until_it_has_space(server: Server) -> None:
    engine = Engine(server.url, "tokenizer", "run")
    engine.recorder.start()
    engine.recorder.record(rollout(1))
    wait_for(lambda: recorded(engine) == 1, TIMEOUT_S)
    server.client().config_set("maxmemory", 1)
    engine.recorder.record(rollout(2))
    wait_for(lambda: engine.recorder.counters.lost == 1, TIMEOUT_S)
    server.client().config_set("maxmemory", 0)
    engine.recorder.record(rollout(3))
    wait_for(lambda: recorded(engine) == 2, TIMEOUT_S)
    engine.recorder.stop(TIMEOUT_S)
    engine.close()
    assert set(generations_of(server.url)) == {"rollout 1", "rollout 3"}


def test_a_slow_server_loses_nothing(server: Server) -> None:
    proxy = Proxy(server.port)
    proxy.delay(0.25)  # in each direction
    engine = Engine(f"redis://127.0.0.1:{proxy.port}", "tokenizer", "run")
    record_all(engine.recorder, [rollout(number) for number in range(20)])
    assert (recorded(engine), engine.recorder.counters.lost) == (20, 0)
    engine.close()
    proxy.close()


def test_a_rollout_that_its_problem_refuses_is_lost(redis_url: str) -> None:
    connect_history(redis_url).set(KEYS.log("p"), "not a stream")
    engine = Engine(redis_url, "tokenizer", "run")
    record_all(engine.recorder, [rollout(1), rollout(2, problem="q")])
    engine.close()
    assert (recorded(engine), engine.recorder.counters.lost) == (1, 1)


def stuck_recorder() -> tuple[RolloutRecorder, threading.Event]:
    """Return a recorder that is in the middle of a write, as to a server that does not answer, until the event."""
    release, is_stuck = threading.Event(), threading.Event()

    class StuckHistory(IndexHistory):
        def use(self, problems: object) -> None:
            is_stuck.set()
            release.wait()

    recorder = RolloutRecorder(StuckHistory(SuffixIndex(), window=2), lambda _: None)
    recorder.start()
    recorder.use("p")
    assert is_stuck.wait(TIMEOUT_S)
    return recorder, release


def test_rollouts_are_lost_rather_than_waited_for() -> None:
    recorder, release = stuck_recorder()
    for number in range(5000):
        recorder.record(rollout(number))
    assert recorder.counters.lost == 5000 - 4096
    release.set()
    recorder.stop(TIMEOUT_S)
    assert recorder.counters.recorded == 4096
    assert "rollout-recorder" not in {thread.name for thread in threading.enumerate()}
