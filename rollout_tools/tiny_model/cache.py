"""Keeps a trained policy on disk, and trains it only if it is missing or belongs to another recipe."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollout_tools.tiny_model.train import Recipe, TrainingProgress, checkpoint_name, train

RECIPE_FILE = "recipe.json"
"""File that describes how the checkpoints were trained. It is written last, so it marks a complete directory."""

CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that every checkpoint contains."""

_SOURCES = ("solutions.py", "tasks.py", "tokenizer.py", "train.py")


def ensure(
    directory: Path,
    *,
    seed: int = 0,
    recipe: Recipe | None = None,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> list[Path]:
    """Return the policy's checkpoints; train them first if they are missing or out of date.

    The policy is built in a temporary directory beside *directory*, which is renamed when it is complete, so that a
    killed run leaves no incomplete policy. If several processes call this at once, one trains and the others wait.

    Args:
        directory: directory of the checkpoints; created, with its parents, if it is missing.
        seed: seed of the training run, 0 to 1023.
        recipe: what to train; by default the demo's policy.
        progress: called after every training step; not called if the policy exists.

    Returns:
        Checkpoint directories, in the order of training.

    Raises:
        FileExistsError: if *directory* contains something else.
    """
    recipe = recipe or Recipe()
    directory = directory.expanduser().absolute()
    if _is_current(directory, seed, recipe):
        return _checkpoints(directory, recipe)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        if not _is_current(directory, seed, recipe):
            _refuse_foreign(directory)
            _remove_leftovers(directory)
            _build(directory, seed, recipe, progress)
    return _checkpoints(directory, recipe)


def recipe_digest(seed: int, recipe: Recipe) -> str:
    """Return a digest of everything in this package that determines the weights, and of the problem generator."""
    described = {
        "seed": seed,
        "recipe": recipe.as_dict(),
        "reasoning-gym": version("reasoning-gym"),
        "sources": {name: code_digest((Path(__file__).parent / name).read_bytes()) for name in _SOURCES},
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def code_digest(source: str | bytes) -> str:
    """Return a digest of what a module does, which comments, docstrings and formatting do not change.

    It is the same in every version of Python, because images may use another one than the machine that has trained.

    Raises:
        SyntaxError: if *source* is not Python.
    """
    return hashlib.sha256(json.dumps(_described(ast.parse(source))).encode()).hexdigest()


def _described(node: Any) -> Any:
    """Describe a syntax tree as data for JSON, without docstrings and without fields that are not set.

    ``ast.dump`` is not used, because newer versions of Python add fields to the nodes.
    """
    if isinstance(node, ast.JoinedStr):  # to which Python 3.12 adds empty strings
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    if isinstance(node, ast.AST):
        fields = {name: _described(value) for name, value in ast.iter_fields(node)}
        return [type(node).__name__, {name: value for name, value in fields.items() if value not in (None, [])}]
    if isinstance(node, list):
        return [_described(each) for each in node if not _is_docstring(each)]
    return None if node is None else repr(node)


def _is_docstring(node: Any) -> bool:
    """Return whether a statement is a string alone: the docstring of what it begins, or of the field before it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _checkpoints(directory: Path, recipe: Recipe) -> list[Path]:
    return [directory / checkpoint_name(step) for step in recipe.checkpoints]


def _is_current(directory: Path, seed: int, recipe: Recipe) -> bool:
    """Return whether the directory contains the complete policy of this seed and recipe."""
    try:
        recorded = json.loads((directory / RECIPE_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return recorded.get("digest") == recipe_digest(seed, recipe) and all(
        (checkpoint / name).is_file() for checkpoint in _checkpoints(directory, recipe) for name in CHECKPOINT_FILES
    )


def _refuse_foreign(directory: Path) -> None:
    """Raise an error if the directory contains something that is not a policy of this package."""
    if not directory.exists() or (directory.is_dir() and (directory / RECIPE_FILE).is_file()):
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise FileExistsError(
            f"{directory} exists and has no {RECIPE_FILE}, so it is not a tiny policy; choose another directory, or "
            "remove it"
        )


def _build(directory: Path, seed: int, recipe: Recipe, progress: Callable[[TrainingProgress], None] | None) -> None:
    """Train in a temporary directory, then replace *directory* by it. Call with the lock held."""
    digest = recipe_digest(seed, recipe)  # now, because the sources may change while training runs
    building = Path(tempfile.mkdtemp(prefix=_prefix(directory), dir=directory.parent))
    try:
        building.chmod(0o755)
        train(building, seed=seed, recipe=recipe, progress=progress)
        described = {"digest": digest, "seed": seed, "recipe": recipe.as_dict()}
        (building / RECIPE_FILE).write_text(json.dumps(described, indent=2) + "\n")
        if directory.exists():
            retired = Path(tempfile.mkdtemp(prefix=_prefix(directory), dir=directory.parent))
            directory.rename(retired / "old")
        building.rename(directory)
    finally:
        _remove_leftovers(directory)


def _remove_leftovers(directory: Path) -> None:
    """Delete temporary directories of this run or of a killed one. Call with the lock held."""
    for leftover in directory.parent.glob(f"{_prefix(directory)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _prefix(directory: Path) -> str:
    return f".{directory.name}.building-"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. The kernel releases it when the process ends, for whatever reason."""
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
