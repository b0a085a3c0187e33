"""Enumerations whose members are strings, also on Python 3.10, which lacks ``enum.StrEnum``."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """An enumeration whose members are strings, which are also their texts."""

        __str__ = str.__str__


__all__ = ["StrEnum"]
