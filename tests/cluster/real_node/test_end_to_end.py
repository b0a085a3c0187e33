"""The examples on a real node, from ``helm install`` to the history that remains."""

from __future__ import annotations

import re

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.requests import LedgerEntry
from tests.support.acceptance import accepted_per_step
from tests.support.cluster.complete_control_plane import GARBAGE_COLLECTION_TIMEOUT_S
from tests.support.cluster.example_jobs import (
    QUICKSTART,
    TRAINER_JOB,
    ExampleJobs,
    num_epochs,
    num_problems,
    quickstart,
)
from tests.support.cluster.real_cluster import RELEASE, RealCluster
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(1200)

DELETION_TIMEOUT_S = 180.0
"""Seconds within which the trainer's job, which has a TTL of 60 s, is deleted after its success."""


def test_helm_test_succeeds(cluster: RealCluster) -> None:
    assert "Succeeded" in cluster.helm("test", RELEASE, "--timeout=2m")


def test_a_trainer_runs_two_epochs_and_only_the_history_remains(cluster: RealCluster, examples: ExampleJobs) -> None:
    status = examples.run(TRAINER_JOB)
    assert "256" == status["progress"]["summary"]
    # The job may run for so short a time that the operator does not read its status meanwhile.
    assert re.search(rf"^{TRAINER_JOB} +(Starting|Running) +1/1 ", examples.watch_log.read_text(), re.MULTILINE)
    cluster.kubectl("wait", "--for=condition=complete", "job/trainer", "--timeout=60s")
    log = cluster.kubectl("logs", "job/trainer")
    accepted = [float(value) for value in re.findall(r"accepted per step ([\d.]+)", log)]
    assert 2 == len(accepted), log
    assert accepted[1] > accepted[0], log

    wait_for(
        lambda: not cluster.get("rolloutjob", TRAINER_JOB), DELETION_TIMEOUT_S, "The job is not deleted after its TTL."
    )
    kinds = "pods,services,configmaps,poddisruptionbudgets,networkpolicies,serviceaccounts"
    wait_for(
        lambda: not cluster.kubectl("get", kinds, "-l", f"das.rollout.dev/job={TRAINER_JOB}", "-o", "name"),
        GARBAGE_COLLECTION_TIMEOUT_S,
        "Objects of the job remain.",
    )
    rollouts = cluster.rollouts_in_history(TRAINER_JOB)
    assert (256, 256) == (len(rollouts), len(set(rollouts)))


def test_a_dataset_job_finishes_and_its_second_epoch_accepts_more_draft_tokens(
    cluster: RealCluster, examples: ExampleJobs
) -> None:
    status = examples.run(QUICKSTART)
    job = quickstart()
    epochs = num_epochs(job)
    num_rollouts = num_problems(job) * job["spec"]["sampling"]["rolloutsPerPrompt"] * epochs
    expected = {"done": num_rollouts, "total": num_rollouts, "summary": f"{num_rollouts}/{num_rollouts}"}
    assert expected.items() <= status["progress"].items()
    watched = examples.watch_log.read_text()
    assert re.search(rf"^{QUICKSTART} +Running ", watched, re.MULTILINE)
    shown = [int(done) for done in re.findall(rf"^{QUICKSTART} .* (\d+)/{num_rollouts} ", watched, re.MULTILINE)]
    assert shown == sorted(shown)
    assert len(set(shown)) >= 3, watched

    rollouts = cluster.rollouts_in_history(QUICKSTART)
    assert (num_rollouts, num_rollouts) == (len(rollouts), len(set(rollouts)))
    keys = MessageKeys(cluster.get("rolloutjob", QUICKSTART)["metadata"]["uid"])
    prefix = keys.ledger("")
    by_epoch: dict[int, list[LedgerEntry]] = {epoch: [] for epoch in range(1, epochs + 1)}
    with cluster.redis() as server:
        requests = [key.decode().removeprefix(prefix) for key in server.scan_iter(keys.ledger("dataset:*"), count=1000)]
        for request, samples in LauncherStore(server, keys).read_ledger(requests).items():
            by_epoch[int(request.split(":")[1])] += samples.values()
    assert accepted_per_step(by_epoch[2]) > accepted_per_step(by_epoch[1])


def test_the_redis_password_appears_neither_in_logs_nor_in_objects(cluster: RealCluster, examples: ExampleJobs) -> None:
    examples.run(QUICKSTART)
    password = cluster.secret(f"{RELEASE}-redis-admin", "password")
    texts = [
        cluster.kubectl("describe", "pods"),
        cluster.kubectl("get", "rolloutjobs,configmaps,pods,events", "-o", "yaml"),
        cluster.kubectl("logs", f"deployment/{RELEASE}-operator", "--tail=-1"),
        cluster.kubectl("logs", f"{QUICKSTART}-head", "--tail=-1"),
    ]
    assert not any(password in text for text in texts)
