from __future__ import annotations

from typing import Any

import pytest
from rollout_operator.drift import differs


@pytest.mark.parametrize(
    ("wanted", "there", "expected"),
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
def test_what_others_added_is_no_drift(wanted: dict[str, Any], there: dict[str, Any], expected: bool) -> None:
    assert expected is differs(wanted, there)
