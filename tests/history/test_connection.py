"""What a person is told when Redis cannot be used, and how soon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.sentinel

from rollout_api.redis_client.connection import passes
from rollout_worker.history.connection import (
    RedisUnusableError,
    check,
    connect,
    connect_async,
    connect_history,
    explain_error,
    retry,
    wait_until_usable,
)
from tests.support.redis_servers import Certificates, Cluster, Sentinels, Server, until


def checked(url: str) -> None:
    client = connect(url)
    try:
        check(client, url)
    finally:
        client.close()


def test_a_server_that_is_fine_passes(redis_url: str) -> None:
    checked(redis_url)


def test_no_server(unused_port: int) -> None:
    with pytest.raises(RedisUnusableError, match="cannot be reached"):
        checked(f"redis://127.0.0.1:{unused_port}")


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def test_a_silent_server_is_given_up_within_ten_seconds(silent_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(RedisUnusableError, match="does not answer in time"):
        checked(f"redis://127.0.0.1:{silent_port}")
    assert time.monotonic() - started < 10


def test_a_wrong_password(redis_url: str) -> None:
    wrong = redis_url.replace("redis://:", "redis://:not-")
    with pytest.raises(RedisUnusableError, match="refused the user name or password") as caught:
        checked(wrong)
    assert "not-" not in str(caught.value)


def test_a_server_that_evicts(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(RedisUnusableError, match="maxmemory-policy noeviction"):
            checked(redis_url)
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 0)


def test_who_starts_waits_for_a_full_server(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(redis_url)
    client.config_set("maxmemory", 1)
    waiting = threading.Thread(target=wait_until_usable, args=(client, redis_url))
    waiting.start()
    try:
        waiting.join(3)
        assert waiting.is_alive()
    finally:
        client.config_set("maxmemory", 0)
    waiting.join(5)
    assert not waiting.is_alive()
    assert "is out of memory" in caplog.text
    assert client.set("key", "value")


def test_who_starts_gives_a_full_server_up_and_says_so(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_worker.history.connection.START_PATIENCE_S", 0.1)
    client = connect(redis_url)
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisUnusableError, match=r"bytes of 1 are used; raise maxmemory"):
            wait_until_usable(client, redis_url)
    finally:
        client.config_set("maxmemory", 0)


def test_a_malformed_url() -> None:
    with pytest.raises(RedisUnusableError, match="no Redis URL"):
        connect("http://redis")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (redis.exceptions.OutOfMemoryError("used memory > maxmemory"), "raise maxmemory"),
        (redis.exceptions.ReadOnlyError("READONLY"), "connect to the primary"),
        (redis.exceptions.NoPermissionError("NOPERM"), "extend its ACL"),
        (redis.exceptions.ResponseError("odd"), "ResponseError: odd"),
        (redis.exceptions.InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'"), "is not Redis"),
        (redis.exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "make room"),
        (redis.exceptions.MovedError("1 h:1"), "node of a cluster"),
        (redis.exceptions.ClusterDownError("Hash slot not served"), "is a node down"),
        (redis.exceptions.ClusterError("TTL exhausted."), "slots on the move"),
        (redis.sentinel.MasterNotFoundError("No master found for 'm'"), "is the service's name right"),
    ],
)
def test_every_error_says_what_to_do(error: redis.RedisError, says: str) -> None:
    assert says in str(explain_error(error, "redis://h"))


@pytest.mark.parametrize(
    ("error", "by_itself"),
    [
        (redis.exceptions.ClusterDownError("CLUSTERDOWN"), True),
        (redis.exceptions.ClusterError("TTL exhausted."), True),
        (redis.exceptions.TryAgainError("Multiple keys request during rehashing of slot"), True),
        (redis.exceptions.MovedError("1 h:1"), False),  # a node of a cluster that is used as a server
        (redis.sentinel.MasterNotFoundError("No master found for 'm'"), True),
        (redis.exceptions.ReadOnlyError("READONLY"), True),
        (redis.exceptions.InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'"), True),  # a proxy's
        (redis.exceptions.BusyLoadingError("LOADING"), True),
        (redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (redis.exceptions.ResponseError("BUSY Redis is busy running a script."), True),
        (redis.exceptions.ResponseError("Command # 1 (SET a 1) of pipeline caused error: MISCONF Redis is …"), True),
        (redis.exceptions.ResponseError("WRONGTYPE Operation against a key"), False),
        (redis.exceptions.AuthenticationError("WRONGPASS"), False),
        (redis.exceptions.OutOfMemoryError("OOM"), False),  # somebody must make room
    ],
)
def test_what_passes_by_itself(error: redis.RedisError, by_itself: bool) -> None:
    assert by_itself is passes(error)


def test_a_hiccup_is_waited_out(redis_url: str) -> None:
    client = connect(redis_url)
    pid = int(client.info()["process_id"])
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(3, os.kill, (pid, signal.SIGCONT)).start()
    assert retry(client.set, "key", "value")


def test_what_does_not_pass_by_itself_is_raised_at_once(redis_url: str) -> None:
    client = connect(redis_url)
    client.config_set("maxmemory", 1)
    started = time.monotonic()
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            retry(client.set, "key", "value")
    finally:
        client.config_set("maxmemory", 0)
    assert time.monotonic() - started < 2


def test_a_server_that_stays_away_is_given_up_within_ten_seconds(unused_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        retry(connect(f"redis://127.0.0.1:{unused_port}").ping)
    assert time.monotonic() - started < 10


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("tls"))


def written(url: str) -> Any:
    with connect_history(url) as client:
        check(client, url)
        client.set("key", "value")
        return client.get("key")


def written_async(url: str) -> Any:
    async def write() -> Any:
        client = connect_async(url)
        try:
            await client.set("key", "value")
            return await client.get("key")
        finally:
            await client.aclose()

    return asyncio.run(write())


def test_tls(tmp_path: Path, certificates: Certificates) -> None:
    with Server(tmp_path, certificates=certificates, password="secret") as server:
        for write in (written, written_async):
            assert b"value" == write(server.url)
            unchecked = server.url.replace("ssl_ca_certs", "ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_certs")
            assert b"value" == write(unchecked)
        with pytest.raises(RedisUnusableError, match="certificate verify failed"):
            checked(server.url.partition("?")[0])
        with pytest.raises(RedisUnusableError, match="cannot be reached"):
            checked(server.url.partition("?")[0].replace("rediss", "redis"))


def test_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Server(tmp_path / "data", settings={"unixsocket": str(path)}):
        assert b"value" == written(f"unix://{path}?db=1")
        assert b"value" == written_async(f"unix://{path}?db=1")


def test_the_primary_is_found_by_sentinels_and_again_after_a_failover(
    tmp_path: Path, certificates: Certificates
) -> None:
    with Sentinels(tmp_path, password="a", sentinel_password="b", certificates=certificates) as running:
        assert b"value" == written(running.url)
        assert b"value" == written_async(running.url)
        with connect(running.url) as client:
            client.set("before", 1)
            assert 1 == client.wait(1, 5000)
            failing = threading.Thread(target=running.fail_over)
            failing.start()
            while failing.is_alive():
                retry(client.set, "during", 1)
            assert b"1" == client.get("before")
            assert running.primary.port == client.info()["tcp_port"]


def test_sentinels_that_know_no_such_primary_or_refuse_to_say(tmp_path: Path) -> None:
    with Sentinels(tmp_path, sentinels=1, sentinel_password="b") as running:
        with pytest.raises(RedisUnusableError, match="knows no other"):
            checked(running.url.replace("mymaster", "other"))
        with pytest.raises(RedisUnusableError, match="refused the user name or password: no Sentinel") as caught:
            checked(running.url.replace("password=b", "password=secret"))
        assert "secret" not in str(caught.value)
        running.primary.kill()
        running.servers[1].kill()
        until(lambda: "s_down" in str(running.sentinels[0].client().sentinel_master("mymaster")["flags"]), "it is down")
        with pytest.raises(RedisUnusableError, match="takes it to be down"):
            checked(running.url)


def test_silent_sentinels_are_given_up_within_ten_seconds(silent_port: int) -> None:
    hosts = ",".join([f"127.0.0.1:{silent_port}"] * 3)
    started = time.monotonic()
    with pytest.raises(RedisUnusableError, match="no Sentinel names a primary mymaster that is up"):
        checked(f"redis+sentinel://{hosts}/mymaster")
    assert time.monotonic() - started < 10


def test_a_cluster_in_tls_with_a_password(tmp_path: Path, certificates: Certificates) -> None:
    with Cluster(tmp_path, password="secret", certificates=certificates) as cluster:
        assert b"value" == written(cluster.url)
        with pytest.raises(RedisUnusableError, match="refused the user name or password") as caught:
            written(cluster.url.replace("secret", "not-"))
        assert "not-" not in str(caught.value)
        with pytest.raises(RedisUnusableError, match="certificate verify failed"):
            written(cluster.url.partition("?")[0])


def test_a_cluster_is_only_for_histories() -> None:
    for connecting in (connect, connect_async):
        with pytest.raises(RedisUnusableError, match="messages are on one server"):
            connecting("redis+cluster://a")


def test_nothing_is_sent_to_a_cluster_before_it_is_used(unused_port: int) -> None:
    url = f"redis+cluster://127.0.0.1:{unused_port}"
    client = connect_history(url)
    started = time.monotonic()
    with pytest.raises(RedisUnusableError, match="cannot be reached"):
        check(client, url)
    with pytest.raises(redis.ConnectionError):
        retry(client.get, "key")
    assert time.monotonic() - started < 10
    client.close()


def test_a_silent_node_is_given_up_within_ten_seconds(silent_port: int) -> None:
    started = time.monotonic()
    url = f"redis+cluster://127.0.0.1:{silent_port}"
    with connect_history(url) as client, pytest.raises(RedisUnusableError, match="does not answer in time"):
        check(client, url)
    assert time.monotonic() - started < 10


def test_a_server_that_is_no_cluster(redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis+cluster://")
    with connect_history(url) as client, pytest.raises(RedisUnusableError, match="write redis://") as caught:
        check(client, url)
    assert not passes(caught.value.__cause__)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.mark.parametrize("number", range(3))
def test_each_primary_of_a_cluster_is_checked(cluster: Cluster, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    node = cluster.servers[number].client()
    with connect_history(cluster.url) as client:
        assert "7.0" <= check(client, cluster.url)["redis_version"]
        node.config_set("maxmemory", "100mb")
        node.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(RedisUnusableError, match="maxmemory-policy noeviction"):
                check(client, cluster.url)
        finally:
            node.config_set("maxmemory-policy", "noeviction")
        monkeypatch.setattr("rollout_worker.history.connection.START_PATIENCE_S", 0.1)
        node.config_set("maxmemory", 1)
        try:
            with pytest.raises(RedisUnusableError, match="bytes of 1 are used; raise maxmemory"):
                wait_until_usable(client, cluster.url)
        finally:
            node.config_set("maxmemory", 0)


def test_a_node_that_is_used_as_if_it_were_a_server(cluster: Cluster) -> None:
    node, key = cluster.servers[0], next(str(i) for i in range(99) if cluster.owner(str(i)) is not cluster.servers[0])
    with connect(node.url) as client, pytest.raises(redis.exceptions.MovedError) as caught:
        retry(client.get, key)
    assert "redis+cluster://" in str(explain_error(caught.value, node.url))


def state(node: Server) -> str:
    said: Any = node.client().execute_command("CLUSTER INFO")
    return str(said["cluster_state"])


def test_a_cluster_that_lacks_a_node_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(tmp_path, appendonly=True) as cluster, connect_history(cluster.url) as client:
        kept, gone = (next(str(i) for i in range(99) if cluster.owner(str(i)) is one) for one in cluster.servers[:2])
        client.set(kept, 1)
        client.set(gone, 2)
        cluster.servers[1].kill()
        with pytest.raises(redis.ConnectionError):
            client.get(gone)
        until(lambda: "fail" == state(cluster.servers[0]), "the others have noticed")
        for key, error in ((gone, redis.ConnectionError), (kept, redis.exceptions.ClusterDownError)):
            with pytest.raises(error) as caught:
                client.get(key)
            assert passes(caught.value)
        waiting = threading.Thread(target=wait_until_usable, args=(client, cluster.url))
        waiting.start()
        waiting.join(1)
        assert waiting.is_alive()
        cluster.servers[1].start()
        waiting.join(20)
        assert not waiting.is_alive()
        assert "Waiting: Redis at" in caplog.text
        assert [b"1", b"2"] == [retry(client.get, kept), retry(client.get, gone)]


def test_a_cluster_that_was_gone_altogether_is_found_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, appendonly=True) as cluster, connect_history(cluster.url) as client:
        client.set("key", "value")
        for server in cluster.servers:
            server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        for server in cluster.servers:
            server.start()
        cluster.wait_until_ok()
        assert b"value" == retry(client.get, "key")
