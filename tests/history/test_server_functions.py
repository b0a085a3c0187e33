"""Server functions: many calls in one round trip, on a server and on a cluster, whatever a node knows or lacks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_worker.history.connection import connect_history, retry
from rollout_worker.history.server_functions import Call, Function, run, run_all
from tests.support.redis_servers import Cluster, Server, until

PUBLISH = Function("publish")


def published(*keys: str) -> list[Call]:
    """Calls that each return 1 the first time, and ever after."""
    return [Call(PUBLISH, [key], ["run:0", 0]) for key in keys]


KEYS = [f"{{{number}}}:meta" for number in range(64)]
"""In slots of all nodes."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server | Cluster]]:
    directory: Path = tmp_path_factory.mktemp("servers")
    with Server(directory / "one") as server, Cluster(directory / "cluster") as cluster:
        yield {"server": server, "cluster": cluster}


@pytest.fixture(params=["server", "cluster"])
def running(request: pytest.FixtureRequest, servers: dict[str, Server | Cluster]) -> Server | Cluster:
    server = servers[request.param]
    for node in nodes(server):
        with contextlib.closing(node.client()) as client:
            client.flushall()
            client.script_flush()
            client.config_resetstat()
    return server


@pytest.fixture
def cluster(servers: dict[str, Server | Cluster]) -> Cluster:
    cluster = servers["cluster"]
    assert isinstance(cluster, Cluster)
    for node in cluster.servers:
        with contextlib.closing(node.client()) as client:
            client.flushall()
    return cluster


@pytest.fixture
def client(running: Server | Cluster) -> Iterator[Any]:
    with connect_history(running.url) as client:
        yield client


def nodes(running: Server | Cluster) -> list[Server]:
    return running.servers if isinstance(running, Cluster) else [running]


def commands(running: Server | Cluster, name: str) -> int:
    """How often a command was carried out by all nodes together."""
    counts = [
        node.client().info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"] for node in nodes(running)
    ]
    return sum(counts)


def test_a_function_is_loaded_when_it_is_missing_and_then_called_by_its_name(
    client: Any, running: Server | Cluster
) -> None:
    assert [1] * 64 == run_all(client, published(*KEYS))
    assert (64, 64) == (commands(running, "evalsha"), commands(running, "eval"))
    assert [1] * 64 == run_all(client, published(*KEYS))
    assert (128, 64) == (commands(running, "evalsha"), commands(running, "eval"))


def test_what_one_server_has_forgotten_is_repeated_alone(client: Any, running: Server | Cluster) -> None:
    run_all(client, published(*KEYS))
    nodes(running)[-1].client().script_flush()
    before = commands(running, "eval")
    assert [1] * 64 == run_all(client, published(*KEYS))
    expected = [key for key in KEYS if isinstance(running, Server) or running.owner(key) is nodes(running)[-1]]
    assert len(expected) == commands(running, "eval") - before > 0


def test_many_calls_take_one_round_trip(client: Any, running: Server | Cluster) -> None:
    run_all(client, published(*KEYS))
    before = {node.port: node.client().info("stats")["total_reads_processed"] for node in nodes(running)}
    run_all(client, published(*KEYS))
    for node in nodes(running):
        # one for the calls, and those of this and the last INFO with their handshakes
        assert node.client().info("stats")["total_reads_processed"] - before[node.port] < 12


def test_one_bad_key_fails_alone(client: Any, running: Server | Cluster) -> None:
    client.set(KEYS[3], "no hash")
    replies = run_all(client, published(*KEYS))
    (bad,) = [reply for reply in replies if reply != 1]
    assert replies.index(bad) == 3
    assert isinstance(bad, redis.ResponseError)
    assert "WRONGTYPE" in str(bad)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        run(client, published(KEYS[3])[0])


def test_no_calls_are_no_round_trip(client: Any) -> None:
    assert [] == run_all(client, [])


def test_a_full_server_is_not_the_fault_of_a_call(client: Any, running: Server | Cluster) -> None:
    full = nodes(running)[-1].client()
    full.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            run_all(client, published(*KEYS))
    finally:
        full.config_set("maxmemory", 0)
    assert [1] * 64 == run_all(client, published(*KEYS))


def test_a_replica_is_not_the_fault_of_a_call(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "primary") as primary,
        Server(tmp_path / "replica", settings={"replicaof": f"127.0.0.1 {primary.port}"}) as replica,
        connect_history(replica.url) as client,
    ):
        until(lambda: replica.client().info("replication")["master_link_status"] == "up", "the replica follows")
        with pytest.raises(redis.exceptions.ReadOnlyError):
            run_all(client, published("key"))


