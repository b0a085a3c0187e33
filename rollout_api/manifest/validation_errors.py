"""Text of pydantic's validation errors, for messages to people."""

from __future__ import annotations

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_PREFIX = re.compile(r"^(Value error, |Input )")


def field_path(parts: tuple[int | str, ...]) -> str:
    """Return the path of a field, for example ``spec.source.dataset.tasks[1].name``; empty for the whole object."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def error_text(error: ErrorDetails) -> str:
    """Return what is wrong with a field, to be read after its path."""
    return _PREFIX.sub("", error["msg"])


def first_error(invalid: ValidationError) -> str:
    """Return the first error, after the path of its field if it concerns a field."""
    error = invalid.errors(include_url=False)[0]
    path = field_path(error["loc"])
    return f"{path}: {error_text(error)}" if path else error_text(error)
