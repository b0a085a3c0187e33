"""A history where platform engineers put it: Cluster, Sentinel, TLS, ACL users; and what happens to such servers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.access_rules import access_rules, service_rules
from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.history.connection import connect_history, retry
from rollout_worker.history.maintenance import HistoryMaintainer, new_token
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import START, Appended, HistoryMismatchError, HistoryStore, histories
from rollout_worker.history.sync import HistorySync
from tests.support.recording_sink import name, names
from tests.support.redis_servers import Certificates, Cluster, Sentinels, Server, until

KEYS = HistoryKeys("default", "math")
PROBLEMS = [f"p{number}" for number in range(12)]


def record(rollout_id: str, generation: int = 1, tokens: int = 50) -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(tokens, dtype=np.uint32), "stop")


def store_at(url: str) -> HistoryStore:
    return HistoryStore(connect_history(url), KEYS, window=4)


def in_history(store: HistoryStore) -> Counter[str]:
    slices = store.read(dict.fromkeys(PROBLEMS, START), count=1_000_000)
    return Counter(one.rollout_id for found in slices.values() for one in found.records)


class Writer:
    """Appends as a relay does: a rollout that failed is tried again."""

    def __init__(self, url: str) -> None:
        self.acknowledged: dict[str, float] = {}
        """Rollout → when its append had been answered."""
        self.failures = 0
        self._store = store_at(url)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            some = [(PROBLEMS[one % len(PROBLEMS)], record(str(one))) for one in range(number, number + 8)]
            try:
                became = self._store.append_all(some, newest=1)
            except redis.RedisError:
                self.failures += 1
                time.sleep(0.05)
                continue
            assert all(one in (Appended.NEW, Appended.KNOWN) for one in became), became
            self.acknowledged |= dict.fromkeys((one.rollout_id for _, one in some), time.monotonic())
            number += 8


def test_slots_move_while_rollouts_are_appended_and_each_is_there_once(cluster: Cluster) -> None:
    connect_history(cluster.url).flushall()
    writer = Writer(cluster.url)
    with writer.writing():
        for problem in PROBLEMS[:4]:
            time.sleep(0.2)
            move = cluster.begin_move(KEYS.log(problem))
            time.sleep(0.1)  # between the two nodes: what is there is asked for here, what is not there
            move.migrate(1)
            time.sleep(0.1)
            move.migrate()
            move.finish()
        time.sleep(0.3)
        cluster.move_slot(KEYS.changed(KEYS.shard(PROBLEMS[0])))
        time.sleep(0.3)
    cluster.wait_until_ok()
    assert len(writer.acknowledged) > 200
    found = in_history(store_at(cluster.url))
    assert set(writer.acknowledged) <= set(found)
    assert {1} == set(found.values())
    lengths = Counter(entry.key for problem in PROBLEMS for entry in store_at(cluster.url).lengths(problem))
    assert {1} == set(lengths.values())
    assert len(found) == len(lengths)


def test_a_history_is_spread_over_a_cluster(cluster: Cluster) -> None:
    connect_history(cluster.url).flushall()
    store = store_at(cluster.url)
    store.open("tokenizer")
    for problem in PROBLEMS:
        store.append(problem, record("a"), newest=1)
        assert store.compact(problem)
    keys = [len(server.client().keys("*")) for server in cluster.servers]
    assert all(count > 5 for count in keys)
    assert [KEYS] == histories(connect_history(cluster.url))


def test_after_a_failover_appends_and_readers_go_on_and_nothing_is_there_twice(tmp_path: Path) -> None:
    with Sentinels(tmp_path) as sentinels:
        writer, index = Writer(sentinels.url), SuffixIndex()
        sync = HistorySync(store_at(sentinels.url), index)
        sync.start()
        sync.announce(PROBLEMS, 1)
        try:
            with writer.writing():
                time.sleep(1.5)
                killed = time.monotonic()
                sentinels.fail_over()
                after = time.monotonic()
                deadline = after + 30
                while not any(when > after for when in writer.acknowledged.values()):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                time.sleep(0.5)
            found = in_history(store_at(sentinels.url))
            # replication is asynchronous: what was acknowledged just before the kill may be lost, by Redis' own rules
            lasting = {name for name, when in writer.acknowledged.items() if when < killed - 0.5 or when > after}
            assert len(lasting) > 100
            assert lasting <= set(found)
            assert {1} == set(found.values())
            deadline = time.monotonic() + 30
            wanted = {name(rollout) for rollout, when in writer.acknowledged.items() if when > after}
            while not wanted <= {one for problem in PROBLEMS for one in index.rollouts(problem)}:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            sync.stop()


def test_a_server_that_comes_back_empty_makes_the_history_begin_anew_and_nobody_takes_it_for_old(
    tmp_path: Path,
) -> None:
    with Server(tmp_path) as server:
        store, index = store_at(server.url), SuffixIndex()
        store.open("tokenizer", "model", max_bytes=10_000)
        for version in range(9):
            store.publish("run", version)
        store.append("p0", record("before", 9))
        sync = HistorySync(store_at(server.url), index)
        sync.start()
        try:
            sync.announce(["p0"], 9)
            assert sync.wait_ready(10)
            server.restart()  # without persistence
            assert Appended.NEW == retry(lambda: store.append("p0", record("after", 9)))
            assert 10 == store.publish("run", 9)
            assert Appended.NEW == store.append("p0", record("later", 10))
            deadline = time.monotonic() + 20
            while names("before", "after", "later") != index.rollouts("p0"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            about = store.about()
            assert about is not None
            assert ("tokenizer", "model", 10, 10_000) == (
                about.tokenizer,
                about.model,
                about.generation,
                about.max_bytes,
            )
            assert [KEYS] == histories(connect_history(server.url))
            with pytest.raises(HistoryMismatchError):
                store_at(server.url).open("another tokenizer")
        finally:
            sync.stop()


def test_who_knows_less_does_not_set_the_generations_back_of_a_history_that_begins_anew(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        stores = [store_at(server.url) for _ in range(3)]
        for store in stores:
            store.open("tokenizer")
        engine, relay, other = stores
        assert [10, 10] == [max(store.publish("run", version) for version in range(10)) for store in stores[:2]]
        server.restart()  # without persistence
        assert 11 == retry(lambda: engine.publish("run", 10))
        assert Appended.NEW == retry(lambda: relay.append("p0", record("late", 10)))
        assert 12 == retry(lambda: other.publish("other run", 0))


def test_nothing_is_appended_to_what_another_tokenizer_has_made_of_a_history_that_went(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        store, other = store_at(server.url), store_at(server.url)
        store.open("tokenizer")
        assert Appended.NEW == store.append("p0", record("a", 1))
        server.restart()  # without persistence
        retry(lambda: other.open("another tokenizer"))
        with pytest.raises(HistoryMismatchError, match="holds rollouts of another tokenizer"):
            retry(lambda: store.append("p0", record("b", 1)))
        assert {} == in_history(other)


def test_a_server_that_was_killed_with_its_append_only_file_has_lost_nothing(tmp_path: Path) -> None:
    with Server(tmp_path, appendonly=True) as server:
        writer = Writer(server.url)
        with writer.writing():
            for _ in range(3):
                time.sleep(0.4)
                server.kill()
                failures = writer.failures
                until(lambda known=failures: writer.failures > known, "an append failed")  # type: ignore[misc]
                server.start()
            time.sleep(0.4)
        found = in_history(store_at(server.url))
        assert len(writer.acknowledged) > 100
        assert set(writer.acknowledged) <= set(found)
        assert {1} == set(found.values())


def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    with Server(tmp_path / "server", certificates=certificates, password="secret") as server:
        store = store_at(server.url)
        store.append("p0", record("a"), newest=1)
        assert {"a": 1} == in_history(store)
        with pytest.raises(redis.ConnectionError):
            store_at(server.url.partition("?")[0]).generation()  # whose authority nobody knows
    with Cluster(tmp_path / "cluster", certificates=certificates, password="secret") as cluster:
        store = store_at(cluster.url)
        for problem in PROBLEMS:
            store.append(problem, record(problem), newest=1)
        assert dict.fromkeys(PROBLEMS, 1) == in_history(store)


def test_the_shipped_rules_suffice_for_a_job_and_for_the_service_and_keep_jobs_apart(tmp_path: Path) -> None:
    users = [
        f"job on >one {' '.join(access_rules('default', 'job', 'uid', 'math'))}",
        f"other on >two {' '.join(access_rules('default', 'other', 'uid2', 'code'))}",
        f"service on >three {' '.join(service_rules())}",
    ]
    with Server(tmp_path, password="admin", users=users) as server:
        job, other, service = (
            server.url_of(*login) for login in (("job", "one"), ("other", "two"), ("service", "three"))
        )
        store = store_at(job)
        store.open("tokenizer", "model", max_bytes=2**20)
        store.publish("run", 1)
        assert Appended.NEW == store.append("p0", record("a"))
        store.reward("p0", {"a": 1.0})
        store.use(["p0"])
        store.report_ages({0: (10.0, 5.0)})
        assert 1 == store.length_stats("p0").count == store.length_stats().count
        assert {"a": 1} == in_history(store)
        with pytest.raises(redis.exceptions.NoPermissionError):
            store_at(other).append("p0", record("b"))
        with pytest.raises(redis.exceptions.NoPermissionError):
            store_at(other).read({"p0": START})
        keeper = HistoryMaintainer(connect_history(service), KEYS, token=new_token())
        assert keeper.run_once().plan is not None
        looking = store_at(service)
        assert looking.compact("p0")
        assert {"a": 1} == in_history(looking)
        assert [] != looking.drop(looking.problems())
        looking.delete()
        assert [] == histories(connect_history(service))
