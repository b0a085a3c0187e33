"""The constraints of structured outputs, which have vLLM's names and meanings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Constraints, of which a request has one."""
_FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties")
_TEXTS = ("regex", "grammar", "whitespace_pattern")
_SCHEMAS = ("json", "structural_tag")
MAX_BYTES = 2**16
"""Size of a constraint. xgrammar takes minutes or gigabytes for some larger ones, and a chain of some thousand
references overflows its stack, which ends the process (seen in 0.2.8)."""
_NAMES = (*KINDS, "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def check_structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of vLLM's ``StructuredOutputsParams`` that are *given*, with schemas as JSON texts.

    Whether a constraint is one that vLLM knows how to apply is decided by the engine.

    Raises:
        ValueError: a field is unknown, has a value of another type or is too large, or there is not exactly one
            constraint.
    """
    if not given:
        return {}
    if unknown := given.keys() - _NAMES:
        raise ValueError(f"{min(unknown)} is unknown; known are {', '.join(_NAMES)}")
    kinds = [name for name in KINDS if name in given]
    if len(kinds) != 1:
        raise ValueError(f"has {' and '.join(kinds) or 'no constraint'}; set exactly one of {', '.join(KINDS)}")
    return {name: check_size(name, _checked(name, value)) for name, value in given.items()}


def check_size(name: str, value: Any) -> Any:
    """Return the *value* of a constraint.

    Raises:
        ValueError: it has more than :data:`MAX_BYTES`, as a text or in JSON.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if (size := len(text.encode())) > MAX_BYTES:
        raise ValueError(f"{name} has {size} bytes, but at most {MAX_BYTES} can be compiled; simplify it")
    return value


def _checked(name: str, value: Any) -> Any:
    problem = ""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not is_encodable(text):
            raise ValueError(f"{name} contains half of a surrogate pair; remove it")
    if name in _SCHEMAS:
        return _as_json(name, value)
    if name in _FLAGS:
        problem = "" if value is True or (value is False and name != "json_object") else "must be true"
    elif name in _TEXTS:
        problem = (
            ""
            if isinstance(value, str) and (value.strip() or name in ("regex", "whitespace_pattern"))
            else "must be a text"
        )
    elif not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
        problem = "must be a list of texts with at least one of them"
    if problem:
        raise ValueError(f"{name} {problem}")
    return value


def is_encodable(text: str) -> bool:
    """Return whether a text is Unicode: Python's texts may have unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_json(name: str, value: Any) -> str:
    """Return a schema as JSON text, in which messages can be nested to any depth."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise ValueError("it is no object")
        return value if isinstance(value, str) else json.dumps(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON object, or the text of one: {error}") from None
