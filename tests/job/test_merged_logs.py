"""The log files of a job's processes: rotation, and merging by time."""

from __future__ import annotations

import logging
import time
from itertools import islice
from pathlib import Path

import pytest

from rollout_store.runtime.output import NUM_OLD_FILES, logging_to_file, rotating_handler
from rollout_tools.cli.merged_logs import JobLogs, LogLine
from rollout_tools.launch.job_state import log_directory


def write(handler: logging.Handler, text: str, seconds: float = 0.0) -> None:
    """Write a record with a time in seconds since 1970."""
    record = logging.LogRecord("test", logging.INFO, "", 0, "%s", (text,), None)
    record.created, record.msecs = seconds, seconds % 1 * 1000
    handler.handle(record)


def texts(lines: list[LogLine]) -> list[tuple[str, str]]:
    return [(line.process, line.text) for line in lines]


def test_processes_are_merged_by_time_and_messages_stay_together(tmp_path: Path) -> None:
    engine = rotating_handler(log_directory(tmp_path), "engine-0", "%(message)s")
    relay = rotating_handler(log_directory(tmp_path), "relay", "%(levelname)s %(message)s")
    write(engine, "loading", 1.0)
    write(relay, "fails\n  because\n  of Redis", 2.5)
    write(engine, "serving", 2.75)
    lines = list(JobLogs(tmp_path).written())
    assert [
        ("engine-0", "loading"),
        ("relay", "INFO fails"),
        ("relay", "  because"),
        ("relay", "  of Redis"),
        ("engine-0", "serving"),
    ] == texts(lines)
    assert ["1970-01-01T00:00:01.000Z", "1970-01-01T00:00:02.500Z"] == [lines[0].time, lines[3].time]
    assert [("relay", "INFO fails")] == texts(list(islice(JobLogs(tmp_path, ["relay"]).written(), 1)))
    assert {"engine-0"} == {line.process for line in JobLogs(tmp_path, ["engine"]).written()}


def test_the_log_of_the_embedded_redis_is_merged_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "redis.log").write_text("77:M 27 Nov 2026 22:30:00.123 * Ready to accept connections\n")
    [line] = JobLogs(tmp_path).written()
    monkeypatch.undo()
    time.tzset()
    assert ("redis", "* Ready to accept connections") == (line.process, line.text)
    assert "2026-11-27T17:00:00.123Z" == line.time


def test_following_continues_through_rotations_without_a_gap(tmp_path: Path) -> None:
    handler = rotating_handler(log_directory(tmp_path), "relay", "%(message)s", max_bytes=100)
    write(handler, "0", 0.0)
    logs = JobLogs(tmp_path)
    assert ["0"] == [line.text for line in logs.written()]
    following = logs.follow()
    for number in range(1, 12):
        write(handler, str(number), float(number))
        assert str(number) == next(following).text
    files = sorted(file.name for file in log_directory(tmp_path).iterdir())
    assert ["relay.log", *(f"relay.log.{number}" for number in range(1, NUM_OLD_FILES + 1))] == files
    kept = [line.text for line in JobLogs(tmp_path).written()]
    assert [str(number) for number in range(12 - len(kept), 12)] == kept


@pytest.mark.parametrize("package", ["rollout_head", "rollout_store", "rollout_tools", "rollout_worker"])
def test_only_warnings_reach_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], package: str) -> None:
    logger = logging.getLogger(f"{package}.test")
    with logging_to_file(tmp_path, "run"):
        logger.info("Started.")
        logger.warning("Redis is slow.")
    assert f"WARNING {package}.test: Redis is slow.\n" == capsys.readouterr().err
    written = (tmp_path / "run.log").read_text()
    assert ["Started.", "Redis is slow."] == [line.rpartition(": ")[2] for line in written.splitlines()]
