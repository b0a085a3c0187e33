"""The jobs of examples/, and a job whose history is on another Redis server than its messages."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from tests.support.cluster.real_cluster import NAMESPACE, RELEASE, RealCluster, example, job_manifest
from tests.support.manifests import SMALL_CPU_ENGINE

QUICKSTART, TRAINER_JOB = "quickstart", "served"
"""Names of the jobs of examples/quickstart.yaml and examples/trainer.yaml."""
JOB_TIMEOUT_S = 600.0
"""Time that a job may take from its creation to its success."""
HISTORY_BYTES = 64 * 2**20
SEPARATE_HISTORY = "separate-history"
"""Name of the job with a history on another server, and of that server's pod, Service and Secret."""
SEPARATE_PROBLEMS = 4


def quickstart() -> dict[str, Any]:
    """Return the job of examples/quickstart.yaml with a byte cap of its history."""
    (job,) = example("quickstart.yaml")
    job["spec"]["history"] = {"maxBytes": str(HISTORY_BYTES)}
    return job


def num_epochs(job: dict[str, Any]) -> int:
    """Return the number of epochs of a job with a dataset source."""
    return int(job["spec"]["source"]["dataset"]["epochs"])


def num_problems(job: dict[str, Any]) -> int:
    """Return the number of problems of a job with a dataset source."""
    return sum(task["problems"] for task in job["spec"]["source"]["dataset"]["tasks"])


def separate_history(cluster: RealCluster) -> list[dict[str, Any]]:
    """Return a Redis server with its Service and Secret, and a job that has its history there."""
    name, password = SEPARATE_HISTORY, "a-password"
    chart_pod = cluster.get("statefulset", f"{RELEASE}-redis")["spec"]["template"]["spec"]
    container = {key: chart_pod["containers"][0][key] for key in ("image", "imagePullPolicy", "securityContext")}
    command = ["redis-server", "--requirepass", password, "--save", "", "--dir", "/tmp"]
    labels = {"app": name}
    task = {"name": "sums", "generator": "chain_sum", "config": {"min_terms": 2, "max_terms": 4}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "automountServiceAccountToken": False,
                "securityContext": chart_pod["securityContext"],
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "redis", **container, "command": command}],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"port": 6379}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "stringData": {"url": f"redis://:{password}@{name}.{NAMESPACE}:6379/0", "password": password},
        },
        job_manifest(
            name,
            source={"dataset": {"tasks": [{**task, "problems": SEPARATE_PROBLEMS}]}},
            model={"uri": "das/tiny-qwen3/step-1080"},
            engine=SMALL_CPU_ENGINE,
            sampling={"rolloutsPerPrompt": 4, "maxTokens": 128},
            workers={"gpusPerWorker": 0},
            history={"name": name, "redis": {"urlFrom": {"secretKeyRef": {"name": name, "key": "url"}}}},
        ),
    ]


class ExampleJobs:
    """The jobs, one at a time: whether drafting pays depends on step times, which other engines would disturb."""

    def __init__(self, cluster: RealCluster, watch_log: Path) -> None:
        self.watch_log = watch_log
        """Output of ``kubectl get rj -w``."""
        self._cluster = cluster
        self._applied: dict[str, list[dict[str, Any]]] = {}
        self._statuses: dict[str, dict[str, Any]] = {}

    def run(self, name: str) -> dict[str, Any]:
        """Run a job until it has succeeded, unless it has run before, and return the status that it had then."""
        if name not in self._applied:
            self._applied[name] = self._manifests(name)
            self._cluster.apply(*self._applied[name])
        if name not in self._statuses:
            self._statuses[name] = self._cluster.wait_for_state(name, "Succeeded", JOB_TIMEOUT_S)
        return self._statuses[name]

    def _manifests(self, name: str) -> list[dict[str, Any]]:
        if name == TRAINER_JOB:
            return example("trainer.yaml")
        return [quickstart()] if name == QUICKSTART else separate_history(self._cluster)

    def delete(self) -> None:
        """Delete everything that :meth:`run` applied."""
        for manifest in chain(*self._applied.values()):
            self._cluster.delete(manifest["kind"].lower(), manifest["metadata"]["name"])
