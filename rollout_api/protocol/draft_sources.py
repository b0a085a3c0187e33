"""The sources of accepted draft tokens, token by token, and their encoding in messages and in the history."""

from __future__ import annotations

import re

DRAFT_SOURCES = ("history", "self", "siblings", "cross_problem")
"""Where drafts are found: the problem's history, the rollout's own text, its siblings, and the cross-problem pool."""
SAMPLED = 0
"""Code of a token that was sampled without an accepted draft token.

The code of an accepted draft token is 1 plus the index of its source in :data:`DRAFT_SOURCES`."""
_CODE_BITS = 3
_MAX_RUN = 2 ** (8 - _CODE_BITS)
_RUNS = [bytes([byte % 2**_CODE_BITS]) * ((byte >> _CODE_BITS) + 1) for byte in range(256)]
"""The codes that each encoded byte stands for."""
_RUN = re.compile(rb"(.)\1{0,%d}" % (_MAX_RUN - 1), re.DOTALL)


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
