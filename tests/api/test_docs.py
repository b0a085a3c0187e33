"""The page about manifests says what the models say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_manifest_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("manifest_docs", ROOT / "scripts" / "manifest_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.document() == (ROOT / "docs" / "manifest.md").read_text()
