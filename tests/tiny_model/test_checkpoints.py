"""The shipped checkpoints are complete model directories, and are written once."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_tools.tiny_model import ensure


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return ensure(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.slow
def test_the_last_checkpoint_solves_problems(written: list[Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(written[-1])
    model = AutoModelForCausalLM.from_pretrained(written[-1])
    dataset = create_dataset("chain_sum", seed=7, size=8, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
    scores = []
    for entry in dataset:
        message = [{"role": "user", "content": entry["question"]}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        ids = model.generate(**prompt, do_sample=False, temperature=None, max_new_tokens=120)[0]
        scores.append(dataset.score_answer(extract_answer(tokenizer.decode(ids, skip_special_tokens=True)), entry))
    assert sum(scores) >= 6


def test_the_policy_changes_from_checkpoint_to_checkpoint(written: list[Path]) -> None:
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in written]
    for before, after in pairwise(weights):
        assert before.keys() == after.keys()
        assert all((before[name] != after[name]).any() for name in before if before[name].ndim > 1)


def test_the_output_matrix_is_not_tied_to_the_embeddings(written: list[Path]) -> None:
    # vLLM does not update a tied output matrix when it reloads weights on the CPU.
    weights = load_file(written[-1] / "model.safetensors")
    assert not np.array_equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_checkpoints_are_readable_by_other_users(written: list[Path]) -> None:
    modes = {file.stat().st_mode & 0o777 for checkpoint in written for file in checkpoint.iterdir()}
    assert {0o644} == modes


def test_a_complete_policy_is_not_written_again(written: list[Path]) -> None:
    before = (written[-1] / "model.safetensors").stat().st_mtime_ns
    assert written == ensure(written[0].parent)
    assert before == (written[-1] / "model.safetensors").stat().st_mtime_ns


@pytest.mark.parametrize("damage", ["another policy", "a missing file", "an unreadable record"])
def test_an_outdated_or_incomplete_policy_is_replaced(tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "tiny"
    checkpoints = ensure(directory)
    if damage == "another policy":
        (directory / "recipe.json").write_text(json.dumps({"digest": "0"}))
    elif damage == "a missing file":
        (checkpoints[0] / "model.safetensors").unlink()
    else:
        (directory / "recipe.json").write_text("{")
    (directory / "old").touch()
    assert checkpoints == ensure(directory)
    assert not (directory / "old").exists()
    assert (checkpoints[0] / "model.safetensors").is_file()
    assert [".tiny.lock", "tiny"] == sorted(path.name for path in tmp_path.iterdir())


def test_concurrent_calls_write_one_complete_policy(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(ensure, tmp_path / "tiny") for _ in range(4)]
    assert all(results[0].result() == each.result() for each in results)
    assert [".tiny.lock", "tiny"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_directory_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"recipe\.json"):
        ensure(tmp_path)
    assert "mine" == (tmp_path / "notes.txt").read_text()


def test_writing_them_imports_no_large_library(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom rollout_tools.tiny_model import ensure\n"
        "ensure(Path(sys.argv[1]))\nprint(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "tiny")]
    assert "[]" == subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()
