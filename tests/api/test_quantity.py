"""Parsing of Kubernetes quantities."""

from decimal import Decimal

import pytest

from rollout_api.manifest.field_types import parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", "1"), ("500m", "0.5"), ("1.5", "1.5"), ("2k", "2000"), ("16Gi", str(16 * 2**30)), ("3T", "3e12")],
)
def test_quantity_is_parsed(text: str, value: str) -> None:
    assert Decimal(value) == parse_quantity(text)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1e3", "1gi", "1KiB", "½"])
def test_text_that_is_not_a_quantity_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)
