"""Manifests, and sections of them, that tests share."""

from __future__ import annotations

from typing import Any

from rollout_api.manifest.rollout_job import API_VERSION, KIND

SMALL_CPU_ENGINE: dict[str, Any] = {
    "maxModelLen": 512,
    "dtype": "float32",
    "kvCacheMemory": "256Mi",
    "enforceEager": True,
}
"""Engine settings for a tiny model on CPU. In float32, rounding does not decide which token is sampled."""


def rollout_job(name: str = "math", namespace: str = "default", **sections: Any) -> dict[str, Any]:
    """Return the manifest of a job of a trainer, with sections of its spec replaced or added."""
    spec = {"source": {"trainer": {}}, "model": {"uri": "Qwen/Qwen3-8B"}, **sections}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }
