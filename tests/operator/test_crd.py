"""The CRD in crds/ agrees with the models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def walk(schema: Any, path: str = "") -> Any:
    if isinstance(schema, dict):
        yield path, schema
        for name, one in schema.get("properties", {}).items():
            yield from walk(one, f"{path}.{name}")
        yield from walk(schema.get("items"), f"{path}[]")
        yield from walk(schema.get("additionalProperties"), f"{path}{{}}")


def test_the_crd_is_up_to_date() -> None:
    crd = script("crd")
    assert crd.text() == crd.TARGET.read_text()
    assert crd.chart_text() == crd.CHART_TARGET.read_text()


def test_images_install_the_versions_that_were_tested() -> None:
    images = script("image_requirements")
    for file, wanted in images.IMAGES.items():
        assert images.pinned(wanted) == (images.REQUIREMENTS / file).read_text(), "run scripts/image_requirements.py"


def test_the_schema_is_structural_and_every_field_has_a_description() -> None:
    (version,) = script("crd").document()["spec"]["versions"]
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
