"""Encodings of what a history keeps of rollouts: lengths and rewards, and the sources of accepted draft tokens.

Messages contain the sources of draft tokens in the same encoding.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

logger = logging.getLogger(__name__)

KEY_BYTES = 8
"""Size of a rollout's key at the start of its entry."""
_ENTRY = struct.Struct(f"<{KEY_BYTES}sIf")
ENTRY_BYTES = _ENTRY.size
"""Size of one rollout's entry."""
_RECENT = struct.Struct("<II")
_MAX_DIGITS = 16
"""Maximum number of digits of a generation, so that it is an exact number in Lua, too."""
DRAFT_SOURCES = ("history", "self", "siblings", "cross_problem")
"""The sources of drafts: the problem's history, the rollout's own text, its siblings, and the cross-problem pool."""
SAMPLED = 0
"""Code of a token that was sampled without an accepted draft token.

The code of an accepted draft token is 1 plus the index of its source in :data:`DRAFT_SOURCES`."""
_CODE_BITS = 3
_MAX_RUN = 2 ** (8 - _CODE_BITS)
_RUNS = [bytes([byte % 2**_CODE_BITS]) * ((byte >> _CODE_BITS) + 1) for byte in range(256)]
"""The codes that each encoded byte stands for."""
_RUN = re.compile(rb"(.)\1{0,%d}" % (_MAX_RUN - 1), re.DOTALL)


class LengthEntry(NamedTuple):
    """The length of one rollout of a problem."""

    key: bytes
    """Key of the rollout; see :func:`rollout_key`."""
    generation: int
    """Generation of the rollout."""
    length: int
    """Number of tokens of the response."""
    cut_off: bool
    """Whether the rollout was cut off, so that its full length would have been larger than *length*."""
    reward: float | None
    """Reward, rounded to binary32; None if the trainer has not reported one."""


def rollout_key(rollout_id: str) -> bytes:
    """Return the 8 bytes that identify a rollout among those of its problem."""
    return blake2b(rollout_id.encode(), digest_size=KEY_BYTES).digest()


def pack_entry(rollout_id: str, length: int, cut_off: bool, reward: float | None = None) -> bytes:
    """Return a rollout's entry: 8 bytes of key, 4 bytes of length and cut-off flag, and the reward as binary32.

    Args:
        rollout_id: id of the rollout.
        length: number of tokens of the response, less than 2³¹.
        cut_off: whether the rollout was cut off.
        reward: reward, if there is one.
    """
    return _ENTRY.pack(rollout_key(rollout_id), _pack_length(length, cut_off), math.nan if reward is None else reward)


def unpack_entries(stored: Mapping[bytes, bytes]) -> list[LengthEntry]:
    """Return the entries of a problem's hash of lengths, oldest generation first.

    Malformed fields are skipped with a warning.

    Args:
        stored: generation in decimal → concatenated entries.
    """
    by_generation: dict[int, bytes] = {}
    malformed: list[bytes] = []
    for field, entries in stored.items():
        if field.isdigit() and len(field) <= _MAX_DIGITS and len(entries) % ENTRY_BYTES == 0:
            by_generation[int(field)] = entries
        else:
            malformed.append(field)
    if malformed:
        logger.warning(
            "%d of %d generations of a problem's lengths are malformed and were skipped, the first of them %r. Does "
            "another program write to the history?",
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
    """Return 8 bytes: the generation, less than 2³², and length and cut-off flag as in :func:`pack_entry`."""
    return _RECENT.pack(generation, _pack_length(length, cut_off))


def unpack_recent(entries: Iterable[bytes]) -> list[tuple[int, int, bool]]:
    """Return generation, length in tokens and cut-off flag of each rollout, in the order of *entries*.

    Malformed entries are skipped with a warning.
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
            "%d of the latest rollouts' lengths are malformed and were skipped. Does another program write to the "
            "history?",
            malformed,
        )
    return read


def _pack_length(length: int, cut_off: bool) -> int:
    return length << 1 | cut_off


def encode_draft_sources(codes: bytes) -> bytes:
    """Encode the code of each token, one byte for a token, as runs of equal codes.

    A run of n tokens is one byte, (n - 1) · 8 + code; one of more than 32 tokens is several runs.
    """
    return bytes([(len(run[0]) - 1) << _CODE_BITS | run[0][0] for run in _RUN.finditer(codes)])


def decode_draft_sources(encoded: bytes) -> bytes:
    """Return the code of each token, one byte for a token. Codes that only a later version knows are at most 7."""
    return b"".join([_RUNS[byte] for byte in encoded])


def source_names(codes: bytes) -> list[str | None]:
    """Return the source of each token, or None for a token that was sampled or has a code of a later version."""
    names = [None, *DRAFT_SOURCES]
    return [names[code] if code < len(names) else None for code in codes]


def num_encoded_tokens(encoded: bytes) -> int:
    """Return of how many tokens the codes are encoded."""
    return sum(len(_RUNS[byte]) for byte in encoded)
