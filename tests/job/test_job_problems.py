"""The problems that `rollout status` reads from a job's status."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollout_api.protocol.status import CoordinatorStatus
from rollout_store.job import EngineReport
from rollout_tools.cli.job_status import missing_coordinator, problems, problems_of_ended_job
from tests.support.job_status import job_status


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
