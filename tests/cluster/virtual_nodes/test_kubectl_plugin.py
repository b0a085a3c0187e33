"""The kubectl plugin with a real API server and operator, as far as it needs no container."""

from __future__ import annotations

from tests.support.cluster.jobs import Jobs
from tests.support.cluster.kubectl_plugin import KubectlPlugin
from tests.support.cluster.virtual_nodes import VirtualNodes
from tests.support.waiting import wait_for

TIMEOUT_S = 60.0


def test_jobs_are_listed_with_what_they_wait_for(plugin: KubectlPlugin, operated_jobs: Jobs) -> None:
    assert "There are no RolloutJobs in this namespace" in plugin.run("status").stdout
    operated_jobs.create("waiting", workers={"accelerator": "unknown-gpu"})
    wait_for(
        lambda: (
            operated_jobs.condition("waiting", "WorkersReady")[1] == "Unschedulable"
            or operated_jobs.condition("waiting", "EngineReady")[1]
        ),
        TIMEOUT_S,
    )
    listed = plugin.run("status")
    assert 0 == listed.returncode, listed.stderr
    table, _, reasons = listed.stdout.partition(f"{operated_jobs.namespace}/waiting: ")
    assert table.startswith("NAME")
    assert reasons

    missing = plugin.run("status", "waitng")
    assert 1 == missing.returncode
    assert "there is no RolloutJob waitng in namespace" in missing.stderr
    assert "did you mean waiting?" in missing.stderr


def test_a_reader_that_stops_reading_causes_no_traceback(plugin: KubectlPlugin, operated_jobs: Jobs) -> None:
    operated_jobs.create("piped", workers={"accelerator": "unknown-gpu"})
    with plugin.start("status") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


def test_a_job_without_a_running_head_is_explained(plugin: KubectlPlugin, operated_jobs: Jobs) -> None:
    operated_jobs.create("suspended", lifecycle={"suspend": True})
    wait_for(lambda: operated_jobs.state("suspended") == "Suspended", TIMEOUT_S)
    shown = plugin.run("status", "suspended")
    assert 4 == shown.returncode
    assert f"{operated_jobs.namespace}/suspended is Suspended" in shown.stdout
    assert "the head of the job does not run" in shown.stderr
    assert "there are no such pods" in plugin.run("logs", "suspended").stderr
    assert "No pod of this job has failed." in plugin.run("logs", "suspended", "--previous").stdout


def test_a_drained_worker_is_replaced_and_its_node_is_cordoned_on_request(
    plugin: KubectlPlugin, operated_jobs: Jobs, nodes: VirtualNodes
) -> None:
    def wait_for_replacement(name: str) -> None:
        def is_replaced() -> bool:
            pod = operated_jobs.pods("draining").get(name)
            return pod is not None and pod.metadata.uid != before[name].metadata.uid

        wait_for(is_replaced, TIMEOUT_S)
        operated_jobs.wait_for_running("draining", 3)

    operated_jobs.create("draining")
    operated_jobs.wait_for_running("draining", 3)
    before = operated_jobs.pods("draining")
    assert "its workers are: draining-worker-0, draining-worker-1" in plugin.run("drain", "draining", "7").stderr

    drained = plugin.run("drain", "draining", "1")
    assert 0 == drained.returncode, drained.stderr
    assert "continue on other workers" in drained.stdout
    assert "The workers have left the job." in drained.stdout
    wait_for_replacement("draining-worker-1")
    kept = operated_jobs.pods("draining")["draining-worker-0"]
    assert before["draining-worker-0"].metadata.uid == kept.metadata.uid

    node = kept.spec.node_name
    try:
        drained = plugin.run("drain", "draining", "--node", node)
        assert 0 == drained.returncode, drained.stderr
        assert f"kubectl uncordon {node}" in drained.stdout
        assert operated_jobs.core.read_node(node).spec.unschedulable
        wait_for_replacement("draining-worker-0")
    finally:
        operated_jobs.core.patch_node(node, {"spec": {"unschedulable": None}})


def test_a_connection_is_described_and_a_job_is_deleted_after_a_confirmation(
    plugin: KubectlPlugin, operated_jobs: Jobs
) -> None:
    operated_jobs.create("connected", server={"replicas": 1})
    wait_for(lambda: operated_jobs.status("connected").get("connection"), TIMEOUT_S)
    shown = plugin.run("connect", "connected")
    assert 0 == shown.returncode, shown.stderr
    assert f"http://connected-server.{operated_jobs.namespace}.svc:8000/v1" in shown.stdout
    assert "key url" in shown.stdout

    kept = plugin.run("cancel", "connected", answer="n\n")
    assert 130 == kept.returncode
    assert "Rollouts that have not finished are lost" in kept.stdout
    assert operated_jobs.get("connected") is not None
    # No container runs here that could complete the deletion that the command waits for.
    with plugin.start("cancel", "connected", "--yes") as process:
        try:
            wait_for(lambda: "deletionTimestamp" in (operated_jobs.get("connected") or {})["metadata"], TIMEOUT_S)
        finally:
            process.terminate()
