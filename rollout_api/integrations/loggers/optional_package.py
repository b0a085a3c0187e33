"""Imports of packages that only users of one logger have installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_for(logger: str, module: str, packages: str) -> Any:
    """Return a module that a logger needs.

    Args:
        logger: name of the logger.
        module: name of the module.
        packages: packages that provide it, separated by spaces.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{logger} needs the module {missing.name}, which is not installed: pip install {packages}",
            name=missing.name,
        ) from missing
