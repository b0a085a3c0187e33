"""Tests of the native index. ``make test-native`` runs them on builds with sanitizers, given by ``DAS_NATIVE``."""

from __future__ import annotations

import importlib.util
import os
import sys

if "DAS_NATIVE" in os.environ:
    name = "rollout_worker.drafting._native"
    assert name not in sys.modules, "the index was imported before, so the build with sanitizers would not be tested"
    spec = importlib.util.spec_from_file_location(name, os.environ["DAS_NATIVE"])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
