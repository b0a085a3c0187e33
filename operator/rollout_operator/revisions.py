"""The settings with which a job's pods are created, which stay the same while the spec changes. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic.alias_generators import to_camel

from rollout_api.manifest.rollout_job import RolloutJob, parse_job
from rollout_api.manifest.runtime import RUNTIME_SECTIONS, SCALING_FIELDS
from rollout_api.manifest.status import Revision

_REPLACED = ("runtimeRef", *map(to_camel, RUNTIME_SECTIONS))
_SCALING = frozenset(map(to_camel, SCALING_FIELDS))


def revision_of(job: RolloutJob, default_image: str, *, has_runtime: bool) -> Revision:
    """Return the revision of pods that are created from the current spec of a job.

    Args:
        job: the job.
        default_image: the image of its pods if it names none.
        has_runtime: whether a runtime may change the model cache, which is fixed otherwise.
    """
    spec = job.spec
    settings = spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        exclude_defaults=True,
        include={
            **dict.fromkeys(RUNTIME_SECTIONS, True),
            "workers": set(type(spec.workers).model_fields) - SCALING_FIELDS,
        },
    )
    if has_runtime:
        cache = spec.model.cache.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        settings["model"] = {"cache": cache}
    image = spec.image.name or default_image
    text = json.dumps([image, settings], sort_keys=True)
    return Revision(hash=hashlib.sha256(text.encode()).hexdigest()[:10], image=image, settings=settings)


def with_revision(job: RolloutJob, revision: Revision) -> RolloutJob:
    """Return a job whose pods are those of an earlier revision."""
    manifest = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    return parse_job(manifest_with_settings(manifest, revision.settings))


def manifest_with_settings(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a job with the settings of a revision instead of its own, and without a runtime."""
    spec = {name: section for name, section in manifest["spec"].items() if name not in _REPLACED}
    own_workers = manifest["spec"].get("workers", {})
    scaling = {name: value for name, value in own_workers.items() if name in _SCALING}
    model = {**spec.get("model", {}), **settings.get("model", {})}
    workers = {**settings.get("workers", {}), **scaling}
    return {**manifest, "spec": {**spec, **settings, "model": model, "workers": workers}}


def changed_settings(old: Revision, new: Revision) -> list[str]:
    """Return the paths of the settings in which two revisions differ, below ``spec``."""
    paths = []
    for section in sorted({*old.settings, *new.settings}):
        one, other = old.settings.get(section), new.settings.get(section)
        if not isinstance(one, dict | None) or not isinstance(other, dict | None):
            paths += [section] if one != other else []
            continue
        fields = sorted({*(one or {}), *(other or {})})
        paths += [f"{section}.{name}" for name in fields if (one or {}).get(name) != (other or {}).get(name)]
    if not paths and old.image != new.image:
        paths.append("the operator's default image")
    return paths
