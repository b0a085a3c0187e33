"""A job whose pods, Redis, operators, kubelet and API server are killed, while a trainer keeps requesting rollouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
from kubernetes import client

from rollout_api import Rollout, RolloutClient
from tests.support.acceptance import FIRST_REFERENCE_STEPS, accepted_per_step
from tests.support.cluster.real_cluster import NAMESPACE, RELEASE, OwnCluster, RealCluster, is_ready, job_manifest
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

JOB = "chaos"
WORKERS = 2
BATCH = 8
"""Rollouts that an engine runs at a time."""
PROMPTS = WORKERS * BATCH
START_TIMEOUT_S = 300
"""Seconds until a new job runs, and until it has finished three epochs then."""
REPLACEMENT_TIMEOUT_S = 240
"""Seconds within which a killed pod is replaced by one that is ready, while an operator runs."""
TAKEOVER_TIMEOUT_S = 300
"""The same for a pod that is killed together with all operators."""
EPOCHS_TIMEOUT_S = 240
"""Seconds within which the running epoch and the next one are finished, whatever was killed."""
END_TIMEOUT_S = 300
"""Seconds within which the last epoch is finished and the job is closed."""
SUCCESS_TIMEOUT_S = 120
"""Seconds from then on until the job has succeeded, and until all its pods but the head are deleted."""


class Trainer:
    """Requests rollouts of the same prompts epoch after epoch, greedily, so that acceptance can be compared."""

    def __init__(self, url: str) -> None:
        self.epochs: list[list[Rollout]] = []
        self._url = url
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the trainer in a thread."""
        self._thread.start()

    def _run(self) -> None:
        prompts = [[2 + (7 * number + 3 * position) % 60 for position in range(8)] for number in range(PROMPTS)]
        try:
            with RolloutClient.connect(
                self._url, f"{NAMESPACE}/{JOB}", timeout=600, reconnect_timeout=600
            ) as rollout_client:
                while not self._stop.is_set():
                    groups = rollout_client.generate(prompts, step=len(self.epochs), n=1)
                    self.epochs.append([rollout for group in groups for rollout in group])
                rollout_client.close_job()
        except BaseException as error:
            self._error = error

    def wait_for_epochs(self, count: int, timeout_s: float) -> None:
        """Wait until *count* epochs are finished."""

        def are_finished() -> bool:
            if self._error is not None:
                raise self._error
            return len(self.epochs) >= count

        wait_for(are_finished, timeout_s, lambda: f"{len(self.epochs)} epochs instead of {count} after {timeout_s} s")

    def wait_for_next_epochs(self) -> None:
        """Wait for the epoch that is running and for the next one, all of whose requests are made after this call."""
        self.wait_for_epochs(len(self.epochs) + 2, EPOCHS_TIMEOUT_S)

    def finish(self) -> list[Rollout]:
        """Close the job after the running epoch, and return the rollouts of all epochs."""
        self._stop.set()
        self._thread.join(END_TIMEOUT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return [rollout for epoch in self.epochs for rollout in epoch]


class PodCountMonitor:
    """Records the largest numbers of heads and workers that ever existed at the same time."""

    def __init__(self, cluster: RealCluster) -> None:
        self._max_counts = {"head": 0, "worker": 0}
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            try:
                pods = self._cluster.pods(JOB)
            except (client.ApiException, urllib3.exceptions.HTTPError):  # The API server was killed.
                continue
            live = [
                pod["metadata"]["labels"]["app.kubernetes.io/component"]
                for pod in pods
                if pod["status"]["phase"] in ("Pending", "Running")
            ]
            for component, count in self._max_counts.items():
                self._max_counts[component] = max(count, live.count(component))

    def finish(self) -> dict[str, int]:
        """Stop, and return the largest number of live pods by component."""
        self._stop.set()
        self._thread.join()
        return self._max_counts


def chaos_job() -> dict[str, Any]:
    return job_manifest(
        JOB,
        source={"trainer": {}},
        model={"uri": "das/tiny-qwen3/step-1080"},
        engine={**SMALL_CPU_ENGINE, "maxNumSeqs": BATCH, "checkpointTokens": 32},
        # A new engine drafts less in some first steps until it has calibrated acceptance; long rollouts outweigh them.
        sampling={"temperature": 0, "minTokens": 400, "maxTokens": 448},
        workers={"gpusPerWorker": 0, "replicas": WORKERS},
        lifecycle={"backoffLimit": 20},
    )


@pytest.fixture
def trainer(cluster: RealCluster) -> Iterator[Trainer]:
    cluster.apply(chaos_job())
    with cluster.redis_address() as address:
        trainer = Trainer(cluster.redis_url(address))
        trainer.start()
        yield trainer
    cluster.delete("rolloutjob", JOB)


def wait_for_replacement(cluster: RealCluster, pod: str, uid: str, timeout_s: float = REPLACEMENT_TIMEOUT_S) -> None:
    """Wait until a pod of the same name but with another uid is ready."""

    def is_replaced() -> bool:
        found = cluster.get("pod", pod)
        return bool(found) and found["metadata"]["uid"] != uid and is_ready(found)

    wait_for(is_replaced, timeout_s, lambda: cluster.describe(JOB))


def test_a_job_loses_no_rollout_while_its_parts_are_killed(cluster: RealCluster, trainer: Trainer) -> None:
    monitor = PodCountMonitor(cluster)
    cluster.wait_for_state(JOB, "Running", START_TIMEOUT_S)
    trainer.wait_for_epochs(3, START_TIMEOUT_S)
    started = time.monotonic()

    def log(event: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {event}; {len(trainer.epochs)} epochs")  # noqa: T201

    known_engines = {rollout.engine for epoch in trainer.epochs for rollout in epoch}
    last_epoch = {rollout.problem_id: rollout for rollout in trainer.epochs[-1]}
    wait_for_replacement(cluster, f"{JOB}-worker-0", cluster.kill(f"{JOB}-worker-0"))
    log("A worker was killed and replaced.")

    # The engine of the replacement drafts as well from its first batch on as the others did for the same problems.
    trainer.wait_for_next_epochs()
    rollouts = [rollout for epoch in trainer.epochs for rollout in epoch if rollout.engine not in known_engines]
    first_batch = sorted(rollouts, key=lambda rollout: rollout.started_at)[:BATCH]
    assert BATCH == len(first_batch)
    before = accepted_per_step([last_epoch[rollout.problem_id] for rollout in first_batch])
    after = accepted_per_step(first_batch, FIRST_REFERENCE_STEPS)
    log(f"Accepted per step: {after:.2f} in its first batch, {before:.2f} of the same problems before.")
    assert after >= 0.9 * before

    cluster.kill_redis()
    trainer.wait_for_next_epochs()
    log("Redis was killed.")

    wait_for_replacement(cluster, f"{JOB}-head", cluster.kill(f"{JOB}-head"))
    trainer.wait_for_next_epochs()
    log("The head was killed and replaced.")

    pods = [pod["metadata"]["name"] for pod in cluster.list_objects("pod")]
    operators = [pod for pod in pods if pod.startswith(f"{RELEASE}-operator")]
    assert 2 == len(operators)
    for operator in operators:
        cluster.kill(operator)
    wait_for_replacement(cluster, f"{JOB}-worker-1", cluster.kill(f"{JOB}-worker-1"), TAKEOVER_TIMEOUT_S)
    log("Both operators and the other worker were killed, and the worker was replaced.")

    if isinstance(cluster, OwnCluster):
        cluster.node.kill_kubelet()
        trainer.wait_for_next_epochs()
        cluster.node.start_kubelet()
        log("The kubelet was killed; the pods kept running.")

        cluster.control_plane.kill_process("apiserver")
        trainer.wait_for_next_epochs()
        cluster.control_plane.restart_api_server()
        trainer.wait_for_next_epochs()
        log("The API server was killed and restarted; the pods kept running.")

    rollouts = trainer.finish()
    cluster.wait_for_state(JOB, "Succeeded", SUCCESS_TIMEOUT_S)
    assert {"head": 1, "worker": WORKERS} == monitor.finish()
    wait_for(
        lambda: [f"{JOB}-head"] == [pod["metadata"]["name"] for pod in cluster.pods(JOB)],
        SUCCESS_TIMEOUT_S,
        lambda: cluster.describe(JOB),
    )
    in_history = cluster.rollouts_in_history(JOB)
    assert sorted(rollout.rollout_id for rollout in rollouts) == sorted(in_history)
