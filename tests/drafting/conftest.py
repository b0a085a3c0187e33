"""Tests of the native index, as it is built for use or with sanitizers (``make test-native``)."""

from __future__ import annotations

import importlib.util
import os
import sys

if "DAS_NATIVE" in os.environ:
    name = "rollout_worker.drafting._native"
    spec = importlib.util.spec_from_file_location(name, os.environ["DAS_NATIVE"])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
