"""Storing the bundle of a failed job, when the API server does not answer."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.actions import DeleteWorkload, KeepBundle, Plan
from rollout_operator.apply import execute
from rollout_operator.bundle_collector import read_end
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


@given(st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=30)), st.integers(100, 400))
def test_the_end_of_a_log_is_read_even_if_its_last_lines_are_long(lines: list[str], max_bytes: int) -> None:
    async def read(num_lines: int) -> str:
        """Answer as the API server does: ``tailLines`` counts from the end, and ``limitBytes`` from the beginning."""
        text = "".join(f"{line}\n" for line in lines[-num_lines:])
        return text.encode()[:max_bytes].decode(errors="replace")

    text = asyncio.run(read_end(read, 64, max_bytes))
    assert "".join(f"{line}\n" for line in lines).endswith(text)
    assert bool(lines) == bool(text)
