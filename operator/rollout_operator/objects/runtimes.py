"""Jobs with the settings of the runtimes that they name (``ClusterRolloutRuntime``, ``RolloutRuntime``). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rollout_api.manifest.pod_spec import CLUSTER_RUNTIME_KIND
from rollout_api.manifest.rollout_job import FieldError, ManifestError
from rollout_operator.objects.observed import Manifest
from rollout_operator.objects.strategic_merge import PatchError, combine_patches

RUNTIME_NOT_FOUND = "RuntimeNotFound"
"""Reason of conditions and Events about a runtime that does not exist."""
_TEMPLATE = "podTemplate"
_EXCLUSIVE = {"gpuResource": "deviceClaimTemplate", "deviceClaimTemplate": "gpuResource"}
"""Fields that exclude each other: if a job sets the value, the key is not taken over from its runtime."""


class RuntimeNotFoundError(ManifestError):
    """A job names a runtime that does not exist, or that the operator may not read."""

    def __init__(self, key: RuntimeKey) -> None:
        message = (
            f"{key} does not exist, or the operator may not read it. Create it, correct the name and the kind, or, for "
            "a ClusterRolloutRuntime and an operator that watches only some namespaces, set the chart's value "
            "operator.readClusterRuntimes."
        )
        super().__init__([FieldError("spec.runtimeRef", message)])


@dataclass(frozen=True)
class RuntimeKey:
    """Identifies a runtime."""

    kind: str
    namespace: str
    """Empty for a ClusterRolloutRuntime."""
    name: str

    @classmethod
    def of_job(cls, job: Manifest) -> Self | None:
        """Return the runtime that a job names, or None if it names none."""
        reference = (job.get("spec") or {}).get("runtimeRef")
        if reference is None:
            return None
        kind = reference.get("kind", CLUSTER_RUNTIME_KIND)
        return cls(kind, "" if kind == CLUSTER_RUNTIME_KIND else job["metadata"]["namespace"], reference["name"])

    @classmethod
    def of_runtime(cls, runtime: Manifest, kind: str) -> Self:
        """Return the key of a runtime."""
        return cls(kind, runtime["metadata"].get("namespace", ""), runtime["metadata"]["name"])

    def __str__(self) -> str:
        """Return kind and name for messages."""
        return f"{self.kind} {self.name}"


def job_with_runtime(job: Manifest, runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job that has its own settings, and those of a runtime where it has none, and that names no runtime.

    Mappings are merged by key, also those of resources and node selectors. Lists are replaced as a whole. Pod templates
    are combined by strategic merge. *runtime* is the ``spec`` of the runtime.

    Raises:
        ManifestError: if the pod templates cannot be combined.
    """
    own = {name: section for name, section in (job.get("spec") or {}).items() if name != "runtimeRef"}
    return {**job, "spec": _merged(runtime, own, "spec")}


def _merged(runtime: Mapping[str, Any], own: Mapping[str, Any], path: str) -> dict[str, Any]:
    result = {name: value for name, value in runtime.items() if _EXCLUSIVE.get(name) not in own}
    for name, value in own.items():
        inherited, field = result.get(name), f"{path}.{name}"
        if not isinstance(inherited, Mapping) or not isinstance(value, Mapping):
            result[name] = value
        elif name == _TEMPLATE:
            try:
                result[name] = combine_patches(inherited, value)
            except PatchError as error:
                raise ManifestError([FieldError(field, str(error))]) from None
        else:
            result[name] = _merged(inherited, value, field)
    return result


def name_runtime_in(error: ManifestError, job: Manifest, runtime: Mapping[str, Any], key: RuntimeKey) -> ManifestError:
    """Return an error about a merged job that says which of the fields are set by the runtime.

    *job* has its own settings only, and *runtime* is the ``spec`` of the runtime.
    """
    return ManifestError(
        [
            FieldError(one.path, f"{one.message} (set by {key})")
            if _has_field({"spec": runtime}, one.path) and not _has_field(job, one.path)
            else one
            for one in error.errors
        ]
    )


def _has_field(manifest: Mapping[str, Any], path: str) -> bool:
    """Return whether a manifest has the field of an error; of a path into a list, the list decides."""
    found: Any = manifest
    for name in path.partition("[")[0].split("."):
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True
