"""A Redis server that runs as a child process, for jobs without a server."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from pathlib import Path

import redis

from rollout_api.ports import free_port
from rollout_api.redis_client.connection import RedisUnusableError
from rollout_store.runtime.child_process import spawn_with_parent

_START_TIMEOUT_S = 10.0
"""Seconds to wait for an answer of a server that is not loading its data."""
_STOP_TIMEOUT_S = 15.0
"""Seconds that a server has to shut down before it is killed."""
_MAX_PORT_ATTEMPTS = 5
"""Number of starts, because another process may take a free port first."""
_MAX_LOG_CHARS = 2000
"""Number of last characters of the server's log in an error message."""


class EmbeddedRedis:
    """A ``redis-server`` on a free loopback port, with an append-only file in a directory that is kept.

    The server ends with this process, even if the process is killed.
    """

    def __init__(self, directory: Path, *, keep_open: int) -> None:
        """Configure a server; :meth:`start` starts it.

        It inherits the file descriptor *keep_open*, such as a lock of *directory*, and holds it until it ends.
        """
        self.url = ""
        self._directory = directory
        self._keep_open = keep_open
        self._log = directory.resolve() / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the server and wait until it has loaded its data.

        Returns:
            The server's URL, which contains a generated password.

        Raises:
            RedisUnusableError: if the server is not installed or does not start.
        """
        program = shutil.which("redis-server")
        if program is None:
            raise RedisUnusableError(
                "redis-server is not installed; install it (Debian: apt-get install redis-server), or use a running "
                "server with --redis URL"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        for _ in range(_MAX_PORT_ATTEMPTS):
            port, password = free_port(), secrets.token_urlsafe(24)
            self._process = self._launch(program, port, password)
            self.url = f"redis://:{password}@127.0.0.1:{port}/0"
            if self._wait_ready(self._process):
                return self.url
        raise RedisUnusableError(f"redis-server does not start; the end of its log, {self._log}:\n{self._end_of_log()}")

    def stop(self) -> None:
        """Shut the server down; its data is kept."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _end_of_log(self) -> str:
        if not self._log.is_file():
            return "(it does not exist)"
        return self._log.read_text(errors="replace")[-_MAX_LOG_CHARS:] or "(it is empty)"

    def _launch(self, program: str, port: int, password: str) -> subprocess.Popen[bytes]:
        settings = self._directory / "redis.conf"
        settings.touch(mode=0o600)
        settings.write_text(
            f'bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir "{self._directory.resolve()}"\n'
            "appendonly yes\nappendfsync everysec\nsave ''\nmaxmemory-policy noeviction\n"
            f'logfile "{self._log}"\n'
        )
        return spawn_with_parent(
            [program, str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._keep_open,),
            # A group of its own shields the server from Ctrl-C. A session of its own would let Linux schedule it
            # separately (autogroup), with delays of seconds beside busy engines.
            process_group=0,
        )

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server is ready; False if it has ended, for example because its port was taken."""
        client = redis.Redis.from_url(self.url, socket_timeout=2)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            try:
                client.ping()
            except redis.exceptions.BusyLoadingError:  # loading much data may take long
                deadline = time.monotonic() + _START_TIMEOUT_S
                time.sleep(0.2)
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.05)
            else:
                client.close()
                return True
        self.stop()
        return False
