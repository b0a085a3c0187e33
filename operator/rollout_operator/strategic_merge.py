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


def strategic_merge(base: Mapping[str, Any], patch: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return *base* with *patch* merged in.

    Mappings are merged by key and lists of named entries by name; any other value is replaced. ``null`` removes a
    field. ``$patch: replace`` in a mapping replaces the whole mapping, and ``$patch: delete`` in a list entry removes
    the entry of that name.

    Raises:
        PatchError: if an entry of a merged list lacks its merge key, or if a directive is unknown.
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
        elif isinstance(value, Mapping):
            result[name] = strategic_merge(current if isinstance(current, Mapping) else {}, value, field_path)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            entries = current if isinstance(current, list) else []
            result[name] = _merge_list(entries, value, _MERGE_KEYS[name], field_path)
        else:
            result[name] = value
    return result


def _merge_list(base: list[Any], patch: list[Any], key: str, path: str) -> list[Any]:
    entries = {entry[key]: entry for entry in base}
    for position, entry in enumerate(patch):
        entry_path = f"{path}[{position}]"
        if not isinstance(entry, Mapping) or key not in entry:
            raise PatchError(f"{entry_path}: entries of this list are merged by {key}, which this entry lacks")
        if entry.get(_DIRECTIVE) == "delete":
            entries.pop(entry[key], None)
        else:
            entries[entry[key]] = strategic_merge(entries.get(entry[key], {}), entry, entry_path)
    return list(entries.values())
