"""Strategic merge patches, as of `kubectl patch`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_operator.objects.strategic_merge import PatchError, combine_patches, strategic_merge

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
        ({"metadata": {"labels": {"env": "x"}}}, ("metadata", "labels"), {"a": "1", "env": "x"}),
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
        ({"spec": {"containers": "x"}}, "spec.containers: this must be a list"),
        (
            {"spec": {"containers": [{"name": "worker", "env": {"A": "1"}}]}},
            "spec.containers[0].env: this must be a list",
        ),
        ({"spec": {"containers": [{"name": ["x"]}]}}, "spec.containers[0]: entries of this list are merged by name"),
        ({"spec": "x"}, "spec: this must be a mapping"),
        ({"spec": {"$patch": "forget"}}, "spec: the directive $patch: forget is not supported"),
    ],
)
def test_an_invalid_patch_is_reported_with_its_path(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError) as caught:
        strategic_merge(POD, patch)
    assert message in str(caught.value)


def entries(fields: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Return lists of entries with different names. Each is merged, replaced or deleted."""
    directive = st.sampled_from([{}, {"$patch": "replace"}, {"$patch": "delete"}])
    entry = st.builds(
        lambda name, values, patch: {"name": name, **values, **patch}, st.sampled_from("abc"), fields, directive
    )
    return st.lists(entry, max_size=3, unique_by=lambda one: one["name"])


VARIABLES = st.fixed_dictionaries({}, optional={"value": st.sampled_from(["1", "2", None])})
CONTAINERS = st.fixed_dictionaries(
    {}, optional={"env": entries(VARIABLES), "image": st.sampled_from(["x", "y", None]), "args": st.just(["z"])}
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", None]), max_size=3)
PATCHES = st.fixed_dictionaries(
    {},
    optional={
        "containers": entries(CONTAINERS),
        "labels": st.one_of(st.none(), MAPPINGS, MAPPINGS.map(lambda labels: {**labels, "$patch": "replace"})),
        "name": st.sampled_from(["n", None]),
    },
)


def without_order(value: Any) -> Any:
    """Return a value with its lists of entries as mappings by name."""
    if isinstance(value, list):
        return {entry["name"] if isinstance(entry, dict) else entry: without_order(entry) for entry in value}
    return {name: without_order(one) for name, one in value.items()} if isinstance(value, dict) else value


@given(base=PATCHES, first=PATCHES, second=PATCHES)
def test_combined_patches_have_the_effect_of_both(
    base: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
) -> None:
    pod = strategic_merge({}, base)  # without directives
    expected = strategic_merge(strategic_merge(pod, first), second)
    try:
        combined = combine_patches(first, second)
    except PatchError as error:
        assert "removes this list" in str(error)
    else:
        assert without_order(expected) == without_order(strategic_merge(pod, combined))


def test_nothing_can_be_added_to_a_list_that_an_earlier_patch_removes() -> None:
    with pytest.raises(PatchError, match=r"spec\.containers: the runtime's template removes this list"):
        combine_patches({"spec": {"containers": None}}, {"spec": {"containers": [{"name": "a"}]}})
