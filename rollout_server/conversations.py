"""Recognises the conversation that a prompt continues, and the tokens that were sampled in it.

A client that sends messages sends back the text of earlier responses. The tokens of this text may differ from those
that were sampled: several sequences of tokens have the same text. A model that is trained on the sampled tokens must
also continue from them. Conversations are therefore recognised by their text, up to the end of each response, and their
tokens are replaced by the sampled ones.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from rollout_api.client.request_client import RequestClient
from rollout_api.client.server_records import TurnRecord
from rollout_api.protocol.messages import FinishReason, Rollout
from rollout_server.request_context import PrefixSource

_Result = TypeVar("_Result")

_MAX_ENDS = 4096
"""Number of ends of messages in a prompt after which no earlier turns are looked up."""


@dataclass(frozen=True)
class Boundary:
    """The end of a message in a sequence of tokens."""

    end: int
    """Number of tokens up to the end of the message."""
    record_id: str
    """Id of the turn that ends here, if a response ends here: a hash of the text so far."""


@dataclass(frozen=True)
class Continuation:
    """A prompt, with the tokens that were sampled in place of those of the text that the client has sent."""

    token_ids: list[int]
    """Tokens of the prompt."""
    record_id: str
    """Id of the last turn in it."""
    num_known: int
    """Number of tokens up to the end of that turn."""
    last_turn: TurnRecord
    """That turn."""
    is_changed: bool
    """Whether tokens were replaced."""


class ConversationText:
    """Splits sequences of tokens at the ends of messages.

    Args:
        decode: returns the text of tokens, including that of special tokens.
        end_tokens: tokens that end a response of the model.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], end_tokens: Set[int]) -> None:
        self._decode, self._end_tokens = decode, end_tokens

    def boundaries(self, token_ids: Sequence[int], after: Boundary | None = None) -> list[Boundary]:
        """Return the ends of messages, the latest one last.

        If an end of a message in the tokens is given by *after*, only later ones are returned.
        """
        found: list[Boundary] = []
        digest, start = (b"", 0) if after is None else (bytes.fromhex(after.record_id), after.end)
        for index in range(start, len(token_ids)):
            if token_ids[index] in self._end_tokens:
                text = self._decode(token_ids[start : index + 1])
                digest = blake2b(digest + text.encode(), digest_size=16).digest()
                found.append(Boundary(index + 1, digest.hex()))
                start = index + 1
        return found


def continue_conversation(
    token_ids: Sequence[int], boundaries: Sequence[Boundary], records: Mapping[str, TurnRecord]
) -> Continuation | None:
    """Return the prompt with the tokens that were sampled; None if it continues no known conversation.

    *boundaries* are the ends of messages in the prompt, and *records* the turns that are known, by id.
    """
    for boundary in reversed(boundaries):
        if (known := _known_tokens(boundary.record_id, records)) is not None:
            continued = [*known, *token_ids[boundary.end :]]
            return Continuation(
                continued,
                boundary.record_id,
                len(known),
                records[boundary.record_id],
                is_changed=known != list(token_ids[: boundary.end]),
            )
    return None


def _known_tokens(record_id: str, records: Mapping[str, TurnRecord]) -> list[int] | None:
    """Return all tokens up to the end of a turn; None if one of its turns is not known."""
    parts: list[list[int]] = []
    while record_id:
        record = records.get(record_id)
        if record is None:
            return None
        parts.append(record.token_ids)
        record_id = record.previous
    return [token for part in reversed(parts) for token in part] if parts else None


class Conversations:
    """The conversations of a job, which all its servers share."""

    def __init__(self, client: RequestClient, tokenizer: Any, end_tokens: Set[int]) -> None:
        self._client = client
        self._end_token: int | None = getattr(tokenizer, "eos_token_id", None)
        # Decoding long prompts takes milliseconds. A tokenizer may only be used by one thread at a time.
        own_tokenizer = copy.deepcopy(tokenizer)
        self._text = ConversationText(lambda tokens: str(own_tokenizer.decode(tokens)), end_tokens)
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="conversations")

    async def find(self, token_ids: Sequence[int]) -> tuple[Continuation | None, PrefixSource]:
        """Return what is known of the conversation that a prompt continues, and where its earlier tokens come from.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        boundaries = await self._in_thread(lambda: self._text.boundaries(token_ids))
        if len(boundaries) > _MAX_ENDS:
            return None, PrefixSource.UNKNOWN
        records = await self._client.turns.read([boundary.record_id for boundary in boundaries])
        continuation = continue_conversation(token_ids, boundaries, records)
        if continuation is not None:
            return continuation, PrefixSource.RESTORED if continuation.is_changed else PrefixSource.SAMPLED
        return None, PrefixSource.UNKNOWN

    async def record(
        self,
        prompt: Sequence[int],
        rollouts: Sequence[Rollout],
        continuation: Continuation | None,
        *,
        trajectory_id: str,
        turn: int,
    ) -> None:
        """Record the responses to a prompt, except for those that were cut off or ended by a stop string.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        previous, num_known = ("", 0) if continuation is None else (continuation.record_id, continuation.num_known)

        def make_records() -> dict[str, TurnRecord]:
            records: dict[str, TurnRecord] = {}
            last = next(reversed(self._text.boundaries(prompt)), None)
            for rollout in rollouts:
                tokens = [*prompt, *rollout.token_ids]
                if rollout.finish_reason is FinishReason.LENGTH and self._end_token is not None:
                    tokens.append(self._end_token)  # as the chat template will, so that the text is the same
                later = self._text.boundaries(tokens, last)
                if later and later[-1].end == len(tokens):
                    record = TurnRecord(previous, tokens[num_known:], trajectory_id, turn, rollout.problem_id)
                    records.setdefault(later[-1].record_id, record)
            return records

        await self._client.turns.write(await self._in_thread(make_records))

    def close(self) -> None:
        """End the thread that decodes conversations."""
        self._decoder.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._decoder, work)
