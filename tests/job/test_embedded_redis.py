"""The embedded Redis server keeps its data, ends with its owner and holds the lock until it has ended."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from rollout_api.redis_client.connection import RedisUnusableError
from rollout_store.runtime.embedded_redis import EmbeddedRedis

OWNER = """
import os, sys, time
from pathlib import Path
from rollout_store.runtime.embedded_redis import EmbeddedRedis
lock = os.open(sys.argv[1] + "/lock", os.O_CREAT | os.O_RDWR)
import fcntl; fcntl.flock(lock, fcntl.LOCK_EX)
print(EmbeddedRedis(Path(sys.argv[1]), keep_open=lock).start(), flush=True)
time.sleep(600)
"""


@contextmanager
def owned(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that owns a server, and yield it with the server's URL; the process is killed on exit."""
    command = [sys.executable, "-c", OWNER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            yield owner, owner.stdout.readline().strip()
        finally:
            owner.kill()


def test_data_survives_when_the_owner_is_killed(tmp_path: Path) -> None:
    with owned(tmp_path) as (_, url):
        client = redis.Redis.from_url(url)
        for number in range(100):
            client.rpush("list", number)

    with (tmp_path / "lock").open("r+") as lock:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        else:
            pytest.fail("the server still holds the lock")
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server = EmbeddedRedis(tmp_path, keep_open=lock.fileno())
        again = redis.Redis.from_url(server.start())
        assert [str(number).encode() for number in range(100)] == again.lrange("list", 0, -1)
        server.stop()


def test_it_requires_a_password_and_listens_only_on_loopback(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        server = EmbeddedRedis(tmp_path, keep_open=lock.fileno())
        url = server.start()
        client = redis.Redis.from_url(url)
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        port = client.connection_pool.connection_kwargs["port"]
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).get("x")
        assert (tmp_path / "redis.conf").stat().st_mode & 0o077 == 0
        server.stop()


def test_a_missing_program_is_reported_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RedisUnusableError, match="apt-get install redis-server"):
        EmbeddedRedis(tmp_path, keep_open=0).start()


def test_the_error_quotes_the_log_if_the_data_cannot_be_read(tmp_path: Path) -> None:
    aof = tmp_path / "appendonlydir"
    aof.mkdir()
    (aof / "appendonly.aof.manifest").write_text("nonsense\n")
    with (tmp_path / "lock").open("w") as lock, pytest.raises(RedisUnusableError, match="AOF"):
        EmbeddedRedis(tmp_path, keep_open=lock.fileno()).start()


def test_it_is_in_the_session_but_not_in_the_process_group_of_its_owner(tmp_path: Path) -> None:
    """Linux schedules by session if autogroup is on: in its own session, the server waited 3 s beside busy engines."""
    with owned(tmp_path) as (owner, url):
        server = int(redis.Redis.from_url(url).info("server")["process_id"])
        assert os.getsid(owner.pid) == os.getsid(server)
        # Ctrl-C reaches only the owner, which stops the server.
        assert server == os.getpgid(server) != os.getpgid(owner.pid)
