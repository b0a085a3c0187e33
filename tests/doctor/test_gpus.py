"""How GPUs are read from the driver's library, and judged."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_tools.doctor.findings import GIB, MIB, Severity
from rollout_tools.doctor.gpus import Gpu, GpuFacts, judge_gpus, read_gpus

GPU = Gpu(
    name="NVIDIA H100 80GB HBM3",
    memory=81559 * MIB,
    used=4 * MIB,
    mig=False,
    persistence=True,
    uncorrected_errors=0,
    needs_reset=False,
    is_broken=False,
)
LIBRARY = """
#include <string.h>
typedef unsigned long long u64;
/* Handles of GPUs are their numbers from 1. The second one is old: it has neither ECC nor MIG. */
int nvmlInitWithFlags(unsigned flags) { return FAILURE; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "?"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "580.95.05"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13010; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)(u64)(index + 1); return 0; }
int nvmlDeviceGetName(void *gpu, char *text, unsigned size) { strcpy(text, "NVIDIA H100"); return 0; }
struct memory { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *gpu, struct memory *memory) {
  memory->total = 80ull << 30; memory->used = (u64)gpu << 30; return 0; }
int nvmlDeviceGetPersistenceMode(void *gpu, unsigned *mode) { *mode = gpu != (void *)3; return 0; }
int nvmlDeviceGetMigMode(void *gpu, unsigned *current, unsigned *pending) {
  *current = gpu == (void *)1; *pending = 0; return gpu == (void *)2 ? 3 : 0; }
int nvmlDeviceGetTotalEccErrors(void *gpu, int type, int counter, u64 *count) {
  *count = type == 1 && counter == 0 ? 7 : 99; return gpu == (void *)2 ? 3 : 0; }
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *corrected, unsigned *not, unsigned *pending, unsigned *failed) {
  *corrected = *not = 5; *pending = gpu == (void *)1; *failed = gpu == (void *)3; return gpu == (void *)2 ? 3 : 0; }
int nvmlDeviceGetP2PStatus(void *first, void *second, int index, int *status) {
  *status = !(index == 2 && first == (void *)1 && second == (void *)2); return 0; }
"""
"""A library with the driver's interface, for a process of its own: three GPUs, two of them linked."""


def read_from(directory: Path, failure: int = 0) -> subprocess.CompletedProcess[str]:
    """Build the library, and let a process print what it reads from it."""
    (directory / "nvml.c").write_text(LIBRARY)
    library = ["-shared", "-fPIC", "-w", f"-DFAILURE={failure}", "-o", str(directory / "libnvidia-ml.so.1")]
    subprocess.run(["cc", *library, str(directory / "nvml.c")], check=True)
    program = (
        "import dataclasses, json\n"
        "from rollout_tools.doctor.gpus import read_gpus\n"
        "print(json.dumps(dataclasses.asdict(read_gpus())))\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(directory)}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_what_the_drivers_library_says_is_read(tmp_path: Path) -> None:
    found = read_from(tmp_path)
    facts: dict[str, Any] = json.loads(found.stdout)
    assert ("580.95.05", "13.1", ["GPU0–GPU2", "GPU1–GPU2"]) == (facts["driver"], facts["cuda"], facts["slow_pairs"])
    gpus = [Gpu(**gpu) for gpu in facts["gpus"]]
    common = replace(GPU, name="NVIDIA H100", memory=80 * GIB)
    assert [
        replace(common, used=GIB, mig=True, uncorrected_errors=7, needs_reset=True),
        replace(common, used=2 * GIB),
        replace(common, used=3 * GIB, persistence=False, uncorrected_errors=7, is_broken=True),
    ] == gpus


def test_a_driver_that_fails_is_an_error(tmp_path: Path) -> None:
    error = read_from(tmp_path, failure=18).stderr.splitlines()[-1]
    assert "GpuDriverError: the driver cannot be used: RM has detected an NVML/RM version mismatch." in error


def test_without_a_driver_there_is_nothing_to_ask() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert read_gpus() is None
    else:
        facts = read_gpus()
        assert facts is not None
        assert all(gpu.memory > GIB for gpu in facts.gpus)


def facts(*gpus: Gpu, **more: Any) -> GpuFacts:
    return GpuFacts(**{"driver": "580.95.05", "cuda": "13.0", "gpus": gpus, **more})


def test_good_gpus_give_no_advice() -> None:
    findings = judge_gpus(facts(GPU, GPU), wanted=2, tensor_parallel=2, torch_cuda="13.0")
    assert {Severity.OK} == {finding.severity for finding in findings}
    assert ["GPUs", "driver", "GPU 0", "GPU 1", "NVLink"] == [finding.check for finding in findings]


@pytest.mark.parametrize(
    ("defect", "severity", "advice"),
    [
        ({"mig": True}, Severity.WARNING, "workers.gpuResource"),
        ({"used": 20_000 * MIB}, Severity.WARNING, "end the processes"),
        ({"persistence": False}, Severity.WARNING, "nvidia-persistenced"),
        ({"uncorrected_errors": 2}, Severity.WARNING, "reset the GPU"),
        ({"needs_reset": True}, Severity.WARNING, "reset it"),
        ({"is_broken": True}, Severity.ERROR, "replace it"),
    ],
)
def test_a_defect_of_a_gpu_is_reported(defect: dict[str, Any], severity: Severity, advice: str) -> None:
    findings = judge_gpus(facts(replace(GPU, **defect)), wanted=1, tensor_parallel=1, torch_cuda=None)
    bad = [one for one in findings if one.severity is not Severity.OK]
    assert [("GPU 0", severity)] == [(one.check, one.severity) for one in bad]
    assert advice in bad[0].advice


@pytest.mark.parametrize(
    ("torch_cuda", "severity"), [("12.8", Severity.OK), ("13.1", Severity.OK), ("14.0", Severity.ERROR)]
)
def test_the_driver_must_support_the_cuda_version_of_torch(torch_cuda: str, severity: Severity) -> None:
    findings = judge_gpus(facts(GPU), wanted=1, tensor_parallel=1, torch_cuda=torch_cuda)
    assert severity == next(one.severity for one in findings if one.check == "driver")


@pytest.mark.parametrize(("wanted", "severity"), [(0, Severity.OK), (1, Severity.ERROR)])
def test_a_machine_needs_gpus_only_if_the_manifest_asks_for_them(wanted: int, severity: Severity) -> None:
    for found in (None, facts()):
        (finding,) = judge_gpus(found, wanted=wanted, tensor_parallel=1, torch_cuda=None)
        assert severity == finding.severity


def test_too_few_gpus_are_an_error() -> None:
    findings = judge_gpus(facts(GPU, GPU), wanted=4, tensor_parallel=1, torch_cuda=None)
    assert ("GPUs", Severity.ERROR) == (findings[0].check, findings[0].severity)


def test_pairs_without_nvlink_matter_for_tensor_parallelism() -> None:
    links = judge_gpus(facts(GPU, GPU, slow_pairs=["GPU0–GPU1"]), wanted=2, tensor_parallel=2, torch_cuda=None)[-1]
    assert ("NVLink", Severity.WARNING) == (links.check, links.severity)
    assert "GPU0–GPU1" in links.seen
