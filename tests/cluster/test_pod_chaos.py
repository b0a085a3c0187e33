"""Real pods die, and what runs them dies: the job goes on, and ends with every rollout once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_api import Rollout, RolloutClient
from tests.support.cluster.control_plane import wait_for
from tests.support.cluster.real_cluster import NAMESPACE, RELEASE, OwnCluster, RealCluster

pytestmark = pytest.mark.timeout(1500)

PROMPTS = 24
WORKERS = 2
BATCH = 8


class Trainer:
    """Epoch after epoch over the same prompts, greedily, so that what is accepted can be compared."""

    def __init__(self, url: str, job: str) -> None:
        self.url, self.job = url, f"{NAMESPACE}/{job}"
        self.epochs: list[list[Rollout]] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        prompts = [[2 + (7 * number + 3 * place) % 60 for place in range(8)] for number in range(PROMPTS)]
        try:
            with RolloutClient.connect(self.url, self.job, timeout=600, patience=600) as client:
                while not self._stop.is_set():
                    groups = client.generate(prompts, step=len(self.epochs), n=1)
                    self.epochs.append([rollout for group in groups for rollout in group])
                client.close_job()
        except BaseException as error:
            self.error = error

    def wait_for_epochs(self, count: int, seconds: float) -> None:
        def there() -> bool:
            if self.error is not None:
                raise self.error
            return len(self.epochs) >= count

        wait_for(there, seconds, f"{len(self.epochs)} epochs, not {count}, after {seconds} s")

    def more(self, seconds: float = 240) -> None:
        """Wait for an epoch that begins after now, and one that is asked for after that."""
        self.wait_for_epochs(len(self.epochs) + 2, seconds)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(300)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


class Guard:
    """Looks all the time whether there are ever more pods than there should be."""

    def __init__(self, cluster: RealCluster, job: str) -> None:
        self.most: dict[str, int] = {}
        self._cluster, self._job = cluster, job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(1):
            text = self._cluster.kubectl(
                "get", "pods", "-l", f"das.rollout.dev/job={self._job}", "-o", "json", check=False
            )
            pods = json.loads(text)["items"] if text else []
            for component in ("head", "worker"):
                live = [
                    pod
                    for pod in pods
                    if pod["metadata"]["labels"]["app.kubernetes.io/component"] == component
                    and pod["status"]["phase"] in ("Pending", "Running")
                ]
                self.most[component] = max(self.most.get(component, 0), len(live))

    def end(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join(10)
        return self.most


def manifest(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "das.rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "source": {"trainer": {}},
            "model": {"uri": "das/tiny-qwen3/step-0450"},
            "engine": {
                "maxModelLen": 512,
                "dtype": "float32",
                "maxNumSeqs": BATCH,
                "kvCacheMemory": "256Mi",
                "enforceEager": True,
                "checkpointTokens": 32,
            },
            # a new engine learns anew how likely drafts are accepted: some steps of each first rollout draft less
            "sampling": {"temperature": 0, "minTokens": 400, "maxTokens": 448},
            "workers": {"gpusPerWorker": 0, "replicas": WORKERS},
            "lifecycle": {"backoffLimit": 20},
        },
    }


@pytest.fixture
def trainer(real: RealCluster) -> Iterator[Trainer]:
    real.kubectl("apply", "-f", "-", stdin=json.dumps(manifest("chaos")))
    with real.redis_address() as address:
        made = Trainer(real.redis_url(address), "chaos")
        made.start()
        yield made
    real.kubectl("delete", "rolloutjob", "chaos", "--timeout=120s")


def accepted_per_step(rollouts: list[Rollout]) -> float:
    return sum(rollout.accepted for rollout in rollouts) / sum(rollout.steps for rollout in rollouts)


def ready_again(cluster: RealCluster, pod: str, uid: str) -> bool:
    found = cluster.get("pod", pod)
    if not found or found["metadata"]["uid"] == uid:
        return False
    return any(one["type"] == "Ready" and one["status"] == "True" for one in found["status"].get("conditions", ()))


def test_a_job_survives_its_pods_its_redis_its_operators_and_its_cluster(real: RealCluster, trainer: Trainer) -> None:
    guard = Guard(real, "chaos")
    real.wait_for_state("chaos", "Running", 300)
    trainer.wait_for_epochs(3, 300)
    began = time.monotonic()

    def said(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}; {len(trainer.epochs)} epochs")  # noqa: T201 – with -s

    said("begin")
    # a worker: the first batch of its replacement is drafted as well as the same problems were before
    known = {rollout.engine for epoch in trainer.epochs for rollout in epoch}
    drafted = {rollout.problem_id: rollout for rollout in trainer.epochs[-1]}
    uid = real.kill("chaos-worker-0")
    wait_for(lambda: ready_again(real, "chaos-worker-0", uid), 240, real.about("chaos"))
    said("a worker was replaced")
    trainer.more()
    new = [rollout for epoch in trainer.epochs for rollout in epoch if rollout.engine not in known]
    first = sorted(new, key=lambda rollout: rollout.started_at)[:BATCH]
    assert BATCH == len(first)
    before, after = accepted_per_step([drafted[one.problem_id] for one in first]), accepted_per_step(first)
    said(f"accepted per step: {after:.2f} in its first batch, {before:.2f} of the same problems before")
    assert after >= 0.9 * before

    # Redis
    real.kill_redis()
    trainer.more()
    said("Redis was killed")

    # the head
    uid = real.kill("chaos-head")
    wait_for(lambda: ready_again(real, "chaos-head", uid), 240, real.about("chaos"))
    trainer.more()
    said("the head was replaced")

    # both operators at once, and a worker while there is none
    operators = [pod for pod in real.kubectl("get", "pods", "-o", "name").split() if f"{RELEASE}-operator" in pod]
    assert len(operators) == 2
    for pod in operators:
        real.kill(pod.removeprefix("pod/"))
    uid = real.kill("chaos-worker-1")
    wait_for(lambda: ready_again(real, "chaos-worker-1", uid), 300, real.about("chaos"))
    said("both operators and a worker were killed")

    if isinstance(real, OwnCluster):
        # the kubelet: pods go on without it
        real.node.kill_kubelet()
        trainer.more()
        real.node.start_kubelet()
        said("the kubelet was killed")

        # the API server: pods go on without it
        real.plane.kill("apiserver")
        time.sleep(10)
        real.plane.spawn("apiserver")
        real.plane.wait_until_ready()
        trainer.more()
        said("the API server was restarted")

    trainer.end()
    real.wait_for_state("chaos", "Succeeded", 120)
    assert {"head": 1, "worker": WORKERS} == guard.end()
    wait_for(
        lambda: (
            real.kubectl("get", "pods", "-l", "das.rollout.dev/job=chaos", "-o", "name").split() == ["pod/chaos-head"]
        ),
        120,
        "pods of the job are left",
    )
    made = sorted(rollout.rollout_id for epoch in trainer.epochs for rollout in epoch)
    with real.redis() as server:
        assert made == sorted(real.in_history(server, "chaos"))
