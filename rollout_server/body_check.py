"""Checks the bodies of requests before anything else reads them."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from types import NoneType
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_api.manifest.structured_outputs import check_size, is_encodable
from rollout_server.access import error_response

_MAX_VALUES = 4 * 2**20
"""Number of values in a body: Python needs 40 to 80 bytes for each, and a body of 64 MiB could have 20 million."""
_MAX_CONTAINERS = 2**18
"""Number of objects and lists in a body, which take more time and memory than tokens."""
MAX_BYTES_AT_ONCE = 2**16
"""Size of a body above which a thread processes it, so that other requests continue."""
_MAX_HELD_BYTES = 2**30
"""Bytes of the bodies of all requests in progress: with the values in them, which vLLM's server keeps as long as the
requests, they take several times this memory, and the pod of a server has 8 GiB by default."""
_MAX_DEPTH = 100
"""Number of objects and lists within each other. Validation, templates and messages to the job are recursive."""
_MAX_PROMPTS = 4096
"""Number of prompts of one request, each of which becomes a request to the job."""
_MAX_PLACE = 200
"""Number of characters of a value's place in a message."""
_BODY_INTEGERS = range(-(2**63), 2**64)
"""Integers that a body can have: those that MessagePack has, with or without a sign."""
_FIELDS_WITH_ANY_INTEGERS = frozenset(
    {"tools", "response_format", "structured_outputs", "documents", "metadata", "text", "guided_json"}
)
"""Fields that reach the job as text or not at all, and whose JSON schemas may have larger integers."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text, or what follows a last quotation mark: without it, each escaped one after it would be tried in turn."""
_TEXT_FIELDS = frozenset({"prompt", "text", "content", "input", "instructions", "system"})
"""Fields with a part of a prompt as text."""
_OBJECTS = (
    "structured_outputs",
    "response_format",
    "stream_options",
    "chat_template_kwargs",
    "logit_bias",
    "vllm_xargs",
)
"""Fields that are objects on every route. vLLM's server reads some of them before it checks their types."""
_COMPILED = ("structured_outputs", "response_format", "text")
"""Fields that are compiled to grammars. On some routes, ``text`` is a prompt, and on others an object with a schema."""
_TEMPLATE_ARGUMENTS = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Arguments of a tokenizer's ``apply_chat_template`` that its template reads."""

_GUIDED_PREFIX = "guided_"
_GUIDED_FIELDS = ("json", "regex", "choice", "grammar", "whitespace_pattern")
"""Fields of ``structured_outputs`` that had this prefix and were fields of the body."""


