"""What goes wrong with real pods is said: by an Event and a condition, in the words of whoever knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.control_plane import wait_for
from tests.support.cluster.real_cluster import NAMESPACE, RealCluster

# name, what is wrong in the manifest, reason of the Event, what its message says
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
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
    ("no-secret", {"redis": {"managed": True}}, "CreateContainerConfigError", 'secret "no-secret-redis" not found'),
    (
        "no-memory",
        {"workers": {"resources": {"memory": "48Mi"}}, "lifecycle": {"backoffLimit": 0}},
        "OOMKilled",
        "no-memory-worker-0",
    ),
    ("no-room", {"workers": {"resources": {"cpu": "900"}}}, "Unschedulable", "Insufficient cpu"),
]


@pytest.fixture(scope="module")
def jobs(real: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """All of them at once."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "wrong-password"}}
    url = real.secret("rollout-redis", "url").replace("redis://:", "redis://:not-")
    objects: list[dict[str, Any]] = [{**secret, "stringData": {"url": url}}]
    for name, changes, _, _ in WRONG:
        spec = {"source": {"trainer": {}}, "model": {"uri": "das/tiny-qwen3/step-0450"}, **changes}
        spec["workers"] = {"gpusPerWorker": 0, **spec.get("workers", {})}
        about = {"name": name, "namespace": NAMESPACE}
        objects.append(
            {"apiVersion": "das.rollout.dev/v1alpha1", "kind": "RolloutJob", "metadata": about, "spec": spec}
        )
    file: Path = tmp_path_factory.mktemp("wrong") / "jobs.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    real.kubectl("apply", "-f", str(file))
    yield real
    real.kubectl("delete", "-f", str(file), "--timeout=180s")


@pytest.mark.parametrize(("name", "reason", "says"), [(one[0], one[2], one[3]) for one in WRONG])
def test_it_is_said(jobs: RealCluster, name: str, reason: str, says: str) -> None:
    def events() -> list[tuple[str, str]]:
        selector = f"--field-selector=involvedObject.name={name},involvedObject.kind=RolloutJob"
        found = json.loads(jobs.kubectl("get", "events", selector, "-o", "json"))["items"]
        return [(one["reason"], one["message"]) for one in found]

    try:
        wait_for(lambda: any(said == reason and says in text for said, text in events()), 150)
    except TimeoutError:
        pytest.fail(f"{events()}\n{jobs.about(name)}")
    conditions = {one["type"]: one for one in jobs.status(name)["conditions"]}
    if reason in ("ErrImagePull", "CreateContainerConfigError", "Unschedulable"):
        assert "False" == conditions["WorkersReady"]["status"]
    else:
        status = jobs.wait_for_state(name, "Failed", 60)
        assert says in next(one["message"] for one in status["conditions"] if one["type"] == "Failed")
