"""Strategic merge of a pod template into a pod, with the semantics of ``kubectl patch --type=strategic``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
"""Lists of a PodTemplateSpec that have a ``patchMergeKey`` in the Kubernetes API; all other lists are replaced."""

_DIRECTIVE = "$patch"


class PatchError(ValueError):
    """A template that cannot be merged. The message names the field."""


def combine_patches(first: Mapping[str, Any], second: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a patch that has the effect of *first* and then of *second*.

    Fields and entries that one of them removes stay marked as removed.

    Raises:
        PatchError: as :func:`strategic_merge`, or if *second* adds entries to a list that *first* removes.
    """
    directive = second.get(_DIRECTIVE)
    if directive == "replace":
        return dict(second)
    if first.get(_DIRECTIVE) == "replace":
        replacement = {name: value for name, value in first.items() if name != _DIRECTIVE}
        return {_DIRECTIVE: "replace", **strategic_merge(replacement, second, path)}
    if directive is not None:
        raise PatchError(f"{path or 'the template'}: the directive $patch: {directive} is not supported here")
    result = dict(first)
    for name, value in second.items():
        field_path = f"{path}.{name}" if path else name
        current = result.get(name)
        if isinstance(value, Mapping):
            removed = {_DIRECTIVE: "replace"} if name in result and not isinstance(current, Mapping) else {}
            inherited = current if isinstance(current, Mapping) else removed
            result[name] = combine_patches(inherited, value, field_path)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            if name in result and not isinstance(current, list):
                raise PatchError(
                    f"{field_path}: the runtime's template removes this list, so the job's template cannot add entries "
                    "to it; change one of them"
                )
            entries = current if isinstance(current, list) else []
            result[name] = _combine_lists(entries, value, _MERGE_KEYS[name], field_path)
        else:
            result[name] = value
    return result


def _combine_lists(first: list[Any], second: list[Any], key: str, path: str) -> list[Any]:
    _check_entries(first, key, path)
    _check_entries(second, key, path)
    entries = {entry[key]: entry for entry in first}
    for position, entry in enumerate(second):
        inherited = entries.get(entry[key], {})
        if entry.get(_DIRECTIVE) == "delete":
            entries[entry[key]] = entry
        else:
            if inherited.get(_DIRECTIVE) == "delete":
                inherited = {_DIRECTIVE: "replace"}
            entries[entry[key]] = combine_patches(inherited, entry, f"{path}[{position}]")
    return list(entries.values())


def _check_entries(entries: list[Any], key: str, path: str) -> None:
    for position, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get(key), str | int):
            raise PatchError(f"{path}[{position}]: entries of this list are merged by {key}, which this entry lacks")


def strategic_merge(base: Mapping[str, Any], patch: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return *base* with *patch* merged in.

    Mappings are merged by key and lists of named entries by name; any other value is replaced. ``null`` removes a
    field. ``$patch: replace`` in a mapping replaces the whole mapping, and ``$patch: delete`` in a list entry removes
    the entry of that name.

    Raises:
        PatchError: if an entry of a merged list lacks its merge key, if a directive is unknown, or if another kind of
            value would replace a mapping or a list.
    """
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return {name: value for name, value in patch.items() if name != _DIRECTIVE}
    if directive is not None:
        raise PatchError(f"{path or 'the template'}: the directive $patch: {directive} is not supported here")
    result = dict(base)
    for name, value in patch.items():
        field_path = f"{path}.{name}" if path else name
        current = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(current, Mapping) and not isinstance(value, Mapping):
            raise PatchError(f"{field_path}: this must be a mapping")
        elif isinstance(current, list) and not isinstance(value, list):
            raise PatchError(f"{field_path}: this must be a list")
        elif isinstance(value, Mapping):
            result[name] = strategic_merge(current if isinstance(current, Mapping) else {}, value, field_path)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            entries = current if isinstance(current, list) else []
            result[name] = _merge_list(entries, value, _MERGE_KEYS[name], field_path)
        else:
            result[name] = value
    return result


def _merge_list(base: list[Any], patch: list[Any], key: str, path: str) -> list[Any]:
    _check_entries(patch, key, path)
    entries = {entry[key]: entry for entry in base}
    for position, entry in enumerate(patch):
        entry_path = f"{path}[{position}]"
        if entry.get(_DIRECTIVE) == "delete":
            entries.pop(entry[key], None)
        else:
            entries[entry[key]] = strategic_merge(entries.get(entry[key], {}), entry, entry_path)
    return list(entries.values())
