"""The command ``rollout report``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner, Result

from rollout_api.ports import free_port
from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_api.protocol.status import EXIT_REDIS, EXIT_STATE
from rollout_tools.cli.main import app
from rollout_tools.launch.job_state import LastRedis
from rollout_tools.report.recording import load_recording, save_recording
from tests.support.recordings import small_job

Report = Callable[..., Result]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.delenv("ROLLOUT_REDIS_URL", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_page_is_written_from_a_saved_recording(report: Report, tmp_path: Path) -> None:
    save_recording(small_job(), tmp_path / "job.json.gz")
    page, copy = tmp_path / "new" / "page.html", tmp_path / "copy.json.gz"
    result = report(tmp_path / "job.json.gz", "--html", page, "--save", copy)
    assert 0 == result.exit_code, result.output
    assert "<title>default/job – rollout report</title>" in page.read_text()
    assert small_job() == load_recording(copy)


@pytest.mark.parametrize("embedded", [True, False])
def test_a_local_job_whose_redis_has_ended_is_reported_from_its_last_recording(
    report: Report, tmp_path: Path, embedded: bool
) -> None:
    directory = tmp_path / "state" / "default" / "job"
    directory.mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps({"uid": "uid", "finished": True}))
    LastRedis(f"redis://127.0.0.1:{free_port()}/0", embedded=embedded).save(directory)
    arguments = ("job", "--state-dir", tmp_path / "state", "--html", tmp_path / "page.html")
    result = report(*arguments)
    assert (EXIT_STATE if embedded else EXIT_REDIS) == result.exit_code
    save_recording(small_job(), directory / "recording.json.gz")
    assert 0 == report(*arguments).exit_code
    assert 0 == report(*arguments[1:]).exit_code  # it is the only job there
    assert "default/job" in (tmp_path / "page.html").read_text()


def test_errors_say_what_to_do(report: Report, tmp_path: Path, redis_url: str) -> None:
    def error(*arguments: object) -> str:
        result = report(*arguments)
        assert EXIT_STATE == result.exit_code, result.output
        return " ".join(result.output.split())

    page = ("--html", tmp_path / "page.html")
    (tmp_path / "file").write_text("text")
    assert "pass --html FILE for the page, or --save FILE" in error("job")
    assert "is not a recording of a job" in error(tmp_path / "file", *page)
    assert "there is no job default/math in this Redis" in error("math", *page, "--redis", redis_url)
    assert "cannot write" in error("math", "--html", tmp_path / "file" / "page.html")
    client = redis.Redis.from_url(redis_url)
    client.set(job_uid_key("default/math"), "uid")
    client.hset(MessageKeys("uid").job, "state", "running")
    assert "there is no timeline of job default/math" in error("math", *page, "--redis", redis_url)
    assert not (tmp_path / "page.html").exists()
