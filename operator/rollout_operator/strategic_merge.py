"""Strategic merge of a pod template into a pod, as ``kubectl patch --type=strategic`` does it."""

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
"""Lists of a PodTemplateSpec whose entries have a ``patchMergeKey`` in Kubernetes' API; others are replaced."""

_DIRECTIVE = "$patch"


class PatchError(ValueError):
    """A template that cannot be merged; the text names the field."""


def merged(base: Mapping[str, Any], patch: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """*base* with *patch* merged in: mappings by key, lists of named entries by name, all else replaced.

    ``null`` removes a field. ``$patch: replace`` in a mapping puts it in place of what was there, ``$patch: delete``
    in a list's entry removes the entry of that name.

    Raises:
        PatchError: an entry of such a list has no name, or a directive is unknown.
    """
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return {name: value for name, value in patch.items() if name != _DIRECTIVE}
    if directive is not None:
        raise PatchError(f"{path or 'the template'}: $patch: {directive} has no meaning here")
    result = dict(base)
    for name, value in patch.items():
        here = f"{path}.{name}" if path else name
        there = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = merged(there if isinstance(there, Mapping) else {}, value, here)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            result[name] = _merged_list(there if isinstance(there, list) else [], value, _MERGE_KEYS[name], here)
        else:
            result[name] = value
    return result


def _merged_list(base: list[Any], patch: list[Any], key: str, path: str) -> list[Any]:
    entries = {entry[key]: entry for entry in base}
    for position, entry in enumerate(patch):
        here = f"{path}[{position}]"
        if not isinstance(entry, Mapping) or key not in entry:
            raise PatchError(f"{here}: has no {key}, by which entries of this list are merged")
        if entry.get(_DIRECTIVE) == "delete":
            entries.pop(entry[key], None)
        else:
            entries[entry[key]] = merged(entries.get(entry[key], {}), entry, here)
    return list(entries.values())
