"""Asks the NVIDIA driver about the GPUs of a machine, and judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pynvml

from rollout_tools.doctor.findings import Finding, error, ok, size_text, warning

_MAX_USED_SHARE = 0.05
"""Share of an idle GPU's memory that its driver may occupy."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Sizes are in bytes, and 0 if they are unknown."""

    name: str
    memory: int
    used: int
    mig: bool
    """Whether it is divided into partitions."""
    persistence: bool
    """Whether the driver stays loaded while nobody uses the GPU."""
    uncorrected_errors: int
    """Errors of the memory since the driver was loaded that ECC could not correct."""
    needs_reset: bool
    """Whether rows of the memory are replaced at the next reset."""
    is_broken: bool
    """Whether rows of the memory could not be replaced."""


@dataclass(frozen=True)
class GpuFacts:
    """What the driver says."""

    driver: str
    cuda: str
    """Newest CUDA version that the driver supports."""
    gpus: Sequence[Gpu]
    slow_pairs: Sequence[str] = ()
    """Pairs of GPUs that no NVLink connects."""


class GpuDriverError(RuntimeError):
    """The driver does not answer."""


def read_gpus() -> GpuFacts | None:
    """Return the GPUs of this machine; None if no driver is installed.

    Raises:
        GpuDriverError: if the driver does not answer.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError as failure:
        raise GpuDriverError(f"the driver cannot be used: {failure}") from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return GpuFacts(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=[_read_gpu(handle) for handle in handles],
            slow_pairs=[
                f"GPU{first}–GPU{second}"
                for first, second in combinations(range(len(handles)), 2)
                if not _are_linked(handles[first], handles[second])
            ],
        )
    except pynvml.NVMLError as failure:
        raise GpuDriverError(f"the driver does not answer: {failure}") from None
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(handle: Any) -> Gpu:
    # The first version of this structure counts what the driver reserves as used.
    memory = _if_supported(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2, otherwise=None)
    uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    _, _, pending, failed = _if_supported(pynvml.nvmlDeviceGetRemappedRows, handle, otherwise=(0, 0, 0, 0))
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory=0 if memory is None else memory.total,
        used=0 if memory is None else memory.used,
        mig=_if_supported(pynvml.nvmlDeviceGetMigMode, handle, otherwise=(0, 0))[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        persistence=bool(_if_supported(pynvml.nvmlDeviceGetPersistenceMode, handle, otherwise=True)),
        uncorrected_errors=_if_supported(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected, otherwise=0),
        needs_reset=bool(pending),
        is_broken=bool(failed),
    )


def _are_linked(first: Any, second: Any) -> bool:
    status = _if_supported(
        pynvml.nvmlDeviceGetP2PStatus, first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK, otherwise=None
    )
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _if_supported(read: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
    """Return a property that not every GPU has, or that not every driver knows."""
    try:
        return read(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return otherwise


def judge_gpus(facts: GpuFacts | None, *, wanted: int, tensor_parallel: int, torch_cuda: str | None) -> list[Finding]:
    """Judge the GPUs.

    Args:
        facts: the GPUs; None if there is no driver.
        wanted: number of GPUs that the manifest asks for on one machine; 0 if there is no manifest.
        tensor_parallel: number of GPUs among which each layer is divided.
        torch_cuda: CUDA version that torch is built for; None for a CPU build.
    """
    if facts is None or not facts.gpus:
        seen = "no NVIDIA driver" if facts is None else f"driver {facts.driver}, but no GPU"
        if not wanted:
            return [ok("GPUs", seen)]
        return [
            error(
                "GPUs",
                seen,
                f"the manifest asks for {wanted} (workers.gpusPerWorker); use a machine or a container with GPUs, or "
                "set gpusPerWorker to 0 for engines on CPUs",
            )
        ]
    findings = [_number(facts, wanted), _driver(facts, torch_cuda)]
    for number, gpu in enumerate(facts.gpus):
        findings += _gpu(f"GPU {number}", gpu)
    if len(facts.gpus) > 1 and tensor_parallel > 1:
        findings.append(_links(facts.slow_pairs))
    return findings


def _number(facts: GpuFacts, wanted: int) -> Finding:
    seen = ", ".join(f"{gpu.name} ({size_text(gpu.memory)})" for gpu in facts.gpus)
    if len(facts.gpus) < wanted:
        return error(
            "GPUs", seen, f"the manifest asks for {wanted} GPUs (workers.gpusPerWorker); reduce it, or add GPUs"
        )
    return ok("GPUs", seen)


def _driver(facts: GpuFacts, torch_cuda: str | None) -> Finding:
    seen = f"driver {facts.driver} for CUDA {facts.cuda}" + (f", torch for {torch_cuda}" if torch_cuda else "")
    if torch_cuda is not None and _major(torch_cuda) > _major(facts.cuda):
        return error(
            "driver", seen, f"upgrade the driver, or install a torch that is built for CUDA {_major(facts.cuda)}"
        )
    return ok("driver", seen)


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0


def _gpu(check: str, gpu: Gpu) -> list[Finding]:
    findings = []
    if gpu.is_broken:
        findings.append(
            error(check, "defective rows of its memory could not be replaced", "take it out of service and replace it")
        )
    if gpu.needs_reset:
        findings.append(
            warning(check, "defective rows of its memory wait to be replaced", "reset it (nvidia-smi --gpu-reset)")
        )
    if gpu.uncorrected_errors:
        findings.append(
            warning(
                check,
                f"{gpu.uncorrected_errors} uncorrected memory errors since the driver was loaded",
                "processes that read them were ended; reset the GPU, and replace it if errors come back",
            )
        )
    if gpu.mig:
        findings.append(
            warning(
                check,
                "divided into partitions (MIG)",
                "an engine gets one partition, and partitions cannot be combined by tensorParallelSize; name the "
                "partition's resource in workers.gpuResource, or disable MIG",
            )
        )
    if gpu.used > gpu.memory * _MAX_USED_SHARE:
        findings.append(
            warning(
                check,
                f"{size_text(gpu.used)} of {size_text(gpu.memory)} in use",
                "vLLM refuses to start if less is free than engine.gpuMemoryUtilizationPercentage says; end the "
                "processes that nvidia-smi lists",
            )
        )
    if not gpu.persistence:
        findings.append(
            warning(
                check,
                "persistence mode is disabled",
                "the driver is loaded again for each engine, which takes seconds; run nvidia-persistenced",
            )
        )
    return findings or [ok(check, f"{size_text(gpu.memory - gpu.used)} free, no memory errors")]


def _links(slow_pairs: Sequence[str]) -> Finding:
    if slow_pairs:
        return warning(
            "NVLink",
            f"none between {', '.join(slow_pairs)}",
            "tensor parallelism exchanges activations in each layer, and is slow over PCIe; prefer several engines or "
            "pipelineParallelSize if the model fits",
        )
    return ok("NVLink", "between all pairs of GPUs")
