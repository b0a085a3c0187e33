"""Generate docs/manifest.md from the models in ``rollout_api.manifest``: ``python scripts/manifest_docs.py``."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollout_api.manifest.rollout_job import RolloutJobSpec

TARGET = Path(__file__).parents[1] / "docs" / "manifest.md"

HEAD = """# The RolloutJob manifest

This page lists all fields of a RolloutJob. The shortest manifest names a model and a source; every other field has a
default:

```yaml
apiVersion: das.rollout.dev/v1beta1
kind: RolloutJob
metadata: {name: math-grpo}
spec:
  model: {uri: Qwen/Qwen3-8B}
  source: {trainer: {}}
```

`metadata.name` is a DNS label that starts with a letter and has at most 45 characters. `metadata.namespace` is
`default` if it is not set. Quantities have the syntax of Kubernetes, for example 500m or 16Gi. Unknown fields are
errors. `rollout check -f FILE` validates a manifest and lists every error with the path of its field.

This page is generated from the models in `rollout_api/manifest/` by `python scripts/manifest_docs.py`."""

_SIGNS = (
    (annotated_types.Ge, "≥"),
    (annotated_types.Gt, ">"),
    (annotated_types.Le, "≤"),
    (annotated_types.Lt, "<"),
)


def model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as ``list[Task]`` or ``Source``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := model_of(arg))), None)


def type_name(annotation: Any) -> str:
    """Return the name of a type in terms of YAML."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return "quantity" if _is_quantity(args[1:]) else type_name(args[0])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args if arg is not type(None))
    if origin is list:
        return "list of objects" if model_of(args[0]) else f"list of {type_name(args[0])}"
    if origin is dict:
        return "mapping"
    if model_of(annotation):
        return "object"
    return {int: "integer", float: "number", bool: "boolean", str: "text"}.get(annotation, "any")


def _is_quantity(metadata: Iterable[Any]) -> bool:
    return any(isinstance(entry, WithJsonSchema) for entry in metadata)


def limits(field: FieldInfo) -> str:
    """Return the range of a number, or an empty text."""
    parts = []
    for rule in field.metadata:
        for kind, sign in _SIGNS:
            if isinstance(rule, kind):
                parts.append(f"{sign} {getattr(rule, kind.__name__.lower())}")
    return ", ".join(parts)


def default(field: FieldInfo, optional_section: str = "") -> str:
    """Return the default in YAML, or whether the field is required."""
    if field.is_required():
        return f"required in `{optional_section}`" if optional_section else "**required**"
    value = field.default if field.default is not PydanticUndefined else None
    if value is None or value == "":
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def description(field: FieldInfo) -> str:
    """Return the description of a field in one line."""
    return " ".join((field.description or "").split())


def row(field: FieldInfo, path: str, optional_section: str = "") -> str:
    """Return the table row of a field."""
    kind = "quantity" if _is_quantity(field.metadata) else type_name(field.annotation)
    type_and_limits = " ".join(part for part in (kind, limits(field)) if part)
    return f"| `{path}` | {type_and_limits} | {default(field, optional_section)} | {description(field)} |"


def rows(model: type[BaseModel], path: str, optional_section: str = "") -> Iterator[str]:
    """Yield a table row for each field below *path*; a section, or a list of them, has one only if it is described.

    Args:
        model: the section.
        path: path of the section, starting with a dot.
        optional_section: path of the innermost section around the fields that may be omitted; empty if none may.
    """
    for name, field in model.model_fields.items():
        field_path = f"{path}.{field.alias or name}"
        inner = model_of(field.annotation)
        if inner and not inner.model_fields:
            yield f"| `{field_path.removeprefix('.')}` | `{{}}` | {default(field)} | {description(field)} |"
            continue
        if inner:
            if field.description:
                yield row(field, field_path.removeprefix("."), optional_section)
            brackets = "[]" if get_origin(field.annotation) is list else ""
            inner_path = field_path + brackets
            is_optional = not field.is_required() and field.default_factory is None
            section = field_path.removeprefix(".") if is_optional else "" if brackets else optional_section
            yield from rows(inner, inner_path, section)
            continue
        yield row(field, field_path.removeprefix("."), optional_section)


def document() -> str:
    """Return the whole page."""
    parts = [HEAD]
    other_rows = []
    for name, field in RolloutJobSpec.model_fields.items():
        model = model_of(field.annotation)
        if model is None:
            other_rows.append(row(field, field.alias or name))
            continue
        section = field.alias or name
        parts += [f"\n## spec.{section}\n", f"{(model.__doc__ or '').strip()}\n"]
        is_optional = not field.is_required() and field.default_factory is None
        parts += ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
        parts += rows(model, f".{section}", section if is_optional else "")
    parts += ["\n## Other fields of spec\n", "| Field | Type | Default | Meaning |", "|---|---|---|---|", *other_rows]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
