"""The ``rollout`` command reports errors, with their exit codes, before anything is started."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from rollout_api.protocol import status as protocol_status
from rollout_api.protocol.status import EXIT_MANIFEST, EXIT_MODEL, EXIT_STATE
from rollout_api.status_token import TOKEN_VARIABLE
from rollout_tools.cli.main import app, run_until_terminated
from tests.support.random_policies import TASKS, make_policies

MANIFEST: dict[str, Any] = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "story"},
    "spec": {
        "model": {"uri": "policy/0"},
        "source": {"dataset": {"tasks": TASKS, "checkpoints": ["policy/0"]}},
        "engine": {"maxModelLen": 512},
        "sampling": {"rolloutsPerPrompt": 2, "maxTokens": 160},
        "workers": {"gpusPerWorker": 0},
    },
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model cache with one model."""
    directory = tmp_path_factory.mktemp("models")
    make_policies(directory, versions=1)
    return directory


@pytest.fixture(autouse=True)
def restored_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which the command replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


class Command:
    """Runs the command within this process."""

    def __init__(self, directory: Path, cache: Path, redis_url: str) -> None:
        self.redis_url, self.manifest = redis_url, copy.deepcopy(MANIFEST)
        self._directory, self._cache = directory, cache

    def __call__(self, name: str, *options: str) -> Result:
        file = self._directory / "job.yaml"
        file.write_text(yaml.safe_dump(self.manifest))
        arguments = [name, "-f", str(file), "--model-cache", str(self._cache), *options]
        arguments += ["--redis", self.redis_url] if self.redis_url else []
        return CliRunner().invoke(app, arguments)

    def run(self) -> Result:
        return self("run", "--no-compare", "--state-dir", str(self._directory / "state"))


@pytest.fixture
def command(tmp_path: Path, cache: Path, redis_url: str) -> Command:
    return Command(tmp_path, cache, redis_url)


def test_an_invalid_manifest_lists_every_error_by_path(command: Command) -> None:
    command.manifest["spec"] |= {"typo": 1, "model": {}}
    command.manifest["spec"]["sampling"] = {"topP": 7, "minP": 0.1}
    result = command.run()
    assert EXIT_MANIFEST == result.exit_code
    for path in ("spec.typo", "spec.model.uri", "spec.sampling.topP"):
        assert path in result.output


def test_the_check_reports_tasks_that_reasoning_gym_cannot_generate(command: Command, tmp_path: Path) -> None:
    command.manifest["spec"]["source"]["dataset"]["tasks"] = [
        {"name": "a", "generator": "chainsum"},
        {"name": "b", "generator": "chain_sum", "config": {"terms": 1}},
        {"name": "c", "generator": "chain_sum", "config": {"min_terms": 3, "max_terms": 2}},
    ]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(command.manifest))
    result = CliRunner().invoke(app, ["check", "-f", str(file)])
    assert EXIT_MANIFEST == result.exit_code, result.output
    assert "did you mean chain_sum" in result.output
    for path in ("tasks[0].generator", "tasks[1].config", "tasks[2].config"):
        assert f"spec.source.dataset.{path}" in result.output


def test_the_check_finds_misspelt_fields_of_pod_templates(command: Command, tmp_path: Path) -> None:
    spec = {
        "hostAliasses": [{"ip": "10.0.0.1"}],
        "$setElementOrder/containers": [],
        "containers": [{"name": "worker", "envs": [], "env": [{"name": "A", "valueFrm": {}}], "resources": None}],
        "nodeSelector": {"anything": "x"},
    }
    command.manifest["spec"]["workers"]["podTemplate"] = {"metadata": {"labels": {"any": "x"}}, "spec": spec}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(command.manifest))
    result = CliRunner().invoke(app, ["check", "-f", str(file)])
    assert EXIT_MANIFEST == result.exit_code, result.output
    prefix = "spec.workers.podTemplate.spec."
    found = re.findall(rf"{re.escape(prefix)}(\S+): pods have no such field; did you mean (\w+)\?", result.output)
    assert {
        ("hostAliasses", "hostAliases"),
        ("containers[0].envs", "env"),
        ("containers[0].env[0].valueFrm", "valueFrom"),
    } == set(found)


