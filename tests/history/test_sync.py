"""The background thread that keeps an index up to date, against a real Redis and a real index."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.history.connection import connect, connect_history
from rollout_worker.history.learned import encode_learned
from rollout_worker.history.maintenance import HistoryMaintainer
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore
from rollout_worker.history.sync import HistorySink, HistorySync
from tests.support.recording_sink import Memory, name, names

KEYS = HistoryKeys("default", "math")


@pytest.fixture
def store(history_url: str) -> HistoryStore:
    return HistoryStore(connect_history(history_url), KEYS, window=2)


@pytest.fixture
def index() -> SuffixIndex:
    return SuffixIndex()


@contextmanager
def running(url: str, sink: HistorySink, window: int = 2) -> Iterator[HistorySync]:
    syncing = HistorySync(HistoryStore(connect_history(url), KEYS, window=window), sink)
    syncing.start()
    try:
        yield syncing
    finally:
        syncing.stop()


@pytest.fixture
def sync(history_url: str, index: SuffixIndex) -> Iterator[HistorySync]:
    with running(history_url, index) as syncing:
        yield syncing


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def remembering(history_url: str, memory: Memory) -> Iterator[HistorySync]:
    with running(history_url, memory) as syncing:
        yield syncing


@pytest.fixture
def second_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the connection breaks between two pages, once."""
    reading, reads = HistoryStore.read, []

    def read(*arguments: Any, **options: Any) -> Any:
        reads.append(arguments)
        if len(reads) == 2:
            raise redis.ConnectionError("gone")
        return reading(*arguments, **options)

    monkeypatch.setattr(HistoryStore, "read", read)


def append(store: HistoryStore, problem: str, rollout_id: str, generation: int, context: int = 0) -> None:
    tokens, before = np.arange(10, dtype=np.uint32), np.arange(context, dtype=np.uint32)
    record = HistoryRecord(rollout_id, "run", generation, generation, tokens, "stop", before)
    store.append(problem, record, newest=generation)


def reads_of_rewards(url: str) -> int:
    client = connect_history(url)
    if isinstance(client, redis.Redis):
        stats = [client.info("commandstats")]
    else:
        stats = list(client.info("commandstats", target_nodes="primaries").values())
    return sum(one.get("cmdstat_hgetall", {"calls": 0})["calls"] for one in stats)


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
    assert index.rollouts("p") == names("p1")
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
    assert eventually(lambda: index.rollouts("p") == names("later"))


def test_what_leaves_the_window_is_dropped(store: HistoryStore, index: SuffixIndex, sync: HistorySync) -> None:
    for generation in (1, 20):
        append(store, "p", str(generation), generation)
    append(store, "q", "other", 1)
    sync.announce(["p", "q"], 50)
    assert sync.wait_ready(10)
    assert index.rollouts("p") == names("1", "20")
    append(store, "p", "50", 50)
    assert eventually(lambda: index.rollouts("p") == names("20", "50"))
    assert index.rollouts("q") == names("other")


def test_rewards_come_with_rollouts_of_all_pages(memory: Memory, history_url: str) -> None:
    """Also where the first pages hold what is behind the window."""
    wide = HistoryStore(connect_history(history_url), KEYS, window=9)
    wide.open("tokenizer")
    for generation in range(1, 5):
        names = [f"{generation}-{number}" for number in range(300)]
        some = [("p", HistoryRecord(name, "run", 1, generation, np.arange(1), "stop")) for name in names]
        wide.append_all(some, newest=generation)
        wide.reward("p", dict.fromkeys(names, 0.5))
    with running(history_url, memory) as sync:
        sync.announce(["p"], 4)
        assert sync.wait_ready(10)
        rewards = [rollout[4] for rollout in memory.problems["p"].values()]
    assert [0.5] * 600 == rewards


@pytest.mark.parametrize("vocabulary", [1000, None])
def test_rollouts_with_ids_of_another_model_are_left_out_and_the_rest_is_loaded(
    store: HistoryStore, index: SuffixIndex, history_url: str, vocabulary: int | None
) -> None:
    """The model might not survive being asked about them, and nor would the thread those that stand for no token."""
    options = {} if vocabulary is None else {"vocabulary": vocabulary}
    syncing = HistorySync(store, index, **options)
    least = vocabulary or 2**32 - 1
    for name_, tokens, context in (("a", [least - 1], []), ("b", [5, least], []), ("c", [5], [least]), ("d", [5], [5])):
        ids, before = np.array(tokens, dtype=np.uint32), np.array(context, dtype=np.uint32)
        store.append("p", HistoryRecord(name_, "run", 1, 1, ids, "stop", before), newest=1)
    syncing.start()
    try:
        syncing.announce(["p"], 1)
        assert syncing.wait_ready(10)
    finally:
        syncing.stop()
    assert names("a", "d") == index.rollouts("p")
    assert (2, 2) == (syncing.counters.rollouts, syncing.counters.corrupt)


