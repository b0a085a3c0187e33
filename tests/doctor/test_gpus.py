"""How GPUs are judged, from what ``nvidia-smi`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_worker.doctor.findings import Severity
from rollout_worker.doctor.gpu_facts import GpuDriverError, read_gpus
from rollout_worker.doctor.gpus import judge_gpus, parse_gpus, parse_slow_pairs
from rollout_worker.doctor.units import GIB, MIB

GPU = """<gpu id="00000000:0{number}:00.0">
<product_name>NVIDIA H100 80GB HBM3</product_name>
<persistence_mode>Enabled</persistence_mode>
<mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
<fb_memory_usage><total>81559 MiB</total><reserved>551 MiB</reserved><used>4 MiB</used><free>81004 MiB</free>
</fb_memory_usage>
<ecc_errors><volatile><sram_correctable>7</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity><sram_uncorrectable_secded>0</sram_uncorrectable_secded>
<dram_correctable>3</dram_correctable><dram_uncorrectable>0</dram_uncorrectable></volatile>
<aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate></ecc_errors>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>0</remapped_row_unc>
<remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure></remapped_rows>
</gpu>"""
MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-31\t0
GPU1\tNV18\t X \tPHB\t0-31\t0
GPU2\tSYS\tPHB\t X \t0-31\t0

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def log(gpus: int = 1, *, old: str = "", new: str = "") -> str:
    """Return the output of ``nvidia-smi -q -x``, with a changed part."""
    text = (
        '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log>'
        "<driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version>"
        f"<attached_gpus>{gpus}</attached_gpus>"
        + "".join(GPU.format(number=number) for number in range(gpus))
        + "</nvidia_smi_log>"
    )
    assert old in text
    return text.replace(old, new) if old else text


def test_good_gpus_give_no_advice() -> None:
    facts = parse_gpus(log(2))
    assert [(81559 * MIB, 4 * MIB)] * 2 == [(gpu.memory, gpu.used) for gpu in facts.gpus]
    findings = judge_gpus(facts, wanted=2, tensor_parallel=2, torch_cuda="13.0")
    assert {Severity.OK} == {finding.severity for finding in findings}
    assert ["GPUs", "driver", "GPU 0", "GPU 1", "NVLink"] == [finding.check for finding in findings]


@pytest.mark.parametrize(
    ("old", "new", "severity", "advice"),
    [
        ("<current_mig>Disabled", "<current_mig>Enabled", Severity.WARNING, "workers.gpuResource"),
        ("<used>4 MiB", "<used>20000 MiB", Severity.WARNING, "end the processes"),
        ("<persistence_mode>Enabled", "<persistence_mode>Disabled", Severity.WARNING, "nvidia-persistenced"),
        ("<dram_uncorrectable>0", "<dram_uncorrectable>2", Severity.WARNING, "reset the GPU"),
        ("<remapped_row_pending>No", "<remapped_row_pending>Yes", Severity.WARNING, "reset it"),
        ("<remapped_row_failure>No", "<remapped_row_failure>Yes", Severity.ERROR, "replace it"),
    ],
)
def test_a_defect_of_a_gpu_is_reported(old: str, new: str, severity: Severity, advice: str) -> None:
    findings = judge_gpus(parse_gpus(log(old=old, new=new)), wanted=1, tensor_parallel=1, torch_cuda=None)
    bad = [one for one in findings if one.severity is not Severity.OK]
    assert [("GPU 0", severity)] == [(one.check, one.severity) for one in bad]
    assert advice in bad[0].advice


@pytest.mark.parametrize(
    ("torch_cuda", "severity"), [("12.8", Severity.OK), ("13.1", Severity.OK), ("14.0", Severity.ERROR)]
)
def test_the_driver_must_support_the_cuda_version_of_torch(torch_cuda: str, severity: Severity) -> None:
    findings = judge_gpus(parse_gpus(log()), wanted=1, tensor_parallel=1, torch_cuda=torch_cuda)
    assert severity == next(one.severity for one in findings if one.check == "driver")


@pytest.mark.parametrize(("wanted", "severity"), [(0, Severity.OK), (1, Severity.ERROR)])
def test_a_machine_needs_gpus_only_if_the_manifest_asks_for_them(wanted: int, severity: Severity) -> None:
    for facts in (None, parse_gpus(log(0))):
        (finding,) = judge_gpus(facts, wanted=wanted, tensor_parallel=1, torch_cuda=None)
        assert severity == finding.severity


def test_too_few_gpus_are_an_error() -> None:
    findings = judge_gpus(parse_gpus(log(2)), wanted=4, tensor_parallel=1, torch_cuda=None)
    assert ("GPUs", Severity.ERROR) == (findings[0].check, findings[0].severity)


def test_pairs_of_gpus_without_nvlink_are_found() -> None:
    assert ["GPU0–GPU2", "GPU1–GPU2"] == parse_slow_pairs(MATRIX)
    assert [] == parse_slow_pairs(MATRIX.replace("SYS", "NV12").replace("PHB", "NV12"))


def program(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for nvidia-smi on the path."""
    file = directory / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_the_program_of_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text(log(3))
    (tmp_path / "matrix").write_text(MATRIX)
    script = f'case "$*" in "-q -x") cat {tmp_path}/log;; "topo -m") cat {tmp_path}/matrix;; esac'
    program(tmp_path, script, monkeypatch)
    facts = read_gpus()
    assert facts is not None
    assert ("13.0", 3, 2) == (facts.cuda, len(facts.gpus), len(facts.slow_pairs))
    assert facts.gpus[0].memory > 79 * GIB
    links = judge_gpus(facts, wanted=3, tensor_parallel=2, torch_cuda=None)[-1]
    assert ("NVLink", Severity.WARNING) == (links.check, links.severity)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "library version mismatch"),
        ("echo no XML", "wrote no XML"),
    ],
)
def test_a_driver_that_fails_is_an_error(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, script, monkeypatch)
    with pytest.raises(GpuDriverError, match=message):
        read_gpus()


def test_without_a_driver_there_is_nothing_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() is None
