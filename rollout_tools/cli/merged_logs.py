"""The log files of a job's processes, merged by time."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from rollout_store.runtime.output import NUM_OLD_FILES
from rollout_tools.launch.job_state import log_directory

REDIS = "redis"
"""Name of the embedded Redis server among the processes; it writes its log itself."""
_POLL_INTERVAL_S = 0.3
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ")
_REDIS_TIME = re.compile(r"\d+:\w (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d{3}) ")


class LogLine(NamedTuple):
    """One line of a log file."""

    time: str
    """Time in UTC (ISO 8601); that of the line before for the further lines of a message. Lines are sorted by it."""
    process: str
    text: str


class JobLogs:
    """The log files in the directory of a job that runs with ``rollout run``."""

    def __init__(self, directory: Path, processes: Collection[str] = ()) -> None:
        """Select log files.

        *processes* are beginnings of the names of the processes to show; empty for all.
        """
        self._directory, self._selected = directory, tuple(processes)
        self._current: dict[str, _OpenFile] = {}

    def processes(self) -> list[str]:
        """Return the names of all processes that have a log, whether they are selected or not."""
        names = {file.name.partition(".")[0] for file in log_directory(self._directory).glob("*.log*")}
        return sorted(names | ({REDIS} if self._redis_log.is_file() else set()))

    def written(self) -> Iterator[LogLine]:
        """Yield all lines that have been written so far, in order of their times."""
        return heapq.merge(*map(self._read_all, self._names()), key=lambda line: line.time)

    def follow(self) -> Iterator[LogLine]:
        """Yield the lines that follow those of :meth:`written`, without end, as they are written."""
        while True:
            new = (line for name in self._names() for line in self._new_lines_of(name))
            yield from sorted(new, key=lambda line: line.time)
            time.sleep(_POLL_INTERVAL_S)

    @property
    def _redis_log(self) -> Path:
        return self._directory / "redis" / "redis.log"

    def _names(self) -> list[str]:
        return [name for name in self.processes() if not self._selected or name.startswith(self._selected)]

    def _path(self, name: str) -> Path:
        return self._redis_log if name == REDIS else log_directory(self._directory) / f"{name}.log"

    def _read_all(self, name: str) -> Iterator[LogLine]:
        path = self._path(name)
        for number in range(NUM_OLD_FILES, 0, -1):
            with contextlib.suppress(FileNotFoundError), _open(path.with_name(f"{path.name}.{number}")) as old:
                yield from _lines(name, old)
        yield from self._new_lines_of(name)

    def _new_lines_of(self, name: str) -> Iterator[LogLine]:
        if name not in self._current:
            self._current[name] = _OpenFile(name, self._path(name))
        yield from self._current[name].read()


class _OpenFile:
    """A file that is still written, and may be rotated."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._file: TextIOWrapper | None = None
        self._time = ""
        self._rest = ""
        """Beginning of a line whose end has not been written yet."""

    def read(self) -> Iterator[LogLine]:
        """Yield the lines that have been written since the last call."""
        if self._file is not None:
            yield from self._complete_lines(self._file)
        with contextlib.suppress(FileNotFoundError):
            if self._file is None or self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                if self._file is not None:
                    yield from self._complete_lines(self._file)  # written before the rotation
                    self._file.close()
                self._file = _open(self._path)
                yield from self._complete_lines(self._file)

    def _complete_lines(self, file: TextIOWrapper) -> Iterator[LogLine]:
        *lines, self._rest = (self._rest + file.read()).split("\n")
        for line in _lines(self._name, lines, self._time):
            self._time = line.time
            yield line


def _open(path: Path) -> TextIOWrapper:
    return path.open(encoding="utf-8", errors="replace", newline="\n")


def _lines(process: str, lines: Iterable[str], last_time: str = "") -> Iterator[LogLine]:
    parse: Callable[[str], tuple[str, str]] = _parse_redis if process == REDIS else _parse
    for line in lines:
        at, text = parse(line.rstrip("\r\n"))
        last_time = at or last_time
        yield LogLine(last_time, process, text)


def _parse(line: str) -> tuple[str, str]:
    """Return the time and the text of a line; the time is '' if the line has none."""
    match = _TIME.match(line)
    return (match[1], line[match.end() :]) if match else ("", line)


def _parse_redis(line: str) -> tuple[str, str]:
    """Return the same for a line of Redis, which writes local times."""
    match = _REDIS_TIME.match(line)
    if match is None:
        return "", line
    local = datetime.strptime(match[1], "%d %b %Y %H:%M:%S.%f").astimezone(UTC)
    return f"{local:%Y-%m-%dT%H:%M:%S}.{local.microsecond // 1000:03}Z", line[match.end() :]
