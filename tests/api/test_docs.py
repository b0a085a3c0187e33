"""The reference page of the manifest agrees with the models."""

from pathlib import Path

from rollout_api.manifest.spec import Source
from scripts import manifest_docs

ROOT = Path(__file__).parents[2]


def test_the_manifest_page_is_up_to_date() -> None:
    assert manifest_docs.document() == (ROOT / "docs" / "manifest.md").read_text()


def test_the_manifest_page_lists_every_source() -> None:
    page = (ROOT / "docs" / "manifest.md").read_text()
    assert all(f"| `source.{name}" in page for name in Source.model_fields)
