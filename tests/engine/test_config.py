"""vLLM's settings and environment variables, without an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollout_api.manifest import engine_args as reserved
from rollout_store.job.engines import EngineError
from rollout_store.job.setup import JobSetup
from rollout_worker.engine.config import (
    EngineConfig,
    cuda_graph_sizes,
    engine_args,
    engine_environment,
    scheduled_tokens,
    vllm_settings,
)
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.vllm_version import unsupported_text
from rollout_worker.engine_worker import engine_setup
from tests.support.engines import MAX_DRAFT_TOKENS, engine_config
from tests.support.manifests import rollout_job
from tests.support.reference_model import MAX_POSITIONS


def test_settings_and_environment_are_computed_without_changing_the_environment(
    model: Path, drafting_config: DraftingConfig
) -> None:
    config = engine_config(model, drafting_config)
    before = dict(os.environ)
    vllm_settings(config)
    engine_environment(config, os.environ)
    assert before == dict(os.environ)


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, ("marginal", 16, 0.0)),
        ({"policy": "das-classes", "maxDraftTokens": 8, "minSurvival": 0.25}, ("das-classes", 8, 0.25)),
        ({"policy": "unlimited", "minSurvival": 0}, ("unlimited", 64, 0.0)),
    ],
)
def test_an_engine_drafts_as_its_manifest_says(speculation: dict[str, Any], expected: tuple[Any, ...]) -> None:
    setup = JobSetup(rollout_job(speculation=speculation), "uid", "redis://redis", 100, "fingerprint")
    drafting = engine_setup.engine_config(setup, Path("model"), speculative=True).drafting
    assert drafting is not None
    assert (drafting.policy, drafting.max_draft_tokens, drafting.min_survival) == expected
    # vLLM's collective calls carry plain values only.
    assert DraftingConfig.from_dict(dataclasses.asdict(drafting)) == drafting


def test_variables_of_the_user_are_not_replaced(model: Path) -> None:
    config = replace(engine_config(model), cores=3)
    assert "3" == engine_environment(config, {})["OMP_NUM_THREADS"]
    assert "OMP_NUM_THREADS" not in engine_environment(config, {"OMP_NUM_THREADS": "1"})
    assert "OMP_NUM_THREADS" not in engine_environment(replace(config, cpu=False), {})


def test_engines_on_gpus_do_not_fork_a_process_that_may_have_used_cuda(model: Path) -> None:
    config = engine_config(model)
    assert "spawn" == engine_environment(replace(config, cpu=False), {})["VLLM_WORKER_MULTIPROC_METHOD"]
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in engine_environment(config, {})


def test_engines_on_gpus_log_their_attention_backend_cuda_graphs_and_kv_cache(model: Path) -> None:
    config = engine_config(model)
    assert "INFO" == engine_environment(replace(config, cpu=False), {})["VLLM_LOGGING_LEVEL"]
    assert "ERROR" == engine_environment(config, {})["VLLM_LOGGING_LEVEL"]


def test_engines_on_gpus_need_v2_unless_the_user_chooses_v1(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V2 cannot run on this machine, which has no Triton."""
    config = replace(engine_config(model), cpu=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in engine_environment(config, os.environ)
    assert not engine_args(vllm_settings(config)).create_engine_config().use_v2_model_runner
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    for name, value in engine_environment(config, os.environ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=r"(?s)Model Runner V2 .*VLLM_USE_V2_MODEL_RUNNER=0"):
        asyncio.run(Engine.start(config))


def test_compiled_code_is_kept_elsewhere_if_its_directory_is_not_writable(model: Path, tmp_path: Path) -> None:
    config = replace(engine_config(model), cpu=False)
    (tmp_path / "file").touch()
    for directory, changed in ((tmp_path / "new" / "compiled", False), (tmp_path / "file" / "compiled", True)):
        variables = engine_environment(config, {"VLLM_CACHE_ROOT": str(directory)})
        assert changed == ("VLLM_CACHE_ROOT" in variables)


def test_eager_cpu_engines_need_no_compiler_for_tensor_parallelism(model: Path) -> None:
    config = engine_config(model)

    def disables_dynamo(ranks: int, *, eager: bool) -> bool:
        spec = config.spec.model_copy(update={"tensor_parallel_size": ranks, "enforce_eager": eager})
        return "TORCHDYNAMO_DISABLE" in engine_environment(replace(config, spec=spec), {})

    assert disables_dynamo(2, eager=True)
    assert not disables_dynamo(2, eager=False)
    assert not disables_dynamo(1, eager=True)


def test_drafting_extends_the_maximum_length_beyond_the_models_positions(
    model: Path, drafting_config: DraftingConfig
) -> None:
    plain, drafting = engine_config(model), engine_config(model, drafting_config)
    assert MAX_POSITIONS == vllm_settings(plain)["max_model_len"]
    assert MAX_POSITIONS + 2 * MAX_DRAFT_TOKENS == vllm_settings(drafting)["max_model_len"]
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in engine_environment(plain, {})
    assert "1" == engine_environment(drafting, {})["VLLM_ALLOW_LONG_MAX_MODEL_LEN"]


def test_steps_on_gpus_have_room_for_prompts_beside_the_longest_drafts(
    model: Path, drafting_config: DraftingConfig
) -> None:
    """An engine that a program starts would have 2,048 tokens, of which 119 responses with drafts leave 25."""
    for responses, draft_tokens in ((1, 0), (119, 16), (1024, 64)):
        assert 8192 == scheduled_tokens(responses, draft_tokens) - responses * (1 + draft_tokens)
    plain = replace(engine_config(model), cpu=False)
    drafting = replace(plain, drafting=replace(drafting_config, max_draft_tokens=16))
    assert 64 + 8192 == vllm_settings(plain)["max_num_batched_tokens"]
    assert 64 * 17 + 8192 == vllm_settings(drafting)["max_num_batched_tokens"]
    chosen = with_engine(drafting, extra_args={"max_num_batched_tokens": 4096})
    assert 4096 == vllm_settings(chosen)["max_num_batched_tokens"]
    assert "max_num_batched_tokens" not in vllm_settings(engine_config(model, drafting_config))


def test_overrides_take_precedence(model: Path) -> None:
    config = replace(engine_config(model), overrides={"max_num_seqs": 7, "num_gpu_blocks_override": 16})
    settings = vllm_settings(config)
    assert (7, 16) == (settings["max_num_seqs"], settings["num_gpu_blocks_override"])


def with_engine(config: EngineConfig, **fields: Any) -> EngineConfig:
    """Return the configuration with some fields of ``spec.engine``."""
    return replace(config, spec=type(config.spec).model_validate({**config.spec.model_dump(), **fields}))


def test_fields_become_arguments_of_vllm(model: Path) -> None:
    fields = {
        "kv_cache_memory": None,
        "gpu_memory_utilization_percentage": 85,
        "kv_cache_dtype": "fp8_e5m2",
        "quantization": "fp8",
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
    }
    settings = vllm_settings(with_engine(replace(engine_config(model), cpu=False), **fields))
    assert 0.85 == settings["gpu_memory_utilization"]
    assert "kv_cache_memory_bytes" not in settings
    assert ("fp8_e5m2", "fp8", True) == (
        settings["kv_cache_dtype"],
        settings["quantization"],
        settings["enable_expert_parallel"],
    )
    defaults = vllm_settings(engine_config(model))
    assert not {"gpu_memory_utilization", "kv_cache_dtype", "quantization", "enable_expert_parallel"} & defaults.keys()


@pytest.mark.parametrize(
    ("field", "path", "known"),
    [("quantization", "engine.quantization", "fp8"), ("kv_cache_dtype", "engine.kvCacheDtype", "fp8_e4m3")],
)
def test_names_that_vllm_does_not_know_are_reported_with_those_it_knows(
    model: Path, field: str, path: str, known: str
) -> None:
    with pytest.raises(EngineError, match=rf"{path} is fp7, but vLLM .* {known}\b"):
        vllm_settings(with_engine(engine_config(model), **{field: "fp7"}))


def test_unknown_extra_args_are_reported_with_similar_names(model: Path) -> None:
    config = with_engine(engine_config(model), extra_args={"max_num_batched_token": 64, "zzzz": 1, "block_size": 32})
    with pytest.raises(EngineError, match=r"max_num_batched_token \(did you mean max_num_batched_tokens") as error:
        engine_args(vllm_settings(config))
    assert "zzzz; correct engine.extraArgs" in str(error.value)
    assert "block_size" not in str(error.value)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0rc1", "0.3.3", "dev"])
def test_other_versions_of_vllm_are_refused(model: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(EngineError, match=rf"vLLM {version} is not supported, but 0.32 and 0.33 are; install"):
        engine_args(vllm_settings(engine_config(model)))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1rc1.dev5+g0508485", "0.32.0+cpu"])
def test_the_supported_versions_of_vllm_are_accepted(version: str) -> None:
    assert "" == unsupported_text(version)


def test_every_reserved_argument_exists() -> None:
    """Otherwise it would have been renamed, and could be set by its new name."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set() == {*reserved.FIELDS, *reserved.REASONS} - arguments
    assert all(any(name.startswith(start) for name in arguments) for start in reserved.PREFIXES)
    own = vllm_settings(replace(engine_config(Path("model")), cpu=False)).keys()
    replaceable = {name for name in own if reserved.extra_arg_error(name) is None}
    assert {"max_num_batched_tokens"} == replaceable


def test_engines_have_different_seeds(model: Path) -> None:
    """With vLLM's default, engines that receive the same prompts would sample the same responses."""
    assert 20 == len({vllm_settings(engine_config(model))["seed"] for _ in range(20)})


@pytest.mark.parametrize(("max_num_seqs", "max_draft_tokens"), [(128, 16), (31, 16), (512, 3), (4096, 64), (4096, 1)])
def test_cuda_graphs_include_batches_with_drafts(max_num_seqs: int, max_draft_tokens: int) -> None:
    from vllm.config import CompilationConfig

    sizes = cuda_graph_sizes(max_num_seqs, max_draft_tokens)
    response_tokens = 1 + max_draft_tokens
    assert 0 <= min(max_num_seqs * response_tokens, 2048) - sizes[-1] < response_tokens
    assert sizes == sorted(set(sizes))
    assert len(sizes) < 90
    # vLLM's V1 model runner captures full graphs of uniform drafts only for multiples of their tokens.
    compilation = CompilationConfig(cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=sizes[-1])
    compilation.adjust_cudagraph_sizes_for_spec_decode(response_tokens)
    captured = compilation.cudagraph_capture_sizes
    assert sizes[-1] == captured[-1] == compilation.max_cudagraph_capture_size
    assert all(size % response_tokens == 0 for size in captured)
    for smaller, larger in pairwise(captured):
        assert larger - smaller <= max(response_tokens, 16, smaller // 16 + response_tokens)


@pytest.mark.parametrize(("max_num_seqs", "max_draft_tokens"), [(1, 1), (8, 16), (128, 3), (30, 16)])
def test_small_batches_use_the_sizes_of_vllm(max_num_seqs: int, max_draft_tokens: int) -> None:
    assert [] == cuda_graph_sizes(max_num_seqs, max_draft_tokens)


def test_sizes_of_cuda_graphs_are_only_set_for_drafts_on_gpus_and_unless_they_are_chosen(
    model: Path, drafting_config: DraftingConfig
) -> None:
    drafting = replace(drafting_config, max_draft_tokens=16)
    gpu = with_engine(replace(engine_config(model, drafting), cpu=False), enforce_eager=False)
    assert cuda_graph_sizes(64, 16) == vllm_settings(gpu)["cudagraph_capture_sizes"]
    chosen = (
        replace(gpu, cpu=True),
        replace(gpu, drafting=None),
        with_engine(gpu, enforce_eager=True),
        with_engine(gpu, extra_args={"max_cudagraph_capture_size": 1024}),
        with_engine(gpu, extra_args={"compilation_config": {"cudagraph_capture_sizes": [8]}}),
    )
    for config in chosen:
        assert "cudagraph_capture_sizes" not in vllm_settings(config)
    one = with_engine(gpu, extra_args={"cudagraph_capture_sizes": [8]})
    assert [8] == vllm_settings(one)["cudagraph_capture_sizes"]
    mode = with_engine(gpu, extra_args={"compilation_config": {"cudagraph_mode": "PIECEWISE"}})
    assert cuda_graph_sizes(64, 16) == vllm_settings(mode)["cudagraph_capture_sizes"]
