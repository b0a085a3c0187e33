"""The message with which a command ends when it fails."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console
from rich.markup import escape


def exit_with_error(code: int, message: str) -> NoReturn:
    """Print ``error:`` and a message to standard error, and exit.

    Args:
        code: the exit code.
        message: what is wrong, where, and what to do.
    """
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)
