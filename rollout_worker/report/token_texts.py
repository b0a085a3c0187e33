"""The text of each token of a rollout, for a page that marks single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

_INCOMPLETE = "\ufffd"
"""What a tokenizer returns for a token that is a part of a character."""


class TokenTexts:
    """Splits decoded text into tokens, so that the texts of all tokens together are the text of the rollout.

    Args:
        tokenizer: a transformers tokenizer; None to return the ids in place of texts.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer: Any = tokenizer
        self._known: dict[int, str] = {}
        # A token is decoded behind another one, because some tokenizers drop the space at the start of a text.
        self._before: list[int] = (
            [] if tokenizer is None else list(tokenizer.encode("x", add_special_tokens=False))[-1:]
        )
        self._before_text = "" if tokenizer is None else self._decode(self._before)

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token. That of a character of several tokens belongs to the first of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in token_ids]
        pieces = [self._text(token) for token in token_ids]
        start = 0
        for incomplete, run in groupby(pieces, key=lambda piece: _INCOMPLETE in piece):
            length = len(list(run))
            if incomplete:
                joined = self._following(token_ids[start : start + length])
                pieces[start : start + length] = [joined, *[""] * (length - 1)]
            start += length
        return pieces

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._following([token])
        return self._known[token]

    def _following(self, token_ids: Sequence[int]) -> str:
        return self._decode([*self._before, *token_ids])[len(self._before_text) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
