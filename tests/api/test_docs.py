"""The reference page of the manifest agrees with the models."""

import importlib.util
from pathlib import Path

from rollout_api.manifest.spec import Source

ROOT = Path(__file__).parents[2]


def test_the_manifest_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("manifest_docs", ROOT / "scripts" / "manifest_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.document() == (ROOT / "docs" / "manifest.md").read_text()


def test_the_manifest_page_lists_every_source() -> None:
    page = (ROOT / "docs" / "manifest.md").read_text()
    assert all(f"| `source.{name}" in page for name in Source.model_fields)
