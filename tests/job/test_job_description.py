"""What clients read about a job."""

from __future__ import annotations

import json
from typing import Any

from rollout_api import parse_job
from rollout_api.manifest.rollout_job import API_VERSION, KIND
from rollout_worker.job.coordinator.recovery import describe_job


def described_sampling(**sampling: Any) -> dict[str, Any]:
    spec = {"model": {"uri": "m"}, "source": {"trainer": {}}, "sampling": sampling}
    job = parse_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "math"}, "spec": spec})
    description = describe_job(job, vocabulary=10, history="default/h", separate_history=False)
    settings: dict[str, Any] = json.loads(description.sampling)
    return settings


def test_settings_that_earlier_clients_do_not_know_are_described_only_if_they_are_used() -> None:
    assert 5 == described_sampling(maxTokens=5)["max_tokens"]
    assert "ignore_eos" not in described_sampling()
    assert described_sampling(ignoreEos=True)["ignore_eos"]
