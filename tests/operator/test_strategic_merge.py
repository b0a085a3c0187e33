from __future__ import annotations

from typing import Any

import pytest
from rollout_operator.strategic_merge import PatchError, merged

POD: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [{"name": "worker", "image": "w:1", "env": [{"name": "A", "value": "1"}]}],
        "tolerations": [{"key": "x"}],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
}


@pytest.mark.parametrize(
    ("patch", "path", "expected"),
    [
        ({"metadata": {"labels": {"b": "2"}}}, ("metadata", "labels"), {"a": "1", "b": "2"}),
        ({"metadata": {"labels": {"a": None}}}, ("metadata", "labels"), {}),
        ({"spec": {"hostNetwork": True}}, ("spec", "hostNetwork"), True),
        ({"spec": {"tolerations": []}}, ("spec", "tolerations"), []),
        (
            {"spec": {"containers": [{"name": "worker", "env": [{"name": "B", "value": "2"}]}]}},
            ("spec", "containers", 0, "env"),
            [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        ),
        (
            {"spec": {"containers": [{"name": "worker", "env": [{"name": "A", "$patch": "delete"}]}]}},
            ("spec", "containers", 0, "env"),
            [],
        ),
        (
            {"spec": {"containers": [{"name": "side", "image": "s"}]}},
            ("spec", "containers", 1),
            {"name": "side", "image": "s"},
        ),
        (
            {"spec": {"volumes": [{"name": "tmp", "$patch": "replace", "hostPath": {"path": "/x"}}]}},
            ("spec", "volumes", 0),
            {"name": "tmp", "hostPath": {"path": "/x"}},
        ),
    ],
)
def test_it_merges_as_kubectl_patch_does(patch: dict[str, Any], path: tuple[Any, ...], expected: Any) -> None:
    found: Any = merged(POD, patch)
    for step in path:
        found = found[step]
    assert expected == found


def test_the_base_stays_as_it_is() -> None:
    before = repr(POD)
    merged(POD, {"spec": {"containers": [{"name": "worker", "image": "other"}]}})
    assert before == repr(POD)


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0]: has no name"),
        ({"spec": {"volumes": ["x"]}}, "spec.volumes[0]: has no name"),
        ({"spec": {"$patch": "forget"}}, "spec: $patch: forget"),
    ],
)
def test_what_cannot_be_merged_is_named(patch: dict[str, Any], says: str) -> None:
    with pytest.raises(PatchError) as caught:
        merged(POD, patch)
    assert says in str(caught.value)
