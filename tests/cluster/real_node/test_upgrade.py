"""An upgrade of the chart and its rollback, while a job runs."""

from __future__ import annotations

import pytest

from tests.support.cluster.real_cluster import RELEASE, RealCluster, is_ready, job_manifest
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NAME = "upgraded"
START_TIMEOUT_S = 300.0
REPLACEMENT_TIMEOUT_S = 120.0


def uids(cluster: RealCluster, labels: str) -> dict[str, str]:
    """Return name and uid of the pods with these labels."""
    pods = cluster.list_objects("pod", labels=labels)
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def test_an_upgrade_and_a_rollback_leave_running_jobs_alone(cluster: RealCluster) -> None:
    job, redis = (
        f"das.rollout.dev/job={NAME}",
        f"app.kubernetes.io/name=das-rollout-redis,app.kubernetes.io/instance={RELEASE}",
    )
    cluster.apply(
        job_manifest(
            NAME,
            source={"trainer": {}},
            model={"uri": "das/tiny-qwen3/step-1080"},
            engine=SMALL_CPU_ENGINE,
            sampling={"maxTokens": 128},
            workers={"gpusPerWorker": 0},
        )
    )
    cluster.wait_for_state(NAME, "Running", START_TIMEOUT_S)
    pods, servers = uids(cluster, job), uids(cluster, redis)
    password = cluster.secret(f"{RELEASE}-redis-admin", "password")

    changes = ["--set=operator.logLevel=debug", "--set=operator.replicas=1"]
    cluster.helm(
        "upgrade", RELEASE, str(cluster.chart()), "--reset-then-reuse-values", "--wait", "--timeout=5m", *changes
    )
    operator = cluster.get("deployment", f"{RELEASE}-operator")
    assert 1 == operator["spec"]["replicas"] == operator["status"]["readyReplicas"]
    assert (pods, servers) == (uids(cluster, job), uids(cluster, redis))

    cluster.helm("rollback", RELEASE, "--wait", "--timeout=5m")
    assert "debug" not in str(
        cluster.get("deployment", f"{RELEASE}-operator")["spec"]["template"]["spec"]["containers"]
    )
    assert (pods, servers) == (uids(cluster, job), uids(cluster, redis))
    assert password == cluster.secret(f"{RELEASE}-redis-admin", "password")
    assert "Running" == cluster.status(NAME)["state"]

    # The operator that has been rolled back still does its work.
    worker = f"{NAME}-worker-0"
    cluster.kill(worker)
    wait_for(
        lambda: uids(cluster, job).get(worker, pods[worker]) != pods[worker] and is_ready(cluster.get("pod", worker)),
        REPLACEMENT_TIMEOUT_S,
        lambda: cluster.describe(NAME),
    )
    cluster.delete("rolloutjob", NAME)
