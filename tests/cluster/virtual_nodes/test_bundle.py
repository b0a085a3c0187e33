"""The operator keeps a bundle of a failed job, and ``kubectl rollouts bundle`` collects it.

No container runs on virtual nodes, so there are no logs here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout_operator.objects import names

from rollout_api.bundle.archive import read_archive
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.kubectl_plugin import KubectlPlugin
from tests.support.cluster.virtual_nodes import VirtualNodes

PASSWORD = "planted-Pa55word"


@pytest.fixture
def plugin(tmp_path: Path, cluster: ControlPlane, operated_jobs: Jobs) -> KubectlPlugin:
    kubectl = cluster.binaries / "bin" / cluster.kubectl_name
    return KubectlPlugin(tmp_path, kubectl, cluster.kubeconfig, operated_jobs.namespace)


def collect(plugin: KubectlPlugin, job: str, file: Path) -> dict[str, bytes]:
    """Return the files of the job's bundle."""
    done = plugin.run("bundle", job, "-o", str(file))
    assert 0 == done.returncode, done.stderr
    assert f"The bundle is in {file}." in done.stdout
    return dict(read_archive(file.read_bytes()))


def fail(jobs: Jobs, nodes: VirtualNodes, name: str) -> None:
    """Create a job, and let it fail after its pods have run."""
    jobs.create(name, lifecycle={"backoffLimit": 0})
    jobs.wait_for_running(name, 3)
    nodes.terminate_pod(jobs.namespace, f"{name}-worker-0", 1, message=f"cannot log in: password={PASSWORD}")
    jobs.wait_for_state(name, "Failed")
    cleanup = names.cleanup_pod(name)
    jobs.wait(lambda: cleanup in jobs.running(name))
    nodes.terminate_pod(jobs.namespace, cleanup)


def test_the_bundle_of_a_failed_job_outlives_its_pods_and_the_job(
    plugin: KubectlPlugin, operated_jobs: Jobs, nodes: VirtualNodes, tmp_path: Path
) -> None:
    jobs = operated_jobs
    fail(jobs, nodes, "broken")
    jobs.wait(lambda: not jobs.finalizers("broken"))
    assert "KeepingBundle" in jobs.events("broken")

    files = collect(plugin, "broken", tmp_path / "failed.tar.gz")
    assert "Failed" == json.loads(files["job.json"])["status"]["state"]
    assert "PodFailed" in {event["reason"] for event in json.loads(files["events.json"])}
    kept_pods = {name for name in files if name.startswith("kept/pods/")}
    assert {f"kept/pods/broken-{pod}.json" for pod in ("head", "worker-0", "worker-1")} == kept_pods
    assert "the head of the job does not run" in files["README.md"].decode()
    assert PASSWORD.encode() not in b"".join(files.values())

    jobs.delete("broken")
    jobs.wait(lambda: jobs.get("broken") is None)
    files = collect(plugin, "broken", tmp_path / "deleted.tar.gz")
    assert "Failed" == json.loads(files["kept/job.json"])["status"]["state"]
    missing = plugin.run("bundle", "brokn")
    assert 1 == missing.returncode
    assert "there is no RolloutJob brokn" in missing.stderr

    kept = jobs.core.read_namespaced_config_map("broken-bundle", jobs.namespace)
    fail(jobs, nodes, "broken")
    replaced = jobs.core.read_namespaced_config_map("broken-bundle", jobs.namespace)
    assert (
        kept.metadata.annotations[names.JOB_UID_ANNOTATION] != replaced.metadata.annotations[names.JOB_UID_ANNOTATION]
    )
    assert replaced.metadata.owner_references is None


def test_a_config_map_of_somebody_else_stays_and_delays_nothing(operated_jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs = operated_jobs
    jobs.core.create_namespaced_config_map(
        jobs.namespace, {"metadata": {"name": "other-bundle"}, "data": {"mine": "true"}}
    )
    fail(jobs, nodes, "other")
    jobs.wait_for_event("other", "BundleNotKept")
    assert {"mine": "true"} == jobs.core.read_namespaced_config_map("other-bundle", jobs.namespace).data


def test_a_running_job_is_described(
    plugin: KubectlPlugin, operated_jobs: Jobs, nodes: VirtualNodes, tmp_path: Path
) -> None:
    operated_jobs.create("working")
    operated_jobs.wait_for_running("working", 3)
    files = collect(plugin, "working", tmp_path / "bundle.tar.gz")
    for pod in ("head", "worker-0", "worker-1"):
        assert f"working-{pod}" == json.loads(files[f"pods/working-{pod}.json"])["metadata"]["name"]
    page = files["README.md"].decode()
    assert "logs/working-head/head.log" in page.partition("## What is missing")[2]
    assert "the operator keeps a bundle only of jobs that have failed" in page
