"""The thread that keeps an index up to date with a history, with a real Redis and a real index."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect, connect_history
from rollout_store.history.known_lengths import KnownLengths
from rollout_store.history.maintenance.maintainer import HistoryMaintainer
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore, encode_drafter_state
from rollout_store.history.sync import DrafterStatistics, HistorySink, HistorySync
from rollout_worker.drafting.index import SuffixIndex
from tests.support.recording_sink import RecordingSink, name, names
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

KEYS = HistoryKeys("default", "math")


@pytest.fixture
def store(history_url: str) -> HistoryStore:
    return HistoryStore(connect_history(history_url), KEYS, window=2)


@pytest.fixture
def index() -> SuffixIndex:
    return SuffixIndex()


@contextmanager
def running(
    url: str,
    sink: HistorySink,
    window: int = 2,
    statistics: DrafterStatistics | None = None,
    lengths: KnownLengths | None = None,
) -> Iterator[HistorySync]:
    """Synchronize *sink* until the block ends."""
    store = HistoryStore(connect_history(url), KEYS, window=window)
    syncing = HistorySync(store, sink, statistics=statistics, lengths=lengths, feedback_interval=0.1)
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
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def sync_to_sink(history_url: str, sink: RecordingSink) -> Iterator[HistorySync]:
    with running(history_url, sink) as syncing:
        yield syncing


@pytest.fixture
def second_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second read of a problem fail once."""
    reading, reads = HistoryStore.read, []

    def read(*arguments: Any, **options: Any) -> Any:
        reads.append(arguments)
        if len(reads) == 2:
            raise redis.ConnectionError("connection lost")
        return reading(*arguments, **options)

    monkeypatch.setattr(HistoryStore, "read", read)


def append(store: HistoryStore, problem: str, rollout_id: str, generation: int, context: int = 0) -> None:
    tokens, before = np.arange(10, dtype=np.uint32), np.arange(context, dtype=np.uint32)
    record = HistoryRecord(rollout_id, "run", generation, generation, tokens, "stop", before)
    store.append(problem, record, newest=generation)


def num_reward_reads(url: str) -> int:
    """Return how often lengths, which contain the rewards, were read."""
    client = connect_history(url)
    if isinstance(client, redis.Redis):
        stats = [client.info("commandstats")]
    else:
        stats = list(client.info("commandstats", target_nodes="primaries").values())
    return sum(counters.get("cmdstat_hgetall", {"calls": 0})["calls"] for counters in stats)


def wait_for_report(sink: RecordingSink) -> None:
    """Wait until a report that begins after this call has ended."""
    before = sink.num_reports
    wait_for(lambda: sink.num_reports >= before + 2, 10)  # the second one begins after the end of the first


def test_rollouts_that_leave_the_window_are_dropped(store: HistoryStore, index: SuffixIndex, sync: HistorySync) -> None:
    for generation in (1, 20):
        append(store, "p", str(generation), generation)
    append(store, "q", "other", 1)
    sync.announce(["p", "q"])
    assert sync.wait_ready(10)
    assert index.rollouts("p") == names("1", "20")
    append(store, "p", "50", 50)
    wait_for(lambda: index.rollouts("p") == names("20", "50"), 10)
    assert index.rollouts("q") == names("other")


def test_rollouts_of_all_reads_have_their_rewards(sink: RecordingSink, history_url: str) -> None:
    """This also holds if the first reads only return rollouts outside the window."""
    wide = HistoryStore(connect_history(history_url), KEYS, window=9)
    wide.metadata.open("tokenizer")
    for generation in range(1, 5):
        names = [f"{generation}-{number}" for number in range(300)]
        some = [("p", HistoryRecord(name, "run", 1, generation, np.arange(1), "stop")) for name in names]
        wide.append_all(some, newest=generation)
        wide.set_rewards("p", dict.fromkeys(names, 0.5))
    with running(history_url, sink) as sync:
        sync.announce(["p"])
        assert sync.wait_ready(10)
        rewards = [rollout[4] for rollout in sink.problems["p"].values()]
    assert [0.5] * 600 == rewards


