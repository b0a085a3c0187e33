"""The history service as the chart runs it: it knows a job's history, outlives its pods, and the history the job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from rollout_api.protocol.keys import HISTORIES
from tests.support.cluster.control_plane import wait_for
from tests.support.cluster.real_cluster import NAMESPACE, RELEASE, RealCluster

pytestmark = pytest.mark.timeout(1200)

JOB, NAME = "kept", "sums"
HISTORY = f"{NAMESPACE}/{NAME}"
DEPLOYMENT = f"{RELEASE}-history"
PROBLEMS, SAMPLES, EPOCHS = 4, 4, 2
ROLLOUTS = PROBLEMS * SAMPLES * EPOCHS
MAX_BYTES = 64 * 2**20
REST_S = 30
"""A problem that has rested for so long is packed."""


def manifest(job: str = JOB, **history: Any) -> dict[str, Any]:
    task = {"name": "sums", "generator": "chain_sum", "problems": PROBLEMS, "config": {"min_terms": 2, "max_terms": 4}}
    return {
        "apiVersion": "das.rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": job, "namespace": NAMESPACE},
        "spec": {
            "source": {
                "dataset": {
                    "epochs": EPOCHS,
                    "tasks": [task],
                    "checkpoints": ["das/tiny-qwen3/step-0450", "das/tiny-qwen3/step-0540"],
                }
            },
            "model": {"uri": "das/tiny-qwen3/step-0450"},
            "engine": {"maxModelLen": 512, "dtype": "float32", "kvCacheMemory": "256Mi", "enforceEager": True},
            "sampling": {"n": SAMPLES, "maxTokens": 128},
            "workers": {"gpusPerWorker": 0},
            "history": {"name": NAME, "maxBytes": "64Mi"} | history,
        },
    }


def service_pods(cluster: RealCluster) -> list[str]:
    """Names of the service's pods that are ready."""
    label = f"app.kubernetes.io/name=das-rollout-history,app.kubernetes.io/instance={RELEASE}"
    pods = json.loads(cluster.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]
    return [
        pod["metadata"]["name"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))
    ]


