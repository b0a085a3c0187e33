"""The history service that the chart runs: it maintains the histories of all jobs, and histories outlive their jobs."""

from __future__ import annotations

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from rollout_api.protocol.keys import HISTORY_NAMES
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

    def maintained(self) -> dict[str, float] | None:
        """Return the metrics of the pod that maintains the history, or None if there is no such pod."""
        found = (self.metrics(pod) for pod in self.pods())
        return next((metrics for metrics in found if metrics.get("lease_held") and "bytes" in metrics), None)

    def logs(self) -> str:
        """Return the end of the logs of all pods."""
        label = "app.kubernetes.io/name=das-rollout-history"
        return self._cluster.kubectl("logs", "-l", label, "--tail=50", check=False)


@pytest.fixture(scope="module")
def service(cluster: RealCluster, examples: ExampleJobs) -> HistoryService:
    """The service when the quickstart job has succeeded."""
    examples.run(QUICKSTART)
    return HistoryService(cluster)


def test_the_service_knows_the_history_of_a_finished_job(cluster: RealCluster, service: HistoryService) -> None:
    assert 1 == cluster.get("deployment", f"{RELEASE}-history")["status"]["readyReplicas"]
    metrics = wait_for(service.maintained, 60, service.logs)
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
    metrics = wait_for(service.maintained, 60, service.logs)
    assert PROBLEMS == metrics["problems"]
