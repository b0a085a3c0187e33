"""Imports modules of SkyRL without the rest of it, which needs Python 3.12."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = ("", ".backends", ".backends.skyrl_train", ".backends.skyrl_train.inference_servers")
_PACKAGES += (".backends.skyrl_train.utils", ".train", ".train.utils")


def import_from_skyrl(folder: Path, module: str) -> Any:
    """Return a module of the package ``skyrl`` in a folder; the ``__init__`` modules of its packages are not run."""
    for package in _PACKAGES:
        name = f"skyrl{package}"
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]
    return importlib.import_module(f"skyrl.{module}")