def figures(cluster: RealCluster, pod: str) -> dict[str, float]:
    """What a pod of the service says of the history; nothing while it does not answer."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:8080/proxy/metrics"
    text = cluster.kubectl("get", "--raw", path, check=False)
    return {
        sample.name.removeprefix("rollout_history_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("history") == HISTORY
    }


def leading(cluster: RealCluster, *, but: str = "") -> tuple[str, dict[str, float]] | None:
    """The pod that looks after the history, and its figures."""
    found = [(pod, figures(cluster, pod)) for pod in service_pods(cluster) if pod != but]
    return next(((pod, of) for pod, of in found if of.get("lease_held") and "bytes" in of), None)


def logs(cluster: RealCluster) -> str:
    return cluster.kubectl("logs", "-l", "app.kubernetes.io/name=das-rollout-history", "--tail=50", check=False)


@pytest.fixture(scope="module")
def made(real: RealCluster) -> Iterator[RealCluster]:
    """A cluster with a job that has ended; its history is its own."""
    with real.redis() as server:
        assert HISTORY.encode() not in server.smembers(HISTORIES)
    real.kubectl("apply", "-f", "-", stdin=json.dumps(manifest()))
    try:
        real.wait_for_state(JOB, "Succeeded", 600)
        yield real
    finally:
        real.kubectl("delete", "rolloutjob", JOB, "--ignore-not-found", "--timeout=120s")


def test_it_knows_the_history_of_a_job_that_has_ended(made: RealCluster) -> None:
    assert 1 == made.get("deployment", DEPLOYMENT)["status"]["readyReplicas"]
    _, of = wait_for(lambda: leading(made), 60, logs(made))
    known = {name: of[name] for name in ("problems", "max_bytes", "generation")}
    assert {"problems": PROBLEMS, "max_bytes": MAX_BYTES, "generation": EPOCHS} == known
    assert 0 < of["bytes"] < MAX_BYTES


def test_it_packs_what_rests_and_nothing_is_lost(made: RealCluster) -> None:
    wait_for(lambda: (found := leading(made)) and found[1]["compacted_total"] >= PROBLEMS, REST_S + 60, logs(made))
    with made.redis() as server:
        ids = made.in_history(server, NAME)
    assert (ROLLOUTS, ROLLOUTS) == (len(ids), len(set(ids)))


def test_its_user_reaches_histories_and_nothing_else(made: RealCluster) -> None:
    secret = f"{RELEASE}-redis-history"
    password = made.secret(secret, "password")
    with made.redis_address() as address, redis.Redis.from_url(f"redis://rollout-history:{password}@{address}") as user:
        assert HISTORY.encode() in user.smembers(HISTORIES)
        uid = made.get("rolloutjob", JOB)["metadata"]["uid"]
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.hgetall(f"rollout:{{{uid}}}:job")
    assert made.secret(secret, "url").startswith(f"redis://rollout-history:{password}@")


def test_of_two_pods_one_is_killed_and_the_other_goes_on(made: RealCluster) -> None:
    made.kubectl("scale", "deployment", DEPLOYMENT, "--replicas=2")
    try:
        wait_for(lambda: len(service_pods(made)) == 2, 60, logs(made))
        pod, _ = wait_for(lambda: leading(made), 30, logs(made))
        made.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
        other, before = wait_for(lambda: leading(made, but=pod), 60, logs(made))
        assert other != pod
        wait_for(lambda: figures(made, other).get("passes_total", 0) > before["passes_total"], 60, logs(made))
        # never both
        holders = [one for one in service_pods(made) if figures(made, one).get("lease_held")]
        assert [other] == holders
    finally:
        made.kubectl("scale", "deployment", DEPLOYMENT, "--replicas=1")


def test_it_stays_when_its_job_is_deleted(made: RealCluster) -> None:
    uid = made.get("rolloutjob", JOB)["metadata"]["uid"]
    made.kubectl("delete", "rolloutjob", JOB, "--timeout=120s")
    with made.redis() as server:
        ids = made.in_history(server, NAME)
        assert (ROLLOUTS, ROLLOUTS) == (len(ids), len(set(ids)))
        assert HISTORY.encode() in server.smembers(HISTORIES)
        assert server.ttl(f"rollout:{{{uid}}}:job") != -1  # its messages go, at once or in time
    _, of = wait_for(lambda: leading(made), 60, logs(made))
    assert PROBLEMS == of["problems"]


@pytest.fixture
def elsewhere(real: RealCluster) -> Iterator[str]:
    """Name of a Redis of its own, of its service, and of a Secret with its address under ``url``."""
    name, password = "elsewhere", "a-password"
    bundled = real.get("statefulset", f"{RELEASE}-redis")["spec"]["template"]["spec"]
    container = {key: bundled["containers"][0][key] for key in ("image", "imagePullPolicy", "securityContext")}
    command = ["redis-server", "--requirepass", password, "--save", "", "--dir", "/tmp"]
    labels = {"app": name}
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "automountServiceAccountToken": False,
                "securityContext": bundled["securityContext"],
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
    ]
    real.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    try:
        real.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s")
        yield name
    finally:
        real.kubectl("delete", f"pod/{name}", f"service/{name}", f"secret/{name}", "--ignore-not-found")


def test_a_job_may_have_its_history_on_another_server_than_its_messages(real: RealCluster, elsewhere: str) -> None:
    job = "kept-elsewhere"
    secret = {"name": elsewhere, "key": "url"}
    made = manifest(job, name=job, redis={"urlFrom": {"secretKeyRef": secret}})
    real.kubectl("apply", "-f", "-", stdin=json.dumps(made))
    try:
        status = real.wait_for_state(job, "Succeeded", 600)
        connection = status["connection"]
        assert secret == {"name": connection["historySecretName"], "key": connection["historySecretKey"]}
        command = ["exec", elsewhere, "--", "redis-cli", "--no-auth-warning", "-a", real.secret(elsewhere, "password")]
        assert [f"{NAMESPACE}/{job}"] == real.kubectl(*command, "smembers", HISTORIES).split()
        keys = real.kubectl(*command, "keys", "*").split()
        assert PROBLEMS == sum(key.endswith(":lengths") for key in keys)
        assert not [key for key in keys if key.startswith("rollout:")]
        with real.redis() as server:
            assert [] == real.in_history(server, job)
    finally:
        real.kubectl("delete", "rolloutjob", job, "--ignore-not-found", "--timeout=120s")
