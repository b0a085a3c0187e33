"""The tiny Qwen3 policy of the examples: a few checkpoints of one training run, which are part of this package.

The checkpoints are like the successive policies of an RL run: they answer problems of reasoning-gym step by step, and
change from one to the next. ``scripts/tiny_model`` has trained them.

Weights are stored as integers, multiples of a step that each tensor has for all checkpoints. The file of a checkpoint
contains the differences from the checkpoint before, compressed with zlib.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
"""Directory of the packed checkpoints."""
COMMON_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that are the same in all checkpoints."""
_RECORD_FILE = "recipe.json"
"""File that says which policy a directory contains."""
STEPS_FILE = "steps.json"
"""File with the size of a step of each tensor."""


def ensure(directory: Path) -> list[Path]:
    """Return the policy's checkpoints, ordinary model directories; write them first unless *directory* has them.

    They are written into a temporary directory beside *directory*, which is renamed when it is complete. If several
    processes call this at once, one writes and the others wait.

    Raises:
        FileExistsError: if *directory* contains something else.
    """
    directory = directory.expanduser().absolute()
    files = sorted(DATA.glob("step-*.z"))
    checkpoints = [directory / file.stem for file in files]
    digest = _digest(files)
    if _is_current(directory, digest):
        return checkpoints
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        if not _is_current(directory, digest):
            _refuse_foreign(directory)
            _replace(directory, files, digest)
    return checkpoints


def unpacked(files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the weights of each checkpoint in the packed *files*, which are in the order of training."""
    import numpy as np
    from safetensors.numpy import load

    steps = json.loads((files[0].parent / STEPS_FILE).read_text())
    integers: dict[str, Any] = {}
    for file in files:
        changes = load(zlib.decompress(file.read_bytes()))
        integers = {name: integers.get(name, 0) + change.astype(np.int16) for name, change in changes.items()}
        yield file.stem, {name: each.astype(np.float32) * np.float32(steps[name]) for name, each in integers.items()}


def _replace(directory: Path, files: Sequence[Path], digest: str) -> None:
    """Write the policy beside *directory*, then replace that. Call with the lock held."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as temporary:
        new = Path(temporary) / "new"
        for name, weights in unpacked(files):
            (new / name).mkdir(parents=True)
            for common in COMMON_FILES:
                shutil.copyfile(DATA / common, new / name / common)
            save_file(dict(weights), new / name / "model.safetensors", metadata={"format": "pt"})
            for file in (new / name).iterdir():
                file.chmod(0o644)  # pods run as other users
        (new / _RECORD_FILE).write_text(json.dumps({"digest": digest}) + "\n")
        if directory.exists():
            directory.rename(Path(temporary) / "old")
        new.rename(directory)


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the shipped policy."""
    digest = hashlib.sha256()
    for file in [*files, *(DATA / name for name in (*COMMON_FILES, STEPS_FILE))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_current(directory: Path, digest: str) -> bool:
    """Return whether the directory contains the complete policy."""
    try:
        recorded = json.loads((directory / _RECORD_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    files = ["model.safetensors", *COMMON_FILES]
    names = [file.stem for file in DATA.glob("step-*.z")]
    return recorded.get("digest") == digest and all(
        (directory / name / file).is_file() for name in names for file in files
    )


def _refuse_foreign(directory: Path) -> None:
    """Raise an error if the directory contains something that is not a policy of this package."""
    if not directory.exists() or (directory.is_dir() and (directory / _RECORD_FILE).is_file()):
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise FileExistsError(
            f"{directory} exists and has no {_RECORD_FILE}, so it is not the tiny policy; choose another directory, or "
            "remove it"
        )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. The kernel releases it when the process ends, for whatever reason."""
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
