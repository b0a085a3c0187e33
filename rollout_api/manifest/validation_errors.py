"""Text of pydantic's validation errors, for messages to people."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
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


def unknown_field(model: type[BaseModel], path: tuple[int | str, ...], *, by_alias: bool) -> str:
    """Return what is wrong with a field that does not exist, and which one may have been meant.

    Args:
        model: the whole object.
        path: path of the field in it.
        by_alias: whether fields are given by their aliases, as in YAML.
    """
    names = _field_names(model, path[:-1], by_alias=by_alias)
    similar = get_close_matches(str(path[-1]), names, n=1)
    return f"unknown field; did you mean {similar[0]}?" if similar else "unknown field; remove it or correct its name"


def first_error(invalid: ValidationError, model: type[BaseModel]) -> str:
    """Return the first error of an object of class *model*, after the path of its field if it concerns a field."""
    error = invalid.errors(include_url=False)[0]
    is_unknown = error["type"] == "extra_forbidden"
    text = unknown_field(model, error["loc"], by_alias=False) if is_unknown else error_text(error)
    path = field_path(error["loc"])
    return f"{path}: {text}" if path else text


def _field_names(model: type[BaseModel], path: tuple[int | str, ...], *, by_alias: bool) -> list[str]:
    """Return the names of the fields of the object at *path*; empty if it has none."""
    for part in path:
        if isinstance(part, int):
            continue  # the elements of a list have the class that was found for the list
        fields = model.model_fields
        found = next((field for name, field in fields.items() if part in (name, field.alias)), None)
        nested = None if found is None else _nested_model(found.annotation)
        if nested is None:
            return []
        model = nested
    return [(field.alias if by_alias else None) or name for name, field in model.model_fields.items()]


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as ``list[Model] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _nested_model(part)) is not None), None)
