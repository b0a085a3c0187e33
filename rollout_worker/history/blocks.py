"""Positions in a problem's log, and the names of the blocks that older parts of the log are packed into.

A block is named ``<newest generation>:<last entry>``, after the newest generation of its rollouts and the id of the
last log entry that was packed into it.
"""

from __future__ import annotations

START = "-"
"""Cursor in front of the first entry of a log."""


def block_name(newest_generation: int, last_entry: str) -> str:
    """Return the name of a block."""
    return f"{newest_generation}:{last_entry}"


def last_entry_of(block: bytes) -> str:
    """Return the id of the last log entry that was packed into the block of this name."""
    return block.decode(errors="replace").rpartition(":")[2]


def entry_position(entry_id: str) -> tuple[int, int]:
    """Return a log entry's id as numbers that can be compared; what is not an id comes first."""
    milliseconds, _, number = entry_id.partition("-")
    return (int(milliseconds), int(number)) if milliseconds.isdigit() and number.isdigit() else (-1, -1)


def block_position(block: bytes) -> tuple[int, int]:
    """Return the position in the log of the last entry that was packed into the block of this name."""
    return entry_position(last_entry_of(block))
