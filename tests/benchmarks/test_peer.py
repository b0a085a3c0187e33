"""The peer that benchmarks of the index need: what is said where it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import suffix_drafters


def test_a_missing_peer_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "arctic_inference"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != suffix_drafters.PEERS])
    monkeypatch.setattr(suffix_drafters, "PEERS", str(tmp_path))
    with pytest.raises(ImportError, match=r"arctic-inference is not in .*; 'make env' installs it"):
        suffix_drafters.suffix_tree(8)
