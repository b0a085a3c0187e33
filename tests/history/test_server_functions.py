"""Server functions on a server and on a cluster: round trips, missing functions, failing calls and moving slots."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api.redis_client import load_functions, server_functions
from rollout_api.redis_client.connection import connect_history
from rollout_api.redis_client.retry import concerns_server, retry
from rollout_api.redis_client.server_functions import (
    FUNCTIONS,
    Call,
    Function,
    libraries,
    load_everywhere,
    run,
    run_all,
)
from tests.support.redis_servers import Cluster, Server
from tests.support.waiting import wait_for

PUBLISH = Function("publish")


def publish(*keys: str) -> list[Call]:
    """Return calls that each return 1, also if they are repeated."""
    return [Call(PUBLISH, [key], ["run:0", 0]) for key in keys]


KEYS = [f"{{{number}}}:meta" for number in range(64)]
"""Keys in slots of all nodes."""


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
            client.function_flush()
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


def num_commands(running: Server | Cluster, name: str) -> int:
    """Return how often all nodes together have executed a command."""
    counts = [
        node.client().info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"] for node in nodes(running)
    ]
    return sum(counts)


def test_all_functions_are_loaded_when_one_is_missing(client: Any, running: Server | Cluster) -> None:
    assert [1] * 64 == run_all(client, publish(*KEYS))
    loaded = len(libraries()) * len(nodes(running))
    assert (128, loaded) == (num_commands(running, "fcall"), num_commands(running, "function|load"))
    assert [1] * 64 == run_all(client, publish(*KEYS))
    assert 1 == run(client, Call(Function("cancel"), ["key"]))
    assert (193, loaded) == (num_commands(running, "fcall"), num_commands(running, "function|load"))


def test_only_calls_on_a_node_that_lacks_the_function_are_repeated(client: Any, running: Server | Cluster) -> None:
    run_all(client, publish(*KEYS))
    nodes(running)[-1].client().function_flush()
    before = num_commands(running, "fcall")
    assert [1] * 64 == run_all(client, publish(*KEYS))
    expected = [key for key in KEYS if isinstance(running, Server) or running.owner(key) is nodes(running)[-1]]
    assert len(expected) == num_commands(running, "fcall") - before - 64 > 0


def test_functions_of_two_versions_are_used_side_by_side(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1 == run(client, *publish("key"))
    shutil.copytree(FUNCTIONS, tmp_path / "functions")
    changed = tmp_path / "functions" / "publish.lua"
    changed.write_text(changed.read_text().replace("tonumber(known)", "-tonumber(known)"))
    older = PUBLISH.registered_name
    with monkeypatch.context() as patch:
        patch.setattr(server_functions, "FUNCTIONS", tmp_path / "functions")
        forget_libraries()
        assert older != PUBLISH.registered_name
        assert -1 == run(client, *publish("key"))
        assert [-1] * 64 == run_all(client, publish(*["key"] * 64))
    forget_libraries()
    assert 1 == run(client, *publish("key"))


def forget_libraries() -> None:
    server_functions._library.cache_clear()
    libraries.cache_clear()


def test_errors_name_the_line_of_the_file(client: Any) -> None:
    client.set("key", "not a hash")
    line = 1 + (FUNCTIONS / "publish.lua").read_text().split("\n").index(
        "local known = redis.call('HGET', KEYS[1], field)"
    )
    with pytest.raises(redis.ResponseError, match=rf"rollout_publish_\w+, on @user_function:{line}\."):
        run(client, *publish("key"))


def test_functions_that_free_memory_are_on_a_server_before_it_is_full(client: Any, running: Server | Cluster) -> None:
    run_all(client, publish(*KEYS))
    for node in nodes(running):
        node.client().config_set("maxmemory", 1)
    try:
        assert [1] * 64 == run_all(
            client, [Call(Function("hold_lease"), [f"{key}:lease"], ["me", 1000]) for key in KEYS]
        )
        trim = Function("append", even_when_full=True)
        assert [-1, 0] == run(client, Call(trim, ["{a}1", "{a}2", "{a}3"], ["", 0, "", 1]))
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            run(client, Call(Function("append"), ["{a}1", "{a}2", "{a}3"], ["", 0, "", 1]))
    finally:
        for node in nodes(running):
            node.client().config_set("maxmemory", 0)


def test_user_who_may_not_load_functions_uses_those_that_an_administrator_has_loaded(
    running: Server | Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes(running):
        node.client().acl_setuser("user", enabled=True, passwords=["+secret"], keys="*", categories=["+@all"])
        node.client().execute_command("ACL", "SETUSER", "user", "-@scripting", "+fcall")
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes(running))
    kind = "redis+cluster" if isinstance(running, Cluster) else "redis"
    with connect_history(f"{kind}://user:secret@{hosts}") as client:
        with pytest.raises(redis.ResponseError, match=r"rollout_publish_\w+\. .*\+function\|load") as error:
            run_all(client, publish(*KEYS))
        assert concerns_server(error.value)
        monkeypatch.setenv("ROLLOUT_REDIS_ADMIN_URL", running.url)
        load_functions.main()
        assert [1] * 64 == run_all(client, publish(*KEYS))


def test_many_calls_take_one_round_trip(client: Any, running: Server | Cluster) -> None:
    run_all(client, publish(*KEYS))
    before = {node.port: node.client().info("stats")["total_reads_processed"] for node in nodes(running)}
    run_all(client, publish(*KEYS))
    for node in nodes(running):
        # One read is for the calls; the others are for two INFO commands and their handshakes.
        assert node.client().info("stats")["total_reads_processed"] - before[node.port] < 12


def test_key_of_the_wrong_type_fails_only_its_own_call(client: Any) -> None:
    client.set(KEYS[3], "not a hash")
    replies = run_all(client, publish(*KEYS))
    (bad,) = [reply for reply in replies if reply != 1]
    assert replies.index(bad) == 3
    assert isinstance(bad, redis.ResponseError)
    assert "WRONGTYPE" in str(bad)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        run(client, publish(KEYS[3])[0])


def test_empty_list_of_calls_is_allowed(client: Any) -> None:
    assert [] == run_all(client, [])


def test_full_server_raises_instead_of_failing_single_calls(client: Any, running: Server | Cluster) -> None:
    full = nodes(running)[-1].client()
    full.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            run_all(client, publish(*KEYS))
    finally:
        full.config_set("maxmemory", 0)
    assert [1] * 64 == run_all(client, publish(*KEYS))


def test_replica_raises_instead_of_failing_single_calls(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "primary") as primary,
        Server(tmp_path / "replica", settings={"replicaof": f"127.0.0.1 {primary.port}"}) as replica,
        connect_history(replica.url) as client,
    ):
        wait_for(
            lambda: replica.client().info("replication")["master_link_status"] == "up",
            20,
            "The replica does not follow.",
        )
        with pytest.raises(redis.exceptions.ReadOnlyError):
            run_all(client, publish("key"))


def test_missing_permission_raises(tmp_path: Path) -> None:
    with (
        Server(tmp_path, users=["reader on >secret ~* +@read +fcall"]) as server,
        connect_history(server.url) as admin,
        connect_history(server.url_of("reader", "secret")) as client,
    ):
        load_everywhere(admin)
        with pytest.raises(redis.exceptions.NoPermissionError):
            run_all(client, publish("key"))


def test_redirections_are_followed_during_a_migration(cluster: Cluster) -> None:
    key, other = "{7}:meta", "{7}:other"
    with connect_history(cluster.url) as client:
        assert [1] == run_all(client, publish(key))
        move = cluster.begin_move(key)
        assert [1, 1] == run_all(client, publish(key, other)), "the other key does not exist yet"
        move.migrate()
        assert [1, 1] == run_all(client, publish(key, other))
        move.target.client().function_flush()
        assert [1, 1] == run_all(client, publish(key, other)), "the new node lacks the function"
        move.finish()
        assert [1, 1] == run_all(client, publish(key, other))


def test_slot_can_be_migrated_to_a_node_without_slots(tmp_path: Path) -> None:
    with Cluster(tmp_path, primaries=2, empty=1) as cluster, connect_history(cluster.url) as client:
        cluster.servers.insert(0, cluster.servers.pop())  # the empty node is the target
        key = "{7}:meta"
        move = cluster.begin_move(key)
        assert 0 == move.target.client().dbsize()
        assert [1] == run_all(client, publish(key))
        assert 1 == move.target.client().dbsize()
        reading = client.pipeline(transaction=False)
        reading.hget(key, "generation")
        assert [b"1"] == reading.execute()
        move.finish()
        assert [1] == run_all(client, publish(key))


def test_no_call_is_lost_while_slots_are_migrated(cluster: Cluster) -> None:
    """Each published version is counted once while the slot is moved between the nodes."""
    key, stop = "{13}:meta", threading.Event()
    generations: list[int] = []

    def write() -> None:
        with connect_history(cluster.url) as client:
            version = 0
            while not stop.is_set():
                generations.append(retry(run, client, Call(PUBLISH, [key], [f"run:{version}", 0])))
                version += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(10):
            cluster.move_slot(key)
    finally:
        stop.set()
        writing.join()
    assert list(range(1, len(generations) + 1)) == generations
    assert len(generations) > 10


def test_node_that_does_not_answer_fails_within_seconds(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, connect_history(cluster.url, timeout=0.5) as client:
        run_all(client, publish(*KEYS))
        cluster.servers[1].pause()
        started = time.monotonic()
        try:
            with pytest.raises((redis.TimeoutError, redis.ConnectionError, redis.exceptions.ClusterDownError)):
                run_all(client, publish(*KEYS))
            reading = client.pipeline(transaction=False)
            for key in KEYS:
                reading.hget(key, "generation")
            with pytest.raises((redis.TimeoutError, redis.ConnectionError, redis.exceptions.ClusterDownError)):
                reading.execute()
        finally:
            cluster.servers[1].resume()
        assert time.monotonic() - started < 10
        cluster.wait_until_ok()
        assert [1] * 64 == retry(run_all, client, publish(*KEYS))


def test_restarted_node_is_used_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, appendonly=True) as cluster, connect_history(cluster.url, timeout=1) as client:
        assert [1] * 64 == run_all(client, publish(*KEYS))
        cluster.servers[0].kill()
        with pytest.raises(redis.RedisError):
            run_all(client, publish(*KEYS))
        cluster.servers[0].start()
        cluster.wait_until_ok()
        assert [1] * 64 == retry(run_all, client, publish(*KEYS))
