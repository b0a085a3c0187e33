"""Supervises processes as a kubelet supervises containers: a process that fails is restarted without leftovers."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil


class ProcessSupervisor:
    """Runs named processes, each with a log file."""

    def __init__(self, logs: Path) -> None:
        self.restarts: dict[str, int] = {}
        self._logs = logs
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._descendants: dict[str, set[psutil.Process]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a command and keep it running until it succeeds."""
        with self._lock:
            self._commands[name] = list(command)
            self.restarts[name] = -1

    def remove(self, name: str, timeout: float = 60) -> None:
        """Terminate a process with SIGTERM and do not restart it."""
        with self._lock:
            del self._commands[name]
            process = self._processes.pop(name)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        self._clean(name, process)

    def kill(self, name: str) -> None:
        """Kill a process and its descendants, as when the machine of a pod is lost."""
        with self._lock:
            process = self._processes.get(name)
        if process is not None:
            self._clean(name, process)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process, without its descendants."""
        with self._lock:
            self._processes[name].send_signal(number)

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the descendants of the supervised processes whose title is *title*, or starts with it and a dot."""
        found = []
        for process in self._all():
            with contextlib.suppress(psutil.Error, IndexError):  # a process that has ended has no command line
                if process.cmdline()[0].partition(".")[0] == title:
                    found.append(process)
        return found

    def processes_with_arguments(self, *arguments: str) -> list[psutil.Process]:
        """Return the descendants of the supervised processes whose command lines contain all *arguments*."""
        found = []
        for process in self._all():
            with contextlib.suppress(psutil.Error):
                if set(arguments) <= set(process.cmdline()):
                    found.append(process)
        return found

    def ended(self, name: str) -> int | None:
        """0 if the process has succeeded; None if it is running or is being restarted."""
        process = self._processes.get(name)
        return 0 if process is not None and process.poll() == 0 else None

    def stop(self) -> None:
        """Kill all processes."""
        self._stopping.set()
        self._thread.join()
        for name, process in self._processes.items():
            self._clean(name, process)

    def _all(self) -> Iterator[psutil.Process]:
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            with contextlib.suppress(psutil.Error):
                yield from psutil.Process(process.pid).children(recursive=True)

    def _run(self) -> None:
        while not self._stopping.wait(0.25):
            with self._lock:
                commands = dict(self._commands)
            for name, command in commands.items():
                process = self._processes.get(name)
                if process is not None and (code := process.poll()) is None:
                    with contextlib.suppress(psutil.Error):
                        self._descendants[name] = set(psutil.Process(process.pid).children(recursive=True))
                    continue
                if process is not None and code == 0:
                    continue  # it has succeeded
                if process is not None:
                    self._clean(name, process)
                    time.sleep(0.5)
                log = (self._logs / f"{name}.log").open("ab")
                with self._lock:
                    if name in self._commands:
                        # Linux schedules the processes of a session together (autogroup), as those of a container.
                        self._processes[name] = subprocess.Popen(
                            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                        )
                        self.restarts[name] += 1
                log.close()

    def _clean(self, name: str, process: subprocess.Popen[bytes]) -> None:
        descendants = self._descendants.pop(name, set())
        with contextlib.suppress(psutil.Error):
            descendants |= set(psutil.Process(process.pid).children(recursive=True))
        for descendant in descendants:
            with contextlib.suppress(psutil.Error):
                descendant.send_signal(signal.SIGKILL)
        process.kill()
        process.wait()
