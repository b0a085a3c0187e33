"""Failures of real pods: an Event and a condition state the cause with the message of the component that knows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster.real_cluster import RELEASE, RealCluster, job_manifest
from tests.support.waiting import wait_for

MESSAGE_TIMEOUT_S = 150.0
"""Seconds within which an Event reports the cause, counted from the creation of the jobs or later."""
FAILED_TIMEOUT_S = 60.0
"""Seconds within which the job has failed after the Event."""
FAULTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("no-image", {"image": {"name": "nowhere.invalid/none:1"}}, "ErrImagePull", "nowhere.invalid/none:1"),
    (
        "no-model",
        {"model": {"uri": "no/such-model"}, "lifecycle": {"backoffLimit": 0}},
        "ModelNotFound",
        "model 'no/such-model' is neither a directory in the model cache",
    ),
    (
        "no-password",
        {
            "redis": {"urlFrom": {"secretKeyRef": {"name": "wrong-password", "key": "url"}}},
            "lifecycle": {"backoffLimit": 0},
        },
        "RedisUnreachable",
        "refused the user name or password",
    ),
    (
        "no-secret",
        {"redis": {"urlFrom": {"secretKeyRef": {"name": "missing", "key": "url"}}}},
        "CreateContainerConfigError",
        'secret "missing" not found',
    ),
    (
        "no-memory",
        {"workers": {"resources": {"memory": "48Mi"}}, "lifecycle": {"backoffLimit": 0}},
        "OOMKilled",
        "no-memory-worker-0",
    ),
    (
        "no-disk",
        {
            "workers": {"podTemplate": {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "100Ki"}}]}}},
            "lifecycle": {"backoffLimit": 0},
        },
        "Evicted",
        'EmptyDir volume "tmp" exceeds the limit "100Ki"',
    ),
]
"""Name of the job, the fault in its spec, the reason of the expected Event, and a part of its message."""


@pytest.fixture(scope="module")
def faulty_jobs(cluster: RealCluster) -> Iterator[RealCluster]:
    """All jobs with a fault; they start together."""
    url = cluster.secret(f"{RELEASE}-redis-admin", "url").replace("redis://:", "redis://:not-")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "wrong-password"}, "stringData": {"url": url}}
    manifests = []
    for name, fault, _, _ in FAULTS:
        spec = {"source": {"trainer": {}}, "model": {"uri": "das/tiny-qwen3/step-1080"}, **fault}
        spec["workers"] = {"gpusPerWorker": 0, **spec.get("workers", {})}
        manifests.append(job_manifest(name, **spec))
    cluster.apply(secret, *manifests)
    yield cluster
    cluster.delete("rolloutjob", *(name for name, *_ in FAULTS))
    cluster.delete("secret", "wrong-password")


@pytest.mark.parametrize(
    ("name", "reason", "message"), [(name, reason, message) for name, _, reason, message in FAULTS]
)
def test_the_cause_of_a_failure_is_reported(faulty_jobs: RealCluster, name: str, reason: str, message: str) -> None:
    def is_reported() -> bool:
        return any(posted == reason and message in text for posted, text in faulty_jobs.events(name))

    try:
        wait_for(is_reported, MESSAGE_TIMEOUT_S)
    except TimeoutError:
        pytest.fail(f"{faulty_jobs.events(name)}\n{faulty_jobs.describe(name)}")
    if reason in ("ErrImagePull", "CreateContainerConfigError"):
        conditions = {condition["type"]: condition for condition in faulty_jobs.status(name)["conditions"]}
        assert "False" == conditions["WorkersReady"]["status"]
    else:
        status = faulty_jobs.wait_for_state(name, "Failed", FAILED_TIMEOUT_S)
        failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
        assert message in failed["message"]
