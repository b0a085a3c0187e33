"""The history service that the chart runs: it maintains the histories of all jobs, and histories outlive their jobs."""

from __future__ import annotations

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from rollout_api.protocol.keys import HISTORY_NAMES
from rollout_store.history.maintenance.planner import COMPACTION_DELAY_S
from tests.support.cluster.example_jobs import (
    HISTORY_BYTES,
    QUICKSTART,
    SEPARATE_HISTORY,
    SEPARATE_PROBLEMS,
    ExampleJobs,
    num_epochs,
    num_problems,
    quickstart,
)
from tests.support.cluster.real_cluster import NAMESPACE, RELEASE, RealCluster, is_ready
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(1200)

HISTORY = f"{NAMESPACE}/{QUICKSTART}"
DEPLOYMENT = f"{RELEASE}-history"
TAKEOVER_TIMEOUT_S = 60.0
"""Seconds within which another pod maintains a history whose maintainer was killed, and within which it has done so."""
POD_START_TIMEOUT_S = 120.0
"""Seconds until a further pod is ready: an allowance for slow machines and no requirement on the history service."""
EPOCHS = num_epochs(quickstart())
PROBLEMS = num_problems(quickstart())
ROLLOUTS = PROBLEMS * quickstart()["spec"]["sampling"]["rolloutsPerPrompt"] * EPOCHS


class HistoryService:
    """The pods of the history service and their metrics."""

    def __init__(self, cluster: RealCluster) -> None:
        self._cluster = cluster

    def pods(self) -> list[str]:
        """Return the names of the pods that are ready."""
        labels = f"app.kubernetes.io/name=das-rollout-history,app.kubernetes.io/instance={RELEASE}"
        return [pod["metadata"]["name"] for pod in self._cluster.list_objects("pod", labels=labels) if is_ready(pod)]

    def metrics(self, pod: str) -> dict[str, float]:
        """Return a pod's metrics of the history, without their common prefix; empty while the pod does not answer."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:8080/proxy/metrics"
        text = self._cluster.kubectl("get", "--raw", path, check=False)
        return {
            sample.name.removeprefix("rollout_history_"): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("history") == HISTORY
        }

    def leader(self, *, excluded: str = "") -> tuple[str, dict[str, float]] | None:
        """Return the pod that maintains the history and its metrics, or None if there is no such pod."""
        candidates = [(pod, self.metrics(pod)) for pod in self.pods() if pod != excluded]
        return next(((pod, found) for pod, found in candidates if found.get("lease_held") and "bytes" in found), None)

    def logs(self) -> str:
        """Return the end of the logs of all pods."""
        label = "app.kubernetes.io/name=das-rollout-history"
        return self._cluster.kubectl("logs", "-l", label, "--tail=50", check=False)

    def scale(self, replicas: int) -> None:
        """Change the number of pods."""
        self._cluster.kubectl("scale", "deployment", DEPLOYMENT, f"--replicas={replicas}")


@pytest.fixture(scope="module")
def service(cluster: RealCluster, examples: ExampleJobs) -> HistoryService:
    """The service when the quickstart job has succeeded."""
    examples.run(QUICKSTART)
    return HistoryService(cluster)


def test_the_service_knows_the_history_of_a_finished_job(cluster: RealCluster, service: HistoryService) -> None:
    assert 1 == cluster.get("deployment", DEPLOYMENT)["status"]["readyReplicas"]
    _, metrics = wait_for(service.leader, 60, service.logs)
    expected = {"problems": PROBLEMS, "max_bytes": HISTORY_BYTES, "generation": EPOCHS}
    assert expected == {name: metrics[name] for name in expected}
    assert 0 < metrics["bytes"] < HISTORY_BYTES


def test_the_service_can_access_histories_but_no_messages(cluster: RealCluster, service: HistoryService) -> None:
    url = cluster.secret(f"{RELEASE}-redis-history-service", "url")
    uid = cluster.get("rolloutjob", QUICKSTART)["metadata"]["uid"]
    with (
        cluster.redis_address() as address,
        redis.Redis.from_url(url.replace(f"{RELEASE}-redis.{NAMESPACE}.svc:6379", address)) as user,
    ):
        assert HISTORY.encode() in user.smembers(HISTORY_NAMES)
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.hgetall(f"rollout:{{{uid}}}:job")


def test_a_job_can_have_its_history_on_another_server_than_its_messages(
    cluster: RealCluster, examples: ExampleJobs
) -> None:
    status = examples.run(SEPARATE_HISTORY)
    connection = status["connection"]
    assert (SEPARATE_HISTORY, "url") == (connection["historySecretName"], connection["historySecretKey"])
    password = cluster.secret(SEPARATE_HISTORY, "password")
    redis_cli = ["exec", SEPARATE_HISTORY, "--", "redis-cli", "--no-auth-warning", "-a", password]
    assert [f"{NAMESPACE}/{SEPARATE_HISTORY}"] == cluster.kubectl(*redis_cli, "smembers", HISTORY_NAMES).split()
    keys = cluster.kubectl(*redis_cli, "keys", "*").split()
    assert SEPARATE_PROBLEMS == sum(key.endswith(":lengths") for key in keys)
    assert not [key for key in keys if key.startswith("rollout:")]
    assert [] == cluster.rollouts_in_history(SEPARATE_HISTORY)


def test_a_history_that_no_longer_changes_is_compacted_without_loss(
    cluster: RealCluster, service: HistoryService
) -> None:
    def is_compacted() -> bool:
        leader = service.leader()
        return leader is not None and leader[1]["compacted_problems_total"] >= PROBLEMS

    wait_for(is_compacted, COMPACTION_DELAY_S + 60, service.logs)
    rollouts = cluster.rollouts_in_history(QUICKSTART)
    assert (ROLLOUTS, ROLLOUTS) == (len(rollouts), len(set(rollouts)))


def test_another_pod_takes_over_when_the_leader_is_killed(cluster: RealCluster, service: HistoryService) -> None:
    service.scale(2)
    try:
        wait_for(lambda: len(service.pods()) == 2, POD_START_TIMEOUT_S, service.logs)
        leader, _ = wait_for(service.leader, 30, service.logs)
        cluster.kubectl("delete", "pod", leader, "--force", "--grace-period=0")
        other, before = wait_for(lambda: service.leader(excluded=leader), TAKEOVER_TIMEOUT_S, service.logs)
        wait_for(
            lambda: service.metrics(other).get("maintenance_runs_total", 0) > before["maintenance_runs_total"],
            TAKEOVER_TIMEOUT_S,
            service.logs,
        )
        assert [other] == [pod for pod in service.pods() if service.metrics(pod).get("lease_held")]
    finally:
        service.scale(1)


def test_the_history_remains_when_its_job_is_deleted(cluster: RealCluster, service: HistoryService) -> None:
    uid = cluster.get("rolloutjob", QUICKSTART)["metadata"]["uid"]
    cluster.delete("rolloutjob", QUICKSTART)
    wait_for(lambda: not cluster.get("rolloutjob", QUICKSTART), 120, lambda: cluster.describe(QUICKSTART))
    rollouts = cluster.rollouts_in_history(QUICKSTART)
    assert (ROLLOUTS, ROLLOUTS) == (len(rollouts), len(set(rollouts)))
    with cluster.redis() as server:
        assert HISTORY.encode() in server.smembers(HISTORY_NAMES)
        # The job's messages are deleted now or expire later.
        assert server.ttl(f"rollout:{{{uid}}}:job") != -1
    _, metrics = wait_for(service.leader, 60, service.logs)
    assert PROBLEMS == metrics["problems"]
