"""Renders the Helm chart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "charts" / "das-rollout"
HELM = Path(sys.executable).with_name("helm")


def render_chart(namespace: str, **values: Any) -> list[dict[str, Any]]:
    """Return the objects that an installation of the chart consists of; the release is called ``das``."""
    command = [str(HELM), "template", "das", str(CHART), "--namespace", namespace, "--values", "-"]
    process = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr)
    return [manifest for manifest in yaml.safe_load_all(process.stdout) if manifest]
