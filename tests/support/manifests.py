"""Sections of manifests that tests share."""

from __future__ import annotations

from typing import Any

SMALL_CPU_ENGINE: dict[str, Any] = {
    "maxModelLen": 512,
    "dtype": "float32",
    "kvCacheMemory": "256Mi",
    "enforceEager": True,
}
"""Engine settings for a tiny model on CPU. In float32, rounding does not decide which token is sampled."""
