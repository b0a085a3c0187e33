"""Recognises the conversation that a prompt continues, and the tokens that were sampled in it.

A client that sends messages sends back what it has read in earlier responses. The tokens of the rendered messages may
differ from those that were sampled: several sequences of tokens have the same text, a chat template formats the
arguments of tool calls anew and omits earlier reasoning, and a response may have been cut off. A model that is trained
on the sampled tokens must also continue from them. Conversations are therefore recognised by their messages, and the
tokens of all messages up to the end of the last response are replaced by the sampled ones.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from rollout_api.client.request_client import RequestClient
from rollout_api.client.server_records import TurnRecord
from rollout_api.protocol.messages import Rollout

_INCOMPLETE = "\ufffd"
"""What a tokenizer returns for a part of a character."""
_MAX_GENERATION_PROMPT = 6
"""Number of last tokens of a prompt that a template may write for the response to come, but not in front of an earlier
response: the beginning of the reasoning, for example."""
_MAX_TRIALS = 3
"""Number of turns that are read, the last one first, until one fits."""


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
    """Number of tokens of the turns that are known: of all messages up to the last response that was sampled."""
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
    """The messages that are complete, as vLLM's server passes them to the chat template."""
    settings: Any = None
    """Everything else that determines the prompt, for example the tools."""
    is_recorded: bool = True
    """Whether the response is recorded: not if it continues a message."""
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
        for index in range(len(self._digests) - 1, length):
            self._digests.append(_hash(self._digests[-1], self._content(index)))
        return self._digests[length]

    def num_responses(self, start: int, stop: int | None = None) -> int:
        """Return the number of responses among the messages from index *start* on, and before *stop*."""
        return sum(message.get("role") == "assistant" for message in self.messages[start:stop])

    def _content(self, index: int) -> Any:
        """Return what clients send back of a message, however they format it."""
        message = self.messages[index]
        if message.get("role") == "assistant":
            return response_content(message)
        call = message.get("tool_call_id")
        calls: Mapping[str, Any] = next(
            (one for one in reversed(self.messages[:index]) if one.get("role") == "assistant"), {}
        )
        numbers = [number for number, one in enumerate(calls.get("tool_calls") or ()) if one.get("id") == call]
        return [message.get("role"), message.get("name"), _text(message.get("content")), numbers]


