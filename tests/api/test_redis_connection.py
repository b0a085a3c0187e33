"""Connections to Redis: errors that say what to do, their duration, retries and failovers."""

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
import redis.asyncio.sentinel
import redis.sentinel

from rollout_api.errors import InvalidRequestError, RedisUnreachableError
from rollout_api.ports import free_port
from rollout_api.redis_client.client_connection import RedisTarget, open_client, server_name
from rollout_api.redis_client.connection import (
    RedisUnusableError,
    check,
    connect,
    connect_async,
    connect_history,
    explain_error,
    wait_until_usable,
)
from rollout_api.redis_client.retry import (
    ClientRetryPolicy,
    RetryPolicy,
    is_out_of_memory,
    is_transient,
    retry,
    retry_async,
)
from tests.support.redis_servers import Certificates, Cluster, Sentinels, Server
from tests.support.waiting import wait_for


def connect_and_check(url: str) -> None:
    client = connect(url)
    try:
        check(client, url)
    finally:
        client.close()


def test_usable_server_passes_the_check(redis_url: str) -> None:
    connect_and_check(redis_url)


def test_unreachable_server_is_reported() -> None:
    with pytest.raises(RedisUnusableError, match=r"cannot be reached: .*refused; is it running") as raised:
        connect_and_check(f"redis://127.0.0.1:{free_port()}")
    # Commands that run no job have no rollouts to keep.
    assert "rollouts are kept" not in str(raised.value)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def test_server_that_does_not_answer_is_reported_within_ten_seconds(silent_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(RedisUnusableError, match="does not answer in time"):
        connect_and_check(f"redis://127.0.0.1:{silent_port}")
    assert time.monotonic() - started < 10


def test_wrong_password_is_reported_without_the_password(redis_url: str) -> None:
    wrong = redis_url.replace("redis://:", "redis://:not-")
    with pytest.raises(RedisUnusableError, match="refused the user name or password") as caught:
        connect_and_check(wrong)
    assert "not-" not in str(caught.value)


def test_eviction_policy_is_rejected(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(RedisUnusableError, match="maxmemory-policy noeviction"):
            connect_and_check(redis_url)
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 0)


def test_starting_process_waits_for_a_full_server(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(redis_url)
    client.config_set("maxmemory", 1)
    waiting = threading.Thread(target=wait_until_usable, args=(client, redis_url))
    waiting.start()
    try:
        wait_for(lambda: "is out of memory" in caplog.text, 20)
        waiting.join(3)
        assert waiting.is_alive()
    finally:
        client.config_set("maxmemory", 0)
    waiting.join(5)
    assert not waiting.is_alive()
    assert client.set("key", "value")


def test_wait_for_a_full_server_is_limited(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_api.redis_client.connection.START_TIMEOUT_S", 0.1)
    client = connect(redis_url)
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisUnusableError, match=r"bytes of 1 are used; raise maxmemory"):
            wait_until_usable(client, redis_url)
    finally:
        client.config_set("maxmemory", 0)


def test_malformed_url_is_rejected() -> None:
    with pytest.raises(RedisUnusableError, match="not a Redis URL"):
        connect("http://redis")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (redis.exceptions.OutOfMemoryError("used memory > maxmemory"), "raise maxmemory"),
        (redis.exceptions.ReadOnlyError("READONLY"), "connect to the primary"),
        (redis.exceptions.NoPermissionError("NOPERM"), "extend its ACL"),
        (redis.exceptions.ResponseError("odd"), "ResponseError: odd"),
        (redis.exceptions.InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'"), "is not Redis"),
        (redis.exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "free disk space"),
        (redis.exceptions.MovedError("1 h:1"), "node of a cluster"),
        (redis.exceptions.ClusterDownError("Hash slot not served"), "is a node down"),
        (redis.exceptions.ClusterError("TTL exhausted."), "slots being migrated"),
        (redis.sentinel.MasterNotFoundError("No master found for 'm'"), "is the service name correct"),
    ],
)
def test_error_message_says_what_to_do(error: redis.RedisError, remedy: str) -> None:
    assert remedy in str(explain_error(error, "redis://h"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (redis.exceptions.ClusterDownError("CLUSTERDOWN"), True),
        (redis.exceptions.ClusterError("TTL exhausted."), True),
        (redis.exceptions.TryAgainError("Multiple keys request during rehashing of slot"), True),
        (redis.exceptions.MovedError("1 h:1"), False),  # a node of a cluster that is used as a server
        (redis.sentinel.MasterNotFoundError("No master found for 'm'"), True),
        (redis.exceptions.ReadOnlyError("READONLY"), True),
        (redis.exceptions.InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'"), True),  # from a proxy
        (redis.exceptions.BusyLoadingError("LOADING"), True),
        (redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (redis.exceptions.ResponseError("BUSY Redis is busy running a script."), True),
        (redis.exceptions.ResponseError("UNBLOCKED force unblock from blocking operation, instance state …"), True),
        (redis.exceptions.ExecAbortError("Transaction discarded because of: READONLY You can't write …"), True),
        (redis.exceptions.ExecAbortError("Transaction discarded because of previous errors."), False),
        (redis.exceptions.ResponseError("Command # 1 (SET a 1) of pipeline caused error: MISCONF Redis is …"), True),
        (redis.exceptions.ResponseError("WRONGTYPE Operation against a key"), False),
        (redis.exceptions.AuthenticationError("WRONGPASS"), False),
        (redis.exceptions.OutOfMemoryError("OOM"), False),  # lasts until memory is freed
    ],
)
def test_transient_errors_are_recognized(error: redis.RedisError, expected: bool) -> None:
    assert expected is is_transient(error)


def test_a_server_that_is_full_when_a_transaction_is_executed_is_recognized(redis_url: str) -> None:
    client = connect(redis_url)
    connection = client.connection_pool.get_connection()
    for command in (("MULTI",), ("SET", "a", "1")):
        connection.send_command(*command)
        connection.read_response()
    client.config_set("maxmemory", 1)
    try:
        connection.send_command("EXEC")
        with pytest.raises(redis.exceptions.ExecAbortError) as caught:
            connection.read_response()
    finally:
        client.config_set("maxmemory", 0)
    assert is_out_of_memory(caught.value)
    assert "raise maxmemory" in str(explain_error(caught.value, redis_url))


def test_short_interruption_is_bridged(redis_url: str) -> None:
    client = connect(redis_url)
    pid = int(client.info()["process_id"])
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(3, os.kill, (pid, signal.SIGCONT)).start()
    assert retry(client.set, "key", "value")


def test_other_errors_are_raised_at_once(redis_url: str) -> None:
    client = connect(redis_url)
    client.config_set("maxmemory", 1)
    started = time.monotonic()
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            retry(client.set, "key", "value")
    finally:
        client.config_set("maxmemory", 0)
    assert time.monotonic() - started < 2


def test_retries_end_within_ten_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        retry(connect(f"redis://127.0.0.1:{free_port()}").ping)
    assert time.monotonic() - started < 10


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("tls"))


def write_and_read(url: str) -> Any:
    """Return the value that was read back."""
    with connect_history(url) as client:
        check(client, url)
        client.set("key", "value")
        return client.get("key")


def write_and_read_async(url: str) -> Any:
    """Return the value that was read back by an asynchronous client."""

    async def write() -> Any:
        client = connect_async(url)
        try:
            await client.set("key", "value")
            return await client.get("key")
        finally:
            await client.aclose()

    return asyncio.run(write())


def test_tls_certificates_are_verified(tmp_path: Path, certificates: Certificates) -> None:
    with Server(tmp_path, certificates=certificates, password="secret") as server:
        for write in (write_and_read, write_and_read_async):
            assert b"value" == write(server.url)
            unchecked = server.url.replace("ssl_ca_certs", "ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_certs")
            assert b"value" == write(unchecked)
        with pytest.raises(RedisUnusableError, match="certificate verify failed"):
            connect_and_check(server.url.partition("?")[0])
        with pytest.raises(RedisUnusableError, match="cannot be reached"):
            connect_and_check(server.url.partition("?")[0].replace("rediss", "redis"))


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Server(tmp_path / "data", settings={"unixsocket": str(path)}):
        assert b"value" == write_and_read(f"unix://{path}?db=1")
        assert b"value" == write_and_read_async(f"unix://{path}?db=1")


def test_sentinels_find_the_primary_and_the_new_one_after_a_failover(
    tmp_path: Path, certificates: Certificates
) -> None:
    with Sentinels(tmp_path, password="a", sentinel_password="b", certificates=certificates) as running:
        assert b"value" == write_and_read(running.url)
        assert b"value" == write_and_read_async(running.url)
        with connect(running.url) as client:
            client.set("before", 1)
            assert 1 == client.wait(1, 5000)
            failing = threading.Thread(target=running.fail_over)
            failing.start()
            while failing.is_alive():
                retry(client.set, "during", 1)
            assert b"1" == client.get("before")
            assert running.primary.port == client.info()["tcp_port"]


def test_replies_of_sentinels_are_reported(tmp_path: Path) -> None:
    with Sentinels(tmp_path, sentinels=1, sentinel_password="b") as running:
        with pytest.raises(RedisUnusableError, match="knows no other"):
            connect_and_check(running.url.replace("mymaster", "other"))
        with pytest.raises(RedisUnusableError, match="refused the user name or password: no Sentinel") as caught:
            connect_and_check(running.url.replace("password=b", "password=secret"))
        assert "secret" not in str(caught.value)
        running.primary.kill()
        running.servers[1].kill()
        wait_for(
            lambda: "s_down" in str(running.sentinels[0].client().sentinel_master("mymaster")["flags"]),
            20,
            "The primary is not considered down.",
        )
        with pytest.raises(RedisUnusableError, match="considers it down"):
            connect_and_check(running.url)


def test_sentinels_that_do_not_answer_are_reported_within_ten_seconds(silent_port: int) -> None:
    hosts = ",".join([f"127.0.0.1:{silent_port}"] * 3)
    started = time.monotonic()
    with pytest.raises(RedisUnusableError, match="no Sentinel names a primary mymaster that is up"):
        connect_and_check(f"redis+sentinel://{hosts}/mymaster")
    assert time.monotonic() - started < 10


def test_cluster_with_tls_and_a_password(tmp_path: Path, certificates: Certificates) -> None:
    with Cluster(tmp_path, password="secret", certificates=certificates) as cluster:
        assert b"value" == write_and_read(cluster.url)
        with pytest.raises(RedisUnusableError, match="refused the user name or password") as caught:
            write_and_read(cluster.url.replace("secret", "not-"))
        assert "not-" not in str(caught.value)
        with pytest.raises(RedisUnusableError, match="certificate verify failed"):
            write_and_read(cluster.url.partition("?")[0])


def test_cluster_is_rejected_for_messages() -> None:
    for connecting in (connect, connect_async):
        with pytest.raises(RedisUnusableError, match="messages are on one server"):
            connecting("redis+cluster://a")
    with pytest.raises(InvalidRequestError, match="messages are on one server"):
        open_client("redis+cluster://:secret@a,b")


def test_unreachable_cluster_is_an_error_on_first_use() -> None:
    url = f"redis+cluster://127.0.0.1:{free_port()}"
    client = connect_history(url)
    started = time.monotonic()
    with pytest.raises(RedisUnusableError, match="cannot be reached"):
        check(client, url)
    with pytest.raises(redis.ConnectionError):
        retry(client.get, "key")
    assert time.monotonic() - started < 10
    client.close()


def test_cluster_that_does_not_answer_is_reported_within_ten_seconds(silent_port: int) -> None:
    started = time.monotonic()
    url = f"redis+cluster://127.0.0.1:{silent_port}"
    with connect_history(url) as client, pytest.raises(RedisUnusableError, match="does not answer in time"):
        check(client, url)
    assert time.monotonic() - started < 10


def test_server_without_cluster_support_is_reported(redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis+cluster://")
    with connect_history(url) as client, pytest.raises(RedisUnusableError, match="write redis://") as caught:
        check(client, url)
    assert not is_transient(caught.value.__cause__)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.mark.parametrize("number", range(3))
def test_every_primary_of_a_cluster_is_checked(cluster: Cluster, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr("rollout_api.redis_client.connection.START_TIMEOUT_S", 0.1)
        node.config_set("maxmemory", 1)
        try:
            with pytest.raises(RedisUnusableError, match="bytes of 1 are used; raise maxmemory"):
                wait_until_usable(client, cluster.url)
        finally:
            node.config_set("maxmemory", 0)


def test_node_used_as_a_single_server_is_reported(cluster: Cluster) -> None:
    node, key = cluster.servers[0], next(str(i) for i in range(99) if cluster.owner(str(i)) is not cluster.servers[0])
    with connect(node.url) as client, pytest.raises(redis.exceptions.MovedError) as caught:
        retry(client.get, key)
    assert "redis+cluster://" in str(explain_error(caught.value, node.url))


def cluster_state(node: Server) -> str:
    reply: Any = node.client().execute_command("CLUSTER INFO")
    return str(reply["cluster_state"])


def test_starting_process_waits_for_a_missing_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(tmp_path, appendonly=True) as cluster, connect_history(cluster.url) as client:
        available_key, lost_key = (
            next(str(i) for i in range(99) if cluster.owner(str(i)) is one) for one in cluster.servers[:2]
        )
        client.set(available_key, 1)
        client.set(lost_key, 2)
        cluster.servers[1].kill()
        with pytest.raises(redis.ConnectionError):
            client.get(lost_key)
        wait_for(lambda: "fail" == cluster_state(cluster.servers[0]), 20, "The other nodes do not notice.")
        for key, error in ((lost_key, redis.ConnectionError), (available_key, redis.exceptions.ClusterDownError)):
            with pytest.raises(error) as caught:
                client.get(key)
            assert is_transient(caught.value)
        waiting = threading.Thread(target=wait_until_usable, args=(client, cluster.url))
        waiting.start()
        wait_for(lambda: "Waiting: Redis at" in caplog.text, 20)
        waiting.join(1)
        assert waiting.is_alive()
        cluster.servers[1].start()
        waiting.join(20)
        assert not waiting.is_alive()
        assert [b"1", b"2"] == [retry(client.get, available_key), retry(client.get, lost_key)]


def test_client_reconnects_to_a_restarted_cluster(tmp_path: Path) -> None:
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


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with Sentinels(tmp_path, password="data", sentinel_password="watch") as running:
        yield running


async def write_during_a_failover(target: RedisTarget, running: Sentinels) -> list[bytes]:
    """Write before, during and after a failover, and return what was written before and after it."""
    client: Any = open_client(target)
    policy = ClientRetryPolicy(server_name(client), 30)
    try:
        await policy.run(lambda: client.set("before", 1), action="write")
        assert 1 == await client.wait(1, 5000)
        failover = asyncio.create_task(asyncio.to_thread(running.fail_over))
        while not failover.done():
            await policy.run(lambda: client.set("during", 1), action="write")
            await asyncio.sleep(0.02)
        await failover
        await policy.run(lambda: client.set("after", 1), action="write")
        found: list[bytes] = await client.mget("before", "after")
        return found
    finally:
        await client.aclose()


def test_connection_by_url_survives_a_failover(sentinels: Sentinels) -> None:
    assert [b"1", b"1"] == asyncio.run(write_during_a_failover(sentinels.url, sentinels))


@pytest.mark.parametrize("kind", [redis.sentinel.Sentinel, redis.asyncio.sentinel.Sentinel])
def test_settings_of_a_sentinel_client_are_copied(sentinels: Sentinels, kind: type) -> None:
    manager = kind(
        [("127.0.0.1", sentinel.port) for sentinel in sentinels.sentinels],
        sentinel_kwargs={"password": "watch"},
        password="data",
    )
    client = manager.master_for(sentinels.SERVICE, decode_responses=True, socket_timeout=0.1)
    assert [b"1", b"1"] == asyncio.run(write_during_a_failover(client, sentinels))


async def test_unreachable_sentinels_are_named_in_the_error() -> None:
    ports = [free_port() for _ in range(3)]
    client = open_client(f"redis+sentinel://:secret@{','.join(f'127.0.0.1:{port}' for port in ports)}/main")

    started = time.monotonic()
    with pytest.raises(RedisUnreachableError, match=f"main, whose Sentinels are 127.0.0.1:{ports[0]},") as caught:
        await ClientRetryPolicy(server_name(client), 1).run(client.ping, action="ping")
    assert time.monotonic() - started < 5
    assert "secret" not in str(caught.value)


USER = "job on >secret ~* &* +@all"


async def test_a_user_that_is_missing_for_a_while_after_a_failover_is_waited_for(tmp_path: Path) -> None:
    with Server(tmp_path, users=[USER]) as server:
        admin = connect(server.url)
        client, policy = connect_async(f"redis://job:secret@127.0.0.1:{server.port}"), RetryPolicy()
        await retry_async(client.set, "key", 1, policy=policy)
        admin.execute_command("ACL", "DELUSER", "job")  # which also closes the user's connections
        later = threading.Timer(1.0, admin.execute_command, ["ACL", "SETUSER", *USER.split()])
        later.start()
        assert b"1" == await retry_async(client.get, "key", policy=policy)
        later.join()
        await client.aclose()


async def test_a_wrong_password_is_reported_at_once(tmp_path: Path) -> None:
    with Server(tmp_path, users=[USER]) as server:
        client = connect_async(f"redis://job:wrong@127.0.0.1:{server.port}")
        with pytest.raises(redis.AuthenticationError):
            await asyncio.wait_for(retry_async(client.get, "key", policy=RetryPolicy()), 5)
        await client.aclose()
