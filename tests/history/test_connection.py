"""What a person is told when Redis cannot be used, and how soon."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from rollout_api.redis_connection import without_password
from rollout_worker.history.connection import (
    RedisUnusableError,
    check,
    connect,
    persist,
    problem,
    wait_until_usable,
)


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
    ],
)
def test_every_error_says_what_to_do(error: redis.RedisError, says: str) -> None:
    assert says in str(problem(error, "redis://h"))


def test_passwords_are_not_shown() -> None:
    assert without_password("redis://u:secret@h:1/0") == "redis://u:***@h:1/0"
    assert without_password("redis://secret@h:1/0") == "redis://***@h:1/0"
    assert without_password("redis://h:1/0") == "redis://h:1/0"
    assert without_password("redis://h:1/0?db=1&password=secret") == "redis://h:1/0?db=1&password=***"


def test_a_hiccup_is_waited_out(redis_url: str) -> None:
    client = connect(redis_url)
    pid = int(client.info()["process_id"])
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(3, os.kill, (pid, signal.SIGCONT)).start()
    assert persist(client.set, "key", "value")


def test_what_does_not_pass_by_itself_is_raised_at_once(redis_url: str) -> None:
    client = connect(redis_url)
    client.config_set("maxmemory", 1)
    started = time.monotonic()
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            persist(client.set, "key", "value")
    finally:
        client.config_set("maxmemory", 0)
    assert time.monotonic() - started < 2


def test_a_server_that_stays_away_is_given_up_within_ten_seconds(unused_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        persist(connect(f"redis://127.0.0.1:{unused_port}").ping)
    assert time.monotonic() - started < 10
