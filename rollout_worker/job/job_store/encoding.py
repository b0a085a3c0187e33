"""Conversion of what Redis returns."""

from __future__ import annotations


def as_text(value: bytes | str) -> str:
    """Return a reply of Redis as text."""
    return value.decode() if isinstance(value, bytes) else value
