"""Reports the statistics of an engine, for vLLM's ``/metrics`` and for ``rollout top``."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import redis

from rollout_store.history.engine_reports import REPORT_INTERVAL_S, EngineReports, OwnEngineReport
from rollout_worker.engine.engine_stats import counters_of

logger = logging.getLogger(__name__)
DIRECTORY_VARIABLE = "DAS_REPORTS_DIRECTORY"
"""Environment variable by which a process tells its engines where to write their reports."""
_SUFFIX = ".json"


class EngineState(NamedTuple):
    """What an engine knows about itself at one moment."""

    version: int
    running: int
    stats: Mapping[str, Any]
    """The statistics of ``DraftingExtension.das_stats``."""
    recorded: int
    """Rollouts that were recorded in the history."""
    lost: int
    """Rollouts that were not."""


class EngineReporter:
    """A thread that reports an engine's state periodically, to a file of its machine and to the history."""

    def __init__(self, read: Callable[[], EngineState], reports: Callable[[], EngineReports | None]) -> None:
        """Prepare the thread.

        Args:
            read: returns the engine's state.
            reports: returns those in the history; None for a history in memory.
        """
        self._read, self._reports = read, reports
        self._id, self._name = uuid.uuid4().hex, f"{socket.gethostname()}-{os.getpid()}"
        directory = os.environ.get(DIRECTORY_VARIABLE)
        self._file = None if directory is None else Path(directory) / f"{self._id}{_SUFFIX}"
        self._last = (time.monotonic(), 0.0)
        """When the last report was made, and the number of tokens then."""
        self._has_failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-reporter", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread; give up after *timeout* seconds."""
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.wait(REPORT_INTERVAL_S):
            try:
                report = self._make_report()
                # The directory does not exist on other machines, nor when the process that made it has ended.
                if self._file is not None and self._file.parent.is_dir():
                    write_report(self._file, report)
                self._report(functools.partial(EngineReports.write, report=report))
            except Exception:  # a later report may succeed
                level = logging.DEBUG if self._has_failed else logging.WARNING
                logger.log(level, "The engine's state cannot be reported; decoding goes on.", exc_info=True)
                self._has_failed = True
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._report(lambda reports: reports.remove(self._id))

    def _make_report(self) -> OwnEngineReport:
        state, now = self._read(), time.monotonic()
        labeled = state.stats["labeled_counters"]
        tokens = float(state.stats["tokens"])
        last_time, last_tokens = self._last
        self._last = now, tokens
        counters = counters_of(state.stats) | {
            "running": float(state.running),
            "tokens": tokens,
            "draft_tokens": float(sum(labeled["source_draft_tokens"].values())),
            "accepted_tokens": float(sum(labeled["source_accepted_tokens"].values())),
            "recorded_rollouts": float(state.recorded),
            "lost_rollouts": float(state.lost),
        }
        speed = (tokens - last_tokens) / (now - last_time)
        return OwnEngineReport(self._id, self._name, state.version, state.running, speed, counters, labeled)

    def _report(self, send: Callable[[EngineReports], None]) -> None:
        reports = self._reports()
        if reports is None:
            return
        try:
            send(reports)
        except redis.RedisError as error:
            logger.debug("The engine's state cannot be reported: %s", error)


def write_report(file: Path, report: OwnEngineReport) -> None:
    """Replace a file with an engine's report, so that readers never see a part of one."""
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(report.to_json())
    temporary.replace(file)


def read_reports(directory: Path) -> list[OwnEngineReport]:
    """Return the reports in the files of a directory, ordered by the engines' names."""
    reports = []
    for file in directory.glob(f"*{_SUFFIX}"):
        try:
            reports.append(OwnEngineReport.from_json(file.read_bytes()))
        except FileNotFoundError:  # its engine has ended
            continue
    return sorted(reports, key=lambda report: (report.name, report.id))