def response_content(message: Mapping[str, Any]) -> Any:
    """Return what clients send back of a response, however they format it."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    arguments = [[call.get("name"), _parsed(call.get("arguments"))] for call in calls]
    return ["assistant", _text(message.get("content")).rstrip(_INCOMPLETE).strip(), arguments]


def _hash(previous: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return blake2b(previous + text.encode(errors="surrogatepass"), digest_size=16).digest()


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
        except (ValueError, RecursionError):
            return arguments.strip()
    return _plain({} if arguments is None else arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # as clients in JavaScript write it
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def turn_names(conversation: Conversation, index: int, message: Mapping[str, Any]) -> list[str]:
    """Return the names of the turn that ends with *message*, the one at *index*, as the client receives or sends it.

    Several responses to the same messages may have the same content, but differ in their reasoning, which clients may
    not send back, or in white space. Names are ordered from those that tell most responses apart to the one that all
    of these responses share.
    """
    digest = _hash(conversation.digest(index), response_content(message))
    text, reasoning = _text(message.get("content")), message.get("reasoning") or message.get("reasoning_content")
    call_ids = [call.get("id") for call in message.get("tool_calls") or ()]
    distinct = [
        *([["reasoning", text, reasoning]] if reasoning else []),
        *([["calls", call_ids]] if any(call_ids) else []),
        *([["trajectory", conversation.trajectory_id]] if conversation.trajectory_id else []),
        ["text", text],
    ]
    return [*(_hash(digest, name).hex() for name in distinct), digest.hex()]


def _packed(token_ids: Sequence[int]) -> bytes:
    """Return token ids as bytes; prompts are too long for JSON in an event loop."""
    return array("q", token_ids).tobytes()


class RenderedPrompt:
    """The tokens of a prompt as a template renders it, with the places of its end tokens.

    A template writes an end token behind each message, or behind each response, or in front of messages.
    """

    def __init__(self, token_ids: Sequence[int], end_tokens: Set[int]) -> None:
        self._tokens = token_ids
        self.ends = [index for index, token in enumerate(token_ids, 1) if token in end_tokens]
        """Number of tokens up to each end token."""

    @property
    def num_last(self) -> int:
        """Number of tokens behind the last end token that are in later prompts, too."""
        return max(0, len(self._tokens) - (self.ends[-1] if self.ends else 0) - _MAX_GENERATION_PROMPT)

    def outline(self, num_ends: int, num_last: int, responses: Collection[int]) -> str:
        """Return a hash of the tokens up to an end token and of those behind it, without earlier responses.

        A template may render these in another way when later messages follow.

        Args:
            num_ends: number of end tokens up to this one.
            num_last: number of tokens behind it.
            responses: numbers of the end tokens, counted from 1, behind the responses that are left out.
        """
        digest, start = blake2b(digest_size=16), 0
        for number, end in enumerate(self.ends[:num_ends], 1):
            if number not in responses:
                digest.update(_packed(self._tokens[start:end]))
            start = end
        digest.update(_packed(self._tokens[start : start + num_last]))
        return digest.hexdigest()


class Conversations:
    """The conversations of a job, which all its servers share. *end_tokens* end a response of the model."""

    def __init__(self, client: RequestClient, end_tokens: Set[int]) -> None:
        self._client, self._end_tokens = client, end_tokens

    async def find(self, conversation: Conversation) -> PrefixSource:
        """Find the last known turn of a conversation, and set its continuation.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        messages, turns = conversation.messages, self._client.turns
        indices = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        found = await turns.find([turn_names(conversation, index, messages[index]) for index in indices])
        known = [(index, record_id) for index, record_id in zip(indices, found, strict=True) if record_id]
        if not known:
            return PrefixSource.UNKNOWN
        prompt = RenderedPrompt(conversation.token_ids, self._end_tokens)
        for index, record_id in reversed(known[-_MAX_TRIALS:]):
            [last] = await turns.read([record_id])
            if last is None or (start := _end_of_turn(conversation, prompt, last, index)) is None:
                continue
            earlier = await turns.read(last.earlier)
            if None not in earlier:
                tokens = [token for turn in (*earlier, last) if turn is not None for token in turn.token_ids]
                return self._continue(conversation, last, tokens, start)
        return PrefixSource.UNKNOWN

    def _continue(self, conversation: Conversation, last: TurnRecord, known: list[int], start: int) -> PrefixSource:
        rest = list(conversation.token_ids[start:])
        # The template ends a response that was cut off.
        closing = [] if known[-1] in self._end_tokens else [conversation.token_ids[start - 1]]
        is_changed = [*known, *closing] != list(conversation.token_ids[:start])
        conversation.continuation = Continuation([*known, *closing, *rest], len(known), last, is_changed)
        return PrefixSource.RESTORED if is_changed else PrefixSource.SAMPLED

    async def record(self, conversation: Conversation, responses: Mapping[int, Mapping[str, Any]]) -> None:
        """Record responses to a conversation, by sample, as the client receives them.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        sampled, continuation = conversation.sampled, conversation.continuation
        if sampled is None or not conversation.is_recorded:
            return
        prompt = RenderedPrompt(conversation.token_ids, self._end_tokens)
        earlier: list[str] = []
        ends_of_responses: list[int] = []
        num_known = 0
        if continuation is not None:
            last, num_known = continuation.last_turn, continuation.num_known
            earlier, ends_of_responses = [*last.earlier, last.record_id], [*last.responses, last.num_ends]
        records: list[tuple[TurnRecord, list[str]]] = []
        for sample, message in responses.items():
            rollout = sampled.rollouts[sample]
            tokens = [*sampled.prompt[num_known:], *rollout.token_ids]
            record = TurnRecord(
                # Responses with the same tokens are the same turn.
                record_id=blake2b(
                    bytes.fromhex(earlier[-1] if earlier else "") + _packed(tokens), digest_size=16
                ).hexdigest(),
                earlier=earlier,
                token_ids=tokens,
                num_ends=len(prompt.ends) + 1,
                num_last=prompt.num_last,
                responses=ends_of_responses,
                outline=prompt.outline(len(prompt.ends), prompt.num_last, ends_of_responses),
                trajectory_id=sampled.trajectory_id,
                turn=sampled.turn,
                problem_id=rollout.problem_id,
            )
            records.append((record, turn_names(conversation, len(conversation.messages), message)))
        await self._client.turns.write(records)


def _end_of_turn(conversation: Conversation, prompt: RenderedPrompt, turn: TurnRecord, index: int) -> int | None:
    """Return the number of tokens of the client's prompt up to the end of the response at *index*; None if unclear.

    It is unclear if the template renders the earlier messages differently now, or not every response with an end.
    """
    num_later_ends = len(prompt.ends) - turn.num_ends
    num_later_responses = conversation.num_responses(index + 1)
    only_responses_end = turn.num_ends - 1 == conversation.num_responses(0, index)
    most = num_later_responses if only_responses_end else len(conversation.messages) - 1 - index
    if not num_later_responses <= num_later_ends <= most:
        return None
    if turn.outline != prompt.outline(turn.num_ends - 1, turn.num_last, turn.responses):
        return None
    return prompt.ends[turn.num_ends - 1]
