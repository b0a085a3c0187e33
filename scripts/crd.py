"""Writes crds/, and the chart's copy, from the models in ``rollout_api``: ``python scripts/crd.py``.

Pydantic's JSON schema becomes a structural schema (apiextensions.k8s.io/v1): references inlined, absent instead of
null, defaults for sections that may be left out, OpenAPI 3.0's way of excluding a bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import yaml

from rollout_api.manifest.field_types import JobName
from rollout_api.manifest.rollout_job import GROUP, KIND, PLURAL, VERSION, RolloutJobSpec
from rollout_api.manifest.status import RolloutJobStatus

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "crds" / f"{PLURAL}.{GROUP}.yaml"
CHART_TARGET = ROOT / "charts" / "das-rollout" / "templates" / "crd.yaml"

HEAD = "# Made by `python scripts/crd.py` from the models in rollout_api/.\n"

_DROPPED = ("title", "propertyNames", "$defs")
_COLUMNS = (
    ("State", "string", ".status.state", 0),
    ("Workers", "string", ".status.workers.summary", 0),
    ("Progress", "string", ".status.progress.summary", 0),
    ("Tok/s", "integer", ".status.progress.tokensPerSecond", 0),
    ("Accepted", "string", ".status.progress.acceptedPerStep", 0),
    ("Saved", "string", ".status.saved", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Left", "integer", ".status.progress.secondsLeft", 1),
    ("Failed", "integer", ".status.failedPods", 1),
    ("Model", "string", ".spec.model.uri", 1),
)


def structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema, as pydantic makes it, as a structural schema."""
    schema = dict(schema)
    if (reference := schema.pop("$ref", None)) is not None:
        # what stands beside a reference is said of this use of it
        schema = {**definitions[reference.rpartition("/")[2]], **schema}
    if "anyOf" in schema and {"type": "null"} in schema["anyOf"]:
        (only,) = (one for one in schema.pop("anyOf") if one != {"type": "null"})
        return structural({**only, **schema}, definitions)
    for name in _DROPPED:
        schema.pop(name, None)
    if schema.get("default", ...) is None:
        del schema["default"]
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    for bound, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in schema:
            schema[inclusive] = schema[bound]
            schema[bound] = True
    if schema.get("type") == "integer":
        schema["format"] = "int64"
    if "items" in schema:
        schema["items"] = structural(schema["items"], definitions)
    # keys are checked by the operator: a structural schema has no patterns for them
    by_pattern = schema.pop("patternProperties", {})
    if (values := next(iter(by_pattern.values()), schema.pop("additionalProperties", False))) is not False:
        schema.pop("additionalProperties", None)
        if values is True or not structural(values, definitions):
            schema["x-kubernetes-preserve-unknown-fields"] = True
        else:
            schema["additionalProperties"] = structural(values, definitions)
    if "properties" in schema:
        required = schema.get("required", [])
        schema["properties"] = {
            name: _with_default(structural(field, definitions), field, name in required)
            for name, field in schema["properties"].items()
        }
    return dict(sorted(schema.items(), key=lambda item: _ORDER.index(item[0]) if item[0] in _ORDER else len(_ORDER)))


_ORDER = ("description", "type", "format", "enum", "default", "required", "properties")


def _with_default(schema: dict[str, Any], source: dict[str, Any], required: bool) -> dict[str, Any]:
    """What pydantic makes by a factory: a section with its defaults, an empty list or mapping.

    With all of them: the API server checks a default by the section's rules without filling it in before.
    """
    if required or "default" in source or schema.get("type") not in ("object", "array"):
        return schema
    if schema["type"] == "array":
        return {**schema, "default": []}
    fields = schema.get("properties", {})
    return {**schema, "default": {name: one["default"] for name, one in fields.items() if "default" in one}}


def _of(model: type[RolloutJobSpec | RolloutJobStatus]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    return structural(schema, schema.get("$defs", {}))


def _without_defaults(schema: Any) -> Any:
    """What nobody has said is absent from a status, not a default."""
    if isinstance(schema, list):
        return [_without_defaults(one) for one in schema]
    if isinstance(schema, dict):
        return {name: _without_defaults(one) for name, one in schema.items() if name != "default"}
    return schema


def document() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    name = get_args(JobName)[1]
    schema = {
        "description": "A job that makes RL rollouts for a trainer, or over a problem set, with drafts from earlier "
        "rollouts.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _of(RolloutJobSpec),
            "status": _without_defaults(_of(RolloutJobStatus)),
        },
        "x-kubernetes-validations": [
            {
                "rule": f"size(self.metadata.name) <= {name.max_length} && "
                f"self.metadata.name.matches('{name.pattern}')",
                "message": f"metadata.name: at most {name.max_length} lower-case letters, digits and dashes, beginning "
                "with a letter: names of pods and Services begin with it",
            }
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["rj"],
                "categories": ["all", "rollout"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.workers.replicas",
                            "statusReplicasPath": ".status.workers.replicas",
                            "labelSelectorPath": ".status.workers.selector",
                        },
                    },
                }
            ],
        },
    }


def _yaml(crd: dict[str, Any]) -> str:
    return yaml.safe_dump(crd, sort_keys=False, width=110, allow_unicode=True)


def text() -> str:
    """The file in crds/."""
    return HEAD + _yaml(document())


def chart_text() -> str:
    """The chart's template. Helm never upgrades what is in a chart's crds/, and deletes what is not kept."""
    crd = document()
    crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    return "{{- if .Values.crds.install }}\n" + HEAD + _yaml(crd) + "{{- end }}\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    CHART_TARGET.write_text(chart_text())
