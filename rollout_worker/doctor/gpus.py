"""Judges the GPUs of a machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from rollout_worker.doctor.findings import Finding, error, ok, warning
from rollout_worker.doctor.units import MIB, size_text

_MAX_USED_SHARE = 0.05
"""Share of an idle GPU's memory that its driver may occupy."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Sizes are in bytes."""

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
    """What ``nvidia-smi`` says."""

    driver: str
    cuda: str
    """Newest CUDA version that the driver supports."""
    gpus: Sequence[Gpu]
    slow_pairs: Sequence[str] = ()
    """Pairs of GPUs that no NVLink connects."""


def parse_gpus(xml: str) -> GpuFacts:
    """Parse the output of ``nvidia-smi -q -x``.

    Raises:
        ValueError: it is not such output.
    """
    try:
        log = ElementTree.fromstring(xml)  # noqa: S314 - the driver's own program has written it
    except ElementTree.ParseError as failure:
        raise ValueError(f"nvidia-smi wrote no XML: {failure}") from None
    return GpuFacts(
        driver=log.findtext("driver_version", "?"),
        cuda=log.findtext("cuda_version", "?"),
        gpus=[_parse_gpu(gpu) for gpu in log.iterfind("gpu")],
    )


def _parse_gpu(gpu: ElementTree.Element) -> Gpu:
    errors = gpu.find("ecc_errors/volatile")
    return Gpu(
        name=gpu.findtext("product_name", "?"),
        memory=_mebibytes(gpu.findtext("fb_memory_usage/total", "")),
        used=_mebibytes(gpu.findtext("fb_memory_usage/used", "")),
        mig=gpu.findtext("mig_mode/current_mig") == "Enabled",
        persistence=gpu.findtext("persistence_mode") != "Disabled",
        uncorrected_errors=sum(
            int(count.text)
            for count in (errors if errors is not None else ())
            if "uncorrectable" in count.tag and count.text is not None and count.text.isdigit()
        ),
        needs_reset=gpu.findtext("remapped_rows/remapped_row_pending") == "Yes",
        is_broken=gpu.findtext("remapped_rows/remapped_row_failure") == "Yes",
    )


def _mebibytes(text: str) -> int:
    number, _, unit = text.partition(" ")
    return int(number) * MIB if unit == "MiB" and number.isdigit() else 0


def parse_slow_pairs(matrix: str) -> list[str]:
    """Return the pairs of GPUs that no NVLink connects, from the output of ``nvidia-smi topo -m``."""
    # nvidia-smi underlines the header with control sequences of the terminal.
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()]
    rows = [words for words in lines if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]
    return [
        f"{row[0]}–{rows[other][0]}"
        for number, row in enumerate(rows)
        for other in range(number + 1, len(rows))
        if not row[1 + other].startswith("NV")
    ]


def judge_gpus(facts: GpuFacts | None, *, wanted: int, tensor_parallel: int, torch_cuda: str | None) -> list[Finding]:
    """Judge the GPUs.

    Args:
        facts: the GPUs; None if there is no driver.
        wanted: number of GPUs that the manifest asks for on one machine; 0 if there is no manifest.
        tensor_parallel: number of GPUs among which each layer is divided.
        torch_cuda: CUDA version for which torch is built; None for a CPU build.
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