class BodyError(ValueError):
    """A body cannot be used; ``parameter`` is the place of what is wrong, if it has one."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter or 'body'}: {message}")
        self.parameter = parameter or None


class BodyCheckMiddleware:
    """ASGI middleware that refuses bodies which vLLM's server could not process, or only with gigabytes of memory.

    A body is a JSON object. It also replaces ``guided_json`` and its like by ``structured_outputs``, because vLLM's
    server would ignore them, so that the responses would not be constrained. If the bodies of all requests in progress
    are too large together, further ones are refused.

    Args:
        app: the application.
        max_characters: number of characters above which a text has more tokens than a prompt may have.
    """

    def __init__(self, app: ASGIApp, max_characters: int) -> None:
        self._app, self._max_characters = app, max_characters
        self._num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            await self._app(scope, receive, send)
            return
        num_own_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_own_bytes
            message = await receive()
            num_bytes = len(message.get("body", b""))
            if num_bytes and self._num_held_bytes + num_bytes > _MAX_HELD_BYTES:
                raise HTTPException(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"the bodies of this server's requests in progress may have at most {_MAX_HELD_BYTES} bytes "
                    "together; try again later, or start more servers",
                )
            num_own_bytes += num_bytes
            self._num_held_bytes += num_bytes
            return message

        try:
            await self._process(scope, receive_counted, send)
        finally:
            self._num_held_bytes -= num_own_bytes

    async def _process(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
            if body is None:
                return
            if len(body) > MAX_BYTES_AT_ONCE:
                body = await asyncio.to_thread(checked_body, body, self._max_characters)
            elif body:
                body = checked_body(body, self._max_characters)
        except HTTPException as error:  # the body is too large, or all bodies together are
            await error_response(HTTPStatus(error.status_code), error.detail)(scope, receive, send)
            return
        except BodyError as error:
            await error_response(HTTPStatus.BAD_REQUEST, str(error), error.parameter)(scope, receive, send)
            return
        waiting = [body]
        del body  # vLLM's server has it once more

        async def receive_checked() -> Message:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            return await receive()

        await self._app(scope, receive_checked, send)


async def read_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if its client has disconnected."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def checked_body(body: bytes, max_characters: int) -> bytes:
    """Return a body that vLLM's server can process.

    Raises:
        BodyError: it is not a JSON object, or has a value that cannot be processed.
    """
    # Commas and brackets in texts do not count, but removing the texts takes longer.
    if _exceeded_limit(body) and (limit := _exceeded_limit(_STRING.sub(b"", body))):
        raise BodyError("", f"it has more than {limit}; send several requests")
    try:
        fields = json.loads(body)
    except RecursionError:
        raise _too_deep("") from None
    except ValueError as error:
        raise BodyError("", f"it is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BodyError("", f"it must be a JSON object, but is {_kind(fields)}")
    for name in _OBJECTS:
        if (value := fields.get(name)) is not None and not isinstance(value, dict):
            raise BodyError(name, f"it must be a JSON object, but is {_kind(value)}")
    if not isinstance(ids := fields.get("request_ids", []), list) or not all(isinstance(one, str) for one in ids):
        # vLLM's server answers before it looks at them.
        raise BodyError("request_ids", "it must be a list of texts")
    _check_values(fields, max_characters)
    _check_prompts(fields)
    has_guided_fields = _replace_guided_fields(fields)
    for name in (*_COMPILED, *(["tools"] if _has_compiled_tools(fields) else [])):
        if isinstance(value := fields.get(name), dict | list):
            try:
                check_size("it", value)
            except ValueError as error:
                raise BodyError(name, str(error)) from None
    return json.dumps(fields).encode() if has_guided_fields else body


def _has_compiled_tools(fields: dict[str, Any]) -> bool:
    """Return whether the tools of a body constrain the response, and are therefore compiled to a grammar."""
    if fields.get("tool_choice") not in (None, "auto", "none"):
        return True
    tools = fields.get("tools")
    objects = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    functions = [tool["function"] for tool in objects if isinstance(tool.get("function"), dict)]
    return any(one.get("strict") for one in (*objects, *functions))


def _exceeded_limit(body: bytes) -> str:
    """Return which limit a body exceeds if it has no texts; empty if none."""
    containers = body.count(b"[") + body.count(b"{")
    if containers > _MAX_CONTAINERS:
        return f"{_MAX_CONTAINERS} objects and lists"
    return f"{_MAX_VALUES} values" if containers + body.count(b",") > _MAX_VALUES else ""


def _check_values(fields: dict[str, Any], max_characters: int) -> None:
    """Check each value, its place in the body being built for an error only: places can be longer than the body.

    Raises:
        BodyError: a value cannot be processed.
    """
    _check_names(fields, [])
    keys: list[str | int] = [""]  # of the current value, and of the objects and lists around it
    levels: list[Iterator[tuple[str | int, Any]]] = [iter(fields.items())]
    while levels:
        for key, value in levels[-1]:
            keys[-1] = key
            has_any_integers = keys[0] in _FIELDS_WITH_ANY_INTEGERS
            if isinstance(value, dict | list):
                if len(levels) == _MAX_DEPTH:
                    raise _too_deep(_place(keys[:1]))
                if not value or (
                    isinstance(value, list) and _are_alike_and_usable(value, max_characters, has_any_integers)
                ):
                    continue
                if isinstance(value, dict):
                    _check_names(value, keys)
                    levels.append(iter(value.items()))
                else:
                    levels.append(enumerate(value))
                keys.append("")
                break
            if isinstance(value, str):
                if not is_encodable(value):
                    raise _not_unicode(_place(keys))
                if len(value) > max_characters and not value.startswith("data:") and _name(keys) in _TEXT_FIELDS:
                    raise BodyError(_place(keys), text_is_too_long(len(value), max_characters))
            elif isinstance(value, float):
                if not math.isfinite(value):
                    raise _not_a_number(_place(keys))
            elif isinstance(value, int) and not has_any_integers and value not in _BODY_INTEGERS:
                raise _not_a_number(_place(keys))
        else:
            levels.pop()
            keys.pop()


def _check_names(value: dict[str, Any], keys: list[str | int]) -> None:
    if not all(map(is_encodable, value)):
        raise _not_unicode(_place(keys))


def _are_alike_and_usable(values: list[Any], max_characters: int, has_any_integers: bool) -> bool:
    """Return whether a list, which may have millions of tokens, has values of one type, none of them wrong."""
    types = set(map(type, values))
    if types == {int}:
        return has_any_integers or (min(values) in _BODY_INTEGERS and max(values) in _BODY_INTEGERS)
    if types == {float}:
        return all(map(math.isfinite, values))
    if types == {str}:
        return max(map(len, values)) <= max_characters and all(map(is_encodable, values))
    return types <= {bool, NoneType}


def _name(keys: list[str | int]) -> str:
    """Return the name of the field that has a value, possibly within lists."""
    return next(key for key in reversed(keys) if isinstance(key, str))


def _place(keys: list[str | int]) -> str:
    """Return where a value is, for a message."""
    parts = [f".{key[: _MAX_PLACE + 1]}" if isinstance(key, str) else f"[{key}]" for key in keys]
    place = "".join(parts).removeprefix(".")
    return place if len(place) <= _MAX_PLACE else f"{place[:_MAX_PLACE]}…"


def text_is_too_long(length: int, max_characters: int) -> str:
    """Return what is wrong with a text that has more characters than a prompt can have."""
    return (
        f"the text has {length} characters, but a prompt has at most {max_characters}: the job's engine.maxModelLen "
        "times the characters of the longest token; shorten it"
    )


def _check_prompts(fields: dict[str, Any]) -> None:
    """Check the number of prompts, and what is passed to the template of each.

    Raises:
        BodyError: there are too many, or an argument is not the template's.
    """
    for name in ("prompt", "messages"):
        prompts = fields.get(name)
        if isinstance(prompts, list) and len(prompts) > _MAX_PROMPTS and isinstance(prompts[0], list | str):
            raise BodyError(name, f"a request has at most {_MAX_PROMPTS} prompts; send several requests")
    arguments = fields.get("chat_template_kwargs")
    if isinstance(arguments, dict) and (wrong := arguments.keys() & _tokenizer_arguments()):
        raise BodyError(
            f"chat_template_kwargs.{min(wrong)}",
            "this is an argument of the tokenizer, not of the template; remove it",
        )


@cache
def _tokenizer_arguments() -> frozenset[str]:
    """Return the arguments of ``apply_chat_template`` that are none of the template, such as one that adds padding."""
    from transformers import PreTrainedTokenizerBase

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(parameters) - _TEMPLATE_ARGUMENTS


def _replace_guided_fields(fields: dict[str, Any]) -> bool:
    """Move fields that vLLM has removed to ``structured_outputs``, and return whether there were any."""
    given = {name: fields[_GUIDED_PREFIX + name] for name in _GUIDED_FIELDS if _GUIDED_PREFIX + name in fields}
    constraints = {name: value for name, value in given.items() if value is not None}
    if not constraints:
        return False
    for name in given:
        del fields[_GUIDED_PREFIX + name]
    # If there are several constraints, vLLM's server refuses the request.
    fields["structured_outputs"] = (fields.get("structured_outputs") or {}) | constraints
    return True


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else "a number"


def _too_deep(place: str) -> BodyError:
    return BodyError(place, f"objects and lists are nested more than {_MAX_DEPTH} deep")


def _not_unicode(place: str) -> BodyError:
    return BodyError(place, "the text has an unpaired surrogate, so it is not Unicode; send whole characters")


def _not_a_number(place: str) -> BodyError:
    return BodyError(place, "the number is not finite, or an integer has more than 64 bits")
