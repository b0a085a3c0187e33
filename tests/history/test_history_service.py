"""The history service: it maintains all histories of a server, and survives failures of Redis."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_api.protocol.keys import HISTORY_NAMES, HistoryKeys
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.metadata import list_histories
from rollout_store.history.store import HistoryStore
from rollout_store.history_service.service import HistoryService
from tests.support.history_contents import KEYS, OTHER, WINDOW, age_history, fill, open_history, problem_ids
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

DAY_S = 86400.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, appendonly=True) as server:
        yield server


def new_service(url: str) -> HistoryService:
    """Return a service with short intervals and timeouts."""
    token = f"service-{os.urandom(4).hex()}"
    return HistoryService(lambda: connect_history(url, timeout=0.5), token=token, interval=0.2)


@contextmanager
def run_service(url: str) -> Iterator[HistoryService]:
    """Run a service in a thread until the block ends or the service is stopped."""
    service = new_service(url)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(10)
        assert not thread.is_alive()


def holds_lease(service: HistoryService) -> bool:
    return any(state.lease_held for state in service.state.histories)


def test_unreadable_histories_do_not_prevent_maintenance_of_the_others(running: Server) -> None:
    client: Any = connect_history(running.url)
    fill(open_history(client, max_bytes=1), ["p"])
    wrong_meta = HistoryKeys("default", "wrong-meta")
    fill(open_history(client, wrong_meta), ["p"])
    client.hset(wrong_meta.meta, "generation", "many")
    wrong_shard = HistoryKeys("default", "b/with{braces}/and spaces")
    client.sadd(HISTORY_NAMES, wrong_shard.full_name)
    client.set(wrong_shard.last_used(0), "not a sorted set")
    with run_service(running.url) as service:
        wait_for(lambda: len(service.state.histories) == 3, 20, "Not all histories are found.")
        states = {state.history: state for state in service.state.histories}
        wait_for(
            lambda: all(state.runs or state.failed_runs for state in states.values()),
            20,
            "Not every history has its turn.",
        )
        failed = [states[keys.full_name].failed_runs for keys in (wrong_meta, wrong_shard, KEYS)]
        assert [1, 1, 0] == failed, "a failed run is not repeated at once"
        assert 1 == states[KEYS.full_name].counts.evicted
        assert service.state.redis_up
    assert 0 == sum(client.exists(keys.maintainer_lease) for keys in (KEYS, wrong_meta, wrong_shard))


def test_service_continues_after_an_outage_of_redis(running: Server, caplog: pytest.LogCaptureFixture) -> None:
    client: Any = connect_history(running.url)
    store = open_history(client, max_bytes=1)
    with run_service(running.url) as service:
        wait_for(lambda: service.state.redis_up and service.state.histories, 20, "Redis is not considered available.")
        running.kill()
        wait_for(lambda: not service.state.redis_up, 20, "The outage is not reported.")
        assert "ConnectionError" in service.state.failure
        assert not service.state.histories[0].lease_held
        running.start()
        fill(store, ["p"])
        wait_for(lambda: service.state.histories[0].counts.evicted == 1, 40, "The problem is not evicted.")
        assert service.state.redis_up
        assert [] == problem_ids(store)
    assert "Histories are not being maintained: ConnectionError" in caplog.text


def test_service_starts_before_redis_and_ends_while_redis_hangs(running: Server) -> None:
    running.kill()
    service = new_service(running.url)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        wait_for(lambda: "ConnectionError" in service.state.failure, 20, "The outage is not reported.")
        running.start()
        open_history(connect_history(running.url))
        wait_for(lambda: holds_lease(service), 20, "The service does not hold the lease.")
        running.pause()
    finally:
        service.stop()
        started = time.monotonic()
        thread.join(20)
        running.resume()
    assert not thread.is_alive()
    assert time.monotonic() - started < 15


def test_service_forgets_deleted_histories_and_deletes_expired_ones(running: Server) -> None:
    client: Any = connect_history(running.url)
    fill(open_history(client), ["p"])
    fill(open_history(client, OTHER), ["p"])
    age_history(client, OTHER, 31 * DAY_S)
    with run_service(running.url) as service:
        wait_for(lambda: service.state.expired == 1, 20, "No history expires.")
        assert [KEYS.full_name] == [state.history for state in service.state.histories]
        MaintenanceOperations(HistoryStore(client, KEYS, window=WINDOW)).delete_history()
        wait_for(lambda: service.state.histories == (), 20, "The other history is not forgotten.")
    assert [] == list_histories(client)
    assert 0 == client.exists(KEYS.maintainer_lease, OTHER.maintainer_lease)


def test_second_service_takes_over_when_the_first_ends(running: Server) -> None:
    open_history(connect_history(running.url))
    with run_service(running.url) as first:
        wait_for(lambda: holds_lease(first), 20, "The first service does not hold the lease.")
        with run_service(running.url) as second:
            wait_for(lambda: second.state.redis_up, 20, "The second service does not try to get the lease.")
            assert not holds_lease(second)
            first.stop()
            wait_for(lambda: holds_lease(second), 20, "The second service does not hold the lease.")