@pytest.mark.usefixtures("second_read_fails")
def test_what_is_drafted_from_is_said_though_a_read_fails_halfway(
    store: HistoryStore, memory: Memory, history_url: str
) -> None:
    for problem in ("p", "q"):
        for number in range(600):
            append(store, problem, str(number), 1)
    client = connect_history(history_url)
    before = {problem: client.zscore(KEYS.used(KEYS.shard(problem)), problem) for problem in ("p", "q")}
    with running(history_url, memory) as sync:
        sync.announce(["p", "q"], 1)
        assert sync.wait_ready(10)
        for problem, then in before.items():
            assert eventually(lambda p=problem, t=then: client.zscore(KEYS.used(KEYS.shard(p)), p) > t)  # type: ignore[misc]


@pytest.mark.usefixtures("second_read_fails")
def test_a_read_that_fails_between_two_pages_goes_on_there(
    store: HistoryStore, memory: Memory, history_url: str
) -> None:
    for number in range(600):
        append(store, "p", str(number), 1)
    store.reward("p", {"599": 0.5})
    with running(history_url, memory) as sync:
        sync.announce(["p"], 1)
        assert sync.wait_ready(10)
        assert 1 == sync.counters.failures
        assert 600 == len(memory.problems["p"])
        assert [0.5] == [rollout[4] for rollout in memory.problems["p"].values() if rollout[4] is not None]


def test_what_is_not_announced_any_more_and_has_nothing_is_forgotten(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync
) -> None:
    append(store, "p", "a", 1)
    sync.announce(["p", "of which nothing comes"], 1)
    assert sync.wait_ready(10)
    sync.announce([], 1)
    assert sync.wait_ready(10)
    assert ["p"] == list(sync._cursors)
    sync.announce(["of which nothing comes"], 1)
    append(store, "of which nothing comes", "b", 1)
    assert eventually(lambda: names("b") == index.rollouts("of which nothing comes"))


def test_what_is_behind_the_window_is_never_brought_in(index: SuffixIndex, sync: HistorySync, history_url: str) -> None:
    """A block may hold it still, or a job that keeps more."""
    wide = HistoryStore(connect_history(history_url), KEYS, window=9)
    wide.open("tokenizer")
    for generation in range(1, 6):
        append(wide, "p", str(generation), generation)
        if generation == 3:
            wide.compact("p")
    sync.announce(["p"], 5)
    assert sync.wait_ready(10)
    assert index.rollouts("p") == names("4", "5")
    assert 2 == sync.counters.rollouts


