"""Finds misspelt fields of pod templates, which the CRD does not describe, in Kubernetes' own models of pods."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob


def check_pod_templates(job: RolloutJob) -> bool:
    """Check the names of all fields of a job's pod templates.

    Returns:
        Whether they were checked, if there are any. The package ``kubernetes`` has the names.

    Raises:
        ManifestError: if there are fields that pods do not have.
    """
    sections = {name: getattr(job.spec, name) for name in ("head", "workers", "server")}
    templates = {name: part.pod_template for name, part in sections.items() if part is not None and part.pod_template}
    if find_spec("kubernetes") is None:
        return not templates
    errors = [
        error
        for name, template in templates.items()
        for error in _unknown_fields(template, "V1PodTemplateSpec", f"spec.{name}.podTemplate")
    ]
    if errors:
        raise ManifestError(errors)
    return True


def _unknown_fields(value: Any, type_name: str, path: str) -> Iterator[FieldError]:
    import kubernetes.client

    if isinstance(value, list):
        (item_type,) = re.findall(r"\[(.+)\]", type_name) or [""]
        for number, item in enumerate(value):
            yield from _unknown_fields(item, item_type, f"{path}[{number}]")
        return
    model = getattr(kubernetes.client, type_name, None)
    if model is None or not isinstance(value, dict):
        return
    types = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    for name, field in value.items():
        if name in types:
            yield from _unknown_fields(field, types[name], f"{path}.{name}")
        elif not name.startswith("$"):  # a directive of a strategic merge patch
            close = get_close_matches(name, types, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield FieldError(f"{path}.{name}", f"pods have no such field{hint}")
