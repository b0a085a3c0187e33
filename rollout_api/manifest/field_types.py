"""Types and the base class from which the sections of a manifest are built.

Constraints that JSON Schema cannot express are given twice: as a validator in Python, and as a CEL rule that the
Kubernetes API server evaluates.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic.alias_generators import to_camel

from rollout_api.manifest.quantity import QUANTITY_PATTERN, parse_quantity

DnsLabel = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
]
"""A name of at most 63 lower-case letters, digits and dashes (RFC 1123 label)."""

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


def _require_positive(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0")
    return text


def _number_to_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_number_to_text),
    AfterValidator(_require_positive),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
            "x-kubernetes-validations": [
                {"rule": "quantity(string(self)).isGreaterThan(quantity('0'))", "message": "must be more than 0"}
            ],
        }
    ),
]
"""A Kubernetes resource quantity above 0, as text. A number in YAML is converted to text."""


class ManifestModel(BaseModel):
    """Base class of all parts of a manifest: camelCase in YAML, snake_case in Python, no unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )


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

    name: DnsName = Field(description="Name of the Secret.")
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = Field(
        description="Key within the Secret."
    )
