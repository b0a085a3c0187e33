"""Recognises the conversation that a prompt continues, and the tokens that were sampled in it.

A client that sends messages sends back what it has read in earlier responses. The tokens of the rendered messages may
differ from those that were sampled: several sequences of tokens have the same text, a chat template formats the
arguments of tool calls anew and omits earlier reasoning, and a response may have been cut off. A model that is trained
on the sampled tokens must also continue from them. Conversations are therefore recognised by their messages, and the
tokens of all messages up to the end of the last response are replaced by the sampled ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from rollout_api.client.request_client import RequestClient
from rollout_api.client.server_records import TurnNames, TurnRecord
from rollout_api.protocol.messages import Rollout

_INCOMPLETE = "\ufffd"
"""What a tokenizer returns for a part of a character."""


class PrefixSource(StrEnum):
    """Where the tokens of the earlier turns of a conversation come from."""

    SAMPLED = "sampled"
    """The messages have the tokens that were sampled."""
    RESTORED = "restored"
    """The messages have other tokens, which were replaced by those that were sampled."""
    UNKNOWN = "unknown"
    """No earlier turn is known, so that all tokens are those of the messages."""


@dataclass(frozen=True)
class Continuation:
    """A prompt, with the tokens that were sampled in place of those of the messages that the client has sent."""

    token_ids: list[int]
    """Tokens of the prompt."""
    num_known: int
    """Number of tokens up to the end of the last turn in it."""
    last_turn: TurnRecord
    """That turn."""
    is_changed: bool
    """Whether tokens were replaced."""


@dataclass(frozen=True)
class SampledTurn:
    """The responses to the last message of a conversation."""

    prompt: Sequence[int]
    """Tokens that the responses follow."""
    rollouts: Sequence[Rollout]
    """The responses."""
    trajectory_id: str
    """Id of the conversation."""
    turn: int
    """Number of the turn."""


@dataclass
class Conversation:
    """The messages of one HTTP request, and what is known of them."""

    messages: Sequence[Mapping[str, Any]]
    """The messages, as vLLM's server passes them to the chat template."""
    settings: Any = None
    """Everything else that determines the prompt, for example the tools."""
    is_open: bool = False
    """Whether the response continues the last message."""
    trajectory_id: str = ""
    """Id that the client has given to its conversation; empty without."""
    token_ids: Sequence[int] = ()
    """Tokens of the prompt as the client has sent it."""
    continuation: Continuation | None = None
    """What is known of it."""
    sampled: SampledTurn | None = None
    """The responses, once all are sampled."""
    _digests: list[bytes] = field(default_factory=list)

    def digest(self, length: int) -> bytes:
        """Return a hash of the first *length* messages, which does not depend on how clients format them."""
        if not self._digests:
            self._digests.append(_hash(b"", self.settings))
        for message in self.messages[len(self._digests) - 1 : length]:
            self._digests.append(_hash(self._digests[-1], _content(message)))
        return self._digests[length]


def _hash(previous: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return blake2b(previous + text.encode(errors="surrogatepass"), digest_size=16).digest()


def _content(message: Mapping[str, Any]) -> Any:
    """Return what clients send back of a message, however they format it."""
    if message.get("role") != "assistant":
        return [message.get("role"), _text(message.get("content"))]
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    arguments = [[call.get("name"), _parsed(call.get("arguments"))] for call in calls]
    return ["assistant", _text(message.get("content")).rstrip(_INCOMPLETE).strip(), arguments]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)  # as vLLM's server joins them
    return json.dumps(content, sort_keys=True, default=str)


