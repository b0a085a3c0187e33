"""Importing the API is fast and needs few packages."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "transformers", "numpy", "kubernetes", "rollout_worker")
OPTIONAL = ("wandb", "tensorboard", "mlflow", "tqdm")


@pytest.mark.parametrize("module", ["rollout_api", "rollout_api.integrations.loggers"])
def test_importing_the_api_loads_no_heavy_or_optional_packages(module: str) -> None:
    script = f"import {module}, sys; print([name for name in {HEAVY + OPTIONAL} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "[]" == loaded.strip()
