"""What the sections of a manifest are made of: types, and rules that the Kubernetes API server checks as well."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic.alias_generators import to_camel

from rollout_api.manifest.quantity import QUANTITY_PATTERN, parse_quantity

DnsLabel = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
]
"""A name of at most 63 lower-case letters, digits and dashes (RFC 1123)."""

DnsName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
    ),
]
"""Name of an object in the job's namespace: DNS labels with dots between (RFC 1123 subdomain)."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A path, URI, image or the like; bounded, so that rules about it are cheap for the API server."""

JobName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=45, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$"),
]
"""A name that leaves room for those of the job's pods and Service, which begin with it (RFC 1035, 63 characters)."""


def _checked_quantity(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0")
    return text


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    AfterValidator(_checked_quantity),
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
"""A Kubernetes resource quantity above 0, as text; a YAML number is taken as one."""


class Part(BaseModel):
    """A piece of a manifest: camelCase outside, snake_case here; an unknown field is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        strict=False,
    )


def rules(*checked: tuple[str, str]) -> dict[str, Any]:
    """JSON schema with CEL rules (``x-kubernetes-validations``).

    What a rule says in CEL, a validator here says in Python: the API server refuses what ``rollout check`` refuses.

    Args:
        checked: CEL expression on ``self``, and what to say where it is false.
    """
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in checked]}


class SecretKey(Part):
    """One key of a Secret in the job's namespace."""

    name: DnsName = Field(description="Name of the Secret.")
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = Field(
        description="Key within it."
    )
