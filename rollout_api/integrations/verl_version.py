"""Checks the installed version of verl; importing this module does so, before modules of verl are imported."""

from __future__ import annotations

from importlib.metadata import version

TESTED = "0.9.1"
"""Version of verl with which the adapter is tested."""


def check(installed: str) -> None:
    """Check that the adapter supports a version of verl.

    Raises:
        ImportError: it does not; the interfaces that it implements differ between minor versions.
    """
    if installed.split(".")[:2] != TESTED.split(".")[:2]:
        raise ImportError(
            f"rollout_api.integrations.verl supports verl {TESTED.rpartition('.')[0]}, but verl {installed} is "
            f"installed; install verl=={TESTED}"
        )


check(version("verl"))
