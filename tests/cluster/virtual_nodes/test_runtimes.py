"""Jobs that take the settings of their cluster from a ClusterRolloutRuntime or a RolloutRuntime."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout_operator.objects import names

from rollout_api.manifest.rollout_job import API_VERSION
from tests.support.cluster.jobs import Jobs

pytestmark = pytest.mark.current_cluster
SETTINGS: dict[str, Any] = {
    "image": {"name": "platform:1"},
    "workers": {"gpuResource": "amd.com/gpu", "gpusPerWorker": 8, "accelerator": "amd-mi300x"},
    "model": {"cache": {"persistentVolumeClaim": "models"}},
}
OWN: dict[str, Any] = {
    "engine": {"tensorParallelSize": 8},
    "workers": {"replicas": 1, "gpusPerWorker": None, "accelerator": None},
}
"""Settings of a job, without those of the default job that its runtime has."""


def manifest(kind: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """Return a runtime called like the namespace, so that tests do not share one."""
    metadata = {"name": namespace, **({"namespace": namespace} if kind == "RolloutRuntime" else {})}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": {**SETTINGS, **spec}}


@pytest.mark.parametrize("kind", ["ClusterRolloutRuntime", "RolloutRuntime"])
def test_a_job_starts_when_its_runtime_exists_and_keeps_its_settings(operated_jobs: Jobs, kind: str) -> None:
    cluster, namespace, name = operated_jobs.cluster, operated_jobs.namespace, kind.lower()
    operated_jobs.create(name, runtimeRef={"name": namespace, "kind": kind}, **OWN)
    operated_jobs.wait(lambda: operated_jobs.condition(name, "Accepted") == ("False", "RuntimeNotFound"))
    runtime = json.dumps(manifest(kind, namespace))
    cluster.kubectl("create", "-f", "-", stdin=runtime)
    operated_jobs.wait(lambda: operated_jobs.pods(name, names.WORKER))
    (pod,) = operated_jobs.pods(name, names.WORKER).values()
    assert "platform:1" == pod.spec.containers[0].image
    assert {"amd.com/gpu": "8"} == pod.spec.containers[0].resources.limits
    cluster.kubectl("delete", "-f", "-", stdin=runtime)
    operated_jobs.wait(lambda: operated_jobs.condition(name, "UpToDate") == ("False", "RuntimeNotFound"))
    assert ("True", "Valid") == operated_jobs.condition(name, "Accepted")


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"gpuResource": "amd.com/gpu", "deviceClaimTemplate": "gpus"}, "remove gpuResource or deviceClaimTemplate"),
        ({"replicas": 3}, 'unknown field "spec.workers.replicas"'),
        ({"gpusPerWorker": -1}, "spec.workers.gpusPerWorker"),
    ],
)
def test_the_api_server_checks_runtimes(operated_jobs: Jobs, workers: dict[str, Any], message: str) -> None:
    runtime = json.dumps(manifest("RolloutRuntime", operated_jobs.namespace, workers=workers))
    result = operated_jobs.cluster.kubectl("create", "--validate=strict", "-f", "-", stdin=runtime, check=False)
    assert result.returncode
    assert message in result.stderr
