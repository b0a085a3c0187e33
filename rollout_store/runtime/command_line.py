"""Functions that the project's commands share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def exit_with_error(code: int, message: str) -> NoReturn:
    """Print ``error:`` and a message to standard error, and exit.

    Args:
        code: the exit code.
        message: what is wrong, where, and what to do.
    """
    from rich.console import Console  # here, because not only commands import this module
    from rich.markup import escape

    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)


def default_cache() -> Path:
    """Return the directory of the model cache: ``ROLLOUT_MODEL_CACHE``, or one in the user's cache."""
    if named := os.environ.get("ROLLOUT_MODEL_CACHE"):
        return Path(named)
    return Path("~/.cache/das-rollout/models").expanduser()
