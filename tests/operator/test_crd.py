"""The CRDs in crds/ agree with the models."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_api.manifest.pod_spec import RUNTIME_PLURALS, SCALING_FIELDS
from scripts import crd, image_requirements


def walk(schema: Any, path: str = "") -> Any:
    if isinstance(schema, dict):
        yield path, schema
        for name, one in schema.get("properties", {}).items():
            yield from walk(one, f"{path}.{name}")
        yield from walk(schema.get("items"), f"{path}[]")
        yield from walk(schema.get("additionalProperties"), f"{path}{{}}")


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the objects of a CRD."""
    (version,) = document["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def test_the_crds_are_up_to_date() -> None:
    assert crd.texts() == {kind: file.read_text() for kind, file in crd.TARGETS.items()}
    assert crd.digests_text() == crd.DIGESTS_TARGET.read_text()


def test_no_field_has_a_name_that_kubectl_and_helm_read_as_a_boolean() -> None:
    """They read YAML 1.1, and the API server would get a field called "true" or "false" instead."""
    fields = {name for _, schema in walk(schema_of(crd.document())) for name in schema.get("properties", {})}
    assert not {name for name in fields if name.lower() in {"y", "n", "yes", "no", "on", "off", "true", "false"}}


def test_images_install_the_versions_that_were_tested() -> None:
    for file, wanted in image_requirements.FILES.items():
        pinned = (image_requirements.REQUIREMENTS / file).read_text()
        assert image_requirements.pinned(wanted) == pinned, "run scripts/image_requirements.py"


@pytest.mark.parametrize("kind", crd.documents())
def test_the_schema_is_structural_and_every_field_has_a_description(kind: str) -> None:
    root = schema_of(crd.documents()[kind])
    for path, schema in walk(root):
        assert "$ref" not in schema, path
        assert "anyOf" not in schema, path
        assert schema.get("type") or schema.get("x-kubernetes-int-or-string"), path
        assert isinstance(schema.get("exclusiveMinimum", True), bool), path
    assert {"model", "workers", "head"} <= root["properties"]["spec"]["properties"].keys()
    undescribed = [
        path
        for path, schema in walk(root["properties"]["spec"])
        if path and not path.endswith(("]", "}")) and not schema.get("description")
    ]
    assert [] == undescribed


@pytest.mark.parametrize(("kind", "scope"), [("ClusterRolloutRuntime", "Cluster"), ("RolloutRuntime", "Namespaced")])
def test_a_runtime_has_the_settings_of_the_cluster_and_no_defaults(kind: str, scope: str) -> None:
    document = crd.documents()[kind]
    assert (scope, f"{RUNTIME_PLURALS[kind]}.das.rollout.dev") == (
        document["spec"]["scope"],
        document["metadata"]["name"],
    )
    spec = schema_of(document)["properties"]["spec"]
    assert {"image", "head", "workers", "priorityClassName", "model"} == spec["properties"].keys()
    assert ["cache"] == list(spec["properties"]["model"]["properties"])
    assert "replicas" not in spec["properties"]["workers"]["properties"]
    assert {"gpuResource", "podTemplate"} <= spec["properties"]["workers"]["properties"].keys()
    assert not [path for path, schema in walk(spec) if "default" in schema]
    assert "required" not in spec
    rules = [rule["rule"] for rule in spec["properties"]["workers"]["x-kubernetes-validations"]]
    assert not [rule for rule in rules if "eplicas" in rule]
    assert [rule for rule in rules if "deviceClaimTemplate" in rule]


def test_the_api_server_fills_in_nothing_of_a_job_that_a_runtime_may_set() -> None:
    spec = schema_of(crd.document())["properties"]["spec"]["properties"]
    parts = [spec["image"], spec["head"], spec["model"]["properties"]["cache"]]
    assert [{}, {}, {}] == [part["default"] for part in parts]
    workers = spec["workers"]
    assert {"replicas": 1, "autoscale": False, "idleSeconds": 60, "maxPendingReplacements": 4} == workers["default"]
    numbers = {crd.to_camel(name) for name in SCALING_FIELDS}
    fields = [field for name, field in workers["properties"].items() if name not in numbers]
    assert not [field for field in fields if "default" in field]
    assert not [path for part in (*parts, *fields) for path, schema in walk(part) if path and "default" in schema]
