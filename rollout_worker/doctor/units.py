"""Amounts of memory and times as text."""

from __future__ import annotations

MIB = 2**20
GIB = 2**30


def size_text(size: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
