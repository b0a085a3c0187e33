"""``rollout prefetch`` fills a model cache, and the other pods load the model from it without the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.pods import head_pod, prefetch_pod, worker_pod

from rollout_api import parse_job
from rollout_api.protocol.status import EXIT_MODEL
from tests.support.model_hub import COMMIT, model_hub
from tests.support.random_policies import make_policies

MODEL = "lab/policy"
MANIFEST: dict[str, Any] = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "pods"},
    "spec": {
        "source": {"trainer": {}},
        "model": {"uri": MODEL, "cache": {"persistentVolumeClaim": "models", "prefetch": True}},
        "workers": {"gpusPerWorker": 0},
    },
}


class Prefetch:
    """Runs the command with the environment of a pod, whose directories are below *directory*."""

    def __init__(self, directory: Path) -> None:
        self.claim = directory / "models"
        self._directory = directory
        (directory / "job.yaml").write_text(yaml.safe_dump(MANIFEST))
        self.claim.mkdir()

    def __call__(self, pod: dict[str, Any], hub: str) -> subprocess.CompletedProcess[str]:
        variables = {
            variable["name"]: self._relocated(variable["value"])
            for variable in pod["spec"]["containers"][0]["env"]
            if "value" in variable
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return subprocess.run(
            [sys.executable, "-m", "rollout_tools.cli", "prefetch", "-f", str(self._directory / "job.yaml")],
            env={**inherited, **variables, "HF_ENDPOINT": hub},
            capture_output=True,
            text=True,
            check=False,
        )

    def _relocated(self, value: str) -> str:
        return f"{self._directory}{value}" if value.startswith(("/models", "/tmp")) else value

    def files(self) -> dict[str, float]:
        """Return the files and directories of the claim, and when they were changed."""
        return {str(path): path.lstat().st_mtime for path in self.claim.rglob("*")}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model."""
    cache = tmp_path_factory.mktemp("cache")
    make_policies(cache, versions=1)
    return cache / "policy" / "0"


@pytest.fixture
def prefetch(tmp_path: Path) -> Prefetch:
    return Prefetch(tmp_path)


def test_pods_find_the_model_without_the_hub_and_write_nothing_into_the_claim(prefetch: Prefetch, policy: Path) -> None:
    context = JobContext(parse_job(MANIFEST), "uid", {}, "worker:1")
    with model_hub(MODEL, policy) as hub:
        result = prefetch(prefetch_pod(context), hub)
    assert 0 == result.returncode, result.stderr
    assert COMMIT in result.stdout
    before = prefetch.files()
    # Workers on GPUs write here: only this directory is mounted writable in their pods.
    assert str(prefetch.claim / "compiled") in before
    assert {file.name for file in policy.iterdir()} <= {Path(path).name for path in before}
    for pod in (head_pod(context), worker_pod(context, 0, replacement=False)):
        result = prefetch(pod, hub)
        assert 0 == result.returncode, result.stderr
        assert COMMIT in result.stdout
    assert before == prefetch.files()


def test_a_model_that_is_neither_in_the_claim_nor_on_the_hub_is_reported(prefetch: Prefetch, policy: Path) -> None:
    context = JobContext(parse_job(MANIFEST), "uid", {}, "worker:1")
    with model_hub("lab/other", policy) as hub:
        result = prefetch(prefetch_pod(context), hub)
    assert EXIT_MODEL == result.returncode
    assert f"model '{MODEL}' is neither a directory in the model cache" in result.stderr
