"""A history on a Redis Cluster, behind Sentinels, with TLS and with ACL users, while servers fail and slots move."""

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
from rollout_api.redis_client.connection import connect_history
from rollout_api.redis_client.retry import retry
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.metadata import HistoryMismatchError, list_histories
from rollout_store.history.records import START, HistoryRecord
from rollout_store.history.store import AppendResult, HistoryStore
from rollout_store.history.sync import HistorySync
from rollout_worker.drafting.index import SuffixIndex
from tests.support.recording_sink import name, names
from tests.support.redis_servers import Cluster, Sentinels, Server
from tests.support.waiting import wait_for

KEYS = HistoryKeys("default", "math")
PROBLEMS = [f"p{number}" for number in range(12)]


def record(rollout_id: str, generation: int = 1, tokens: int = 50) -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(tokens, dtype=np.uint32), "stop")


def store_at(url: str) -> HistoryStore:
    return HistoryStore(connect_history(url), KEYS, window=4)


def stored_rollouts(store: HistoryStore) -> Counter[str]:
    """Return how often the history contains each rollout."""
    slices = store.read(dict.fromkeys(PROBLEMS, START), count=1_000_000)
    return Counter(record.rollout_id for found in slices.values() for record in found.records)


class Writer:
    """Appends rollouts in a thread, as the relay does: failed appends are repeated."""

    def __init__(self, url: str) -> None:
        self.acknowledged: dict[str, float] = {}
        """Rollout id → when its append was acknowledged, by ``time.monotonic()``."""
        self.attempts = self.failures = 0
        """Number of batches that were attempted, and that failed."""
        self._store = store_at(url)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Append rollouts until the block ends."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join(60)
        assert not self._thread.is_alive()

    def wait_for_appends(self, count: int = 40) -> None:
        """Wait until *count* further rollouts are appended."""
        before = len(self.acknowledged)
        wait_for(lambda: len(self.acknowledged) >= before + count, 20, "No rollouts are appended.")

    def wait_for_attempt(self) -> None:
        """Wait until a batch that was started after this call has been appended or has failed."""
        before = self.attempts
        wait_for(lambda: self.attempts >= before + 2, 20, "No appends are attempted.")

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            self.attempts += 1
            batch = [(PROBLEMS[i % len(PROBLEMS)], record(str(i))) for i in range(number, number + 8)]
            try:
                results = self._store.append_all(batch, newest=1)
            except redis.RedisError:
                self.failures += 1
                time.sleep(0.05)
                continue
            assert all(result in (AppendResult.APPENDED, AppendResult.DUPLICATE) for result in results), results
            self.acknowledged |= dict.fromkeys((rollout.rollout_id for _, rollout in batch), time.monotonic())
            number += 8


def test_each_rollout_is_stored_once_while_slots_are_migrated(cluster: Cluster) -> None:
    connect_history(cluster.url).flushall()
    writer = Writer(cluster.url)
    with writer.writing():
        for problem in PROBLEMS[:4]:
            writer.wait_for_appends()
            move = cluster.begin_move(KEYS.log(problem))
            writer.wait_for_attempt()  # the keys are still on the old node
            move.migrate(1)
            writer.wait_for_attempt()  # some keys are on each node, so appends may fail until the others follow
            move.migrate()
            move.finish()
        writer.wait_for_appends()
        cluster.move_slot(KEYS.last_changed(KEYS.shard_of(PROBLEMS[0])))
        writer.wait_for_appends()
    cluster.wait_until_ok()
    assert len(writer.acknowledged) > 200
    found = stored_rollouts(store_at(cluster.url))
    assert set(writer.acknowledged) <= set(found)
    assert {1} == set(found.values())
    statistics = store_at(cluster.url).statistics
    lengths = Counter(entry.key for problem in PROBLEMS for entry in statistics.length_entries(problem))
    assert {1} == set(lengths.values())
    assert len(found) == len(lengths)


def test_history_is_spread_over_the_nodes_of_a_cluster(cluster: Cluster) -> None:
    connect_history(cluster.url).flushall()
    store = store_at(cluster.url)
    store.metadata.open("tokenizer")
    for problem in PROBLEMS:
        store.append(problem, record("a"), newest=1)
        assert MaintenanceOperations(store).compact(problem)
    keys = [len(server.client().keys("*")) for server in cluster.servers]
    assert all(count > 5 for count in keys)
    assert [KEYS] == list_histories(connect_history(cluster.url))


