"""Test of the error that is raised when arctic-inference is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import suffix_drafters


def test_error_explains_the_installation_when_the_peer_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "arctic_inference"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != suffix_drafters.PEERS_DIRECTORY])
    monkeypatch.setattr(suffix_drafters, "PEERS_DIRECTORY", str(tmp_path))
    with pytest.raises(ImportError, match=r"arctic-inference is not installed in .*; 'make env' installs it"):
        suffix_drafters.suffix_tree(8)
