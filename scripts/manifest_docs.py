"""Generate docs/manifest.md from the models in ``rollout_api.manifest``: ``python scripts/manifest_docs.py``."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollout_api.manifest.rollout_job import RolloutJobSpec

TARGET = Path(__file__).parents[1] / "docs" / "manifest.md"

HEAD = """# The RolloutJob manifest

`apiVersion: das.rollout.dev/v1alpha1`, `kind: RolloutJob`. `metadata.name` is a DNS label of at most 45
characters that begins with a letter; `metadata.namespace` is
`default` unless given. The shortest manifest names a model and a source; everything else has a default. An unknown
field is an error.
`rollout check -f FILE` lists every error by field.

Made by `python scripts/manifest_docs.py` from the models in `rollout_api/`.
"""


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation, as in ``list[Task]`` or ``Source``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := model_of(arg))), None)


def type_name(annotation: Any) -> str:
    """How a type is called in YAML."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args if arg is not type(None))
    if origin is list:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return "mapping"
    if model_of(annotation):
        return "object"
    return {int: "integer", float: "number", bool: "boolean", str: "text"}.get(annotation, "any")


def limits(field: FieldInfo) -> str:
    """The range of a number, if it has one."""
    parts = []
    for rule in field.metadata:
        for kind, sign in ((annotated_types.Ge, "≥"), (annotated_types.Gt, ">"), (annotated_types.Le, "≤")):
            if isinstance(rule, kind):
                parts.append(f"{sign} {getattr(rule, kind.__name__.lower())}")
    return ", ".join(parts)


def default(field: FieldInfo) -> str:
    """The default as YAML, or that there is none."""
    if field.is_required():
        return "**required**"
    value = field.default if field.default is not PydanticUndefined else None
    if value is None or value == "":
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row(field: FieldInfo, path: str) -> str:
    """A table row for a field that is no section."""
    kind = " ".join(part for part in (type_name(field.annotation), limits(field)) if part)
    return f"| `{path}` | {kind} | {default(field)} | {field.description or ''} |"


def rows(model: type[BaseModel], path: str) -> Iterator[str]:
    """A table row for each field below *path*."""
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}"
        inner = model_of(field.annotation)
        if inner and not inner.model_fields:
            yield f"| `{here.removeprefix('.')}` | `{{}}` | {default(field)} | {field.description or ''} |"
            continue
        if inner:
            many = "[]" if get_origin(field.annotation) is list else ""
            yield from rows(inner, here + many)
            continue
        yield row(field, here.removeprefix("."))


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    plain = []
    for name, field in RolloutJobSpec.model_fields.items():
        model = model_of(field.annotation)
        if model is None:
            plain.append(row(field, field.alias or name))
            continue
        parts += [f"\n## spec.{name}\n", f"{(model.__doc__ or '').strip()}\n"]
        parts += ["| field | type | default | |", "|---|---|---|---|", *rows(model, f".{name}")]
    parts += ["\n## spec, besides\n", "| field | type | default | |", "|---|---|---|---|", *plain]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
