"""Strategic merge patches, as of `kubectl patch`."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_operator.strategic_merge import PatchError, strategic_merge

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
def test_patches_merge_as_kubectl_patch_does(patch: dict[str, Any], path: tuple[Any, ...], expected: Any) -> None:
    result: Any = strategic_merge(POD, patch)
    for step in path:
        result = result[step]
    assert expected == result


def test_the_base_is_not_modified() -> None:
    before = repr(POD)
    strategic_merge(POD, {"spec": {"containers": [{"name": "worker", "image": "other"}]}})
    assert before == repr(POD)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0]: entries of this list are merged by name"),
        ({"spec": {"volumes": ["x"]}}, "spec.volumes[0]: entries of this list are merged by name"),
        ({"spec": {"$patch": "forget"}}, "spec: the directive $patch: forget is not supported"),
    ],
)
def test_an_invalid_patch_is_reported_with_its_path(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError) as caught:
        strategic_merge(POD, patch)
    assert message in str(caught.value)
