"""``rollout run`` with environments of Python and of verifiers, which fail in many ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_store.models.model_source import default_cache
from rollout_tools.tiny_model import ensure
from tests.support.history_contents import rollout_ids_in
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "tests" / "support" / "environments"
VERIFIERS = ROOT / ".venv" / "verifiers" / "bin" / "python"
SAMPLES = 2
TURNS = 3

needs_verifiers = pytest.mark.skipif(
    not VERIFIERS.exists(), reason="verifiers is not installed; run scripts/get-verifiers"
)


class EnvironmentJob:
    """A job with an environment, on a Redis server of the test."""

    def __init__(self, directory: Path, url: str, name: str, environment: dict[str, Any], epochs: int = 1) -> None:
        self.redis = redis.Redis.from_url(url)
        self._directory, self._url, self._name = directory, url, name
        model = ensure(default_cache() / "das" / "tiny-qwen3")[-1]
        self.manifest = {
            "apiVersion": "das.rollout.dev/v1beta1",
            "kind": "RolloutJob",
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": str(model)},
                "source": {"dataset": {"epochs": epochs, "environment": {"timeoutSeconds": 600, **environment}}},
                "engine": SMALL_CPU_ENGINE,
                "sampling": {"rolloutsPerPrompt": SAMPLES, "maxTokens": 40},
                "workers": {"gpusPerWorker": 0},
            },
        }

    def start(self) -> subprocess.Popen[str]:
        file = self._directory / "job.yaml"
        file.write_text(yaml.safe_dump(self.manifest))
        command = [sys.executable, "-m", "rollout_tools.cli", "run", "-f", str(file), "--no-compare"]
        command += ["--redis", self._url, "--state-dir", str(self._directory / "state")]
        command += ["--json", str(self._directory / "report.json")]
        environ = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)

    def run(self) -> dict[str, Any]:
        """Run the job to its end; return its report."""
        process = self.start()
        output, _ = process.communicate(timeout=400)
        assert 0 == process.returncode, output[-4000:]
        report: dict[str, Any] = json.loads((self._directory / "report.json").read_text())
        return report

    @property
    def keys(self) -> MessageKeys:
        state = self._directory / "state" / "default" / self._name / "job.json"
        return MessageKeys(json.loads(state.read_text())["uid"])

    def sampled(self) -> int:
        """Number of rollouts, each of them one turn, that the engines have finished."""
        return int(self.redis.hget(self.keys.totals, "rollouts") or 0)  # type: ignore[arg-type]

    def in_history(self) -> Counter[str]:
        return rollout_ids_in(self.redis, HistoryKeys("default", self._name))


def by_problem(report: dict[str, Any], epoch: int = 1) -> dict[str, list[dict[str, Any]]]:
    (run,) = [run for run in report["epoch_runs"] if run["epoch"] == epoch]
    problems = {row["problem_id"] for row in run["rollouts"]}
    return {problem: [row for row in run["rollouts"] if row["problem_id"] == problem] for problem in problems}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_rollouts_without_a_reward_do_not_end_the_job(tmp_path: Path, redis_server: str) -> None:
    actions = ["one", "raise", "die", "nan", "hang"]
    environment = {"entryPoint": "scripted:make", "args": {"actions": actions}, "timeoutSeconds": 2}
    job = EnvironmentJob(tmp_path, redis_server, "flaky-environment", environment)
    report = job.run()

    rows = by_problem(report)
    assert {f"{number}-{action}" for number, action in enumerate(actions)} == rows.keys()
    assert [(1.0, None)] * SAMPLES == [(row["reward"], row["error"]) for row in rows["0-one"]]
    for problem, kind in {"1-raise": "exception", "2-die": "exit", "3-nan": "reward", "4-hang": "timeout"}.items():
        assert [None] * SAMPLES == [row["reward"] for row in rows[problem]]
        assert all(row["error"].startswith(f"{kind}: ") for row in rows[problem])
    errors = report["environment_errors"]
    assert dict.fromkeys(("exception", "exit", "reward", "timeout"), SAMPLES) == {
        kind: found["count"] for kind, found in errors.items()
    }
    assert ("1-raise", "LookupError: the judge is gone") == (
        errors["exception"]["problem"],
        errors["exception"]["message"].partition(" (")[0],
    )
    # Each rollout was sampled once, and is in the history.
    assert SAMPLES * len(actions) == job.sampled() == len(job.in_history())


@pytest.mark.timeout(600)
def test_an_environment_that_cannot_be_loaded_ends_the_job_with_advice(tmp_path: Path, redis_server: str) -> None:
    job = EnvironmentJob(tmp_path, redis_server, "no-environment", {"entryPoint": "no_such_module:make"})
    process = job.start()
    output, _ = process.communicate(timeout=120)
    assert 2 == process.returncode, output
    assert "spec.source.dataset.environment.entryPoint: cannot be loaded: there is no module" in output


@pytest.mark.timeout(600)
def test_a_python_environment_replies_turn_by_turn(tmp_path: Path, redis_server: str) -> None:
    actions = ["one", "raise", "die"]
    environment = {"entryPoint": "scripted:Dialogue", "args": {"actions": actions}}
    job = EnvironmentJob(tmp_path, redis_server, "dialogue-environment", environment)
    report = job.run()

    rows = by_problem(report)
    assert [(3.0, None)] * SAMPLES == [(row["reward"], row["error"]) for row in rows["0-one"]]
    assert all(row["error"].startswith("exception: LookupError") for row in rows["1-raise"])
    assert all(row["error"].startswith("exit: ") for row in rows["2-die"])
    # A trajectory that is repeated gets the responses that were sampled before. Problem 2 ends before its third turn.
    assert SAMPLES * (TURNS + TURNS + 2) == job.sampled() == len(job.in_history())


@needs_verifiers
@pytest.mark.timeout(600)
def test_an_unmodified_environment_of_verifiers(tmp_path: Path, redis_server: str) -> None:
    settings = {"turns": TURNS, "marker": str(tmp_path / "died")}
    environment = {"verifiers": "sums-for-verifiers", "args": settings, "python": str(VERIFIERS)}
    job = EnvironmentJob(tmp_path, redis_server, "verifiers-environment", environment, epochs=2)
    report = job.run()

    for epoch in (1, 2):
        rows = by_problem(report, epoch)
        assert {f"sums-for-verifiers/{number}" for number in range(3)} == rows.keys()
        for number in (0, 1):
            assert [3.0, 3.0] == [row["reward"] for row in rows[f"sums-for-verifiers/{number}"]]
        assert all("this sum has no successor" in row["error"] for row in rows["sums-for-verifiers/2"])
    assert (tmp_path / "died").exists()
    assert 1 == report["environment_restarts"]
    assert 2 * SAMPLES * (2 * TURNS + 1) == job.sampled() == len(job.in_history())


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_rollouts_that_were_not_scored_when_the_job_was_killed_are_scored_later(
    tmp_path: Path, redis_server: str
) -> None:
    environment = {"entryPoint": "scripted:make", "args": {"actions": ["slow"] * 6}}
    job = EnvironmentJob(tmp_path, redis_server, "unscored-environment", environment)
    process = job.start()
    state = tmp_path / "state" / "default" / "unscored-environment" / "job.json"
    wait_for(lambda: state.exists() and job.sampled() == SAMPLES * 6, 200)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 0 == len(job.redis.xrange(job.keys.rewards))
    report = job.run()

    assert [1.0] * SAMPLES * 6 == [row["reward"] for rows in by_problem(report).values() for row in rows]
    assert SAMPLES * 6 == job.sampled() == len(job.in_history())
