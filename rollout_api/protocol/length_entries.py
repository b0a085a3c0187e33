"""How a history writes the lengths of its rollouts in Redis: by problem, and the last ones of all problems."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

logger = logging.getLogger(__name__)

KEY_BYTES = 8
"""Of a rollout's key, with which its entry begins."""
_ENTRY = struct.Struct(f"<{KEY_BYTES}sIf")
ENTRY_BYTES = _ENTRY.size
"""Of one rollout's entry among those of its problem and generation."""
_RECENT = struct.Struct("<II")
_DIGITS = 16
"""As many as a generation may have: it is an exact number in Lua, too."""


class LengthEntry(NamedTuple):
    """What a problem's lengths say of one rollout."""

    key: bytes
    """See :func:`rollout_key`."""
    generation: int
    length: int
    """Tokens of its response."""
    cut_off: bool
    """Whether it did not end by itself, so that *length* is what its true length exceeds."""
    reward: float | None
    """As the trainer reported it, rounded to binary32; None until then."""


def rollout_key(rollout_id: str) -> bytes:
    """The 8 bytes by which a rollout is known among those of its problem."""
    return blake2b(rollout_id.encode(), digest_size=KEY_BYTES).digest()


def pack_entry(rollout_id: str, length: int, cut_off: bool, reward: float | None = None) -> bytes:
    """16 bytes: the rollout's key, its length and whether it was cut off in 32 bits, its reward as binary32.

    Args:
        rollout_id: of the rollout.
        length: tokens of its response, fewer than 2³¹.
        cut_off: whether something else than the model ended it.
        reward: if it has one.
    """
    return _ENTRY.pack(rollout_key(rollout_id), _measured(length, cut_off), math.nan if reward is None else reward)


def unpack_entries(stored: Mapping[bytes, bytes]) -> list[LengthEntry]:
    """The rollouts in a problem's hash of lengths, oldest generation first.

    A field that is no generation, or whose value is not made of whole entries, is left out, with a warning.

    Args:
        stored: generation, in decimal → entries one after the other.
    """
    by_generation: dict[int, bytes] = {}
    malformed: list[bytes] = []
    for field, entries in stored.items():
        if field.isdigit() and len(field) <= _DIGITS and len(entries) % ENTRY_BYTES == 0:
            by_generation[int(field)] = entries
        else:
            malformed.append(field)
    if malformed:
        logger.warning(
            "%d of %d generations of a problem's lengths cannot be read and are left out, the first of them %r. Does "
            "another program write into the history?",
            len(malformed),
            len(stored),
            malformed[0][:40],
        )
    return [
        LengthEntry(key, generation, measured >> 1, bool(measured & 1), None if math.isnan(reward) else reward)
        for generation, entries in sorted(by_generation.items())
        for key, measured, reward in _ENTRY.iter_unpack(entries)
    ]


def pack_recent(generation: int, length: int, cut_off: bool) -> bytes:
    """8 bytes: a rollout's generation, below 2³²; its length and whether it was cut off, as in :func:`pack_entry`."""
    return _RECENT.pack(generation, _measured(length, cut_off))


def unpack_recent(entries: Iterable[bytes]) -> list[tuple[int, int, bool]]:
    """Generation, length in tokens, and whether it was cut off, of each rollout, in the order of *entries*.

    What is no entry is left out, with a warning.
    """
    read: list[tuple[int, int, bool]] = []
    malformed = 0
    for entry in entries:
        if len(entry) != _RECENT.size:
            malformed += 1
            continue
        generation, measured = _RECENT.unpack(entry)
        read.append((generation, measured >> 1, bool(measured & 1)))
    if malformed:
        logger.warning(
            "%d of the last rollouts' lengths cannot be read and are left out. Does another program write into the "
            "history?",
            malformed,
        )
    return read


def _measured(length: int, cut_off: bool) -> int:
    return length << 1 | cut_off