def test_a_corrupt_record_is_counted_and_the_rest_is_loaded(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync, history_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    append(store, "p", "a", 1)
    connect_history(history_url).xadd(KEYS.log("p"), {"i": "bad", "g": 1, "d": b"\x93\x01"})
    append(store, "p", "b", 1)
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    assert index.rollouts("p") == names("a", "b")
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
        assert eventually(lambda: index.rollouts("p") == names("a", "b"), timeout=20)
    finally:
        os.kill(pid, signal.SIGCONT)
        sync.stop()
        server.stop()
        os.close(lock)


def test_rollouts_come_with_their_context_and_the_reward_they_have_by_then(
    store: HistoryStore, memory: Memory, remembering: HistorySync
) -> None:
    for number in range(600):  # more than one batch
        append(store, "p", str(number), 1, context=number % 3)
    store.reward("p", {"1": 0.5, "599": 1.0})
    remembering.announce(["p"], 1)
    assert remembering.wait_ready(10)
    kept = memory.problems["p"]
    assert {name("1"): 0.5, name("599"): 1.0} == {one: row[4] for one, row in kept.items() if row[4] is not None}
    assert [number % 3 for number in range(600)] == [len(row[3]) for row in kept.values()]
    assert [] == memory.rewards


def test_rewards_are_read_again_when_the_problem_is_wanted_again(
    store: HistoryStore, memory: Memory, remembering: HistorySync, history_url: str
) -> None:
    for rollout in ("a", "b"):
        append(store, "p", rollout, 1)
    store.reward("p", {"a": 0.5})
    remembering.announce(["p"], 1)
    assert remembering.wait_ready(10)
    store.reward("p", {"b": 0.25})
    reads = reads_of_rewards(history_url)
    append(store, "p", "c", 1)
    assert eventually(lambda: name("c") in memory.problems["p"])  # it is polled
    remembering.announce(["p"], 1, wanted=[])
    assert remembering.wait_ready(10)
    assert reads == reads_of_rewards(history_url)
    for _ in range(2):
        remembering.announce(["p"], 1)
        assert remembering.wait_ready(10)
    assert reads + 2 == reads_of_rewards(history_url)
    store.reward("p", {"a": 0.75, "c": -1.0})
    append(store, "p", "d", 1)
    store.reward("p", {"d": 2.0})
    remembering.announce(["p"], 1, wanted=["p"])
    assert remembering.wait_ready(10)
    wanted = {"a": 0.75, "b": 0.25, "c": -1.0, "d": 2.0}
    found = {one: row[4] for one, row in memory.problems["p"].items()}
    assert {name(rollout): reward for rollout, reward in wanted.items()} == found
    assert not remembering._rewards  # each rollout has its own in the index


def test_what_was_never_wanted_is_not_read_and_what_comes_back_goes_on(
    store: HistoryStore, memory: Memory, remembering: HistorySync
) -> None:
    for problem in ("p", "q"):
        append(store, problem, "a", 1)
    remembering.announce(["p", "q"], 1, wanted=["p", "never announced"])
    assert remembering.wait_ready(10)
    assert ["p"] == list(memory.problems)
    remembering.announce(["q"], 1)
    assert remembering.wait_ready(10)
    append(store, "p", "b", 1)
    append(store, "q", "b", 1)
    assert eventually(lambda: names("a", "b") == list(memory.problems["q"]))
    assert names("a") == list(memory.problems["p"])
    remembering.announce(["p", "q"], 1, wanted=[])
    assert remembering.wait_ready(10)
    assert names("a", "b") == list(memory.problems["p"])
    assert 4 == remembering.counters.rollouts  # each was read once


@pytest.fixture
def small(history_url: str) -> Iterator[tuple[HistorySync, Memory]]:
    memory = Memory(most=2)
    with running(history_url, memory) as syncing:
        yield syncing, memory


def test_what_was_thrown_out_is_read_again_whole_when_it_is_wanted_and_not_before(
    store: HistoryStore, small: tuple[HistorySync, Memory]
) -> None:
    sync, memory = small
    for problem in ("p", "q", "r"):
        for rollout in ("a", "b"):
            append(store, problem, rollout, 1)
        store.reward(problem, {"a": 0.5})
    for problem in ("p", "q", "r"):
        sync.announce(["p", "q", "r"], 1, wanted=[problem])
        assert sync.wait_ready(10)
    assert ["q", "r"] == list(memory.problems)
    assert 1 == sync.counters.evictions
    # neither polls, nor announcements for others' sake or of another generation, bring it back
    append(store, "p", "c", 1)
    append(store, "q", "c", 1)
    assert eventually(lambda: name("c") in memory.problems["q"])
    sync.announce(["p", "q", "r"], 2, wanted=["q"])
    assert sync.wait_ready(10)
    sync.announce(["p", "q", "r"], 2, wanted=[])
    assert sync.wait_ready(10)
    assert {"q", "r"} == memory.problems.keys()
    assert (7, 1) == (sync.counters.rollouts, sync.counters.evictions)
    sync.announce(["p", "q", "r"], 2, wanted=["p"])
    assert sync.wait_ready(10)
    rewards = dict(zip(names("a", "b", "c"), [0.5, None, None], strict=True))
    assert rewards == {one: row[4] for one, row in memory.problems["p"].items()}
    assert (10, 2) == (sync.counters.rollouts, sync.counters.evictions)


def test_what_is_thrown_out_while_nobody_announces_it_is_whole_when_it_comes_back(
    store: HistoryStore, small: tuple[HistorySync, Memory]
) -> None:
    sync, memory = small
    for problem in ("p", "q", "r"):
        append(store, problem, "a", 1)
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    sync.announce(["q", "r"], 1)
    assert sync.wait_ready(10)
    append(store, "p", "b", 1)
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    assert names("a", "b") == list(memory.problems["p"])


def test_histories_that_do_not_fit_together_are_each_read_once_and_none_has_gaps(
    store: HistoryStore, small: tuple[HistorySync, Memory]
) -> None:
    sync, memory = small
    problems = [str(number) for number in range(6)]
    for problem in problems:
        for number in range(520):  # more than one batch
            append(store, problem, str(number), 1)
    sync.announce(problems, 1)
    assert sync.wait_ready(30)
    read = sync.counters.rollouts
    time.sleep(1)
    assert read == sync.counters.rollouts
    for _ in range(2):
        for problem in problems:
            sync.announce(problems, 1, wanted=[problem])
            assert sync.wait_ready(30)
            assert 520 == len(memory.problems[problem])


def test_whatever_is_kept_is_whole_in_whatever_order_histories_grow_and_are_wanted(
    store: HistoryStore, small: tuple[HistorySync, Memory]
) -> None:
    sync, memory = small
    rng = random.Random(0)
    there: dict[str, list[str]] = {problem: [] for problem in "pqrst"}
    for number in range(150):
        for problem in rng.sample(list(there), 3):
            append(store, problem, str(number), 1)
            there[problem].append(str(number))
        announced = rng.sample(list(there), 4)
        sync.announce(announced, 1, wanted=announced[:1])
        assert sync.wait_ready(10)
        assert not there[announced[0]] or announced[0] in memory.problems
        for problem in memory.problems.keys() & set(announced):
            assert names(*there[problem]) == list(memory.problems[problem])
    assert sync.counters.evictions > 10


def test_what_is_about_to_start_is_not_thrown_out_for_what_is_merely_kept_up_to_date(
    store: HistoryStore, small: tuple[HistorySync, Memory]
) -> None:
    sync, memory = small
    for problem in ("p", "q"):
        append(store, problem, "a", 1)
        sync.announce(["p", "q"], 1, wanted=[problem])
        assert sync.wait_ready(10)
    sync.announce(["p", "q", "r"], 1, wanted=["p"])  # which brings nothing new
    assert sync.wait_ready(10)
    append(store, "r", "a", 1)
    sync.announce(["p", "q", "r"], 1, wanted=["r"])
    assert sync.wait_ready(10)
    assert ["p", "r"] == list(memory.problems)


def test_lengths_are_known_without_asking_redis(
    store: HistoryStore, remembering: HistorySync, history_url: str
) -> None:
    assert 0 == remembering.length_stats("p").count == remembering.length_stats().count
    for number, length in enumerate((10, 20, 30)):
        cut = "length" if length == 30 else "stop"
        tokens = np.arange(length, dtype=np.uint32)
        store.append("p", HistoryRecord(str(number), "run", 1, 1, tokens, cut), newest=1)
    remembering.announce(["p"], 1)
    assert remembering.wait_ready(10)
    stats = remembering.length_stats("p")
    assert (3, 30, 1 / 3) == (stats.count, stats.longest, pytest.approx(stats.longer(25)))
    assert 1.0 == remembering.length_stats("never announced").longer(1)


def test_acceptance_by_age_is_reported_and_what_is_behind_the_services_horizon_is_dropped(
    memory: Memory, history_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_worker.history.sync._REPORT_S", 0.1)
    store = HistoryStore(connect_history(history_url), KEYS, window=4)
    for generation in (1, 2, 3, 4):
        append(store, "p", str(generation), generation)
    with running(history_url, memory, window=4) as sync:
        sync.announce(["p"], 5)
        assert sync.wait_ready(10)
        assert names("1", "2", "3", "4") == list(memory.problems["p"])
        assert eventually(lambda: sync.length_stats().count == 4)
        memory.ages = {0: (10.0, 5.0), 1: (4.0, 0.0)}
        assert eventually(lambda: store.ages() == {0: (10.0, 5.0), 1: (4.0, 0.0)})
        memory.ages = {0: (12.0, 6.0), 1: (4.0, 0.0)}
        assert eventually(lambda: store.ages() == {0: (12.0, 6.0), 1: (4.0, 0.0)})
        store.set_horizon(4)
        assert eventually(lambda: names("2", "3", "4") == list(memory.problems["p"]))
        sync.announce(["p"], 60)
        assert eventually(lambda: names("3", "4") == list(memory.problems["p"]))


def test_what_an_engine_learns_is_there_for_those_that_begin_before_their_first_rollout(
    memory: Memory, history_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_worker.history.sync._REPORT_S", 0.1)
    store = HistoryStore(connect_history(history_url), KEYS, window=2)
    with running(history_url, memory) as sync:
        sync.announce([], 1)
        assert sync.wait_ready(10)
        time.sleep(0.3)
        assert store.learned() is None  # nobody knows anything yet
        memory.knows, memory.verified_tokens = b"of drafts, this", 1000
        assert eventually(lambda: store.learned() == b"of drafts, this")
        memory.knows, memory.verified_tokens = b"of drafts, a little more", 1010
        time.sleep(0.3)
        assert store.learned() == b"of drafts, this"
        memory.verified_tokens = 2000
        assert eventually(lambda: store.learned() == b"of drafts, a little more")
    other = Memory()
    with running(history_url, other) as sync:
        sync.announce([], 1)
        assert sync.wait_ready(10)
        assert other.knows == b"of drafts, a little more"


@pytest.mark.parametrize("failure", [redis.ConnectionError("away"), redis.exceptions.ClusterDownError("moving")])
def test_what_was_learned_and_what_is_wanted_are_read_though_the_server_is_away_at_first(
    failure: redis.RedisError, memory: Memory, history_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore(connect_history(history_url), KEYS, window=2)
    append(store, "p", "a", 1)
    store.keep_learned(b"of drafts")
    learned, failures = HistoryStore.learned, [failure]

    def fail_once(self: HistoryStore) -> bytes | None:
        if failures:
            raise failures.pop()
        return learned(self)

    monkeypatch.setattr(HistoryStore, "learned", fail_once)
    syncing = HistorySync(store, memory)
    syncing.announce(["p"], 1)
    syncing.start()
    try:
        assert syncing.wait_ready(10)
        assert names("a") == list(memory.problems["p"])
        assert memory.knows == b"of drafts"
    finally:
        syncing.stop()


@pytest.mark.parametrize("kept", [b"", b"damaged", b"too long for its frame"])
def test_what_cannot_be_read_of_what_was_learned_is_said_and_learned_anew(
    kept: bytes, memory: Memory, history_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout_worker.history.sync._REPORT_S", 0.1)
    client = connect_history(history_url)
    store = HistoryStore(client, KEYS, window=2)
    append(store, "p", "a", 1)
    if kept:
        store.keep_learned(kept)
    else:
        client.rpush(KEYS.learned, "a list")
    if kept == b"damaged":
        whole: Any = client.get(KEYS.learned)
        client.set(KEYS.learned, whole[:-1])
    with running(history_url, memory) as sync:
        sync.announce(["p"], 1)
        assert sync.wait_ready(10)
        assert names("a") == list(memory.problems["p"])
        assert memory.knows == b"nothing"
        (said,) = [record.getMessage() for record in caplog.records]
        assert KEYS.learned in said
        memory.knows, memory.verified_tokens = b"of drafts", 1000
        whole = encode_learned(b"of drafts")
        assert eventually(lambda: client.type(KEYS.learned) == b"string" and client.get(KEYS.learned) == whole)


def test_a_server_whose_clock_is_set_back_is_followed(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync, history_url: str
) -> None:
    """As after a failover to one that is an hour behind; by then the readers have seen the later times."""
    client = connect_history(history_url)
    append(store, "p", "a", 1)
    shard, ahead = KEYS.shard("p"), 3600
    client.zincrby(KEYS.changed(shard), ahead * 1e6, "p")
    client.zincrby(KEYS.used(shard), ahead, "p")
    last = int(client.xinfo_stream(KEYS.log("p"))["last-generated-id"].split(b"-")[0])
    client.xadd(KEYS.log("p"), {"g": 1, "d": b"?"}, id=f"{last + ahead * 1000}-0")
    client.xdel(KEYS.log("p"), f"{last + ahead * 1000}-0")
    sync.announce(["p"], 1)
    assert sync.wait_ready(10)
    for number, rollout in enumerate("bcd", 2):
        append(store, "p", rollout, 1)
        assert eventually(lambda count=number: len(index.rollouts("p")) == count)  # type: ignore[misc]
    assert names("a", "b", "c", "d") == index.rollouts("p")
    keeper = HistoryMaintainer(client, KEYS, token="a")
    assert (plan := keeper.plan()).unused < 60
    assert not plan.expired
    assert not keeper.run_once().failed