@pytest.mark.parametrize("vocabulary", [1000, None])
def test_rollouts_with_token_ids_outside_the_vocabulary_are_skipped(
    store: HistoryStore, index: SuffixIndex, vocabulary: int | None
) -> None:
    """Such ids might crash the model, and 2**32 - 1 is not a token id at all."""
    options = {} if vocabulary is None else {"vocabulary": vocabulary}
    syncing = HistorySync(store, index, **options)
    limit = vocabulary or 2**32 - 1
    for rollout_id, tokens, context in (
        ("a", [limit - 1], []),
        ("b", [5, limit], []),
        ("c", [5], [limit]),
        ("d", [5], [5]),
    ):
        ids, before = np.array(tokens, dtype=np.uint32), np.array(context, dtype=np.uint32)
        store.append("p", HistoryRecord(rollout_id, "run", 1, 1, ids, "stop", before), newest=1)
    syncing.start()
    try:
        syncing.announce(["p"])
        assert syncing.wait_ready(10)
    finally:
        syncing.stop()
    assert names("a", "d") == index.rollouts("p")
    assert (2, 2) == (syncing.counters.rollouts, syncing.counters.corrupt)


@pytest.mark.usefixtures("second_read_fails")
def test_use_of_a_problem_is_recorded_even_if_a_read_fails(
    store: HistoryStore, sink: RecordingSink, history_url: str
) -> None:
    for problem in ("p", "q"):
        for number in range(600):
            append(store, problem, str(number), 1)
    client = connect_history(history_url)
    before = {problem: client.zscore(KEYS.last_used(KEYS.shard_of(problem)), problem) for problem in ("p", "q")}
    with running(history_url, sink) as sync:
        sync.announce(["p", "q"])
        assert sync.wait_ready(10)
        for problem, then in before.items():
            wait_for(lambda p=problem, t=then: client.zscore(KEYS.last_used(KEYS.shard_of(p)), p) > t, 10)


@pytest.mark.usefixtures("second_read_fails")
def test_failed_read_is_continued(store: HistoryStore, sink: RecordingSink, history_url: str) -> None:
    for number in range(600):
        append(store, "p", str(number), 1)
    store.set_rewards("p", {"599": 0.5})
    with running(history_url, sink) as sync:
        sync.announce(["p"])
        assert sync.wait_ready(10)
        assert 1 == sync.counters.failures
        assert 600 == len(sink.problems["p"])
        assert [0.5] == [rollout[4] for rollout in sink.problems["p"].values() if rollout[4] is not None]


def test_problem_without_rollouts_can_be_announced_again(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync
) -> None:
    append(store, "p", "a", 1)
    sync.announce(["p", "empty"])
    assert sync.wait_ready(10)
    sync.announce([])
    assert sync.wait_ready(10)
    assert 1 == sync.num_known_problems, "the problem without rollouts is forgotten"
    sync.announce(["empty"])
    append(store, "empty", "b", 1)
    wait_for(lambda: names("b") == index.rollouts("empty"), 10)
    assert names("a") == index.rollouts("p")


def test_rollouts_outside_the_window_are_not_loaded(index: SuffixIndex, sync: HistorySync, history_url: str) -> None:
    """They may still be in a block, or another job may have a larger window."""
    wide = HistoryStore(connect_history(history_url), KEYS, window=9)
    wide.metadata.open("tokenizer")
    for generation in range(1, 6):
        append(wide, "p", str(generation), generation)
        if generation == 3:
            MaintenanceOperations(wide).compact("p")
    sync.announce(["p"])
    assert sync.wait_ready(10)
    assert index.rollouts("p") == names("4", "5")
    assert 2 == sync.counters.rollouts