def test_writers_and_readers_continue_after_a_failover(tmp_path: Path) -> None:
    with Sentinels(tmp_path) as sentinels:
        writer, index = Writer(sentinels.url), SuffixIndex()
        sync = HistorySync(store_at(sentinels.url), index)
        sync.start()
        sync.announce(PROBLEMS)
        try:
            with writer.writing():
                wait_for(lambda: len(writer.acknowledged) > 100, 20, "Few rollouts are appended.")
                replicated_until = time.monotonic()
                with connect_history(sentinels.url) as client:
                    client.set("marker", 1)
                    assert 1 == client.wait(1, 5000), "the replica has the marker and everything before it"
                sentinels.fail_over()
                after = time.monotonic()
                wait_for(
                    lambda: any(when > after for when in list(writer.acknowledged.values())),
                    20,
                    "Appends do not continue.",
                )
                writer.wait_for_appends()
            found = stored_rollouts(store_at(sentinels.url))
            # Replication is asynchronous: rollouts that were acknowledged just before the failover may be lost.
            acknowledged = writer.acknowledged.items()
            replicated = {rollout for rollout, when in acknowledged if when < replicated_until or when > after}
            assert len(replicated) > 100
            assert replicated <= set(found)
            assert {1} == set(found.values())
            expected = {name(rollout) for rollout, when in acknowledged if when > after}
            wait_for(
                lambda: expected <= {rollout_id for problem in PROBLEMS for rollout_id in index.rollouts(problem)},
                30,
                "The index lacks rollouts.",
            )
        finally:
            sync.stop()


def test_history_is_created_again_after_its_server_lost_it(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        store, index = store_at(server.url), SuffixIndex()
        store.metadata.open("tokenizer", "model", max_bytes=10_000)
        for version in range(9):
            store.metadata.publish("run", version)
        store.append("p0", record("before", 9))
        sync = HistorySync(store_at(server.url), index)
        sync.start()
        try:
            sync.announce(["p0"])
            assert sync.wait_ready(10)
            server.restart()  # it loses its data
            assert AppendResult.APPENDED == retry(lambda: store.append("p0", record("after", 9)))
            assert 10 == store.metadata.publish("run", 9)
            assert AppendResult.APPENDED == store.append("p0", record("later", 10))
            expected = names("before", "after", "later")
            wait_for(lambda: expected == index.rollouts("p0"), 20, "The index lacks the new rollouts.")
            info = store.metadata.info()
            assert info is not None
            assert ("tokenizer", "model", 10, 10_000) == (info.tokenizer, info.model, info.generation, info.max_bytes)
            assert [KEYS] == list_histories(connect_history(server.url))
            with pytest.raises(HistoryMismatchError):
                store_at(server.url).metadata.open("another tokenizer")
        finally:
            sync.stop()


def test_generations_continue_after_data_loss_whoever_publishes_first(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        stores = [store_at(server.url) for _ in range(3)]
        for store in stores:
            store.metadata.open("tokenizer")
        engine, relay, other = stores
        assert [10, 10] == [
            max(store.metadata.publish("run", version) for version in range(10)) for store in stores[:2]
        ]
        server.restart()  # it loses its data
        assert 11 == retry(lambda: engine.metadata.publish("run", 10))
        assert AppendResult.APPENDED == retry(lambda: relay.append("p0", record("late", 10)))
        assert 12 == retry(lambda: other.metadata.publish("other run", 0))


def test_rollouts_are_rejected_if_another_tokenizer_took_the_name_of_a_lost_history(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        store, other = store_at(server.url), store_at(server.url)
        store.metadata.open("tokenizer")
        assert AppendResult.APPENDED == store.append("p0", record("a", 1))
        server.restart()  # it loses its data
        retry(lambda: other.metadata.open("another tokenizer"))
        with pytest.raises(HistoryMismatchError, match="holds rollouts of another tokenizer"):
            retry(lambda: store.append("p0", record("b", 1)))
        assert {} == stored_rollouts(other)


def test_killed_server_with_an_append_only_file_loses_no_rollout(tmp_path: Path) -> None:
    with Server(tmp_path, appendonly=True) as server:
        writer = Writer(server.url)
        with writer.writing():
            for _ in range(3):
                writer.wait_for_appends()
                server.kill()
                failures = writer.failures
                wait_for(lambda known=failures: writer.failures > known, 20, "No append fails.")
                server.start()
            writer.wait_for_appends()
        found = stored_rollouts(store_at(server.url))
        assert len(writer.acknowledged) > 100
        assert set(writer.acknowledged) <= set(found)
        assert {1} == set(found.values())
