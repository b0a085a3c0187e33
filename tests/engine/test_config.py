"""vLLM's settings and environment variables, without an engine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rollout_worker.engine.config import engine_environment, vllm_settings
from rollout_worker.engine.drafting_config import DraftingConfig
from tests.support.engines import MAX_DRAFT_TOKENS, engine_config
from tests.support.reference_model import MAX_POSITIONS


def test_settings_and_environment_are_computed_without_changing_the_environment(
    model: Path, drafting_config: DraftingConfig
) -> None:
    config = engine_config(model, drafting_config)
    before = dict(os.environ)
    vllm_settings(config)
    engine_environment(config, os.environ)
    assert before == dict(os.environ)


def test_variables_of_the_user_are_not_replaced(model: Path) -> None:
    config = replace(engine_config(model), cores=3)
    assert "3" == engine_environment(config, {})["OMP_NUM_THREADS"]
    assert "OMP_NUM_THREADS" not in engine_environment(config, {"OMP_NUM_THREADS": "1"})
    assert "OMP_NUM_THREADS" not in engine_environment(replace(config, cpu=False), {})


def test_drafting_extends_the_maximum_length_beyond_the_models_positions(
    model: Path, drafting_config: DraftingConfig
) -> None:
    plain, drafting = engine_config(model), engine_config(model, drafting_config)
    assert MAX_POSITIONS == vllm_settings(plain)["max_model_len"]
    assert MAX_POSITIONS + MAX_DRAFT_TOKENS == vllm_settings(drafting)["max_model_len"]
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in engine_environment(plain, {})
    assert "1" == engine_environment(drafting, {})["VLLM_ALLOW_LONG_MAX_MODEL_LEN"]


def test_overrides_take_precedence(model: Path) -> None:
    config = replace(engine_config(model), overrides={"max_num_seqs": 7, "num_gpu_blocks_override": 16})
    settings = vllm_settings(config)
    assert (7, 16) == (settings["max_num_seqs"], settings["num_gpu_blocks_override"])
