"""Formats numbers and tables for the command line."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

_TABLE_WIDTH = 160
"""Columns of a table that is not printed to a terminal."""


def console() -> Console:
    """Return a console for standard output."""
    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=1))


def new_table(*columns: str) -> Table:
    """Return a table without lines; columns whose name begins with ``>`` are right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table


def format_bytes(count: float) -> str:
    """Return a size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_age(seconds: float | None) -> str:
    """Return how long ago something was; a dash if that is unknown."""
    return "–" if seconds is None else f"{format_duration(seconds)} ago"
