"""The process of an environment, seen from the job: its start, its messages, its output and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout_head.environment.host import HEADER

_HOST = Path(__file__).with_name("host.py")
_SECRETS = ("ROLLOUT_REDIS_URL", "ROLLOUT_HISTORY_REDIS_URL", "ROLLOUT_STATUS_TOKEN")
"""Environment variables of the head that an environment does not need."""
_READ_BYTES = 1 << 20
_KEPT_LINES = 5
"""Number of lines of output that are kept for the message about the end of the process."""
_MAX_LINE_BYTES = 400
_SEND_TIMEOUT_S = 30.0
"""Seconds after which a process that reads no messages is considered hung."""


class EnvironmentProcess:
    """A running process of an environment.

    Args:
        python: the interpreter; None for that of this process.
        memory_limit: bytes that the process and its children may use.
        timeout_s: seconds that the environment may take for one call.

    Raises:
        OSError: if the interpreter cannot be started.
    """

    def __init__(self, python: str | None, memory_limit: int, timeout_s: float) -> None:
        self._memory_limit = memory_limit
        self._channel, theirs = socket.socketpair()
        self._output, their_output = os.pipe()
        self._channel.settimeout(_SEND_TIMEOUT_S)
        environ = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        command = [python or sys.executable, "-u", str(_HOST), str(theirs.fileno()), str(memory_limit), str(timeout_s)]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environ,
            )
        except OSError:
            self._channel.close()
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(their_output)
        os.set_blocking(self._output, False)
        self._output_has_ended = False
        self._received = bytearray()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._line = b""

    @property
    def pid(self) -> int:
        """Id of the process, which is also that of its process group."""
        return self._process.pid

    @property
    def channel(self) -> socket.socket:
        """The socket with the messages, which becomes readable when one arrives or the process has ended."""
        return self._channel

    @property
    def output(self) -> int | None:
        """File descriptor of the output, which becomes readable when the environment prints; None at its end."""
        return None if self._output_has_ended else self._output

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`kill` was called."""
        return self._channel.fileno() < 0

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; one to a process that has ended is dropped.

        Raises:
            TimeoutError: if the process does not read.
        """
        data = json.dumps(message).encode()
        with suppress(BrokenPipeError, ConnectionError):
            self._channel.sendall(HEADER.pack(len(data)) + data)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived completely.

        Raises:
            EOFError: if the process has ended.
        """
        try:
            data = self._channel.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._received += data
        messages = []
        while len(self._received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[HEADER.size : end]))
            del self._received[:end]
        return messages

    def read_output(self) -> list[str]:
        """Return the lines that the environment has printed since the last call."""
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return []
        self._output_has_ended = not data
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _MAX_LINE_BYTES or (not data and self._line):
            lines, self._line = [*lines, self._line], b""
        printed = [line[:_MAX_LINE_BYTES].decode(errors="replace") for line in lines]
        self._lines.extend(line for line in printed if line.strip())
        return printed

    def exceeds_memory(self) -> bool:
        """Return whether the process and its children use more memory than they may."""
        return exceeds_memory(self.pid, self._memory_limit)

    @property
    def last_output(self) -> str:
        """The last lines that the environment has printed, as the end of a sentence; empty without any."""
        return f"; its last output: {' | '.join(self._lines)}" if self._lines else ""

    def kill(self) -> str:
        """Kill the process with all its children; return how it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5 if self._has_closed_channel() else 0)
        kill_tree(self.pid)
        code = self._process.wait()
        self.read_output()
        self._channel.close()
        os.close(self._output)
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def _has_closed_channel(self) -> bool:
        readable, _, _ = select.select([self._channel], [], [], 0)
        try:
            return bool(readable) and not self._channel.recv(1, socket.MSG_PEEK)
        except OSError:
            return True


_PAGE = os.sysconf("SC_PAGE_SIZE")


def process_tree(pid: int) -> list[int]:
    """Return *pid* and the ids of all its descendants.

    This is called several times per second. psutil would read the state of every process of the machine for it.
    """
    found = [pid]
    for parent in found:
        # The kernel lists children by the thread that created them.
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def kill_tree(pid: int) -> None:
    """Kill a process, which leads a process group, with its group and all its descendants."""
    for process in process_tree(pid)[1:]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def exceeds_memory(pid: int, limit: int) -> bool:
    """Return whether a process and its descendants together use more than *limit* bytes.

    Pages that several of them share count once. Counting them takes longer, and is only done if it may matter.
    """
    processes = process_tree(pid)
    return sum(map(_resident_bytes, processes)) > limit and sum(map(_proportional_bytes, processes)) > limit


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # it has ended
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError):
        pass
    return 0