def test_the_version_is_that_of_the_distribution() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert 0 == result.exit_code, result.output
    assert f"rollout {metadata.version('das-rollout')}\n" == result.output


def test_a_redis_url_in_a_secret_is_rejected(command: Command) -> None:
    command.redis_url = ""
    command.manifest["spec"]["redis"] = {"urlFrom": {"secretKeyRef": {"name": "rollout-redis", "key": "url"}}}
    result = command.run()
    assert EXIT_MANIFEST == result.exit_code, result.output
    assert "spec.redis.urlFrom" in result.output
    assert "--redis" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"uri": "policy/none"}}, "neither a directory in the model cache"),
        ({"model": {"uri": "/nowhere"}}, "the directory /nowhere does not exist"),
        ({"model": {"uri": "../policy/0"}}, "is outside the model cache"),
        ({"sampling": {"maxTokens": 500}}, "spec.sampling.maxTokens"),
        ({"sampling": {"maxTokens": 10, "allowedTokenIds": [10000000]}}, "spec.sampling.allowedTokenIds"),
        ({"workers": {"gpusPerWorker": 0, "resources": {"cpu": "9000"}}}, "spec.workers.resources.cpu"),
        ({"lifecycle": {"suspend": True}}, "spec.lifecycle.suspend"),
        ({"source": {"dataset": {"tasks": [{"name": "a", "generator": "chainsum"}]}}}, "did you mean chain_sum"),
    ],
)
def test_settings_that_this_machine_cannot_fulfil_are_rejected(
    command: Command, change: dict[str, Any], message: str
) -> None:
    command.manifest["spec"] |= change
    result = command.run()
    assert (EXIT_MODEL if "model" in change else EXIT_MANIFEST) == result.exit_code, result.output
    assert message in result.output.replace("\n", " ")


def test_a_worker_that_is_larger_than_the_cpu_limit_is_rejected(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control group limits the time, and the affinity mask does not show it."""
    monkeypatch.setattr("rollout_store.runtime.control_groups.read_cpu_limit", lambda: 0.5)
    command.manifest["spec"]["workers"] = {"gpusPerWorker": 0, "resources": {"cpu": "1"}}
    result = command.run()
    assert EXIT_MANIFEST == result.exit_code, result.output
    assert "1 cores are requested, but this machine has 0.5" in result.output.replace("\n", " ")


@pytest.mark.parametrize("name", ["head", "worker"])
def test_head_and_worker_report_that_the_model_does_not_exist(command: Command, name: str) -> None:
    command.manifest["spec"]["model"] = {"uri": "no/such-model"}
    result = command(name, "--uid", "uid")
    assert EXIT_MODEL == result.exit_code, result.output
    assert "model 'no/such-model' is neither a directory in the model cache" in result.output.replace("\n", " ")


def test_a_head_reports_that_its_token_is_too_short(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    result = command("head", "--uid", "uid")
    assert EXIT_STATE == result.exit_code, result.output
    assert f"{TOKEN_VARIABLE} must have at least 32 characters" in result.output


def test_exit_codes_are_those_that_operators_write_into_failure_policies() -> None:
    codes = {
        "EXIT_MANIFEST": 2,
        "EXIT_REDIS": 3,
        "EXIT_ENGINE": 4,
        "EXIT_STATE": 5,
        "EXIT_DEADLINE": 6,
        "EXIT_MODEL": 7,
        "EXIT_INTERRUPTED": 130,
    }
    assert codes == {name: code for name, code in vars(protocol_status).items() if name.startswith("EXIT_")}
    documented = CliRunner().invoke(app, ["--help"]).output.partition("Exit codes:")[2]
    assert {0, 1, *codes.values()} == set(map(int, re.findall(r"\d+", documented)))


@pytest.mark.timeout(20)
async def test_sigterm_cancels_the_work_even_if_a_library_swallows_the_first_cancellation() -> None:
    """redis-py swallows a cancellation while it connects, and kubelets send SIGTERM only once."""
    swallowed = 0

    async def work() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed > 1:
                    raise

    with pytest.raises(asyncio.CancelledError):
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        await run_until_terminated(work())
    assert 2 == swallowed
