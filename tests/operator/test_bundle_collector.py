"""Storing the bundle of a failed job, when the API server does not answer."""

from __future__ import annotations

import asyncio

import pytest
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.actions import DeleteWorkload, KeepBundle, Plan
from rollout_operator.apply import execute
from rollout_operator.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.object_cache import ObjectCache
from rollout_operator.observed import Target

from rollout_api.ports import free_port
from tests.support.planned_jobs import running_job


def test_a_bundle_that_cannot_be_stored_counts_as_rejected() -> None:
    asyncio.run(store_bundle_without_api_server())


async def store_bundle_without_api_server() -> None:
    configuration = Configuration(host=f"http://127.0.0.1:{free_port()}")
    configuration.retries = 0
    api = KubernetesApi(ApiClient(configuration))
    observed = running_job().observe()
    try:
        bundle = KeepBundle("math-bundle", ("math-head",))
        (rejection,) = await execute(api, ObjectCache(), observed, Plan(actions=(bundle,)))
        assert (Target("ConfigMap", "math-bundle"), "Unreachable") == (rejection.target, rejection.reason)
        with pytest.raises(ApiError, match="Unreachable"):  # as any other action that fails temporarily
            await execute(api, ObjectCache(), observed, Plan(actions=(DeleteWorkload("math"),)))
    finally:
        await api.close()


def test_a_defect_in_the_bundle_does_not_keep_the_pods_of_a_failed_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("metadata")

    monkeypatch.setattr("rollout_operator.bundle_collector.bundle_config_map", fail)

    async def store() -> None:
        configuration = Configuration(host=f"http://127.0.0.1:{free_port()}")
        configuration.retries = 0
        api = KubernetesApi(ApiClient(configuration))
        try:
            plan = Plan(actions=(KeepBundle("math-bundle", ("math-head",)),))
            (rejection,) = await execute(api, ObjectCache(), running_job().observe(), plan)
            assert "BundleFailed" == rejection.reason
            assert "KeyError" in rejection.message
        finally:
            await api.close()

    asyncio.run(store())
