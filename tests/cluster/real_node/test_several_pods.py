"""A worker with two pods on a real node: each runs one rank of an engine with tensor parallelism."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.real_cluster import RealCluster, is_ready, job_manifest
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.random_policies import TASKS, make_policies
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

NAME = "two-pods"
MODEL_DIRECTORY = "/policy"
SAMPLES = 8
START_TIMEOUT_S = 400.0
LOSS_TIMEOUT_S = 60.0
JOB_TIMEOUT_S = 600.0


@pytest.fixture
def model(cluster: RealCluster, tmp_path: Path) -> str:
    """The name of a ConfigMap with a model whose two attention heads can be divided."""
    make_policies(tmp_path, versions=1)
    files = {path.name: path.read_bytes() for path in (tmp_path / "policy" / "0").iterdir()}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME},
        "binaryData": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(config_map))  # "apply" limits the size
    return NAME


def template(container: str, config_map: str) -> dict[str, Any]:
    """Return a pod template that mounts the model."""
    mount = {"name": "policy", "mountPath": MODEL_DIRECTORY}
    volume = {"name": "policy", "configMap": {"name": config_map}}
    return {"spec": {"containers": [{"name": container, "volumeMounts": [mount]}], "volumes": [volume]}}


def test_an_engine_over_two_pods_continues_after_the_loss_of_one(cluster: RealCluster, model: str) -> None:
    epochs = 3
    job = job_manifest(
        NAME,
        source={"dataset": {"tasks": TASKS, "epochs": epochs}},
        model={"uri": MODEL_DIRECTORY},
        engine={**SMALL_CPU_ENGINE, "tensorParallelSize": 2},
        sampling={"rolloutsPerPrompt": SAMPLES, "maxTokens": 400},
        workers={"gpusPerWorker": 0, "podsPerWorker": 2, "podTemplate": template("worker", model)},
        head={"podTemplate": template("head", model)},
    )
    cluster.apply(job)

    def pod(name: str) -> dict[str, Any]:
        return cluster.get("pod", f"{NAME}-{name}") or {"metadata": {"uid": ""}}

    def explain() -> str:
        return cluster.kubectl("get", "rolloutjob,pods", "-o", "wide") + json.dumps(pod("worker-0-1").get("status"))

    wait_for(lambda: is_ready(pod("worker-0")) and is_ready(pod("worker-0-1")), START_TIMEOUT_S, explain)
    leader, follower = pod("worker-0"), pod("worker-0-1")
    assert leader["status"]["podIP"] != follower["status"]["podIP"]

    # The leader's pod stays, and its engine starts again with the new follower.
    cluster.kubectl("delete", "pod", follower["metadata"]["name"], "--force", "--grace-period=0")
    wait_for(lambda: pod("worker-0-1")["metadata"]["uid"] not in ("", follower["metadata"]["uid"]), LOSS_TIMEOUT_S)
    wait_for(lambda: not is_ready(pod("worker-0")), LOSS_TIMEOUT_S, explain)
    assert leader["metadata"]["uid"] == pod("worker-0")["metadata"]["uid"]
    wait_for(lambda: is_ready(pod("worker-0")), START_TIMEOUT_S, explain)

    status = cluster.wait_for_state(NAME, "Succeeded", JOB_TIMEOUT_S)
    rollouts = epochs * SAMPLES * sum(task["problems"] for task in TASKS)
    assert f"{rollouts}/{rollouts}" == status["progress"]["summary"]
    assert rollouts == len(set(cluster.rollouts_in_history(NAME)))
    cluster.delete("rolloutjob", NAME)
    cluster.delete("configmap", NAME)
