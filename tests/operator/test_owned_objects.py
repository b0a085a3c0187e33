"""Differences after which an object is applied again."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_operator.objects.owned_objects import needs_apply


@pytest.mark.parametrize(
    ("desired", "actual", "expected"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"a": 2}, True),
        ({"a": 1}, {}, True),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2], "c": 3}}, False),
        ({"a": [1, 2]}, {"a": [1]}, True),
        ({"a": [{"x": 1}]}, {"a": [{"x": 1, "y": 2}]}, False),
        ({"a": [], "b": {}, "c": ""}, {}, False),
        ({"a": []}, {"a": [1]}, True),
    ],
)
def test_only_fields_of_the_desired_object_are_compared(
    desired: dict[str, Any], actual: dict[str, Any], expected: bool
) -> None:
    assert expected is needs_apply(desired, actual)
