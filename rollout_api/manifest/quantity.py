"""Kubernetes resource quantities (``500m``, ``16Gi``) as plain numbers."""

from __future__ import annotations

import re
from decimal import Decimal

QUANTITY_PATTERN = r"^([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
"""A number and its suffix, in syntax that both Python's ``re`` and the API server's RE2 accept."""

_QUANTITY = re.compile(QUANTITY_PATTERN)
_FACTOR = {
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** (i + 1) for i, suffix in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{suffix: Decimal(1024) ** (i + 1) for i, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
}


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