def test_a_user_that_may_not_is_told(tmp_path: Path) -> None:
    with (
        Server(tmp_path, users=["reader on >secret ~* +@read +evalsha +eval"]) as server,
        connect_history(server.url_of("reader", "secret")) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        run_all(client, published("key"))


def test_a_server_that_was_started_anew_is_given_its_functions_again(tmp_path: Path) -> None:
    with Server(tmp_path, appendonly=True) as server, connect_history(server.url) as client:
        assert [1, 1] == run_all(client, published("a", "b"))
        server.restart()
        assert [1, 1] == retry(run_all, client, published("a", "b"))


def test_a_server_that_is_away_raises(tmp_path: Path) -> None:
    with Server(tmp_path) as server, connect_history(server.url) as client:
        assert [1] == run_all(client, published("a"))
        server.kill()
        with pytest.raises(redis.ConnectionError):
            run_all(client, published("a"))


def test_a_slot_that_has_moved_is_found(cluster: Cluster) -> None:
    with connect_history(cluster.url) as client:
        run_all(client, published(*KEYS))
        for key in KEYS[:3]:
            cluster.move_slot(key)
        assert [1] * 64 == run_all(client, published(*KEYS))
        assert {b"generation": b"1", b"generation:run:0": b"1"} == client.hgetall(KEYS[0])  # type: ignore[comparison-overlap]


def test_a_slot_on_the_move_is_followed(cluster: Cluster) -> None:
    key, other = "{7}:meta", "{7}:other"
    with connect_history(cluster.url) as client:
        assert [1] == run_all(client, published(key))
        move = cluster.begin_move(key)
        assert [1, 1] == run_all(client, published(key, other)), "one on the old node, one that is not there yet"
        move.migrate()
        assert [1, 1] == run_all(client, published(key, other))
        move.target.client().script_flush()
        assert [1, 1] == run_all(client, published(key, other)), "the new node lacks the function"
        move.finish()
        assert [1, 1] == run_all(client, published(key, other))


def test_a_slot_moves_to_a_node_that_has_none(tmp_path: Path) -> None:
    with Cluster(tmp_path, primaries=2, empty=1) as cluster, connect_history(cluster.url) as client:
        cluster.servers.insert(0, cluster.servers.pop())  # the empty one is the target
        key = "{7}:meta"
        move = cluster.begin_move(key)
        assert 0 == move.target.client().dbsize()
        assert [1] == run_all(client, published(key))
        assert 1 == move.target.client().dbsize()
        reading = client.pipeline(transaction=False)
        reading.hget(key, "generation")
        assert [b"1"] == reading.execute()
        move.finish()
        assert [1] == run_all(client, published(key))


def test_slots_that_move_all_the_time_lose_nothing(cluster: Cluster) -> None:
    """Every publish of a version counts once, while the slot goes round the nodes."""
    key, stop = "{13}:meta", threading.Event()
    done: list[int] = []

    def write() -> None:
        with connect_history(cluster.url) as client:
            version = 0
            while not stop.is_set():
                done.append(retry(run, client, Call(PUBLISH, [key], [f"run:{version}", 0])))
                version += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(10):
            cluster.move_slot(key)
    finally:
        stop.set()
        writing.join()
    assert list(range(1, len(done) + 1)) == done
    assert len(done) > 10


def test_a_node_that_is_silent_costs_seconds_and_not_minutes(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, connect_history(cluster.url, timeout=0.5) as client:
        run_all(client, published(*KEYS))
        cluster.servers[1].pause()
        began = time.monotonic()
        try:
            with pytest.raises((redis.TimeoutError, redis.ConnectionError, redis.exceptions.ClusterDownError)):
                run_all(client, published(*KEYS))
            reading = client.pipeline(transaction=False)
            for key in KEYS:
                reading.hget(key, "generation")
            with pytest.raises((redis.TimeoutError, redis.ConnectionError, redis.exceptions.ClusterDownError)):
                reading.execute()
        finally:
            cluster.servers[1].resume()
        assert time.monotonic() - began < 10
        cluster.wait_until_ok()
        assert [1] * 64 == retry(run_all, client, published(*KEYS))


def test_a_node_that_comes_back_is_used_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, appendonly=True) as cluster, connect_history(cluster.url, timeout=1) as client:
        assert [1] * 64 == run_all(client, published(*KEYS))
        cluster.servers[0].kill()
        with pytest.raises(redis.RedisError):
            run_all(client, published(*KEYS))
        cluster.servers[0].start()
        cluster.wait_until_ok()
        assert [1] * 64 == retry(run_all, client, published(*KEYS))
