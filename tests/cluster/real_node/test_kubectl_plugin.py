"""The kubectl plugin with a job whose pods run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.cluster.kubectl_plugin import KubectlPlugin
from tests.support.cluster.real_cluster import NAMESPACE, RealCluster, example, is_ready
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

JOB = "agents"
START_TIMEOUT_S = 300
REPLACEMENT_TIMEOUT_S = 300
DELETION_TIMEOUT_S = 180


@pytest.fixture
def job(cluster: RealCluster) -> Iterator[str]:
    """The job of examples/http.yaml, without the agent that uses it."""
    manifests = [manifest for manifest in example("http.yaml") if manifest["kind"] in ("Secret", "RolloutJob")]
    cluster.wait_until_deleted(JOB, DELETION_TIMEOUT_S)  # another test runs the same example
    cluster.apply(*manifests)
    wait_for(
        lambda: (cluster.status(JOB).get("server") or {}).get("ready") == 2,
        START_TIMEOUT_S,
        lambda: cluster.describe(JOB),
    )
    cluster.wait_for_state(JOB, "Running", START_TIMEOUT_S)
    yield JOB
    for manifest in manifests:
        cluster.delete(manifest["kind"].lower(), manifest["metadata"]["name"])


@pytest.fixture
def plugin(tmp_path: Path, cluster: RealCluster) -> KubectlPlugin:
    return KubectlPlugin(tmp_path, cluster.kubectl_program, cluster.kubeconfig, NAMESPACE)


def test_a_running_job_is_watched_reached_drained_and_deleted(
    cluster: RealCluster, plugin: KubectlPlugin, job: str
) -> None:
    shown = plugin.run("status", job)
    assert 0 == shown.returncode, shown.stdout + shown.stderr
    assert f"{NAMESPACE}/{job} is Running" in shown.stdout
    assert "served by 1 of 1 engines" in shown.stdout
    status = json.loads(plugin.run("status", job, "--json").stdout)
    assert (f"{NAMESPACE}/{job}", 1) == (status["job"], len(status["engines"]))

    logs = plugin.run("logs", job, "--tail", "5")
    assert 0 == logs.returncode, logs.stderr
    assert f"[pod/{job}-worker-0/worker]" in logs.stdout
    assert {f"{job}-worker-0"} == set(
        re.findall(r"^\[pod/([^/]+)/", plugin.run("logs", job, "--worker", "0").stdout, re.M)
    )

    password = re.search(r"redis://[^:]*:([^@]+)@", plugin.run("connect", job, "--show-secret").stdout)
    assert password is not None
    assert password[1] not in plugin.run("connect", job).stdout
    with plugin.start("connect", job, "--port-forward=http") as process:
        try:
            assert process.stdout is not None
            found = re.match(r"(http://127\.0\.0\.1:\d+) reaches the HTTP server", process.stdout.readline())
            assert found is not None
            assert 200 == httpx.get(f"{found[1]}/ping").status_code
        finally:
            process.terminate()

    uid = cluster.get("pod", f"{job}-worker-0")["metadata"]["uid"]
    drained = plugin.run("drain", job, "0")
    assert 0 == drained.returncode, drained.stderr
    assert "wait for the replacements" in drained.stdout
    wait_for(
        lambda: (
            is_ready(pod := cluster.get("pod", f"{job}-worker-0") or {"metadata": {}}) and pod["metadata"]["uid"] != uid
        ),
        REPLACEMENT_TIMEOUT_S,
        lambda: cluster.describe(job),
    )

    deleted = plugin.run("cancel", job, "--yes")
    assert 0 == deleted.returncode, deleted.stderr
    assert not cluster.get("rolloutjob", job)
