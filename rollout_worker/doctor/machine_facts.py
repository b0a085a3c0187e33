"""Reads facts about this machine."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from importlib import metadata
from pathlib import Path

import psutil

from rollout_worker.doctor.cgroup_facts import read_cpu_limit, read_memory_limit
from rollout_worker.doctor.machine import MachineFacts

_OWN_DISTRIBUTIONS = ("das-rollout", "das-rollout-client")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is examined, and nothing is written there
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
