"""Types and the base class from which the sections of a manifest are built, and texts about invalid fields.

Constraints that JSON Schema cannot express are given twice: as a validator in Python, and as a CEL rule that the
Kubernetes API server evaluates.
"""

from __future__ import annotations

import re
from decimal import Decimal
from difflib import get_close_matches
from typing import Annotated, Any, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, ErrorDetails, PydanticKnownError, core_schema

DnsLabel = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
]
"""A name of at most 63 lower-case letters, digits and dashes (RFC 1123 label)."""

LabelKey = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$",
    ),
]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$")]
DnsName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
    ),
]
"""Name of an object in the job's namespace: DNS labels separated by dots (RFC 1123 subdomain)."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A path, URI, image or similar text. Its length is bounded because the API server limits the cost of CEL rules."""

JobName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=45, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$"),
]
"""A name short enough that the names of the job's pods and Service, which begin with it, have at most 63 characters
(RFC 1035)."""
QUANTITY_PATTERN = r"^([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
"""A number and its suffix, in syntax that both Python's ``re`` and the API server's RE2 accept."""

_MAX_QUANTITY_LENGTH = 32
_QUANTITY = re.compile(QUANTITY_PATTERN)
_FACTOR = {
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** (i + 1) for i, suffix in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{suffix: Decimal(1024) ** (i + 1) for i, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
}
_PREFIX = re.compile(r"^(Value error, |Input )")


def parse_quantity(text: str) -> Decimal:
    """Return the value of a Kubernetes quantity in its base unit (cores or bytes).

    Follows ``resource.Quantity`` of ``k8s.io/apimachinery``, but without exponents and signs, which have no use in a
    RolloutJob.

    Raises:
        ValueError: *text* is not a quantity. The message shows the expected form.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity; write a number with an optional suffix, as in 500m or 16Gi")
    number, suffix = match.groups()
    return Decimal(number) * _FACTOR.get(suffix or "", Decimal(1))


def _require_positive(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0")
    return text


def _number_to_text(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not float(value).is_integer():
        raise ValueError(f"{value} is neither an integer nor text; write it in quotes")
    return str(int(value))


Quantity = Annotated[
    str,
    BeforeValidator(_number_to_text),
    StringConstraints(max_length=_MAX_QUANTITY_LENGTH),
    AfterValidator(_require_positive),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": _MAX_QUANTITY_LENGTH,
            "x-kubernetes-validations": [
                {"rule": "quantity(string(self)).isGreaterThan(quantity('0'))", "message": "must be more than 0"}
            ],
        }
    ),
]
"""A Kubernetes resource quantity above 0, as text. An integer in YAML is converted to text."""


def _require_integer(value: object) -> object:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("int_type")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must be less than 2**63")
    return value


def _require_number(value: object) -> object:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("float_type")
    return value


def _require_boolean(value: object) -> object:
    if isinstance(value, int | float | str | bytes) and not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


_TYPE_CHECKS = {"int": _require_integer, "float": _require_number, "bool": _require_boolean}
_NESTED_SCHEMAS = ("schema", "items_schema", "values_schema")


def _with_type_checks(schema: Any, model: type[BaseModel]) -> Any:
    """Return the core schema of a model, or of a part of it, that does not convert between types.

    Keys of mappings remain as they are, because in JSON they are text. So do other models, which have their own checks.
    """
    schema = dict(schema)
    if schema["type"] == "model-fields":
        schema["fields"] = {name: _with_type_checks(field, model) for name, field in schema["fields"].items()}
    for name in _NESTED_SCHEMAS:
        if name in schema and schema[name].get("cls", model) is model:
            schema[name] = _with_type_checks(schema[name], model)
    check = _TYPE_CHECKS.get(schema["type"])
    return schema if check is None else core_schema.no_info_before_validator_function(check, schema)


class ManifestModel(BaseModel):
    """Base class of all parts of a manifest: camelCase in YAML, snake_case in Python, no unknown fields.

    Pydantic alone would accept ``true`` and ``"1"`` as the number 1, which the API server refuses.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # descriptions in the CRD
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast(CoreSchema, _with_type_checks(handler(source), cls))


def cel_rules(*rules: tuple[str, str]) -> dict[str, Any]:
    """Return a JSON schema with CEL rules (``x-kubernetes-validations``).

    Every rule has a validator in Python that checks the same, so that ``rollout check`` and the API server reject the
    same manifests.

    Args:
        rules: pairs of a CEL expression about ``self`` and the message if it is false.
    """
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def _require_min_size(size: str) -> str:
    if parse_quantity(size) < 2**20:
        raise ValueError(f"{size!r} must be at least 1Mi")
    return size


Size = Annotated[
    Quantity,
    AfterValidator(_require_min_size),
    Field(
        json_schema_extra=cel_rules(("quantity(string(self)).compareTo(quantity('1Mi')) >= 0", "must be at least 1Mi"))
    ),
]
"""An amount of memory, at least 1Mi."""


class SecretKey(ManifestModel):
    """One key of a Secret in the job's namespace."""

    name: DnsName
    """Name of the Secret."""
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """Key within the Secret."""


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
