"""The doctor examines a manifest and its model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_api import RolloutJob, parse_job
from rollout_api.manifest.rollout_job import FieldError, ManifestError
from rollout_tools.doctor.findings import GIB, Finding, Severity
from rollout_tools.doctor.manifest import (
    MemoryEstimate,
    ModelFacts,
    check_invalid_manifest,
    check_manifest,
    estimate_memory,
    read_model,
)
from tests.support.manifests import rollout_job
from tests.support.recurrent_model import qwen3_next
from tests.support.reference_model import make_model

QWEN3_8B = {
    "dtype": "bfloat16",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
}
QWEN3_8B_BYTES = 16_381_470_720


def job(**sections: Any) -> RolloutJob:
    """Return a job on CPUs with changed sections."""
    return parse_job(rollout_job(**{"model": {"uri": "m/m"}, "workers": {"gpusPerWorker": 0}, **sections}))


def check(
    manifest: RolloutJob, model: ModelFacts, *, gpu_memory: int | None = None, memory: int | None = 64 * GIB
) -> dict[str, Finding]:
    return {one.check: one for one in check_manifest(manifest, model, gpu_memory=gpu_memory, memory=memory)}


def facts(estimate: MemoryEstimate | None = None) -> ModelFacts:
    return ModelFacts("m/m", "/models/m", estimate=estimate)


def estimate(config: dict[str, Any] = QWEN3_8B, **changes: Any) -> MemoryEstimate:
    arguments: dict[str, Any] = {"max_model_len": 32_768, "gpus": 1, **changes}
    found = estimate_memory(config, QWEN3_8B_BYTES, **arguments)
    assert found is not None
    return found


def test_the_estimate_of_a_known_model() -> None:
    # 2 (keys and values) × 36 layers × 8 heads × 128 numbers × 2 bytes
    assert 147_456 == estimate().kv_cache_per_token
    assert QWEN3_8B_BYTES == estimate().weights
    assert 4.5 * GIB == estimate().kv_cache_of_longest


@pytest.mark.parametrize(
    ("changes", "weights", "per_token"),
    [
        ({"gpus": 4}, QWEN3_8B_BYTES // 4, 147_456 // 4),
        ({"kv_cache_dtype": "fp8_e4m3"}, QWEN3_8B_BYTES, 147_456 // 2),
        ({"dtype": "float32"}, QWEN3_8B_BYTES * 2, 147_456 * 2),
        ({"config": {**QWEN3_8B, "quantization_config": {}}, "dtype": "float32"}, QWEN3_8B_BYTES, 147_456 * 2),
        ({"config": {"text_config": QWEN3_8B}}, QWEN3_8B_BYTES, 147_456),
        # Without a head dimension and groups of heads: 2 × 36 × 4096 × 2
        (
            {"config": {k: v for k, v in QWEN3_8B.items() if k not in ("head_dim", "num_key_value_heads")}},
            QWEN3_8B_BYTES,
            589_824,
        ),
        # Multi-head latent attention: 36 × (512 + 64) × 2
        ({"config": {**QWEN3_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64}}, QWEN3_8B_BYTES, 41_472),
    ],
)
def test_the_estimate_follows_the_settings(changes: dict[str, Any], weights: int, per_token: int) -> None:
    found = estimate(**changes)
    assert (weights, per_token) == (found.weights, found.kv_cache_per_token)


def test_there_is_no_estimate_for_an_unusual_configuration() -> None:
    assert estimate_memory({"model_type": "mamba"}, 1, max_model_len=1, gpus=1) is None


@pytest.mark.parametrize(
    ("gpu_memory", "severity", "text"),
    [
        (80 * GIB, Severity.OK, "12 fit"),
        (20 * GIB, Severity.ERROR, "raise engine.tensorParallelSize"),
        (None, Severity.OK, "none here to compare with"),
    ],
)
def test_an_engine_must_fit_into_a_gpu(gpu_memory: int | None, severity: Severity, text: str) -> None:
    manifest = job(workers={"gpusPerWorker": 1}, engine={"maxModelLen": 32_768})
    finding = check(manifest, facts(estimate()), gpu_memory=gpu_memory)["memory"]
    assert severity == finding.severity
    assert text in finding.seen + finding.advice


def test_the_share_of_a_gpu_that_an_engine_may_use_counts() -> None:
    manifest = job(workers={"gpusPerWorker": 1}, engine={"gpuMemoryUtilizationPercentage": 20})
    assert Severity.ERROR == check(manifest, facts(estimate()), gpu_memory=80 * GIB)["memory"].severity


@pytest.mark.parametrize(
    ("engine", "memory", "severity", "text"),
    [
        ({}, 64 * GIB, Severity.ERROR, "raise engine.kvCacheMemory"),
        ({"kvCacheMemory": "10Gi"}, 64 * GIB, Severity.OK, "2 fit"),
        ({"kvCacheMemory": "10Gi"}, 20 * GIB, Severity.ERROR, "20.0 GiB available"),
    ],
)
def test_an_engine_must_fit_into_the_memory_of_the_machine(
    engine: dict[str, Any], memory: int, severity: Severity, text: str
) -> None:
    finding = check(job(engine=engine), facts(estimate()), memory=memory)["memory"]
    assert severity == finding.severity
    assert text in finding.seen + finding.advice


def test_what_pods_need_is_not_compared_with_this_machine(tmp_path: Path) -> None:
    manifest = job(model={"uri": "/models/m"}, engine={"kvCacheMemory": "10Gi"})
    assert Severity.ERROR == check(manifest, facts(estimate()), memory=GIB)["memory"].severity
    assert Severity.OK == check(manifest, facts(estimate()), memory=None)["memory"].severity
    missing = read_model(manifest, tmp_path)
    assert Severity.ERROR == check(manifest, missing)["model"].severity
    finding = check(manifest, missing, memory=None)["model"]
    assert Severity.WARNING == finding.severity
    assert "make sure that pods have it" in finding.advice


@pytest.mark.parametrize(("policy", "drafts"), [("off", 0), ("marginal", 1)])
def test_the_recurrent_states_of_a_rollout_and_its_drafts_count(tmp_path: Path, policy: str, drafts: int) -> None:
    """Qwen3-Next has 36 layers with a state of 2 MiB and some tokens of a convolution each."""
    qwen3_next(make_model(tmp_path / "model"))
    manifest = job(
        model={"uri": str(tmp_path / "model")},
        engine={"maxModelLen": 32_768, "kvCacheMemory": "32Gi"},
        speculation={"policy": policy},
    )
    found = read_model(manifest, tmp_path)
    assert found.estimate is not None
    assert 36 * (2 + drafts) * (2 * 2**20 + (3 + drafts) * 8192 * 2) == found.estimate.states
    assert "of which its recurrent states take" in check(manifest, found)["memory"].seen


def test_there_is_no_estimate_if_only_vllm_knows_the_recurrent_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen3_next(make_model(tmp_path / "model"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert read_model(job(model={"uri": str(tmp_path / "model")}), tmp_path).estimate is None


def test_each_error_of_a_manifest_is_a_finding() -> None:
    errors = ManifestError([FieldError("spec.a", "wrong"), FieldError("spec.b", "missing")])
    found = check_invalid_manifest(errors)
    assert [("spec.a", "wrong"), ("spec.b", "missing")] == [(one.check, one.seen) for one in found]
    assert {Severity.ERROR} == {one.severity for one in found}


def test_settings_of_a_runtime_are_not_examined() -> None:
    manifest = job(runtimeRef={"name": "gpus"})
    assert Severity.WARNING == check(manifest, facts())["runtime"].severity


def test_a_model_directory_is_examined(tmp_path: Path) -> None:
    make_model(tmp_path / "org" / "model")
    manifest = job(
        model={"uri": "org/model"},
        weights={"allowedRoots": [str(tmp_path), str(tmp_path / "none")]},
        engine={"maxModelLen": 256},
        sampling={"maxTokens": 128},
    )
    found = read_model(manifest, tmp_path)
    assert str(tmp_path / "org" / "model") == found.directory
    assert ("", "") == (found.unusable, found.tokenizer_error)
    assert [str(tmp_path / "none")] == found.missing_roots
    size = (tmp_path / "org/model/model.safetensors").stat().st_size
    assert found.estimate is not None
    assert (size, 256) == (found.estimate.weights, found.estimate.max_model_len)
    findings = check(manifest, found)
    assert Severity.WARNING == findings.pop("weights").severity
    assert {Severity.OK} == {one.severity for one in findings.values()}

    (tmp_path / "org/model/tokenizer.json").write_text("{")
    assert Severity.ERROR == check(manifest, read_model(manifest, tmp_path))["tokenizer"].severity

    (tmp_path / "org/model/model.safetensors").unlink()
    finding = check(manifest, read_model(manifest, tmp_path))["model"]
    assert Severity.ERROR == finding.severity
    assert "has no *.safetensors" in finding.advice


def test_a_missing_model_of_the_hub_is_downloaded_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    manifest = job(model={"uri": "org/model"})
    finding = check(manifest, read_model(manifest, tmp_path))["model"]
    assert (Severity.WARNING, "org/model is not on this machine") == (finding.severity, finding.seen)
    assert "rollout prefetch" in finding.advice


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("/no/such/directory", "does not exist"),
        ("das/tiny-qwen3/step-1080", "'rollout tiny-model' writes"),
        ("a/b/c", "nor the id of a Hugging Face model"),
    ],
)
def test_a_model_that_can_be_nowhere_is_an_error(uri: str, advice: str, tmp_path: Path) -> None:
    manifest = job(model={"uri": uri})
    finding = check(manifest, read_model(manifest, tmp_path))["model"]
    assert Severity.ERROR == finding.severity
    assert advice in finding.advice
