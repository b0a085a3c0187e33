"""`rollout status` and `rollout cancel` on a job whose coordinator and relay run as processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from rollout_api import FinishReason, RolloutClient
from rollout_api.ports import free_port
from rollout_api.protocol.status import EXIT_ENGINE, EXIT_INTERRUPTED, EXIT_STATE
from rollout_head.child_services import JobServices
from rollout_store.job.setup import JobSetup
from rollout_tools.cli.main import app
from tests.support.waiting import wait_for

MANIFEST = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "math"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "any/model"}, "workers": {"gpusPerWorker": 0}},
}
START_S = 30.0
STATUS_EXPIRY_S = 30.0


def rollout(command: str, redis_url: str, *arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [command, "math", "--redis", redis_url, *arguments], input=answer)


@pytest.fixture
def setup(redis_url: str, tmp_path: Path) -> JobSetup:
    return JobSetup(
        MANIFEST, "uid-1", redis_url, 100, "fingerprint", http_port=free_port(), log_directory=str(tmp_path / "logs")
    )


@pytest.fixture
def services(setup: JobSetup) -> Iterator[JobServices]:
    """A coordinator without engines, which has published its status."""
    running = JobServices(setup)
    running.start()
    server = redis.Redis.from_url(setup.redis_url)
    wait_for(lambda: server.exists(setup.keys.status), START_S)
    yield running
    running.stop()


def test_the_status_says_what_waits_and_why(setup: JobSetup, services: JobServices) -> None:
    with RolloutClient.connect(setup.redis_url, "math", name="trainer") as client, client.step(1, [[1, 2]] * 3) as step:
        wait_for(lambda: (client.status or {}).get("requests") == 3, START_S)
        shown = rollout("status", setup.redis_url)
        assert 0 == shown.exit_code, shown.output
        assert "Job default/math (uid uid-1) is running; 0 rollouts are done." in shown.output
        assert "3 open" in shown.output
        assert "No engine serves yet" in shown.output
        document = json.loads(rollout("status", setup.redis_url, "--json").output)
        assert ("default/math", "running", 3, []) == tuple(
            document[name] for name in ("job", "state", "requests", "engines")
        )
        step.cancel()


def test_a_job_without_a_coordinator_is_told_from_one_that_has_ended(setup: JobSetup, services: JobServices) -> None:
    services.stop()
    server = redis.Redis.from_url(setup.redis_url)
    wait_for(lambda: not server.exists(setup.keys.status), STATUS_EXPIRY_S)
    shown = rollout("status", setup.redis_url)
    assert EXIT_ENGINE == shown.exit_code
    assert "without a coordinator" in shown.output
    assert "start it again with the same manifest" in shown.output.replace("\n", " ")
    document = json.loads(rollout("status", setup.redis_url, "--json").output)
    assert {"job": "default/math", "uid": "uid-1", "state": "no coordinator", "done": 0} == document
    assert "job default/math is without a coordinator; see `rollout status`" in rollout("top", setup.redis_url).output

    server.hset(setup.keys.job, mapping={"state": "failed", "reason": "out of quota"})
    shown = rollout("status", setup.redis_url)
    assert EXIT_ENGINE == shown.exit_code
    assert "The job has failed: out of quota" in shown.output
    shown = rollout("top", setup.redis_url)
    assert EXIT_ENGINE == shown.exit_code
    assert "job default/math is failed; see `rollout status`" in shown.output


def test_only_named_requests_are_cancelled(setup: JobSetup, services: JobServices) -> None:
    with RolloutClient.connect(setup.redis_url, "math", name="trainer") as client, client.step(1, [[1], [2]]) as step:
        wait_for(lambda: (client.status or {}).get("requests") == 2, START_S)
        unknown = rollout("cancel", setup.redis_url, "nobody", "--yes")
        assert EXIT_STATE == unknown.exit_code
        first, second = unknown.output.replace("\n", "").partition("open requests: ")[2].split(", ")
        cancelled = rollout("cancel", setup.redis_url, first, "--yes")
        assert 0 == cancelled.exit_code, cancelled.output
        assert "Cancelled 1 request." in cancelled.output
        assert EXIT_STATE == rollout("cancel", setup.redis_url, first, "--yes").exit_code
        assert 0 == rollout("cancel", setup.redis_url, second, "--yes").exit_code
        assert {FinishReason.CANCELLED} == {one.finish_reason for one in step}


def test_a_cancelled_job_ends_after_a_confirmation(setup: JobSetup, services: JobServices) -> None:
    with RolloutClient.connect(setup.redis_url, "math", name="trainer") as client, client.step(1, [[1], [2]]) as step:
        wait_for(lambda: (client.status or {}).get("requests") == 2, START_S)
        refused = rollout("cancel", setup.redis_url, answer="n\n")
        assert EXIT_INTERRUPTED == refused.exit_code
        assert "Cancel 2 open requests" in refused.output
        assert not services.ended()

        ended = rollout("cancel", setup.redis_url, answer="y\n")
        assert 0 == ended.exit_code, ended.output
        assert "Ended job default/math." in ended.output
        assert {FinishReason.CANCELLED} == {one.finish_reason for one in step}
    wait_for(services.ended, START_S)
    again = rollout("cancel", setup.redis_url, "--yes")
    assert EXIT_STATE == again.exit_code
    assert "is closed already" in again.output
    shown = rollout("status", setup.redis_url)
    assert 0 == shown.exit_code
    assert "is closed" in shown.output
