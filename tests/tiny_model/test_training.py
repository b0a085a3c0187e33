"""Checkpoints of a training run can be loaded, reproduced, and packed as those that the package contains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_tools.tiny_model import unpacked
from scripts.tiny_model.__main__ import RESOLUTION, pack
from scripts.tiny_model.train import Recipe, checkpoint_name, train

pytestmark = pytest.mark.slow

SMALL = Recipe(
    vocabulary=300,
    hidden_size=32,
    layers=1,
    intermediate_size=64,
    heads=1,
    kv_heads=1,
    head_dim=32,
    batch_tokens=1024,
    steps=4,
    warmup_steps=1,
    decay_steps=1,
    curriculum_steps=2,
    checkpoints=(2, 4),
)


def _train(directory: Path, seed: int = 0) -> list[Path]:
    directory.mkdir()
    train(directory, seed=seed, recipe=SMALL)
    return [directory / checkpoint_name(step) for step in SMALL.checkpoints]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return _train(tmp_path_factory.mktemp("models") / "tiny")


def test_checkpoints_load_and_generate(trained: list[Path]) -> None:
    assert ["step-0002", "step-0004"] == [checkpoint.name for checkpoint in trained]
    for checkpoint in trained:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        assert "qwen3" == model.config.model_type
        assert torch.float32 == model.dtype
        assert tokenizer.eos_token_id == model.generation_config.eos_token_id
        assert (1.0, 0, 1.0) == (
            model.generation_config.temperature,
            model.generation_config.top_k,
            model.generation_config.top_p,
        )
        prompt = tokenizer("1 + 1 =", return_tensors="pt")
        assert prompt["input_ids"].shape[1] + 3 >= model.generate(**prompt, max_new_tokens=3).shape[1]


def test_the_same_seed_gives_the_same_weights(trained: list[Path], tmp_path: Path) -> None:
    weights = (trained[-1] / "model.safetensors").read_bytes()
    assert weights == (_train(tmp_path / "again")[-1] / "model.safetensors").read_bytes()
    assert weights != (_train(tmp_path / "other", seed=1)[-1] / "model.safetensors").read_bytes()


def test_packing_moves_each_weight_by_half_a_step_at_most(trained: list[Path], tmp_path: Path) -> None:
    pack(trained, tmp_path)
    last = load_file(trained[-1] / "model.safetensors")
    contents = dict(unpacked(sorted(tmp_path.glob("step-*.z"))))
    assert [checkpoint.name for checkpoint in trained] == list(contents)
    for checkpoint in trained:
        weights = load_file(checkpoint / "model.safetensors")
        assert weights.keys() == contents[checkpoint.name].keys()
        for name, expected in weights.items():
            step = last[name].std() / RESOLUTION if expected.ndim > 1 else np.abs(last[name]).max() / 2000
            assert np.abs(expected - contents[checkpoint.name][name]).max() <= 0.501 * step, name


@pytest.mark.parametrize("checkpoints", [(), (4, 2), (0, 4), (2, 3)])
def test_a_recipe_rejects_checkpoints_that_do_not_end_with_the_last_step(checkpoints: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="checkpoints"):
        Recipe(steps=4, checkpoints=checkpoints)
