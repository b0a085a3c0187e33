import subprocess
import sys

HEAVY = ("torch", "ray", "vllm", "transformers", "numpy", "kubernetes", "rollout_worker")


def test_importing_the_contract_is_light() -> None:
    script = f"import rollout_api, sys; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
