"""Where the models of jobs are kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """Return the directory of the model cache: ``ROLLOUT_MODEL_CACHE``, or one in the user's cache."""
    if named := os.environ.get("ROLLOUT_MODEL_CACHE"):
        return Path(named)
    return Path("~/.cache/das-rollout/models").expanduser()
