"""A Redis server of a job's own, for running without one."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import redis

from rollout_worker.child_process import end_with_parent
from rollout_worker.history.connection import RedisUnusableError

_START_TIMEOUT_S = 10.0
_PORT_TRIES = 5


class EmbeddedRedis:
    """``redis-server`` on a free loopback port, its data (an append-only file) in a directory that is kept.

    It ends with this process, however that ends.
    """

    def __init__(self, directory: Path, *, keep_open: int) -> None:
        """Start nothing yet.

        Args:
            directory: where its data lie.
            keep_open: a file descriptor that the server holds while it lives, as the lock of *directory*.
        """
        self.url = ""
        self._directory = directory
        self._keep_open = keep_open
        self._log = directory.resolve() / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the server and wait until it has read its data.

        Returns:
            Its URL, with the password that was made for it.

        Raises:
            RedisUnusableError: if it is not installed or does not start.
        """
        program = shutil.which("redis-server")
        if program is None:
            raise RedisUnusableError(
                "redis-server is not installed: install it (Debian: apt-get install redis-server), or name a server "
                "with --redis URL"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        for _ in range(_PORT_TRIES):
            port, password = _free_port(), secrets.token_urlsafe(24)
            self._process = self._launch(program, port, password)
            self.url = f"redis://:{password}@127.0.0.1:{port}/0"
            if self._answers(self._process):
                return self.url
        log = self._log.read_text(errors="replace")[-2000:] if self._log.is_file() else "(there is none)"
        raise RedisUnusableError(f"redis-server does not start; its log in {self._directory} ends:\n{log}")

    def stop(self) -> None:
        """Shut the server down; its data stay."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _launch(self, program: str, port: int, password: str) -> subprocess.Popen[bytes]:
        settings = self._directory / "redis.conf"
        settings.touch(mode=0o600)
        settings.write_text(
            f'bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir "{self._directory.resolve()}"\n'
            "appendonly yes\nappendfsync everysec\nsave ''\nmaxmemory-policy noeviction\n"
            f'logfile "{self._log}"\n'
        )
        return subprocess.Popen(
            [program, str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._keep_open,),
            preexec_fn=end_with_parent,  # noqa: PLW1509 – see there
            process_group=0,  # no Ctrl-C; but not a session, whose processes Linux may let wait for seconds (autogroup)
        )

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the server is ready; False if it ended (its port was taken meanwhile, say)."""
        client = redis.Redis.from_url(self.url, socket_timeout=2)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            try:
                client.ping()
            except redis.exceptions.BusyLoadingError:  # its data, which may take long
                deadline = time.monotonic() + _START_TIMEOUT_S
                time.sleep(0.2)
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.05)
            else:
                client.close()
                return True
        self.stop()
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
