"""A connection to Redis on which commands are sent without waiting for the replies to earlier ones."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import hiredis
import redis
import redis.asyncio.connection as async_connection
from redis._parsers import BaseParser

_INCOMPLETE = object()
"""What the parser returns while it has no complete reply."""


class _Command(NamedTuple):
    chunks: Sequence[bytes]
    reply: asyncio.Future[Any]
    deadline: float
    """Time of the event loop until which the reply must have arrived."""


class Wire(asyncio.Protocol):
    """A connection on which many commands are in flight at the same time. Replies arrive in their order.

    redis-py connects and authenticates; afterwards, this class reads and writes the transport itself, because the
    coroutines and time limits with which redis-py surrounds each command take several times the CPU time of the
    command. Commands that are sent in the same iteration of the event loop are written together.

    Args:
        pool: the pool to which the connection belongs.
        connection: a connection of the pool that is open and not used otherwise.
    """

    def __init__(self, pool: async_connection.ConnectionPool, connection: async_connection.AbstractConnection) -> None:
        self.is_usable = True
        """Whether commands can be sent; False after an error, or once the server is no primary any more."""
        self._pool, self._connection = pool, connection
        self._loop = asyncio.get_running_loop()
        self._timeout_s = math.inf if connection.socket_timeout is None else float(connection.socket_timeout)
        self._reader = hiredis.Reader(
            protocolError=redis.exceptions.InvalidResponse,
            replyError=BaseParser.parse_error,
            notEnoughData=_INCOMPLETE,
        )
        self._unsent: list[_Command] = []
        self._in_flight: deque[_Command] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        # redis-py has no public attribute for the transport of a connection.
        self._transport: asyncio.Transport = connection._writer.transport  # type: ignore[union-attr,assignment]
        self._streams = self._transport.get_protocol()
        self._transport.set_protocol(self)

    @classmethod
    async def open(cls, pool: async_connection.ConnectionPool) -> Wire:
        """Connect to the server of a pool.

        Raises:
            redis.RedisError: the server cannot be reached, or refuses the user.
        """
        connection = await pool.get_connection()
        return cls(pool, connection)

    @property
    def is_writable(self) -> bool:
        """Whether the server has read most of what was sent before."""
        return self._writable.is_set()

    async def wait_writable(self) -> None:
        """Wait until the server has read most of what was sent before."""
        while not self._writable.is_set():
            await self._writable.wait()

    def send(self, *args: Any) -> asyncio.Future[Any]:
        """Send a command.

        Returns:
            The reply, as the parser returns it. It may fail with these errors:

            - ``redis.ResponseError``: the server has replied with an error.
            - ``redis.TimeoutError``: no reply has arrived in time. The connection is closed.
            - ``redis.ConnectionError``: the connection is lost.
        """
        reply: asyncio.Future[Any] = self._loop.create_future()
        if not self._unsent:
            self._loop.call_soon(self._flush)
        deadline = self._loop.time() + self._timeout_s
        self._unsent.append(_Command(self._pack(args), reply, deadline))
        return reply

    def _pack(self, args: tuple[Any, ...]) -> Sequence[bytes]:
        if " " not in str(args[0]):
            with contextlib.suppress(TypeError):  # it does not know all types
                return (hiredis.pack_command(args),)
        return self._connection.pack_command(*args)

    def abort(self, error: Exception) -> None:
        """Close the connection at once; commands without a reply fail with *error*."""
        self.is_usable = False
        self._transport.abort()
        self._fail_all(error)

    async def close(self) -> None:
        """Close the connection and give it back to the pool."""
        self.abort(redis.ConnectionError("the connection was closed"))
        await self._connection.disconnect(nowait=True)
        await self._pool.release(self._connection)

    def _flush(self) -> None:
        if not self.is_usable:  # replies to what was sent before may still arrive
            self._fail(self._unsent, redis.ConnectionError("the connection was closed"))
            return
        commands = [command for command in self._unsent if not command.reply.done()]  # the caller may be cancelled
        self._unsent.clear()
        if not commands:
            return
        self._in_flight += commands
        self._transport.writelines([chunk for command in commands for chunk in command.chunks])
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        deadline = self._in_flight[0].deadline
        self._timer = self._loop.call_at(deadline, self._check_deadline) if deadline < math.inf else None

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._in_flight:
            return
        if self._in_flight[0].deadline <= self._loop.time():
            self.abort(redis.TimeoutError(f"Redis has not replied within {self._timeout_s:g} s"))
        else:
            self._start_timer()

    @staticmethod
    def _fail(commands: list[_Command] | deque[_Command], error: Exception) -> None:
        failed = list(commands)
        commands.clear()
        for command in failed:
            if not command.reply.done():
                command.reply.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        self._fail(self._in_flight, error)
        self._fail(self._unsent, error)
        self._writable.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        """Pass the replies in *data* on; see :class:`asyncio.Protocol`."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                self._pass_on(reply)
        except redis.RedisError as error:  # not a reply of Redis
            self.abort(error)

    def _pass_on(self, reply: Any) -> None:
        waiting = self._in_flight.popleft().reply
        if isinstance(reply, redis.exceptions.ReadOnlyError):
            self.is_usable = False  # another server is the primary now
        if waiting.done():
            return
        if isinstance(reply, Exception):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the commands without a reply; see :class:`asyncio.Protocol`."""
        self.is_usable = False
        self._fail_all(redis.ConnectionError(f"the connection to Redis is lost ({exc or 'closed by the server'})"))
        self._streams.connection_lost(exc)

    def pause_writing(self) -> None:
        """Let commands wait until the server has read those before; see :class:`asyncio.Protocol`."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let commands be sent again; see :class:`asyncio.Protocol`."""
        self._writable.set()
