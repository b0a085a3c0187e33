"""The example of an agent that calls a job over HTTP, while a server is killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.cluster.real_cluster import OwnCluster, RealCluster, example
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

JOB = "agents"
REPLICAS = 2
ROLLOUTS = 2 * 16 * 4
"""Epochs, problems, and samples of the example."""
START_TIMEOUT_S = 300
AGENT_TIMEOUT_S = 300
"""Seconds that the agent's two epochs may take, although a server is killed and replaced meanwhile."""
SUSPENSION_TIMEOUT_S = 120
CONNECTION_RETRIES = 6


def servers(cluster: RealCluster) -> list[dict[str, Any]]:
    return [pod for pod in cluster.pods(JOB) if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "server"]


def wait_for_servers(cluster: RealCluster) -> None:
    wait_for(
        lambda: cluster.status(JOB).get("server") == {"replicas": REPLICAS, "ready": REPLICAS},
        START_TIMEOUT_S,
        lambda: cluster.describe(JOB),
    )


@pytest.fixture
def manifests(cluster: RealCluster) -> Iterator[list[dict[str, Any]]]:
    """The objects of the example, which are deleted at the end."""
    found = example("http.yaml")
    yield found
    for manifest in found:
        cluster.delete(manifest["kind"].lower(), manifest["metadata"]["name"])


def test_an_agent_gets_each_rollout_once_although_a_server_is_killed(
    cluster: RealCluster, manifests: list[dict[str, Any]]
) -> None:
    cluster.apply(*(manifest for manifest in manifests if manifest["kind"] != "Job"))
    wait_for_servers(cluster)
    cluster.apply(*(manifest for manifest in manifests if manifest["kind"] == "Job"))
    wait_for(lambda: cluster.status(JOB)["progress"]["done"] > 0, AGENT_TIMEOUT_S, lambda: cluster.describe(JOB))
    killed = servers(cluster)[0]["metadata"]["name"]
    cluster.kill(killed)

    cluster.kubectl("wait", "--for=condition=complete", "job/agent", f"--timeout={AGENT_TIMEOUT_S}s")
    log = cluster.kubectl("logs", "job/agent")
    assert [("1", "64"), ("2", "64")] == re.findall(r"epoch (\d): (\d+) rollouts", log), log
    rollouts = cluster.rollouts_in_history(JOB)
    assert (ROLLOUTS, ROLLOUTS) == (len(rollouts), len(set(rollouts)))
    if isinstance(cluster, OwnCluster):
        wait_for_servers(cluster)
        address = cluster.get("service", f"{JOB}-server")["spec"]["clusterIP"]
        # kube-proxy may send connections to the killed server until it has seen the Service's new endpoints.
        with httpx.Client(transport=httpx.HTTPTransport(retries=CONNECTION_RETRIES)) as client:
            assert 401 == client.get(f"http://{address}:8000/v1/models").status_code

    cluster.kubectl("patch", "rolloutjob", JOB, "--type=merge", "-p", '{"spec": {"lifecycle": {"suspend": true}}}')
    wait_for(lambda: not servers(cluster), SUSPENSION_TIMEOUT_S, lambda: cluster.describe(JOB))
    assert not cluster.get("service", f"{JOB}-server")
