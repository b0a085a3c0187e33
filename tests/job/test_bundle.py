"""`rollout bundle`: what it collects of a job whose coordinator and relay run as processes, and what it leaves out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from rollout_api import FinishReason, RolloutClient
from rollout_api.bundle import read_archive
from rollout_api.ports import free_port
from rollout_api.protocol.status import EXIT_STATE
from rollout_head.child_services import JobServices
from rollout_store.job.setup import JobSetup
from rollout_store.job.streams import add_dead_letter
from rollout_tools.cli.main import app
from rollout_tools.launch.job_state import LastRedis, save_manifest
from rollout_tools.report.recording import load_recording
from tests.support.waiting import wait_for

MANIFEST = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "math"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "any/model"}, "workers": {"gpusPerWorker": 0}},
}
START_S = 30.0
ROLLOUTS = 8
"""Rollouts of a prompt, by default."""
PASSWORD = "planted-Pa55word/@:"
ENCODED_PASSWORD = "planted-Pa55word%2F%40%3A"
TOKEN = "planted-token-of-the-environment"
PROMPT = [91_919_191, 92_929_292]
"""Token ids that occur nowhere else."""
MESSAGE = b"a planted message with a prompt"


def bundle(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bundle", *map(str, arguments)])


def files_of(archive: Path) -> dict[str, bytes]:
    """Return the files of an archive, decompressed."""
    return {
        name: gzip.decompress(content) if name.endswith(".gz") else content
        for name, content in read_archive(archive.read_bytes())
    }


@pytest.fixture
def setup(redis_url: str, tmp_path: Path) -> JobSetup:
    """A job whose Redis user has a password, in a state directory with logs."""
    server = redis.Redis.from_url(redis_url)
    server.acl_setuser(
        "planted", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], channels=["*"], commands=["+@all"]
    )
    url = f"redis://planted:{ENCODED_PASSWORD}@{redis_url.rpartition('@')[2]}"
    directory = tmp_path / "default" / "math"
    setup = JobSetup(
        MANIFEST, "uid-1", url, 2**30, "fingerprint", http_port=free_port(), log_directory=str(directory / "logs")
    )
    directory.mkdir(parents=True)
    LastRedis(url, embedded=False).save(directory)
    save_manifest(directory, setup.job)
    (directory / "job.json").write_text('{"uid": "uid-1", "finished": false}')
    return setup


@pytest.fixture
def services(setup: JobSetup) -> Iterator[JobServices]:
    setup.open_history()
    running = JobServices(setup)
    running.start()
    server = redis.Redis.from_url(setup.redis_url)
    wait_for(lambda: server.exists(setup.keys.status), START_S)
    yield running
    running.stop()


@pytest.fixture
def job(setup: JobSetup, services: JobServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of a job with a cancelled rollout, a dead letter and secrets in its log."""
    monkeypatch.setenv("ROLLOUT_STATUS_TOKEN", TOKEN)
    monkeypatch.setenv("MAX_BATCHED_TOKENS", "16384")  # no secret
    with RolloutClient.connect(setup.redis_url, "math", name="trainer") as client, client.step(1, [PROMPT]) as step:
        wait_for(lambda: (client.status or {}).get("requests") == 1, START_S)
        step.cancel()
        assert {FinishReason.CANCELLED} == {one.finish_reason for one in step}
    server = redis.Redis.from_url(setup.redis_url)
    add_dead_letter(
        server, setup.keys.dead_letters, stream=setup.keys.requests, data=MESSAGE, reason="malformed message"
    )
    with (Path(setup.log_directory) / "engine-0.log").open("w") as log:
        log.write(f"2026-11-27T22:31:18.123Z INFO vllm: connected to {setup.redis_url} with api_key={TOKEN}\n")
        log.write("2026-11-27T22:31:18.223Z INFO vllm: at most 16384 tokens in a step\n")
        log.write(f"2026-11-27T22:31:19.123Z ERROR vllm: out of memory; password {PASSWORD}\n")
    return tmp_path


