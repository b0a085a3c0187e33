"""An upgrade from the CRD of v1alpha1, under which jobs were created, to the current one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_operator import names

from rollout_api.manifest.rollout_job import DEPRECATED_VERSION, GROUP, KIND, PLURAL, VERSION
from tests.support.cluster.control_plane import CRDS, ControlPlane
from tests.support.cluster.current_control_plane import CurrentControlPlane
from tests.support.cluster.jobs import SPEC, Jobs
from tests.support.cluster.operator_process import running_operator
from tests.support.waiting import wait_for

NAMESPACE = "upgraded"
OLD_CRD = Path(__file__).with_name("data") / "rolloutjobs-v1alpha1.yaml"
CRD_NAME = f"{PLURAL}.{GROUP}"
SERVED_TIMEOUT_S = 60


@pytest.fixture
def old_cluster(tmp_path: Path) -> Iterator[ControlPlane]:
    """An API server of its own, which has stored no job of the current version and has the CRD of v1alpha1."""
    control_plane = CurrentControlPlane(tmp_path)
    try:
        control_plane.start()
        control_plane.kubectl("delete", "crd", CRD_NAME)
        control_plane.kubectl("apply", "--server-side", "-f", str(OLD_CRD))
        wait_until_served(control_plane, DEPRECATED_VERSION)
        yield control_plane
    finally:
        control_plane.stop()


def wait_until_served(cluster: ControlPlane, version: str) -> None:
    path = f"/apis/{GROUP}/{version}/{PLURAL}"
    wait_for(lambda: not cluster.kubectl("get", "--raw", path, check=False).returncode, SERVED_TIMEOUT_S)


def job_in(cluster: ControlPlane, version: str, name: str) -> dict[str, Any]:
    path = f"/apis/{GROUP}/{version}/namespaces/{NAMESPACE}/{PLURAL}/{name}"
    found: dict[str, Any] = json.loads(cluster.kubectl("get", "--raw", path).stdout)
    return found


def fields_of(spec: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `newer` that `spec` has as well, because a newer CRD adds the defaults of its new fields."""
    return {
        name: fields_of(value, newer[name]) if isinstance(value, dict) else newer[name]
        for name, value in spec.items()
        if name in newer
    }


def stored_versions(cluster: ControlPlane) -> list[str]:
    output = cluster.kubectl("get", "crd", CRD_NAME, "-o", "jsonpath={.status.storedVersions}").stdout
    versions: list[str] = json.loads(output)
    return versions


def test_jobs_of_the_previous_version_are_kept_and_reconciled(old_cluster: ControlPlane) -> None:
    jobs = Jobs(old_cluster, NAMESPACE)
    manifest = {
        "apiVersion": f"{GROUP}/{DEPRECATED_VERSION}",
        "kind": KIND,
        "metadata": {"name": "math", "namespace": NAMESPACE},
        "spec": SPEC,
    }
    old_cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    before = job_in(old_cluster, DEPRECATED_VERSION, "math")

    old_cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
    wait_until_served(old_cluster, VERSION)
    assert before["spec"] == fields_of(before["spec"], job_in(old_cluster, DEPRECATED_VERSION, "math")["spec"])
    after = job_in(old_cluster, VERSION, "math")
    assert (f"{GROUP}/{VERSION}", before["metadata"]["uid"]) == (after["apiVersion"], after["metadata"]["uid"])
    with running_operator(old_cluster, NAMESPACE):
        jobs.wait(lambda: jobs.condition("math", "Accepted") == ("True", "Valid"))
        jobs.wait(lambda: len(jobs.pods("math", names.WORKER)) == 2)

        # The deprecated version is still accepted, with a warning, and may be used to change a job.
        manifest["metadata"]["name"] = "more"
        created = old_cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
        assert f"{DEPRECATED_VERSION} {KIND} is deprecated; use {GROUP}/{VERSION}" in created.stderr
        jobs.wait(lambda: len(jobs.pods("more", names.WORKER)) == 2)

    # The commands of the chart's README, after which a later CRD may omit the deprecated version.
    assert [DEPRECATED_VERSION, VERSION] == sorted(stored_versions(old_cluster))
    everything = old_cluster.kubectl("get", PLURAL, "--all-namespaces", "-o", "json").stdout
    old_cluster.kubectl("replace", "-f", "-", stdin=everything)
    patch = json.dumps({"status": {"storedVersions": [VERSION]}})
    old_cluster.kubectl("patch", "crd", CRD_NAME, "--subresource=status", "--type=merge", "-p", patch)
    assert [VERSION] == stored_versions(old_cluster)
    assert ("True", "Valid") == jobs.condition("math", "Accepted")
