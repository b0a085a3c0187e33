"""The jobs of examples/, shortened, and a job whose history is on another Redis server than its messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster.real_cluster import NAMESPACE, RELEASE, RealCluster, example, job_manifest

EPOCHS = 2
HISTORY_BYTES = 64 * 2**20
SEPARATE_HISTORY = "separate-history"
"""Name of the job with a history on another server, and of that server's pod, Service and Secret."""
SEPARATE_PROBLEMS = 4


def quickstart() -> dict[str, Any]:
    """Return examples/quickstart.yaml with two of its four epochs."""
    (job,) = example("quickstart.yaml")
    dataset = job["spec"]["source"]["dataset"]
    dataset |= {"epochs": EPOCHS, "checkpoints": dataset["checkpoints"][:EPOCHS]}
    job["spec"]["history"] = {"maxBytes": str(HISTORY_BYTES)}
    return job


def num_problems(job: dict[str, Any]) -> int:
    """Return the number of problems of a job with a dataset source."""
    return sum(task["problems"] for task in job["spec"]["source"]["dataset"]["tasks"])


def trainer() -> list[dict[str, Any]]:
    """Return examples/trainer.yaml; its job is kept until a test shortens its TTL."""
    job, *others = example("trainer.yaml")
    job["spec"]["lifecycle"]["ttlSecondsAfterFinished"] = 3600
    return [job, *others]


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
            model={"uri": "das/tiny-qwen3/step-0450"},
            engine={"maxModelLen": 512, "dtype": "float32", "kvCacheMemory": "256Mi", "enforceEager": True},
            sampling={"n": 4, "maxTokens": 128},
            workers={"gpusPerWorker": 0},
            history={"name": name, "redis": {"urlFrom": {"secretKeyRef": {"name": name, "key": "url"}}}},
        ),
    ]


@dataclass(frozen=True)
class ExampleJobs:
    """The jobs, which run at the same time; each test waits for the job that it is about."""

    cluster: RealCluster
    watch_log: Path
    """Output of ``kubectl get rj -w``."""

    def start(self) -> None:
        """Apply all manifests."""
        self.cluster.apply(*trainer(), quickstart(), *separate_history(self.cluster))

    def delete(self) -> None:
        """Delete everything that :meth:`start` applied."""
        self.cluster.delete("rolloutjob", "quickstart", "served", SEPARATE_HISTORY)
        self.cluster.delete("job", "trainer")
        self.cluster.delete("configmap", "trainer")
        for kind in ("pod", "service", "secret"):
            self.cluster.delete(kind, SEPARATE_HISTORY)
