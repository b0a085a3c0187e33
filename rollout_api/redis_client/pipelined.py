"""A client whose concurrent commands share a connection."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import hiredis
import redis
import redis.asyncio
import redis.asyncio.connection as async_connection
from redis._parsers import BaseParser
from redis.asyncio.client import Pipeline

from rollout_api.asyncio_tasks import cancel_and_wait

_INCOMPLETE = object()
"""The parser returns this while it has no complete reply."""


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise a connection error where uvloop raises RuntimeError: for a connection that the other side has closed."""
    try:
        yield
    except RuntimeError as error:
        if "closed" not in str(error):
            raise
        raise redis.ConnectionError(f"the connection was closed ({error})") from error


class _Command(NamedTuple):
    chunks: Sequence[bytes]
    reply: asyncio.Future[Any]
    deadline: float
    """Time of the event loop until which the reply must have arrived."""


class PipelinedConnection(asyncio.Protocol):
    """A connection with many commands in flight at the same time. Replies arrive in their order.

    redis-py connects and authenticates; afterwards, this class reads and writes the transport itself, because the
    coroutines and time limits that redis-py puts around each command take several times the CPU time of the
    command. Commands that are sent in the same iteration of the event loop are written together.

    Args:
        pool: the pool that the connection belongs to.
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
    async def open(cls, pool: async_connection.ConnectionPool) -> PipelinedConnection:
        """Connect to the server of a pool.

        Raises:
            redis.RedisError: the server cannot be reached, or refuses the user.
        """
        with _connection_errors():
            connection = await pool.get_connection()
            try:
                return cls(pool, connection)
            except BaseException:
                await connection.disconnect(nowait=True)
                await pool.release(connection)
                raise

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
        try:
            self._transport.writelines([chunk for command in commands for chunk in command.chunks])
        except RuntimeError as error:  # see _connection_errors
            self.abort(redis.ConnectionError(f"the connection was closed ({error})"))
            return
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


class PipelinedRedis(redis.asyncio.Redis):
    """A client that sends each command at once, without waiting for the replies to others.

    Concurrent commands share one connection and are independent of each other; each gets its own reply or error.
    Commands that block in the server, and transactions, have connections of their own. The pool must use RESP2.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._retries = int(self.connection_pool.connection_kwargs["retry"].get_retries())
        self._shared: PipelinedConnection | None = None
        self._opening: asyncio.Task[PipelinedConnection] | None = None
        self._blocking: list[PipelinedConnection] = []
        """Idle connections for commands that block."""
        self._is_closed = False
        self._failed: list[PipelinedConnection] = []
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
                    reply = await (self._ready_connection() or await self._usable_connection()).send(*args)
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
            For each command its reply, or the server's error.

        Raises:
            redis.ConnectionError: the connection failed more often than the pool allows, or could not be opened.
            redis.TimeoutError: likewise.
        """
        retries = self._retries
        while True:
            try:
                connection = self._ready_connection() or await self._usable_connection()
                replies = await _replies([connection.send(*args) for args, _ in commands])
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
        if not transaction:
            return _Batch(self)
        return _Transaction(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections; see :class:`redis.asyncio.Redis`."""
        self._is_closed = True
        if self._opening is not None:
            await cancel_and_wait(self._opening)
        connections = [*self._blocking, *self._failed, *([] if self._shared is None else [self._shared])]
        self._shared = None
        self._blocking.clear()
        self._failed.clear()
        for connection in connections:
            await connection.close()
        await super().aclose(close_connection_pool)

    def _parsed(self, reply: Any, name: str, options: dict[str, Any]) -> Any:
        callback = self.response_callbacks.get(name)
        if callback is None:
            return reply
        options.pop("keys", None)  # these are for redis-py's cache
        return callback(reply, **options)

    def _ready_connection(self) -> PipelinedConnection | None:
        """Return the shared connection if it can be written to at once."""
        connection = self._shared
        return connection if connection is not None and connection.is_usable and connection.is_writable else None

    async def _usable_connection(self) -> PipelinedConnection:
        """Return the shared connection, once it can be written to."""
        connection = self._shared
        if connection is None or not connection.is_usable:
            connection = await self._open_shared()
        await connection.wait_writable()
        return connection

    async def _open_shared(self) -> PipelinedConnection:
        """Return the shared connection. All commands wait for it together while it is being opened."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._replace_shared())
        opening = self._opening
        await asyncio.wait((opening,))
        if opening.cancelled():
            raise redis.ConnectionError("the client was closed")
        return opening.result()

    async def _replace_shared(self) -> PipelinedConnection:
        if self._shared is not None:
            self._failed.append(self._shared)
            self._shared = None
        self._shared = await self._open()
        return self._shared

    async def _open(self) -> PipelinedConnection:
        if self._is_closed:
            raise redis.ConnectionError("the client was closed")
        while self._failed:
            await asyncio.shield(self._failed.pop().close())
        return await PipelinedConnection.open(self.connection_pool)

    async def _execute_blocking(self, args: tuple[Any, ...]) -> Any:
        connection = await self._take_blocking()
        try:
            reply = await connection.send(*args)
        except BaseException as error:
            if not isinstance(error, redis.ResponseError):
                connection.abort(redis.ConnectionError("the command was cancelled"))
            self._keep_blocking(connection)
            raise
        self._keep_blocking(connection)
        return reply

    async def _take_blocking(self) -> PipelinedConnection:
        while self._blocking:
            connection = self._blocking.pop()
            if connection.is_usable:
                return connection
            self._failed.append(connection)
        return await self._open()

    def _keep_blocking(self, connection: PipelinedConnection) -> None:
        (self._blocking if connection.is_usable else self._failed).append(connection)


class _Transaction(Pipeline):
    """A transaction, which has a connection of its own."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Execute the commands; see :class:`redis.asyncio.client.Pipeline`."""
        with _connection_errors():
            return await super().execute(raise_on_error)


class _Batch(Pipeline):
    """Commands that are sent together on the shared connection of a client."""

    def __init__(self, client: PipelinedRedis) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, False, None)
        self._batch_client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Execute the commands; see :class:`redis.asyncio.client.Pipeline`.

        Raises:
            redis.RedisError: the server was unreachable, or, with *raise_on_error*, the first error of a command.
        """
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
