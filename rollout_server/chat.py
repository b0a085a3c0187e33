"""vLLM's chat API, which also recognises and records conversations."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from rollout_api.errors import RolloutClientError
from rollout_server.conversations import Conversation, Conversations
from rollout_server.request_context import current_context

logger = logging.getLogger(__name__)

_RECORD_TIMEOUT_S = 2.0
"""Seconds that a response may wait until its conversation is recorded."""
_SETTINGS = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "tools")
"""Fields of a request that determine its prompt, beside the messages."""
_END = '"finish_reason":"'
"""What the last event of a response contains, and no earlier one, because quotes in texts are escaped."""


class ConversationChat(OpenAIServingChat):  # type: ignore[misc]  # mypy skips vLLM, so the base class is Any
    """vLLM's chat API for a job. It records what clients receive, and so what they may send back."""

    conversations: Conversations

    @classmethod
    def adopt(cls, chat: OpenAIServingChat, conversations: Conversations) -> None:
        """Make vLLM's chat API one that records conversations."""
        chat.__class__ = cls
        chat.conversations = conversations

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """See the base class."""
        rendered = await super().render_chat_request(request)
        if isinstance(rendered, tuple):
            current_context().conversation = self._conversation(request, rendered[0])
        return rendered

    def _conversation(self, request: ChatCompletionRequest, messages: Sequence[Any]) -> Conversation:
        """Return the conversation of a request, which is empty if it cannot be recognised."""
        if request.truncate_prompt_tokens is not None or not all(isinstance(one, Mapping) for one in messages):
            return Conversation([], is_recorded=False)  # Harmony's messages, for example, are rendered by vLLM itself
        settings = request.model_dump(mode="json", include=set(_SETTINGS), exclude_none=True)
        if request.tool_choice == "none" and self.exclude_tools_when_tool_choice_none:
            settings.pop("tools", None)
        is_open = request.continue_final_message
        return Conversation(messages[:-1] if is_open else messages, settings, is_recorded=not is_open)

    async def chat_completion_full_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Record the responses before they are sent."""
        response = await super().chat_completion_full_generator(*args, **kwargs)
        if isinstance(response, ChatCompletionResponse):
            await self._record({choice.index: choice.message.model_dump() for choice in response.choices})
        return response

    async def chat_completion_stream_generator(self, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        """Record each response before its end is sent."""
        messages: dict[int, _StreamedMessage] = {}
        events: list[str] = []
        async for event in super().chat_completion_stream_generator(*args, **kwargs):
            events.append(event)
            if _END in event:  # until then, nothing needs to be parsed
                for choice in _choices(events):
                    message = messages.setdefault(choice["index"], _StreamedMessage())
                    message.append(choice.get("delta") or {})
                    if choice.get("finish_reason"):
                        await self._record({choice["index"]: message.as_message()})
                events.clear()
            yield event

    async def _record(self, responses: Mapping[int, Mapping[str, Any]]) -> None:
        """Record responses, if Redis does not take too long."""
        conversation = current_context().conversation
        if conversation is None:
            return
        try:
            async with asyncio.timeout(_RECORD_TIMEOUT_S):
                await self.conversations.record(conversation, responses)
        except (TimeoutError, RolloutClientError) as error:
            reason = str(error) or f"Redis took more than {_RECORD_TIMEOUT_S:g} s"
            logger.warning("The turn of a conversation is not recorded, so its next turn will be unknown: %s", reason)


def _choices(events: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the choices of server-sent events of vLLM's server."""
    for event in events:
        data = event.removeprefix("data: ").strip()
        if data.startswith("{"):
            yield from json.loads(data).get("choices") or ()


class _StreamedMessage:
    """A response that arrives in parts."""

    def __init__(self) -> None:
        self._texts = {"content": "", "reasoning": ""}
        self._calls: dict[int, dict[str, Any]] = {}

    def append(self, delta: Mapping[str, Any]) -> None:
        """Append the next part."""
        for name in self._texts:
            self._texts[name] += delta.get(name) or ""
        for part in delta.get("tool_calls") or ():
            call = self._calls.setdefault(part["index"], {"id": None, "function": {"name": "", "arguments": ""}})
            call["id"] = call["id"] or part.get("id")
            for name, text in (part.get("function") or {}).items():
                call["function"][name] += text or ""

    def as_message(self) -> dict[str, Any]:
        """Return what has arrived as a message."""
        return {"role": "assistant", **self._texts, "tool_calls": [self._calls[index] for index in sorted(self._calls)]}