def test_a_bundle_explains_a_running_job_without_secrets_and_prompts(job: Path, setup: JobSetup) -> None:
    archive = job / "out.tar.gz"
    collected = bundle("math", "--state-dir", job, "-o", archive)
    assert 0 == collected.exit_code, collected.output
    assert "The bundle is in" in collected.output
    files = files_of(archive)
    page = files["README.md"].decode()
    assert "## What is missing" not in page, page
    expected = {"manifest.json", "status.json", "job.json", "engines.json", "dead_letters.json", "history.json"}
    expected |= {"recording.json.gz", "redis.json", "logs.txt", "metrics.txt", "versions.json", "environment.json"}
    assert expected | {"doctor.json", "README.md"} == set(files)
    for name in expected:
        assert f"| `{name}` |" in page

    assert "any/model" == json.loads(files["manifest.json"])["spec"]["model"]["uri"]
    assert "running" == json.loads(files["status.json"])["state"]
    assert "any/model" == json.loads(files["job.json"])["description"]["model"]
    (letter,) = json.loads(files["dead_letters.json"])
    assert ("malformed message", len(MESSAGE)) == (letter["reason"], letter["bytes"])
    assert "default/math" == json.loads(files["history.json"])["history"]
    assert ["cancelled"] * ROLLOUTS == [row[7] for row in json.loads(files["recording.json.gz"])["ended"]["rows"]]
    assert "noeviction" == json.loads(files["redis.json"])["settings"]["maxmemory-policy"]
    assert b'rollout_requests_open{job="default/math"}' in files["metrics.txt"]
    assert json.loads(files["versions.json"])["distributions"]["redis"]
    assert json.loads(files["doctor.json"])["findings"]
    log = files["logs.txt"].decode()
    assert "engine-0 ERROR vllm: out of memory; password ***" in log
    assert "connected to redis://planted:***@" in log
    assert "at most 16384 tokens" in log

    everything = b"\n".join(files.values()) + archive.read_bytes()
    for secret in (PASSWORD, ENCODED_PASSWORD, TOKEN, str(PROMPT[0]), str(PROMPT[1])):
        assert secret.encode() not in everything
    assert MESSAGE not in everything
    assert PROMPT[0].to_bytes(4, "little") not in everything


def test_messages_are_included_on_request(job: Path) -> None:
    collected = bundle("math", "--state-dir", job, "--output=-", "--with-rollouts")
    assert 0 == collected.exit_code
    archive = job / "out.tar.gz"
    archive.write_bytes(collected.stdout_bytes)
    files = files_of(archive)
    assert json.loads(files["dead_letters.json"])[0]["message"]
    assert b"Prompts and responses are included" in files["README.md"]


def test_a_job_whose_redis_is_gone_still_has_logs_and_a_manifest(
    job: Path, setup: JobSetup, services: JobServices
) -> None:
    services.stop()
    url = f"redis://planted:{ENCODED_PASSWORD}@127.0.0.1:{free_port()}/0"
    LastRedis(url, embedded=True).save(job / "default" / "math")
    archive = job / "out.tar.gz"
    collected = bundle("math", "--state-dir", job, "-o", archive)
    assert 0 == collected.exit_code, collected.output
    files = files_of(archive)
    assert {"manifest.json", "logs.txt", "versions.json", "environment.json", "doctor.json", "README.md"} == set(files)
    page = files["README.md"].decode()
    missing = page.partition("## What is missing")[2]
    for name in ("status.json", "engines.json", "redis.json", "recording.json.gz"):
        assert f"| `{name}` |" in missing
    assert "does not run at the moment" in missing
    assert PASSWORD.encode() not in b"\n".join(files.values())


def test_a_job_whose_rollouts_have_not_ended_has_its_measurements(setup: JobSetup, services: JobServices) -> None:
    server = redis.Redis.from_url(setup.redis_url)
    wait_for(lambda: server.exists(setup.keys.measurements), START_S)
    archive = Path(setup.log_directory).parent / "out.tar.gz"
    assert 0 == bundle("math", "--redis", setup.redis_url, "-o", archive).exit_code
    files = files_of(archive)
    assert b"" == files["timeline/ended.jsonl"]
    first = json.loads(files["timeline/measurements.jsonl"].splitlines()[0])
    assert "running" == first["state"]
    assert "none of its rollouts has ended yet" in files["README.md"].decode()


def test_the_recording_of_a_bundle_makes_a_report(job: Path) -> None:
    archive = job / "out.tar.gz"
    assert 0 == bundle("math", "--state-dir", job, "-o", archive).exit_code
    saved = job / "recording.json.gz"
    saved.write_bytes(dict(read_archive(archive.read_bytes()))["recording.json.gz"])
    recording = load_recording(saved)
    assert ("default/math", [], ROLLOUTS) == (recording.name, recording.problems, len(recording.ended))


def test_an_unknown_job_is_an_error(redis_url: str, tmp_path: Path) -> None:
    refused = bundle("mth", "--redis", redis_url, "--state-dir", tmp_path)
    assert EXIT_STATE == refused.exit_code
    assert "there is no job default/mth" in refused.output
    assert [] == list(tmp_path.iterdir())
