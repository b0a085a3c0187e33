"""A client whose concurrent commands share a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.client import Pipeline

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.redis_client.wire import Wire


class PipelinedRedis(redis.asyncio.Redis):
    """A client that sends each command at once, without waiting for the replies to others.

    Concurrent commands share one connection and are independent of each other; each gets its own reply or error.
    Commands that block in the server, and transactions, have connections of their own. The pool must use RESP2.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._retries = int(self.connection_pool.connection_kwargs["retry"].get_retries())
        self._shared: Wire | None = None
        self._opening: asyncio.Task[Wire] | None = None
        self._blocking: list[Wire] = []
        """Idle connections for commands that block."""
        self._is_closed = False
        self._failed: list[Wire] = []
        """Connections that are to be given back to the pool."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command; see :class:`redis.asyncio.Redis`.

        If the connection fails, the command is sent again as often as the retry settings of the pool allow.
        """
        retries = self._retries
        while True:
            try:
                if b"BLOCK" in args:
                    reply = await self._execute_blocking(args)
                else:
                    reply = await (self._ready_wire() or await self._wire()).send(*args)
                break
            except (redis.ConnectionError, redis.TimeoutError):
                if not retries:
                    raise
                retries -= 1
        return self._parsed(reply, args[0], options)

    async def execute_all(self, commands: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Execute commands together.

        Args:
            commands: arguments and options of each.

        Returns:
            For each command its reply, or the error with which the server has replied.

        Raises:
            redis.ConnectionError: the connection failed more often than the pool allows, or could not be opened.
            redis.TimeoutError: likewise.
        """
        retries = self._retries
        while True:
            try:
                wire = self._ready_wire() or await self._wire()
                replies = await _replies([wire.send(*args) for args, _ in commands])
                break
            except (redis.ConnectionError, redis.TimeoutError):
                if not retries:
                    raise
                retries -= 1
        return [
            reply if isinstance(reply, Exception) else self._parsed(reply, args[0], options)
            for reply, (args, options) in zip(replies, commands, strict=True)
        ]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Return a transaction, or a batch of commands; see :class:`redis.asyncio.Redis`."""
        return super().pipeline(transaction, shard_hint) if transaction else _Batch(self)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections; see :class:`redis.asyncio.Redis`."""
        self._is_closed = True
        if self._opening is not None:
            await cancel_and_wait(self._opening)
        wires = [*self._blocking, *self._failed, *([] if self._shared is None else [self._shared])]
        self._shared = None
        self._blocking.clear()
        self._failed.clear()
        for wire in wires:
            await wire.close()
        await super().aclose(close_connection_pool)

    def _parsed(self, reply: Any, name: str, options: dict[str, Any]) -> Any:
        callback = self.response_callbacks.get(name)
        if callback is None:
            return reply
        options.pop("keys", None)  # these are for redis-py's cache
        return callback(reply, **options)

    def _ready_wire(self) -> Wire | None:
        """Return the shared connection if it can be written to at once."""
        wire = self._shared
        return wire if wire is not None and wire.is_usable and wire.is_writable else None

    async def _wire(self) -> Wire:
        """Return the shared connection, once it can be written to."""
        wire = self._shared
        if wire is None or not wire.is_usable:
            wire = await self._open_shared()
        await wire.wait_writable()
        return wire

    async def _open_shared(self) -> Wire:
        """Return the shared connection, for which all commands wait together while it is being opened."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._replace_shared())
        opening = self._opening
        await asyncio.wait((opening,))
        if opening.cancelled():
            raise redis.ConnectionError("the client was closed")
        return opening.result()

    async def _replace_shared(self) -> Wire:
        if self._shared is not None:
            self._failed.append(self._shared)
            self._shared = None
        self._shared = await self._open()
        return self._shared

    async def _open(self) -> Wire:
        if self._is_closed:
            raise redis.ConnectionError("the client was closed")
        while self._failed:
            await asyncio.shield(self._failed.pop().close())
        return await Wire.open(self.connection_pool)

    async def _execute_blocking(self, args: tuple[Any, ...]) -> Any:
        wire = await self._take_blocking()
        try:
            reply = await wire.send(*args)
        except BaseException as error:
            if not isinstance(error, redis.ResponseError):
                wire.abort(redis.ConnectionError("the command was cancelled"))
            self._keep_blocking(wire)
            raise
        self._keep_blocking(wire)
        return reply

    async def _take_blocking(self) -> Wire:
        while self._blocking:
            wire = self._blocking.pop()
            if wire.is_usable:
                return wire
            self._failed.append(wire)
        return await self._open()

    def _keep_blocking(self, wire: Wire) -> None:
        (self._blocking if wire.is_usable else self._failed).append(wire)


class _Batch(Pipeline):
    """Commands that are sent together on the shared connection of a client."""

    def __init__(self, client: PipelinedRedis) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, False, None)
        self._batch_client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Execute the commands; see :class:`redis.asyncio.client.Pipeline`.

        Raises:
            ValueError: a command is a script, which the server may not have.
            redis.RedisError: the server was unreachable, or, with *raise_on_error*, the first error of a command.
        """
        if self.scripts:
            raise ValueError("scripts cannot be executed in a batch; await them together instead")
        commands, self.command_stack = self.command_stack, []
        replies = await self._batch_client.execute_all(commands) if commands else []
        if raise_on_error:
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies


async def _replies(sent: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Wait for the replies to commands of one connection, and return them or the errors of the server.

    Raises:
        redis.RedisError: the connection has failed.
    """
    replies: list[Any] = []
    try:
        for future in sent:
            try:
                replies.append(await future)
            except redis.ResponseError as error:
                replies.append(error)
    finally:
        for future in sent[len(replies) :]:
            if not future.cancel() and not future.cancelled():
                future.exception()  # otherwise asyncio would report that nothing has noticed the error
    return replies
