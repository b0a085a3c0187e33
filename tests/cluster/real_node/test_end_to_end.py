"""The examples on a real node, from ``helm install`` to the history that remains."""

from __future__ import annotations

import re

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_worker.job.ledger import LedgerEntry, read_ledger
from tests.support.cluster.example_jobs import EPOCHS, ExampleJobs, num_problems, quickstart
from tests.support.cluster.real_cluster import RELEASE, RealCluster
from tests.support.cluster.waiting import wait_for

pytestmark = pytest.mark.timeout(1200)

GARBAGE_COLLECTION_TIMEOUT_S = 120


def accepted_per_step(entries: list[LedgerEntry]) -> float:
    return sum(entry.num_accepted_tokens for entry in entries) / sum(entry.num_decoding_steps for entry in entries)


def test_helm_test_succeeds(cluster: RealCluster, examples: ExampleJobs) -> None:
    assert "Succeeded" in cluster.helm("test", RELEASE, "--timeout=3m")


def test_a_trainer_runs_two_epochs_and_only_the_history_remains(cluster: RealCluster, examples: ExampleJobs) -> None:
    cluster.wait_for_state("served", "Running", 400)
    status = cluster.wait_for_state("served", "Succeeded", 600)
    assert "256" == status["progress"]["summary"]
    cluster.kubectl("wait", "--for=condition=complete", "job/trainer", "--timeout=60s")
    log = cluster.kubectl("logs", "job/trainer")
    accepted = [float(value) for value in re.findall(r"accepted per step ([\d.]+)", log)]
    assert 2 == len(accepted), log
    assert accepted[1] > accepted[0], log

    cluster.kubectl(
        "patch", "rolloutjob", "served", "--type=merge", "-p", '{"spec": {"lifecycle": {"ttlSecondsAfterFinished": 1}}}'
    )
    wait_for(lambda: not cluster.get("rolloutjob", "served"), 60, "The job is not deleted after its TTL.")
    kinds = "pods,services,configmaps,poddisruptionbudgets,networkpolicies,serviceaccounts"
    wait_for(
        lambda: not cluster.kubectl("get", kinds, "-l", "das.rollout.dev/job=served", "-o", "name"),
        GARBAGE_COLLECTION_TIMEOUT_S,
        "Objects of the job remain.",
    )
    rollouts = cluster.rollouts_in_history("served")
    assert (256, 256) == (len(rollouts), len(set(rollouts)))


def test_a_dataset_job_finishes_and_its_second_epoch_accepts_more_draft_tokens(
    cluster: RealCluster, examples: ExampleJobs
) -> None:
    status = cluster.wait_for_state("quickstart", "Succeeded", 900)
    job = quickstart()
    num_rollouts = num_problems(job) * job["spec"]["sampling"]["n"] * EPOCHS
    expected = {"done": num_rollouts, "total": num_rollouts, "summary": f"{num_rollouts}/{num_rollouts}"}
    assert expected.items() <= status["progress"].items()
    watched = examples.watch_log.read_text()
    shown = [int(done) for done in re.findall(rf"^quickstart .* (\d+)/{num_rollouts} ", watched, re.MULTILINE)]
    assert shown == sorted(shown)
    assert len(set(shown)) >= 3, watched

    rollouts = cluster.rollouts_in_history("quickstart")
    assert (num_rollouts, num_rollouts) == (len(rollouts), len(set(rollouts)))
    keys = MessageKeys(cluster.get("rolloutjob", "quickstart")["metadata"]["uid"])
    prefix = keys.ledger("")
    by_epoch: dict[int, list[LedgerEntry]] = {epoch: [] for epoch in range(1, EPOCHS + 1)}
    with cluster.redis() as server:
        requests = [key.decode().removeprefix(prefix) for key in server.scan_iter(keys.ledger("dataset:*"), count=1000)]
        for request, samples in read_ledger(server, keys, requests).items():
            by_epoch[int(request.split(":")[1])] += samples.values()
    assert accepted_per_step(by_epoch[2]) > accepted_per_step(by_epoch[1])


def test_the_redis_password_appears_neither_in_logs_nor_in_objects(cluster: RealCluster, examples: ExampleJobs) -> None:
    cluster.wait_for_state("quickstart", "Succeeded", 900)
    password = cluster.secret(f"{RELEASE}-redis-admin", "password")
    texts = [
        cluster.kubectl("describe", "pods"),
        cluster.kubectl("get", "rolloutjobs,configmaps,pods,events", "-o", "yaml"),
        cluster.kubectl("logs", f"deployment/{RELEASE}-operator", "--tail=-1"),
        cluster.kubectl("logs", "quickstart-head", "--tail=-1"),
    ]
    assert not any(password in text for text in texts)
