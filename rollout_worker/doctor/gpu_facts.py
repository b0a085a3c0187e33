"""Asks ``nvidia-smi``, which is installed together with the driver, about the GPUs of this machine."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

from rollout_worker.doctor.gpus import GpuFacts, parse_gpus, parse_slow_pairs

_TIMEOUT_S = 30.0
"""Without persistence mode, loading the driver takes seconds for each GPU."""


class GpuDriverError(RuntimeError):
    """``nvidia-smi`` has failed."""


def read_gpus() -> GpuFacts | None:
    """Return the GPUs of this machine; None if no driver is installed.

    Raises:
        GpuDriverError: if the driver does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        facts = parse_gpus(_output(program, "-q", "-x"))
        if len(facts.gpus) < 2:
            return facts
        return dataclasses.replace(facts, slow_pairs=parse_slow_pairs(_output(program, "topo", "-m")))
    except ValueError as failure:
        raise GpuDriverError(str(failure)) from None


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise GpuDriverError(f"nvidia-smi cannot be run: {failure}") from None
    if result.returncode:
        raise GpuDriverError(f"nvidia-smi failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout
