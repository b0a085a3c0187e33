"""The CRD in crds/ agrees with the models."""

from __future__ import annotations

from typing import Any

from scripts import crd, image_requirements


def walk(schema: Any, path: str = "") -> Any:
    if isinstance(schema, dict):
        yield path, schema
        for name, one in schema.get("properties", {}).items():
            yield from walk(one, f"{path}.{name}")
        yield from walk(schema.get("items"), f"{path}[]")
        yield from walk(schema.get("additionalProperties"), f"{path}{{}}")


def test_the_crd_is_up_to_date() -> None:
    assert crd.text() == crd.TARGET.read_text()
    assert crd.chart_text() == crd.CHART_TARGET.read_text()


def test_extra_args_keep_any_json_values_up_to_a_number() -> None:
    (version,) = crd.document()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    schema = spec["properties"]["engine"]["properties"]["extraArgs"]
    assert ("object", 64, True) == (
        schema["type"],
        schema["maxProperties"],
        schema["x-kubernetes-preserve-unknown-fields"],
    )
    assert "properties" not in schema
    assert "additionalProperties" not in schema


def test_no_field_has_a_name_that_kubectl_and_helm_read_as_a_boolean() -> None:
    """They read YAML 1.1, and the API server would get a field called "true" or "false" instead."""
    (version,) = crd.document()["spec"]["versions"]
    fields = {name for _, schema in walk(version["schema"]["openAPIV3Schema"]) for name in schema.get("properties", {})}
    assert not {name for name in fields if name.lower() in {"y", "n", "yes", "no", "on", "off", "true", "false"}}


def test_images_install_the_versions_that_were_tested() -> None:
    for file, wanted in image_requirements.IMAGES.items():
        pinned = (image_requirements.REQUIREMENTS / file).read_text()
        assert image_requirements.pinned(wanted) == pinned, "run scripts/image_requirements.py"


def test_the_schema_is_structural_and_every_field_has_a_description() -> None:
    (version,) = crd.document()["spec"]["versions"]
    root = version["schema"]["openAPIV3Schema"]
    for path, schema in walk(root):
        assert "$ref" not in schema, path
        assert "anyOf" not in schema, path
        assert schema.get("type") or schema.get("x-kubernetes-int-or-string"), path
        assert isinstance(schema.get("exclusiveMinimum", True), bool), path
    assert {"source", "model", "workers", "lifecycle"} <= root["properties"]["spec"]["properties"].keys()
    undescribed = [
        path
        for path, schema in walk(root["properties"]["spec"])
        if path and not path.endswith(("]", "}")) and not schema.get("description")
    ]
    assert [] == undescribed
