"""Train the tiny policy, and replace the checkpoints that rollout_tools.tiny_model contains.

    python -m scripts.tiny_model

This takes some ten minutes on two cores. The weights depend on the version of torch and the type of CPU.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from rollout_tools.tiny_model import COMMON_FILES, DATA, STEPS_FILE
from scripts.tiny_model.train import Recipe, TrainingProgress, checkpoint_name, train

RESOLUTION = 12
"""Number of steps in the standard deviation of a matrix."""


def pack(checkpoints: Sequence[Path], data: Path) -> None:
    """Write model directories, in the order of training, in the packed format to *data*."""
    data.mkdir(exist_ok=True)
    for file in data.glob("step-*.z"):
        file.unlink()
    for name in COMMON_FILES:
        shutil.copyfile(checkpoints[0] / name, data / name)
    last = load_file(checkpoints[-1] / "model.safetensors")
    # Vectors are gains. There are few of them, so they may be exact.
    steps = {name: each.std() / RESOLUTION if each.ndim > 1 else abs(each).max() / 2000 for name, each in last.items()}
    before = {name: np.zeros(each.shape, np.int16) for name, each in last.items()}
    for checkpoint in checkpoints:
        weights = load_file(checkpoint / "model.safetensors")
        integers = {name: np.rint(each / steps[name]).astype(np.int16) for name, each in weights.items()}
        changes = {name: _narrow(each - before[name]) for name, each in integers.items()}
        (data / f"{checkpoint.name}.z").write_bytes(zlib.compress(save(changes), 9))
        before = integers
    (data / STEPS_FILE).write_text(json.dumps({name: float(steps[name]) for name in sorted(steps)}, indent=1) + "\n")


def _narrow(integers: NDArray[np.int16]) -> NDArray[np.int16] | NDArray[np.int8]:
    """Return integers as single bytes if they fit."""
    return integers.astype(np.int8) if abs(integers).max() <= np.iinfo(np.int8).max else integers


def _show(progress: TrainingProgress) -> None:
    if progress.step % 10 == 0:
        print(f"step {progress.step}/{progress.steps}, loss {progress.loss:.3f}", flush=True)


def main() -> None:
    """Train and pack."""
    recipe = Recipe()
    with tempfile.TemporaryDirectory() as temporary:
        train(Path(temporary), seed=0, recipe=recipe, progress=_show)
        pack([Path(temporary) / checkpoint_name(step) for step in recipe.checkpoints], DATA)


if __name__ == "__main__":
    main()
