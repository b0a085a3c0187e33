"""Finds the token with which a response contains a stop string.

vLLM looks for stop strings after each step. A step with accepted drafts returns several tokens, of which some may be
behind the stop string. Depending on the version, vLLM (0.26) keeps these tokens, and prefers a stop string that occurs
later; or it cuts them off (0.32). A response that is continued from a prefix is a new request for vLLM, which does not
look into the prefix. Both would make the end of a response depend on drafts. Here, tokens are read one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class StopStrings:
    """Reads the tokens of one response and finds the first one that completes a stop string."""

    def __init__(self, stop: Sequence[str], min_tokens: int, decode: Callable[[int], str]) -> None:
        """Start before the first token.

        Args:
            stop: the stop strings, none of them empty.
            min_tokens: number of first tokens that cannot end the response. A stop string that one of them completes
                does not count later either.
            decode: returns the text that a token adds to the response. It is called for each token in order.
        """
        self._stop, self._min_tokens, self._decode = tuple(stop), min_tokens, decode
        self._tail_length = max(map(len, self._stop)) - 1
        self._tail = ""
        self._num_tokens = 0

    def completed_by(self, token: int) -> bool:
        """Read the next token of the response, and return whether it completes a stop string."""
        known, new = self._tail, self._decode(token)
        text = known + new
        self._tail = text[max(0, len(text) - self._tail_length) :]
        self._num_tokens += 1
        if not new or self._num_tokens <= self._min_tokens:
            return False
        return any(text.find(string, max(0, len(known) - len(string) + 1)) >= 0 for string in self._stop)


def token_decoder(tokenizer: Any, prompt_token_ids: Sequence[int]) -> Callable[[int], str]:
    """Return a function for :class:`StopStrings` that decodes the tokens after a prompt as vLLM does.

    Args:
        tokenizer: the tokenizer of the ``AsyncLLM``.
        prompt_token_ids: the prompt, without the prefix from which a response is continued.
    """
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = SimpleNamespace(
        request_id="",
        prompt_token_ids=list(prompt_token_ids),
        prompt_embeds=None,
        sampling_params=SamplingParams(),
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def decode(token: int) -> str:
        length = len(detokenizer.output_text)
        detokenizer.update([token], False)
        return str(detokenizer.output_text[length:])

    return decode
