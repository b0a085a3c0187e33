"""The whole of it, where pods really run: helm install, kubectl apply, a trainer, and what is left after."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_worker.job.ledger import LedgerEntry, read_ledger
from tests.support.cluster.control_plane import wait_for
from tests.support.cluster.real_cluster import EXAMPLES, RELEASE, RealCluster

pytestmark = pytest.mark.timeout(1200)

ROLLOUTS = 20 * 8 * 4


def accepted_per_step(entries: list[LedgerEntry]) -> float:
    return sum(one.accepted for one in entries) / sum(one.steps for one in entries)


def test_the_chart_says_that_it_works(real: RealCluster) -> None:
    assert "Succeeded" in real.helm("test", RELEASE, "--timeout=2m")


def test_a_dataset_is_worked_off_and_later_epochs_draft_better(real: RealCluster, tmp_path: Path) -> None:
    log = tmp_path / "watch"
    with real.watching(log):
        real.apply_example("quickstart.yaml")
        real.wait_for_state("quickstart", "Running", 240)
        status = real.wait_for_state("quickstart", "Succeeded", 600)
    whole = {"done": ROLLOUTS, "total": ROLLOUTS, "summary": f"{ROLLOUTS}/{ROLLOUTS}"}
    assert whole.items() <= status["progress"].items()
    shown = [int(done) for done in re.findall(rf" (\d+)/{ROLLOUTS} ", log.read_text())]
    assert shown == sorted(shown)
    assert len(set(shown)) >= 3, log.read_text()

    uid = real.get("rolloutjob", "quickstart")["metadata"]["uid"]
    keys = MessageKeys(uid)
    with real.redis() as server:
        history = real.in_history(server, "quickstart")
        prefix = keys.ledger("")
        names = [key.decode().removeprefix(prefix) for key in server.scan_iter(keys.ledger("dataset:*"), count=1000)]
        by_epoch: dict[int, list[LedgerEntry]] = {}
        for name, samples in read_ledger(server, keys, names).items():
            by_epoch.setdefault(int(name.split(":")[1]), []).extend(samples.values())
    assert (ROLLOUTS, ROLLOUTS) == (len(history), len(set(history)))
    assert accepted_per_step(by_epoch[2]) > accepted_per_step(by_epoch[1])

    # no password where everybody looks
    password = real.secret(f"{RELEASE}-redis-admin", "password")
    looks = [
        real.kubectl("describe", "pods"),
        real.kubectl("get", "rolloutjobs,configmaps,pods,events", "-o", "yaml"),
        real.kubectl("logs", f"deployment/{RELEASE}-operator", "--tail=-1"),
        real.kubectl("logs", "quickstart-head", "--tail=-1"),
    ]
    assert not any(password in text for text in looks)
    real.kubectl("delete", "rolloutjob", "quickstart", "--timeout=120s")


def test_a_trainer_drives_two_epochs_and_only_the_history_stays(real: RealCluster) -> None:
    real.apply_example("trainer.yaml")
    real.wait_for_state("served", "Running", 300)
    status = real.wait_for_state("served", "Succeeded", 400)
    assert "256" == status["progress"]["summary"]
    real.kubectl("wait", "--for=condition=complete", "job/trainer", "--timeout=60s")
    said = real.kubectl("logs", "job/trainer")
    accepted = [float(one) for one in re.findall(r"accepted per step ([\d.]+)", said)]
    assert len(accepted) == 2, said
    assert accepted[1] > accepted[0], said

    wait_for(lambda: not real.get("rolloutjob", "served"), 180, "the job is not removed in time")
    left = "pods,services,configmaps,poddisruptionbudgets,networkpolicies,serviceaccounts"
    wait_for(
        lambda: not real.kubectl("get", left, "-l", "das.rollout.dev/job=served", "-o", "name"),
        90,
        "something of the job is left",
    )
    with real.redis() as server:
        history = real.in_history(server, "served")
    assert (256, 256) == (len(history), len(set(history)))
    real.kubectl("delete", "-f", str(EXAMPLES / "trainer.yaml"), "--ignore-not-found")
