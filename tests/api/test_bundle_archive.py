"""The archive of a bundle: a part that fails does not prevent the others, and the page says why it is missing."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from typing import Any

import pytest

from rollout_api.bundle.archive import BundleArchive, read_archive
from rollout_api.bundle.cluster import ContainerLog, Evidence
from rollout_api.bundle.redaction import Redactor


def test_parts_that_fail_are_explained_beside_those_that_exist() -> None:
    file = io.BytesIO()
    archive = BundleArchive(file, folder="bundle-math", redactor=Redactor(["hunter22"]))
    archive.collect("status.json", "The status.", lambda: {"state": "failed", "reason": "hunter22 | refused"})
    archive.collect("redis.json", "The server.", lambda: 1 // 0)
    archive.note_missing("logs", "The logs.", "the pod is gone,\nits password was hunter22")
    archive.collect("log.txt", "A log.", lambda: "password=abcdefgh\nlast line")
    archive.close("Job math", "Collected now.")

    files = dict(read_archive(file.getvalue()))
    assert ["status.json", "log.txt", "README.md"] == list(files)
    assert {"state": "failed", "reason": "*** | refused"} == json.loads(files["status.json"])
    assert b"password=***\nlast line" == files["log.txt"]
    page = files["README.md"].decode()
    assert "| `redis.json` | The server. | integer division or modulo by zero |" in page
    assert "| `logs` | The logs. | the pod is gone, its password was *** |" in page


def test_an_archive_can_contain_another() -> None:
    inner, outer = io.BytesIO(), io.BytesIO()
    archive = BundleArchive(inner, folder="inner", redactor=Redactor())
    archive.add("a.txt", "A text.", "content")
    archive.close("Inner", "")
    archive = BundleArchive(outer, folder="outer", redactor=Redactor())
    archive.add_archive("head", "What the head has collected.", inner.getvalue())
    archive.close("Outer", "")
    files = dict(read_archive(outer.getvalue()))
    assert ["head/a.txt", "head/README.md", "README.md"] == list(files)
    assert b"content" == files["head/a.txt"]


def test_paths_outside_of_the_archive_are_not_read() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in ("bundle/../../evil", "bundle//evil", "bundle/good"):
            tar.addfile(tarfile.TarInfo(name))
    assert ["good"] == [name for name, _ in read_archive(file.getvalue())]
    with pytest.raises(tarfile.TarError):
        dict(read_archive(b"something else"))


class Cluster:
    """A cluster with a pod that has restarted, where Events must not be read and one log is gone."""

    async def events(self) -> list[dict[str, Any]]:
        raise PermissionError("events is forbidden")

    async def pods(self) -> list[dict[str, Any]]:
        statuses = [
            {"name": "head", "restartCount": 1, "state": {"running": {}}},
            {"name": "proxy", "state": {"waiting": {}}},
        ]
        return [{"metadata": {"name": "math-head", "managedFields": []}, "status": {"containerStatuses": statuses}}]

    async def log(self, log: ContainerLog, num_logs: int) -> str:
        if log.previous:
            raise LookupError("it is gone")
        return f"one of {num_logs} logs\n"


def test_what_a_cluster_does_not_tell_is_named() -> None:
    evidence = Evidence({"metadata": {"name": "math"}})
    asyncio.run(evidence.read(Cluster()))
    file = io.BytesIO()
    archive = BundleArchive(file, folder="bundle-math", redactor=Redactor())
    evidence.add_to(archive)
    archive.close("Job math", "")
    files = dict(read_archive(file.getvalue()))
    assert ["job.json", "pods/math-head.json", "logs/math-head/head.log", "README.md"] == list(files)
    assert {"name": "math-head"} == json.loads(files["pods/math-head.json"])["metadata"]
    assert b"one of 2 logs\n" == files["logs/math-head/head.log"]
    page = files["README.md"].decode()
    assert "| `events.json` |  | events is forbidden |" in page
    assert "| `logs/math-head/head-previous.log` |  | it is gone |" in page
