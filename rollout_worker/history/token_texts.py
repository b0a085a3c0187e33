"""Texts of single tokens, for people who read rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

Decoder = Callable[[Iterable[int]], list[str]]
"""Returns the text of each token; together, they are the text of all."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message says where it was looked for, and what to do."""


def load_decoder(source: str) -> Decoder:
    """Return a decoder of a tokenizer.

    Args:
        source: a directory with ``tokenizer.json``, such a file, or the name of a model on the Hugging Face hub.

    Raises:
        TokenizerError: if it cannot be loaded.
    """
    from tokenizers import Tokenizer

    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(source)
    except Exception as error:  # tokenizers has no errors of its own
        reason = str(error).partition("\n")[0]
        raise TokenizerError(
            f"the tokenizer {source} cannot be loaded ({reason}); name a directory that contains tokenizer.json, or a "
            "model of the Hugging Face hub"
        ) from None
    return partial(_texts, tokenizer)


def decoder_of(tokenizer: Any | None) -> Decoder:
    """Return a decoder of a transformers tokenizer; that of ids for None, and for one that is not a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return show_ids if backend is None else partial(_texts, backend)


def show_ids(tokens: Iterable[int]) -> list[str]:
    """Return the ids of tokens as text, separated by spaces: a decoder for those without a tokenizer."""
    return [f"{token} " for token in tokens]


def _texts(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    def whole(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    stream = DecodeStream(skip_special_tokens=False)
    texts: list[str] = []
    incomplete: list[int] = []
    for token in tokens:
        incomplete.append(int(token))
        try:
            # A token that ends within a character has no text; the one that completes the character has it all.
            text = stream.step(tokenizer, int(token))
        except Exception:  # bytes that are no character; tokenizers has no errors of its own
            stream, text = DecodeStream(skip_special_tokens=False), whole(incomplete)
        if text is not None:
            incomplete = []
        texts.append(text or "")
    if incomplete:
        texts[-1] += whole(incomplete)
    return texts
