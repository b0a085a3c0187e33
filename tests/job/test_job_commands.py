"""A job whose coordinator and relay run as processes, and what `rollout status` and `rollout cancel` do with it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from rollout_api import FinishReason, RolloutClient
from rollout_api.ports import free_port
from rollout_api.protocol.status import EXIT_ENGINE, EXIT_INTERRUPTED, EXIT_STATE, CoordinatorStatus
from rollout_head.child_services import JobServices
from rollout_head.services import Service
from rollout_store.job import EngineReport
from rollout_store.job.engines import EngineError
from rollout_store.job.setup import JobSetup
from rollout_tools.cli.job_status import missing_coordinator, problems, problems_of_ended_job
from rollout_tools.cli.main import app
from tests.support.job_status import job_status
from tests.support.waiting import wait_for

MANIFEST = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "math"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "any/model"}, "workers": {"gpusPerWorker": 0}},
}
START_S = 30.0
"""Seconds until a process has started and published its first state, on a busy machine."""
STATUS_EXPIRY_S = 30.0


@pytest.fixture
def setup(redis_url: str, tmp_path: Path) -> JobSetup:
    return JobSetup(
        MANIFEST, "uid-1", redis_url, 100, "fingerprint", http_port=free_port(), log_directory=str(tmp_path / "logs")
    )


@pytest.fixture
def services(setup: JobSetup) -> Iterator[JobServices]:
    """A coordinator without engines, which has published its status, and a relay."""
    running = JobServices(setup)
    running.start()
    server = redis.Redis.from_url(setup.redis_url)
    wait_for(lambda: server.exists(setup.keys.status), START_S)
    yield running
    running.stop()
    assert not processes()


def processes() -> dict[str, psutil.Process]:
    """Return the running services of this process by name."""
    found = {}
    for child in psutil.Process().children():
        try:
            line = child.cmdline()
        except psutil.Error:
            continue
        if "rollout_head.services" in line and child.status() != psutil.STATUS_ZOMBIE:
            found[line[-1]] = child
    return found


def coordinator_number(setup: JobSetup) -> int:
    """Return the number of the last coordinator that took over."""
    server: Any = redis.Redis.from_url(setup.redis_url)
    return int(server.get(setup.keys.fencing_token) or 0)


def test_both_processes_are_restarted(setup: JobSetup, services: JobServices) -> None:
    first = wait_for(lambda: len(found := processes()) == 2 and found, START_S)
    for process in first.values():
        process.kill()
    wait_for(lambda: coordinator_number(setup) == 2, START_S)
    second = wait_for(lambda: len(found := processes()) == 2 and found, START_S)
    assert set(Service) == set(second)
    assert not {process.pid for process in first.values()} & {process.pid for process in second.values()}
    assert not services.ended()


def test_a_head_ends_when_another_one_has_taken_over(setup: JobSetup, services: JobServices) -> None:
    redis.Redis.from_url(setup.redis_url).incr(setup.keys.fencing_token)

    def is_superseded() -> bool:
        try:
            services.ended()
        except EngineError as error:
            return "another head" in str(error)
        return False

    wait_for(is_superseded, START_S)
    wait_for(lambda: [Service.RELAY] == list(processes()), START_S)  # it starts a second after the coordinator


def test_a_service_that_cannot_be_started_is_started_later(setup: JobSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing")
    services = JobServices(setup)
    services.start()
    try:
        assert not processes()
        monkeypatch.undo()
        wait_for(lambda: coordinator_number(setup) == 1, START_S)
    finally:
        services.stop()


@pytest.mark.usefixtures("services")
def test_the_services_survive_ctrl_c() -> None:
    groups = {os.getpgid(process.pid) for process in processes().values()}
    assert os.getpgid(0) not in groups


def test_a_closed_job_is_recorded_as_closed_before_the_wait_ends(setup: JobSetup, services: JobServices) -> None:
    server = redis.Redis.from_url(setup.redis_url)
    asyncio.run(services.wait_ended(0.1))
    assert not services.ended()
    with RolloutClient.connect(setup.redis_url, uid=setup.uid, name="trainer") as client:
        client.close_job()
    asyncio.run(services.wait_ended(START_S))
    services.stop()
    assert b"closed" == server.hget(setup.keys.job, "state")


# Commands


def rollout(command: str, redis_url: str, *arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [command, "math", "--redis", redis_url, *arguments], input=answer)


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


# The problems that `rollout status` reads from a status


def status(**changes: Any) -> CoordinatorStatus:
    """Return the status of a job with one engine, with changed fields."""
    board = job_status({"e": EngineReport("engine-0", "worker", max_running=16)})
    assert board.last is not None
    return cast(CoordinatorStatus, board.last | changes)


def test_a_healthy_job_has_no_problems() -> None:
    assert [] == problems(status())
    assert [] == problems_of_ended_job("closed", None)


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"state": "paused"}, "paused", "client.resume()"),
        ({"engines": []}, "No engine serves yet", "rollout logs"),
        ({"engines": [], "engine_errors": {"w/engine-0": "out of memory"}}, "w/engine-0 cannot start", "`engine`"),
        ({"engines_lost": 2}, "2 engines were lost", "rollout logs"),
        ({"distribution_drift": True}, "changes the output distribution", "speculation.policy"),
        ({"unverified": ["engine-0"]}, "does not verify the drafts that are proposed on engine-0", "warnings"),
        (
            {"slow_clients": ["t"], "unread_bytes": {"t": 9 * 2**20}},
            "t has not read 9.0 MiB of results",
            "read its results",
        ),
        ({"slow_clients": ["t"], "silent_clients": ["t"]}, "t has not noticed new results for a minute", "event loop"),
        ({"conflicts": 2}, "2 rewards or rollouts were not recorded", "appendfsync always"),
        ({"dead_letters": 3}, "3 messages", "rollout:{uid}:dead-letters"),
        (
            {"environment_errors": {"timeout": {"count": 4, "problem": "p7", "message": "took 60 s"}}},
            "4 rollouts got no reward from the environment (timeout). The first one is of problem p7: took 60 s",
            "source.dataset.environment",
        ),
    ],
)
def test_each_problem_has_a_remedy(changes: dict[str, Any], what: str, remedy: str) -> None:
    [problem] = problems(status(**changes))
    assert what in problem.what
    assert remedy in problem.remedy


def test_weights_that_an_engine_cannot_load_are_named() -> None:
    engine = status()["engines"][0] | {"failed": {"3": "no such file"}, "version": 2}
    [problem] = problems(status(engines=[engine]))
    assert "engine-0 could not load weight version 3: no such file" == problem.what
    assert "serves version 2" in problem.remedy


def test_what_to_restart_depends_on_how_the_job_was_started() -> None:
    assert "`rollout run` has ended" in missing_coordinator(is_local=True).remedy
    assert "`rollout head`" in missing_coordinator(is_local=False).remedy
    assert "The job has failed: out of quota" == problems_of_ended_job("failed", "out of quota")[0].what
