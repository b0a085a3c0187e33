"""Importing the API is fast and needs few packages."""

import subprocess
import sys

HEAVY = ("torch", "ray", "vllm", "transformers", "numpy", "kubernetes", "rollout_worker")


def test_importing_the_api_loads_no_heavy_packages() -> None:
    script = f"import rollout_api, sys; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "[]" == loaded.strip()
