"""An operator of the namespaces with a label."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient
from rollout_operator.__main__ import parse_arguments
from rollout_operator.http_server import MetricsCollector
from rollout_operator.kubernetes_api import KubernetesApi
from rollout_operator.object_cache import ObjectCache, SelectedNamespaces
from rollout_operator.reconciler import Reconciler


def namespace(name: str, uid: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid}}


def test_the_selected_namespaces_follow_the_watch() -> None:
    changes: list[str] = []
    selected = SelectedNamespaces(changes.append)
    for _ in range(2):
        selected.update(namespace("a", "1"), "Namespace")
    selected.update(namespace("b", "2"), "Namespace")
    assert "a" in selected
    assert "c" not in selected
    # The namespace was deleted and created again, and the deletion is reported late.
    selected.update(namespace("b", "3"), "Namespace")
    selected.remove(namespace("b", "2"), "Namespace")
    assert "b" in selected
    assert {"1", "3"} == selected.uids("Namespace", "")
    selected.remove_uid("Namespace", "1")
    selected.remove_uid("Namespace", "1")
    assert "a" not in selected
    assert ["a", "b", "b", "b", "a"] == changes


def test_the_jobs_of_a_namespace_that_is_selected_are_reconciled_and_counted() -> None:
    async def scenario() -> None:
        api, cache = KubernetesApi(cast(ApiClient, None)), ObjectCache()
        reconciler = Reconciler(api, cache, "image")
        selected = SelectedNamespaces(reconciler.reconcile_namespace)
        reconciler.namespaces = selected
        for name in ("a", "b"):
            metadata = {"namespace": name, "name": "math", "uid": name, "resourceVersion": "1"}
            status = {"state": "Starting", "workers": {"gpus": 16}} if name == "b" else None
            cache.update_job({"metadata": metadata, "spec": {}, "status": status})

        def samples(metric: str) -> list[tuple[dict[str, str], float]]:
            families = MetricsCollector(api, cache, reconciler, None).collect()
            return [(sample.labels, sample.value) for one in families if one.name == metric for sample in one.samples]

        assert 0 == len(reconciler.queue)
        assert [] == samples("rollout_operator_jobs") == samples("rollout_operator_job_state")
        selected.update(namespace("b", "1"), "Namespace")
        assert ("b", "math") == await reconciler.queue.get()
        assert 0 == len(reconciler.queue)
        assert [({"state": "Starting"}, 1)] == samples("rollout_operator_jobs")
        job = {"namespace": "b", "job": "b/math"}
        assert [(job | {"state": "Starting"}, 1)] == samples("rollout_operator_job_state")
        assert [(job, 16)] == samples("rollout_operator_job_gpus")

    asyncio.run(scenario())


def test_namespaces_are_named_or_selected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--worker-image=w", "--namespace=a", "--namespace-selector=b=c"])
    assert "exclude each other" in capsys.readouterr().err
