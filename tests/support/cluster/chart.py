"""The Helm chart, as a user renders it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "charts" / "das-rollout"
HELM = Path(sys.executable).with_name("helm")


def render(namespace: str, release: str = "das", **values: Any) -> list[dict[str, Any]]:
    """Objects of the chart."""
    command = [str(HELM), "template", release, str(CHART), "--namespace", namespace, "--values", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [one for one in yaml.safe_load_all(done.stdout) if one]