def _parsed(arguments: Any) -> Any:
    """Return the value of a tool call's arguments, of which several texts in JSON may be the same."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return arguments.strip()
    return _plain({} if arguments is None else arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # as clients in JavaScript write it
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def turn_names(conversation: Conversation, index: int, message: Mapping[str, Any]) -> TurnNames:
    """Return the names of the turn that ends with *message*, the one at *index*, as the client receives or sends it.

    Several responses to the same messages may have the same content, but differ in their reasoning, which clients may
    not send back. The ids of tool calls and of the trajectory tell them apart.
    """
    digest = _hash(conversation.digest(index), _content(message))
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    call_ids = [call.get("id") for call in message.get("tool_calls") or ()]
    distinct = [
        *([["calls", call_ids]] if any(call_ids) else []),
        *([["trajectory", conversation.trajectory_id]] if conversation.trajectory_id else []),
        ["sent", _text(message.get("content")), reasoning],
    ]
    return TurnNames([_hash(digest, name).hex() for name in distinct], digest.hex())


def end_of_message(token_ids: Sequence[int], end_tokens: Set[int], number: int) -> int | None:
    """Return the index behind the end token with this number, counted from 1; None if there are fewer."""
    ends = (index for index, token in enumerate(token_ids, 1) if token in end_tokens)
    return next((index for count, index in enumerate(ends, 1) if count == number), None)


def num_ends(token_ids: Iterable[int], end_tokens: Set[int]) -> int:
    """Return the number of end tokens."""
    return sum(token in end_tokens for token in token_ids)


class Conversations:
    """The conversations of a job, which all its servers share.

    Args:
        client: connection to the job.
        end_tokens: tokens that end a response of the model.
        end_token: the one with which the chat template ends a response that was cut off; None if it has none.
    """

    def __init__(self, client: RequestClient, end_tokens: Set[int], end_token: int | None) -> None:
        self._client, self._end_tokens, self._end_token = client, end_tokens, end_token

    async def find(self, conversation: Conversation) -> PrefixSource:
        """Find the last known turn of a conversation, and set its continuation.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        closed = conversation.messages[: len(conversation.messages) - conversation.is_open]
        indices = [index for index, message in enumerate(closed) if message.get("role") == "assistant"]
        found = await self._client.turns.find([turn_names(conversation, index, closed[index]) for index in indices])
        for index, record_id in zip(reversed(indices), reversed(found), strict=True):
            turns = await self._client.turns.read(record_id) if record_id else None
            if turns and (start := self._end_of_turn(conversation, turns[-1], index)) is not None:
                known = [token for turn in turns for token in turn.token_ids]
                is_changed = known != list(conversation.token_ids[:start])
                conversation.continuation = Continuation(
                    [*known, *conversation.token_ids[start:]], len(known), turns[-1], is_changed
                )
                return PrefixSource.RESTORED if is_changed else PrefixSource.SAMPLED
        return PrefixSource.UNKNOWN

    def _end_of_turn(self, conversation: Conversation, turn: TurnRecord, index: int) -> int | None:
        """Return the number of tokens of the client's prompt up to the end of the response at *index*; None if unclear.

        Templates end each message, or each response, with an end token.
        """
        start = end_of_message(conversation.token_ids, self._end_tokens, turn.num_ends)
        num_later = len(conversation.messages) - 1 - index
        if start is None or num_ends(conversation.token_ids[start:], self._end_tokens) > num_later:
            return None
        return start

    async def record(self, conversation: Conversation, responses: Mapping[int, Mapping[str, Any]]) -> None:
        """Record responses to a conversation, by sample, as the client receives them.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        sampled, last = conversation.sampled, conversation.continuation
        if sampled is None or conversation.is_open:
            return
        earlier = [] if last is None else [*last.last_turn.earlier, last.last_turn.record_id]
        new_prompt = sampled.prompt[0 if last is None else last.num_known :]
        records: list[tuple[TurnRecord, TurnNames]] = []
        for sample, message in responses.items():
            rollout = sampled.rollouts[sample]
            tokens = [*new_prompt, *rollout.token_ids]
            if tokens[-1] not in self._end_tokens and self._end_token is not None:
                tokens.append(self._end_token)  # as the chat template will
            record = TurnRecord(
                record_id=blake2b(rollout.rollout_id.encode(), digest_size=16).hexdigest(),
                earlier=earlier,
                token_ids=tokens,
                num_ends=num_ends(conversation.token_ids, self._end_tokens) + 1,
                trajectory_id=sampled.trajectory_id,
                turn=sampled.turn,
                problem_id=rollout.problem_id,
            )
            records.append((record, turn_names(conversation, len(conversation.messages), message)))
        await self._client.turns.write(records)
