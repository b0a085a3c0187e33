"""Merging a job with its runtime, and which jobs a change of a runtime concerns."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from rollout_operator.cluster.object_cache import ObjectCache, RuntimeCache
from rollout_operator.objects.runtimes import RuntimeKey, job_with_runtime

from rollout_api import ManifestError

RUNTIME: dict[str, Any] = {
    "workers": {
        "gpuResource": "amd.com/gpu",
        "nodeSelector": {"pool": "gpu", "zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "podTemplate": {
            "spec": {
                "schedulerName": "packing",
                "containers": [{"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]}],
            }
        },
    },
    "model": {"cache": {"persistentVolumeClaim": "models", "prefetch": True}},
}


def job(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "rl", "name": "math", "uid": "1"}, "spec": spec}


def merged(**spec: Any) -> dict[str, Any]:
    result: dict[str, Any] = job_with_runtime(job(runtimeRef={"name": "a"}, **spec), RUNTIME)["spec"]
    return result


def test_the_runtime_is_replaced_by_its_settings() -> None:
    assert {**RUNTIME, "source": {"trainer": {}}} == merged(source={"trainer": {}})


def test_mappings_are_merged_and_lists_are_replaced() -> None:
    workers = merged(workers={"replicas": 2, "nodeSelector": {"zone": "b"}, "tolerations": []})["workers"]
    assert {"pool": "gpu", "zone": "b"} == workers["nodeSelector"]
    assert [] == workers["tolerations"]
    assert 2 == workers["replicas"]
    assert "amd.com/gpu" == workers["gpuResource"]
    model = merged(model={"uri": "a/b", "cache": {"prefetch": False}})["model"]
    assert {"uri": "a/b", "cache": {"persistentVolumeClaim": "models", "prefetch": False}} == model


def test_a_device_claim_of_the_job_replaces_the_gpu_resource_of_the_runtime() -> None:
    workers = merged(workers={"deviceClaimTemplate": "gpus"})["workers"]
    assert "gpuResource" not in workers


def test_pod_templates_are_combined() -> None:
    own = {"spec": {"schedulerName": None, "containers": [{"name": "worker", "env": [{"name": "A", "value": "1"}]}]}}
    template = merged(workers={"podTemplate": own})["workers"]["podTemplate"]
    (container,) = template["spec"]["containers"]
    assert [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "A", "value": "1"}] == container["env"]
    assert template["spec"]["schedulerName"] is None  # removes the field also from the pod


def test_a_template_that_cannot_be_combined_is_reported_with_its_path() -> None:
    with pytest.raises(ManifestError, match=r"spec\.workers\.podTemplate: .*merged by name"):
        merged(workers={"podTemplate": {"spec": {"containers": [{"image": "x"}]}}})


@pytest.mark.parametrize(
    ("reference", "key"),
    [
        ({"name": "a"}, RuntimeKey("ClusterRolloutRuntime", "", "a")),
        ({"name": "a", "kind": "RolloutRuntime"}, RuntimeKey("RolloutRuntime", "rl", "a")),
    ],
)
def test_only_jobs_that_name_a_runtime_are_reconciled_when_it_changes(
    reference: dict[str, str], key: RuntimeKey
) -> None:
    jobs, queue = ObjectCache(), Mock()
    jobs.update_job(job(runtimeRef=reference))
    other = job()
    other["metadata"]["name"] = "other"
    jobs.update_job(other)
    runtimes = RuntimeCache(jobs, queue.add)
    body = {"metadata": {"name": "a", "namespace": key.namespace, "uid": "r"}, "spec": RUNTIME}

    def reconciled() -> list[tuple[str, str]]:
        added = [call.args[0] for call in queue.add.call_args_list]
        queue.reset_mock()
        return added

    for change, expected in (
        (lambda: runtimes.update(body, key.kind), RUNTIME),
        (lambda: runtimes.update({**body, "spec": {}}, key.kind), {}),
        (lambda: runtimes.remove(body["metadata"]["uid"]), None),
    ):
        change()
        assert expected == runtimes.settings(key)
        assert [("rl", "math")] == reconciled()
    runtimes.update(body, key.kind)
    reconciled()
    runtimes.update(body, key.kind)  # nothing has changed
    assert [] == reconciled()
    assert {"r"} == runtimes.uids(key.kind, "")
    jobs.remove_job(("rl", "math"))
    runtimes.remove("r")
    assert [] == reconciled()
