"""The ConfigMap with what is kept of a failed job: redacted, and never too large."""

from __future__ import annotations

import base64
import json
import random
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_operator.bundle_collector import ContainerLog, Evidence, bundle_config_map, last_lines, pack

from rollout_api.bundle.archive import read_archive
from rollout_api.bundle.kubernetes_objects import ARCHIVE_KEY

NOW = 1_700_000_000.0
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


def evidence(*logs: ContainerLog) -> Evidence:
    return Evidence(JOB, [POD], [EVENT], list(logs), {"logs/math-worker-0/worker.log": "404 NotFound: it is gone"})


def test_the_config_map_outlives_the_job_and_has_no_secrets() -> None:
    log = ContainerLog("math-head", "head", False, f"starting\napi_key={PASSWORD}\nout of memory\n")
    earlier = ContainerLog("math-head", "head", True, "first attempt\n")
    made = bundle_config_map(evidence(log, earlier), "math-bundle", NOW)
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
    logs = [ContainerLog("math-worker-0", f"c{number}", False, text) for number, text in enumerate(texts)]
    packed = pack(evidence(*logs), NOW, max_bytes=100_000)
    assert len(packed) <= 100_000
    files = dict(read_archive(packed))
    for log in logs:
        kept = files[log.path].decode()
        assert log.text.endswith(kept)
        assert kept.endswith(log.text.rpartition("\nend")[2])


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
