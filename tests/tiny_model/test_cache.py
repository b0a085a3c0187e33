"""Checkpoints on disk can be loaded and reproduced, and are never incomplete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_tools.tiny_model import Recipe, TrainingProgress, ensure
from rollout_tools.tiny_model.cache import code_digest

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

TRAIN_SLOWLY = """
import sys, time
from pathlib import Path
from rollout_tools.tiny_model import ensure
from tests.tiny_model.test_cache import SMALL

def progress(now):
    print(now.step, flush=True)
    if now.checkpoint:
        time.sleep(60)

ensure(Path(sys.argv[1]), recipe=SMALL, progress=progress)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return ensure(tmp_path_factory.mktemp("models") / "tiny", recipe=SMALL)


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


def test_the_output_matrix_is_not_tied_to_the_embeddings(trained: list[Path]) -> None:
    # vLLM does not update a tied output matrix when it reloads weights on the CPU.
    weights = load_file(trained[-1] / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_checkpoints_are_readable_by_other_users(trained: list[Path]) -> None:
    modes = {file.stat().st_mode & 0o777 for checkpoint in trained for file in checkpoint.iterdir()}
    assert {0o644} == modes


def test_the_policy_changes_between_checkpoints(trained: list[Path]) -> None:
    first, last = (load_file(checkpoint / "model.safetensors") for checkpoint in trained)
    assert first.keys() == last.keys()
    assert all(not torch.equal(first[name], last[name]) for name in first)


def test_the_same_seed_gives_the_same_weights(trained: list[Path], tmp_path: Path) -> None:
    again = ensure(tmp_path / "again", recipe=SMALL)
    other = ensure(tmp_path / "other", recipe=SMALL, seed=1)
    weights = (trained[-1] / "model.safetensors").read_bytes()
    assert weights == (again[-1] / "model.safetensors").read_bytes()
    assert weights != (other[-1] / "model.safetensors").read_bytes()


def test_a_current_policy_is_not_trained_again(trained: list[Path]) -> None:
    before = (trained[-1] / "model.safetensors").stat().st_mtime_ns
    steps: list[TrainingProgress] = []
    assert trained == ensure(trained[0].parent, recipe=SMALL, progress=steps.append)
    assert [] == steps
    assert before == (trained[-1] / "model.safetensors").stat().st_mtime_ns


@pytest.mark.parametrize("damage", ["another recipe", "a missing file", "an unreadable record"])
def test_an_outdated_or_incomplete_policy_is_replaced(tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "tiny"
    checkpoints = ensure(directory, recipe=SMALL)
    if damage == "another recipe":
        record = json.loads((directory / "recipe.json").read_text())
        (directory / "recipe.json").write_text(json.dumps({**record, "digest": "0"}))
    elif damage == "a missing file":
        (checkpoints[0] / "model.safetensors").unlink()
    else:
        (directory / "recipe.json").write_text("{")
    steps: list[TrainingProgress] = []
    assert checkpoints == ensure(directory, recipe=SMALL, progress=steps.append)
    assert [1, 2, 3, 4] == [now.step for now in steps]
    assert [None, "step-0002", None, "step-0004"] == [now.checkpoint for now in steps]
    assert (checkpoints[0] / "model.safetensors").is_file()
    assert [".tiny.lock", "tiny"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_policy_is_outdated_once_the_code_of_its_training_changes_but_not_its_comments() -> None:
    source = '''"""A module."""

import math

RATE = 0.5  # per step
"""The learning rate."""


class Schedule:
    """The rates."""

    def rate(self, step: int) -> float:
        """Return a rate."""
        return RATE if step is not None else math.nan
'''
    reworded = source.replace("A module.", "Another module.").replace("per step", "per batch")
    reworded = reworded.replace("The learning rate.", "A rate.").replace("Return a rate.", "Return\n\n        one.")
    reworded = reworded.replace("The rates.", "Rates.").replace("(self, step: int)", "(self,\n        step: int)")
    without = source.replace('    """The rates."""\n\n', "").replace('"""The learning rate."""\n', "")
    assert 3 == len({source, reworded, without})
    assert {code_digest(source)} == {code_digest(reworded), code_digest(without)}
    for changed in (
        source.replace("0.5", "0.25"),
        source.replace("RATE if", "RATE + 1 if"),
        source.replace("math.nan", "None"),
        source.replace("step is not None", "step is None"),
        source.replace("float:", "int:"),
        source.replace("def rate", "def other"),
    ):
        assert code_digest(source) != code_digest(changed)


def test_a_killed_run_leaves_no_incomplete_policy(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN_SLOWLY, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    with process:
        assert ["1\n", "2\n"] == [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGKILL)
    assert not directory.exists()
    assert any(path.is_dir() for path in tmp_path.iterdir())  # the temporary directory of the killed run
    checkpoints = ensure(directory, recipe=SMALL)
    assert all((checkpoint / "model.safetensors").is_file() for checkpoint in checkpoints)
    assert [".tiny.lock", "tiny"] == sorted(path.name for path in tmp_path.iterdir())


def test_only_one_of_two_concurrent_calls_trains(tmp_path: Path) -> None:
    calls: list[int] = []

    def progress(now: TrainingProgress) -> None:
        calls.append(now.step)
        time.sleep(0.05)

    def one() -> list[Path]:
        return ensure(tmp_path / "tiny", recipe=SMALL, progress=progress)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(one), pool.submit(one)
        assert first.result() == second.result()
    assert [1, 2, 3, 4] == calls


def test_a_directory_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"recipe\.json"):
        ensure(tmp_path, recipe=SMALL)
    assert "mine" == (tmp_path / "notes.txt").read_text()


@pytest.mark.parametrize("checkpoints", [(), (4, 2), (0, 4), (2, 3)])
def test_a_recipe_rejects_checkpoints_that_do_not_end_with_the_last_step(checkpoints: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="checkpoints"):
        Recipe(steps=4, checkpoints=checkpoints)


def test_importing_the_package_imports_no_large_library() -> None:
    script = (
        "import sys, rollout_tools.tiny_model\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'reasoning_gym'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "[]" == result.stdout.strip()