def test_corrupt_record_is_skipped_and_counted(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync, history_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    append(store, "p", "a", 1)
    connect_history(history_url).xadd(KEYS.log("p"), {"i": "bad", "g": 1, "d": b"\x93\x01"})
    append(store, "p", "b", 1)
    sync.announce(["p"])
    assert sync.wait_ready(10)
    assert index.rollouts("p") == names("a", "b")
    assert (sync.counters.rollouts, sync.counters.corrupt) == (2, 1)
    assert "of problem p, which cannot be read" in caplog.text


def test_synchronization_continues_after_an_outage(index: SuffixIndex, tmp_path: Path) -> None:
    with Server(tmp_path) as server, running(server.url, index) as sync:
        append(HistoryStore(connect(server.url), KEYS, window=2), "p", "a", 1)
        sync.announce(["p"])
        assert sync.wait_ready(10)
        server.pause()
        wait_for(lambda: sync.counters.failures > 0, 20)
        server.resume()
        append(HistoryStore(connect(server.url), KEYS, window=2), "p", "b", 1)
        wait_for(lambda: index.rollouts("p") == names("a", "b"), 20)


def test_rollouts_are_loaded_with_context_and_reward(
    store: HistoryStore, sink: RecordingSink, sync_to_sink: HistorySync
) -> None:
    for number in range(600):  # more than one batch
        append(store, "p", str(number), 1, context=number % 3)
    store.set_rewards("p", {"1": 0.5, "599": 1.0})
    sync_to_sink.announce(["p"])
    assert sync_to_sink.wait_ready(10)
    kept = sink.problems["p"]
    assert {name("1"): 0.5, name("599"): 1.0} == {key: row[4] for key, row in kept.items() if row[4] is not None}
    assert [number % 3 for number in range(600)] == [len(row[3]) for row in kept.values()]
    assert [] == sink.rewards


def test_rewards_are_read_again_when_the_problem_is_requested_again(
    store: HistoryStore, sink: RecordingSink, sync_to_sink: HistorySync, history_url: str
) -> None:
    for rollout in ("a", "b"):
        append(store, "p", rollout, 1)
    store.set_rewards("p", {"a": 0.5})
    sync_to_sink.announce(["p"])
    assert sync_to_sink.wait_ready(10)
    store.set_rewards("p", {"b": 0.25})
    reads = num_reward_reads(history_url)
    append(store, "p", "c", 1)
    wait_for(lambda: name("c") in sink.problems["p"], 10)  # rollouts are polled
    sync_to_sink.announce(["p"], wanted=[])
    assert sync_to_sink.wait_ready(10)
    assert reads == num_reward_reads(history_url)
    for _ in range(2):
        sync_to_sink.announce(["p"])
        assert sync_to_sink.wait_ready(10)
    assert reads + 2 == num_reward_reads(history_url)
    store.set_rewards("p", {"a": 0.75, "c": -1.0})
    append(store, "p", "d", 1)
    store.set_rewards("p", {"d": 2.0})
    sync_to_sink.announce(["p"], wanted=["p"])
    assert sync_to_sink.wait_ready(10)
    expected = {"a": 0.75, "b": 0.25, "c": -1.0, "d": 2.0}
    found = {key: row[4] for key, row in sink.problems["p"].items()}
    assert {name(rollout): reward for rollout, reward in expected.items()} == found
    assert 0 == sync_to_sink.num_partly_read_problems


def test_problem_is_read_once_it_is_requested_and_continues_from_there(
    store: HistoryStore, sink: RecordingSink, sync_to_sink: HistorySync
) -> None:
    for problem in ("p", "q"):
        append(store, problem, "a", 1)
    sync_to_sink.announce(["p", "q"], wanted=["p", "never announced"])
    assert sync_to_sink.wait_ready(10)
    assert ["p"] == list(sink.problems)
    sync_to_sink.announce(["q"])
    assert sync_to_sink.wait_ready(10)
    append(store, "p", "b", 1)
    append(store, "q", "b", 1)
    wait_for(lambda: names("a", "b") == list(sink.problems["q"]), 10)
    assert names("a") == list(sink.problems["p"])
    sync_to_sink.announce(["p", "q"], wanted=[])
    assert sync_to_sink.wait_ready(10)
    assert names("a", "b") == list(sink.problems["p"])
    assert 4 == sync_to_sink.counters.rollouts  # each rollout was read once


@pytest.fixture
def small_sink(history_url: str) -> Iterator[tuple[HistorySync, RecordingSink]]:
    """A sink that holds two problems, and the thread that fills it."""
    sink = RecordingSink(max_problems=2)
    with running(history_url, sink) as syncing:
        yield syncing, sink


def test_evicted_problem_is_read_again_when_it_is_requested(
    store: HistoryStore, small_sink: tuple[HistorySync, RecordingSink]
) -> None:
    sync, sink = small_sink
    for problem in ("p", "q", "r"):
        for rollout in ("a", "b"):
            append(store, problem, rollout, 1)
        store.set_rewards(problem, {"a": 0.5})
    for problem in ("p", "q", "r"):
        sync.announce(["p", "q", "r"], wanted=[problem])
        assert sync.wait_ready(10)
    assert ["q", "r"] == list(sink.problems)
    assert 1 == sync.counters.evictions
    # Neither polling nor announcements in which it is not requested load it again.
    append(store, "p", "c", 1)
    append(store, "q", "c", 1)
    wait_for(lambda: name("c") in sink.problems["q"], 10)
    sync.announce(["p", "q", "r"], wanted=["q"])
    assert sync.wait_ready(10)
    sync.announce(["p", "q", "r"], wanted=[])
    assert sync.wait_ready(10)
    assert {"q", "r"} == sink.problems.keys()
    assert (7, 1) == (sync.counters.rollouts, sync.counters.evictions)
    sync.announce(["p", "q", "r"], wanted=["p"])
    assert sync.wait_ready(10)
    rewards = dict(zip(names("a", "b", "c"), [0.5, None, None], strict=True))
    assert rewards == {key: row[4] for key, row in sink.problems["p"].items()}
    assert (10, 2) == (sync.counters.rollouts, sync.counters.evictions)


def test_problems_that_do_not_fit_together_are_not_read_again_and_again(
    store: HistoryStore, small_sink: tuple[HistorySync, RecordingSink]
) -> None:
    sync, sink = small_sink
    problems = [str(number) for number in range(6)]
    for problem in problems:
        for number in range(520):  # more than one batch
            append(store, problem, str(number), 1)
    sync.announce(problems)
    assert sync.wait_ready(30)
    # Several polls take place, because rollouts of a problem in the sink arrive with polls. They read nothing else.
    resident, read = list(sink.problems)[-1], sync.counters.rollouts
    for number in range(1, 4):
        append(store, resident, f"later-{number}", 1)
        wait_for(lambda expected=read + number: sync.counters.rollouts >= expected, 10)
        assert read + number == sync.counters.rollouts
    for _ in range(2):
        for problem in problems:
            sync.announce(problems, wanted=[problem])
            assert sync.wait_ready(30)
            assert 520 + 3 * (problem == resident) == len(sink.problems[problem])


def test_problems_in_the_index_are_complete_in_any_order_of_appends_and_requests(
    store: HistoryStore, small_sink: tuple[HistorySync, RecordingSink]
) -> None:
    sync, sink = small_sink
    rng = random.Random(0)
    stored: dict[str, list[str]] = {problem: [] for problem in "pqrst"}
    for number in range(150):
        for problem in rng.sample(list(stored), 3):
            append(store, problem, str(number), 1)
            stored[problem].append(str(number))
        announced = rng.sample(list(stored), 4)
        sync.announce(announced, wanted=announced[:1])
        assert sync.wait_ready(10)
        assert not stored[announced[0]] or announced[0] in sink.problems
        for problem in sink.problems.keys() & set(announced):
            assert names(*stored[problem]) == list(sink.problems[problem])
    assert sync.counters.evictions > 10


def append_length(store: HistoryStore, problem: str, generation: int, length: int, *, cut_off: bool = False) -> None:
    tokens = np.arange(length, dtype=np.uint32)
    rollout_id = f"{problem} {generation} {length}"
    reason = "length" if cut_off else "stop"
    record = HistoryRecord(rollout_id, "run", generation, generation, tokens, reason)
    store.append(problem, record, newest=generation)


def test_lengths_follow_the_window_of_the_index(store: HistoryStore, index: SuffixIndex, history_url: str) -> None:
    lengths = KnownLengths()
    with running(history_url, index, lengths=lengths) as sync:
        for generation, length in ((1, 10), (1, 20), (2, 30)):
            append_length(store, "p", generation, length, cut_off=length == 20)
        sync.announce(["p"])
        assert sync.wait_ready(10)
        assert lengths.of_problem("p") == LengthStats.from_lengths([(1, 10, False), (1, 20, True), (2, 30, False)])
        assert lengths.overall().count == 3
        append_length(store, "p", 3, 40)
        expected = LengthStats.from_lengths([(2, 30, False), (3, 40, False)])
        wait_for(lambda: lengths.of_problem("p") == expected, 10)
        assert lengths.of_problem("q").count == 0


def test_lengths_of_an_evicted_problem_are_read_again(store: HistoryStore, history_url: str) -> None:
    lengths, problems = KnownLengths(), ["p", "q", "r"]
    with running(history_url, RecordingSink(max_problems=2), lengths=lengths) as sync:
        for number, problem in enumerate(problems, start=1):
            append_length(store, problem, 1, 10 * number)
        for wanted in (*problems, "p"):
            sync.announce(problems, wanted=[wanted])
            assert sync.wait_ready(10)
            known = {problem: lengths.of_problem(problem).longest for problem in problems}
            assert lengths.overall().count == sum(length > 0 for length in known.values())
        assert known == {"p": 10, "q": 0, "r": 30}


def test_lengths_are_not_counted_twice_after_the_history_has_lost_data(
    store: HistoryStore, index: SuffixIndex, history_url: str
) -> None:
    lengths = KnownLengths()
    with running(history_url, index, lengths=lengths) as sync:
        append_length(store, "p", 1, 10)
        sync.announce(["p"])
        assert sync.wait_ready(10)
        connect_history(history_url).flushall()
        wait_for(lambda: lengths.of_problem("p").count == 0, 10)
        append_length(store, "p", 1, 10)
        append_length(store, "p", 1, 20)
        wait_for(lambda: lengths.of_problem("p").longest == 20, 10)
        assert (lengths.of_problem("p").count, lengths.overall().count) == (2, 2)


def test_requested_problem_is_not_evicted_by_an_update_of_another(
    store: HistoryStore, small_sink: tuple[HistorySync, RecordingSink]
) -> None:
    sync, sink = small_sink
    for problem in ("p", "q"):
        append(store, problem, "a", 1)
        sync.announce(["p", "q"], wanted=[problem])
        assert sync.wait_ready(10)
    sync.announce(["p", "q", "r"], wanted=["p"])  # there is nothing new
    assert sync.wait_ready(10)
    append(store, "r", "a", 1)
    sync.announce(["p", "q", "r"], wanted=["r"])
    assert sync.wait_ready(10)
    assert ["p", "r"] == list(sink.problems)


def test_drafter_state_is_saved_and_loaded_by_the_next_engine(sink: RecordingSink, history_url: str) -> None:
    store = HistoryStore(connect_history(history_url), KEYS, window=2)
    with running(history_url, sink) as sync:
        sync.announce([])
        assert sync.wait_ready(10)
        wait_for_report(sink)
        assert store.drafter_state() is None, "nothing was learned yet"
        sink.state, sink.verified_tokens = b"state 1", 1000
        wait_for(lambda: store.drafter_state() == b"state 1", 10)
        sink.state, sink.verified_tokens = b"state 2", 1010
        wait_for_report(sink)
        assert store.drafter_state() == b"state 1", "10 more tokens are too few"
        sink.verified_tokens = 2000
        wait_for(lambda: store.drafter_state() == b"state 2", 10)
    other = RecordingSink()
    with running(history_url, other) as sync:
        sync.announce([])
        assert sync.wait_ready(10)
        assert other.state == b"state 2"


def test_the_learned_state_may_comprise_more_than_that_of_the_index(sink: RecordingSink, history_url: str) -> None:
    store = HistoryStore(connect_history(history_url), KEYS, window=2)
    statistics = RecordingSink()
    sink.state, sink.verified_tokens = b"index", 1000
    statistics.state, statistics.verified_tokens = b"index and gain", 1000
    with running(history_url, sink, statistics=statistics) as syncing:
        syncing.announce([])
        wait_for(lambda: store.drafter_state() == b"index and gain", 10)


@pytest.mark.parametrize("failure", [redis.ConnectionError("unreachable"), redis.exceptions.ClusterDownError("moving")])
def test_drafter_state_is_loaded_after_a_transient_failure(
    failure: redis.RedisError, sink: RecordingSink, history_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore(connect_history(history_url), KEYS, window=2)
    append(store, "p", "a", 1)
    store.save_drafter_state(b"state")
    load, failures = HistoryStore.drafter_state, [failure]

    def fail_once(self: HistoryStore) -> bytes | None:
        if failures:
            raise failures.pop()
        return load(self)

    monkeypatch.setattr(HistoryStore, "drafter_state", fail_once)
    syncing = HistorySync(store, sink)
    syncing.announce(["p"])
    syncing.start()
    try:
        assert syncing.wait_ready(10)
        assert names("a") == list(sink.problems["p"])
        assert sink.state == b"state"
    finally:
        syncing.stop()


@pytest.mark.parametrize("stored", [b"", b"damaged", b"not a state"])
def test_unreadable_drafter_state_is_reported_and_replaced(
    stored: bytes,
    sink: RecordingSink,
    history_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = connect_history(history_url)
    store = HistoryStore(client, KEYS, window=2)
    append(store, "p", "a", 1)
    if stored:
        store.save_drafter_state(stored)
    else:
        client.rpush(KEYS.drafter_state, "a list")
    if stored == b"damaged":
        whole: Any = client.get(KEYS.drafter_state)
        client.set(KEYS.drafter_state, whole[:-1])
    with running(history_url, sink) as sync:
        sync.announce(["p"])
        assert sync.wait_ready(10)
        assert names("a") == list(sink.problems["p"])
        assert sink.state == b"initial"
        (message,) = [record.getMessage() for record in caplog.records]
        assert KEYS.drafter_state in message
        sink.state, sink.verified_tokens = b"state", 1000
        whole = encode_drafter_state(b"state")
        wait_for(lambda: client.type(KEYS.drafter_state) == b"string" and client.get(KEYS.drafter_state) == whole, 10)


def test_changes_are_found_after_the_clock_of_the_server_was_set_back(
    store: HistoryStore, index: SuffixIndex, sync: HistorySync, history_url: str
) -> None:
    """This happens after a failover to a server whose clock is an hour behind."""
    client = connect_history(history_url)
    append(store, "p", "a", 1)
    shard, ahead = KEYS.shard_of("p"), 3600
    client.zincrby(KEYS.last_changed(shard), ahead * 1e6, "p")
    client.zincrby(KEYS.last_used(shard), ahead, "p")
    last = int(client.xinfo_stream(KEYS.log("p"))["last-generated-id"].split(b"-")[0])
    client.xadd(KEYS.log("p"), {"g": 1, "d": b"?"}, id=f"{last + ahead * 1000}-0")
    client.xdel(KEYS.log("p"), f"{last + ahead * 1000}-0")
    sync.announce(["p"])
    assert sync.wait_ready(10)
    for number, rollout in enumerate("bcd", 2):
        append(store, "p", rollout, 1)
        wait_for(lambda count=number: len(index.rollouts("p")) == count, 10)
    assert names("a", "b", "c", "d") == index.rollouts("p")
    maintainer = HistoryMaintainer(client, KEYS, token="a")
    assert (plan := maintainer.plan()).unused < 60
    assert not plan.expired
    assert not maintainer.run_once().counts.unreadable
