"""A client that sends commands which are executed at the same time together."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

import redis.asyncio

_MAX_COMMANDS = 256
"""Largest number of commands in one round trip."""


class _Command(NamedTuple):
    args: tuple[Any, ...]
    options: dict[str, Any]
    reply: asyncio.Future[Any]


class CombiningRedis(redis.asyncio.Redis):
    """A client that needs one round trip, and one connection, for all commands that wait at the same time.

    A round trip costs both sides several times the CPU time of a command in it. A command is sent at once if none is in
    flight; those that are executed meanwhile follow together. Each gets its own reply or error. Commands that block in
    the server, and explicit pipelines, have connections of their own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: deque[_Command] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command; see :class:`redis.asyncio.Redis`."""
        if b"BLOCK" in args:
            return await self._execute_alone(*args, **options)
        reply = asyncio.get_running_loop().create_future()
        self._waiting.append(_Command(args, options, reply))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send_waiting())
        return await reply

    async def _send_waiting(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(_MAX_COMMANDS, len(self._waiting)))]
            commands = [command for command in taken if not command.reply.done()]  # the caller may be cancelled
            try:
                replies = await self._execute_all(commands)
            except Exception as error:
                replies = [error] * len(commands)
            except asyncio.CancelledError:  # the event loop is being closed
                for command in (*commands, *self._waiting):
                    command.reply.cancel()
                self._waiting.clear()
                raise
            for command, reply in zip(commands, replies, strict=True):
                if command.reply.done():
                    continue
                if isinstance(reply, Exception):
                    command.reply.set_exception(reply)
                else:
                    command.reply.set_result(reply)

    async def _execute_alone(self, *args: Any, **options: Any) -> Any:
        execute: Any = super().execute_command
        return await execute(*args, **options)

    async def _execute_all(self, commands: list[_Command]) -> list[Any]:
        if len(commands) == 1:  # without the overhead of a pipeline
            return [await self._execute_alone(*commands[0].args, **commands[0].options)]
        pipeline = self.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command.args, **command.options)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies
