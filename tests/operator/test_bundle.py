"""The ConfigMap with what is kept of a failed job: redacted, never too large, and no reason to keep the pods."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import string
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.cluster.apply import bundle_config_map, execute, last_lines, pack, read_end
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.objects.observed import Rejection, Target
from rollout_operator.planning.actions import Action, DeleteWorkload, KeepBundle, Plan

from rollout_api.bundle import ARCHIVE_KEY, ContainerLog, Evidence, read_archive
from rollout_api.ports import free_port
from tests.support.planned_jobs import running_job

NOW = 1_700_000_000.0
BUNDLE = KeepBundle("math-bundle", ("math-head",))
PASSWORD = "planted-Pa55word"
JOB: dict[str, Any] = {
    "metadata": {
        "name": "math",
        "namespace": "rl",
        "uid": "u-1",
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
    },
    "spec": {"redis": {"url": f"redis://job:{PASSWORD}@redis:6379/0"}, "model": {"uri": "any/model"}},
    "status": {
        "state": "Failed",
        "conditions": [{"type": "Failed", "status": "True", "reason": "Error", "message": f"password={PASSWORD}"}],
    },
}
POD = {
    "metadata": {"name": "math-head", "namespace": "rl"},
    "spec": {"containers": [{"name": "head", "env": [{"name": "HF_TOKEN", "value": PASSWORD}]}]},
}
EVENT = {
    "involvedObject": {"kind": "Pod", "name": "math-head"},
    "reason": "BackOff",
    "message": f"redis://job:{PASSWORD}@redis refused",
    "lastTimestamp": "2026-11-27T22:31:18Z",
}


def evidence(logs: dict[str, str]) -> Evidence:
    return Evidence(JOB, [POD], [EVENT], {**logs}, {"logs/math-worker-0/worker.log": "404 NotFound: it is gone"})


def test_the_config_map_outlives_the_job_and_has_no_secrets() -> None:
    logs = {
        ContainerLog("math-head", "head", False).path: f"starting\napi_key={PASSWORD}\nout of memory\n",
        ContainerLog("math-head", "head", True).path: "first attempt\n",
    }
    made = bundle_config_map(evidence(logs), "math-bundle", NOW)
    metadata = made["metadata"]
    assert ("math-bundle", "rl") == (metadata["name"], metadata["namespace"])
    assert "math" == metadata["labels"]["das.rollout.dev/bundle-of"]
    assert "u-1" == metadata["annotations"]["das.rollout.dev/job-uid"]
    assert "ownerReferences" not in metadata
    assert "Error: password=***" in made["data"]["README"]
    assert (
        f"configmap math-bundle -o jsonpath='{{.binaryData.{ARCHIVE_KEY}}}'".replace(".tar.gz", "\\.tar\\.gz")
        in (made["data"]["README"])
    )

    files = dict(read_archive(base64.b64decode(made["binaryData"][ARCHIVE_KEY])))
    assert "any/model" == json.loads(files["job.json"])["spec"]["model"]["uri"]
    assert {"name", "namespace", "uid", "annotations"} == set(json.loads(files["job.json"])["metadata"])
    assert b"starting\napi_key=***\nout of memory\n" == files["logs/math-head/head.log"]
    assert b"first attempt\n" == files["logs/math-head/head-previous.log"]
    assert "Pod/math-head" == json.loads(files["events.json"])[0]["object"]
    assert "it is gone" in files["README.md"].decode()
    assert PASSWORD.encode() not in b"".join(files.values())


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(0, 200_000), max_size=6), seed=st.integers())
def test_the_newest_lines_win_where_not_all_fit(sizes: list[int], seed: int) -> None:
    chosen = random.Random(seed)
    texts = ["".join(chosen.choices(string.ascii_lowercase + "\n", k=size)) + f"\nend {size}\n" for size in sizes]
    logs = {ContainerLog("math-worker-0", f"c{number}", False).path: text for number, text in enumerate(texts)}
    packed = pack(evidence(logs), NOW, max_bytes=100_000)
    assert len(packed) <= 100_000
    files = dict(read_archive(packed))
    for path, text in logs.items():
        kept = files[path].decode()
        assert text.endswith(kept)
        assert kept.endswith(text.rpartition("\nend")[2])


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("one\ntwo\nthree\n", 100, "one\ntwo\nthree\n"),
        ("one\ntwo\nthree\n", 10, "two\nthree\n"),
        ("one\ntwo\nthree\n", 9, "three\n"),
        ("without an end of line", 7, "of line"),
        ("äöü", 3, "ü"),
    ],
)
def test_lines_are_cut_at_the_beginning(text: str, limit: int, expected: str) -> None:
    assert expected == last_lines(text, limit)


def execute_without_api_server(action: Action) -> Sequence[Rejection]:
    """Execute an action with an API server that cannot be reached."""

    async def run() -> Sequence[Rejection]:
        configuration = Configuration(host=f"http://127.0.0.1:{free_port()}")
        configuration.retries = 0
        api = KubernetesApi(ApiClient(configuration))
        try:
            return await execute(api, ObjectCache(), running_job().observe(), Plan(actions=(action,)))
        finally:
            await api.close()

    return asyncio.run(run())


def test_a_bundle_that_cannot_be_stored_counts_as_rejected() -> None:
    (rejection,) = execute_without_api_server(BUNDLE)
    assert (Target("ConfigMap", "math-bundle"), "Unreachable") == (rejection.target, rejection.reason)
    with pytest.raises(ApiError, match="Unreachable"):  # as any other action that fails temporarily
        execute_without_api_server(DeleteWorkload("math"))


def test_a_defect_in_the_bundle_does_not_keep_the_pods_of_a_failed_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("metadata")

    monkeypatch.setattr("rollout_operator.cluster.apply.bundle_config_map", fail)
    (rejection,) = execute_without_api_server(BUNDLE)
    assert "BundleFailed" == rejection.reason
    assert "KeyError" in rejection.message


@given(st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=30)), st.integers(100, 400))
def test_the_end_of_a_log_is_read_even_if_its_last_lines_are_long(lines: list[str], max_bytes: int) -> None:
    async def read(num_lines: int) -> str:
        """Answer as the API server does: ``tailLines`` counts from the end, and ``limitBytes`` from the beginning."""
        text = "".join(f"{line}\n" for line in lines[-num_lines:])
        return text.encode()[:max_bytes].decode(errors="replace")

    text = asyncio.run(read_end(read, 64, max_bytes))
    assert "".join(f"{line}\n" for line in lines).endswith(text)
    assert bool(lines) == bool(text)
