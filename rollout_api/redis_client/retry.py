"""Pauses between Redis commands: retries of those that fail, and reads of a stream that is written often.

Every retried command must be idempotent, because a reply that was lost may belong to a command that was executed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeVar

import redis

from rollout_api.errors import RedisRefusedError, RedisUnreachableError

logger = logging.getLogger(__name__)

FIRST_CONNECTION_S = 30.0
"""Seconds that a client tries to reach a server that has never answered: long enough for a failover, and not too
long if the address is wrong.
"""
MAX_OUTAGE_S = 7.0
"""Seconds that :func:`retry` bridges: a hiccup is survived, and a user still gets an error within 10 s."""
MAX_REFUSAL_S = 180.0
"""Seconds that a server which has answered before may refuse the user, or lack a function. After a failover, the new
primary may lack both until whoever manages the users has created and loaded them there.
"""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
_SYNC_PAUSE_S = 0.2
_LOG_INTERVAL_S = 10.0

_IN_PIPELINE = r"(?:.* caused error: )?"
"""Errors of a pipeline begin with the command."""
_TRANSIENT_CODES = re.compile(
    rf"{_IN_PIPELINE}(BUSY |MISCONF |NOREPLICAS |UNBLOCKED |Script killed by user)", re.DOTALL
)
"""Error codes without a class in redis-py: a function is running or was ended, the disk is full, too few replicas are
connected, or the server has become a replica while a command waited for data.
"""
_LACKS_FUNCTION = re.compile(rf"{_IN_PIPELINE}Function not found", re.DOTALL)
_IN_TRANSACTION = re.compile(rf"{_IN_PIPELINE}Transaction discarded because of: ([A-Z]+) ", re.DOTALL)
"""Code of the error for which a transaction was refused when it was to be executed."""
_TRANSIENT_IN_TRANSACTION = ("BUSY", "MISCONF", "NOREPLICAS", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN")

_Result = TypeVar("_Result")
_WINDOW_S = 1.0
"""Time constant of the mean arrival rate."""
_MIN_RATE = 200.0
"""Reads pause from this many messages per second on. Below, the CPU time that batches save is not worth the delay."""
_PAUSE_PER_MESSAGE_S, _MAX_READ_PAUSE_S = 0.002, 0.02
"""Pause per message of the last read, and longest pause."""


def is_transient(error: redis.RedisError) -> bool:
    """Return whether *error* may go away by itself.

    That is the case while the server is slow, unreachable or loading, during a failover or a migration of slots, and
    when something else answers in the server's place (usually the proxy of a service without a running server).
    """
    if isinstance(error, redis.ResponseError) and _TRANSIENT_CODES.match(str(error)):
        return True
    if isinstance(error, redis.exceptions.ExecAbortError):
        return _refusal_of_transaction(error) in _TRANSIENT_IN_TRANSACTION
    unreachable = (
        redis.ConnectionError | redis.TimeoutError | redis.exceptions.ReadOnlyError | redis.exceptions.InvalidResponse
    )
    # ClusterError means that a slot's nodes redirected to each other for too long. MOVED is not transient: it only
    # occurs here if a node of a cluster is used as if it were a single server.
    on_cluster = redis.exceptions.ClusterError | redis.exceptions.TryAgainError
    return isinstance(error, unreachable | on_cluster) and not is_refused(error)


def is_refused(error: redis.RedisError) -> bool:
    """Return whether the server refused the user name or password."""
    return isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError)


def lacks_function(error: redis.RedisError) -> bool:
    """Return whether the server lacks the function that was called."""
    return isinstance(error, redis.ResponseError) and _LACKS_FUNCTION.match(str(error)) is not None


def is_out_of_memory(error: redis.RedisError) -> bool:
    """Return whether the server refused a write because it is full, which lasts until memory is freed or added."""
    return isinstance(error, redis.exceptions.OutOfMemoryError) or _refusal_of_transaction(error) == "OOM"


def _refusal_of_transaction(error: redis.RedisError) -> str:
    """Return the code of the error for which the server refused to execute a transaction; empty if it did not."""
    refusal = _IN_TRANSACTION.match(str(error)) if isinstance(error, redis.exceptions.ExecAbortError) else None
    return "" if refusal is None else refusal[1]


def concerns_server(error: redis.RedisError) -> bool:
    """Return whether *error* is about the server or this user's access to it, not about the keys of one command."""
    is_forbidden = isinstance(error, redis.exceptions.NoPermissionError)
    is_unusable = is_transient(error) or is_out_of_memory(error) or is_refused(error) or lacks_function(error)
    return is_unusable or is_forbidden


class RetryPolicy:
    """How long and how often a failing command is repeated.

    Args:
        max_outage: seconds of retries after transient errors.
        wait_while_full: whether to retry, without a time limit, while the server is out of memory.
        first_pause: seconds before the first retry; the pause doubles with each further one.
        max_pause: longest pause in seconds.
        log: whether to log, at most every ten seconds, that a command is being retried.
        has_answered: whether the server has answered before, and may therefore refuse the user for a while.
    """

    def __init__(
        self,
        *,
        max_outage: float = math.inf,
        wait_while_full: bool = True,
        first_pause: float = _FIRST_PAUSE_S,
        max_pause: float = _MAX_PAUSE_S,
        log: bool = True,
        has_answered: bool = False,
    ) -> None:
        self._has_answered = has_answered
        self._max_outage, self._wait_while_full = max_outage, wait_while_full
        self._first_pause, self._max_pause = first_pause, max_pause
        self._next_log = 0.0 if log else math.inf

    def record_answer(self) -> None:
        """Record that the server has executed a command for this user."""
        self._has_answered = True

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each retry, without end."""
        pause = self._first_pause
        while True:
            yield pause
            pause = min(2 * pause, self._max_pause)

    def raise_unless_retryable(self, error: redis.RedisError, failing_since: float, action: str = "") -> None:
        """Return if the command should be tried again, and log that at most every ten seconds.

        Args:
            error: error of the last attempt.
            failing_since: ``time.monotonic()`` of the first attempt.
            action: what the command does, for messages.

        Raises:
            redis.RedisError: *error*, if it is not transient or has lasted too long. A subclass may raise another
                error in its place.
        """
        outage = time.monotonic() - failing_since
        if is_out_of_memory(error):
            retryable = self._wait_while_full
        elif is_refused(error) or lacks_function(error):
            retryable = self._has_answered and outage <= min(self._max_outage, MAX_REFUSAL_S)
        else:
            retryable = is_transient(error) and outage <= self._max_outage
        if not retryable:
            self._raise(error, outage, action)
        if (now := time.monotonic()) >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            self._log_retry(error, outage, action)

    def _raise(self, error: redis.RedisError, outage: float, action: str) -> NoReturn:
        raise error

    def _log_retry(self, error: redis.RedisError, outage: float, action: str) -> None:
        logger.warning("Redis: %s: %s; retrying until it is available again.", type(error).__name__, error)


def retry(command: Callable[..., _Result], *args: Any, policy: RetryPolicy | None = None) -> _Result:
    """Return ``command(*args)``, repeated while Redis is unreachable, by default for :data:`MAX_OUTAGE_S`.

    Raises:
        redis.RedisError: the last error, or the first one that is not transient.
    """
    if policy is None:
        policy = RetryPolicy(
            max_outage=MAX_OUTAGE_S,
            wait_while_full=False,
            first_pause=_SYNC_PAUSE_S,
            max_pause=_SYNC_PAUSE_S,
            log=False,
        )
    started, pauses = time.monotonic(), policy.pauses()
    while True:
        try:
            result = command(*args)
        except redis.RedisError as error:
            policy.raise_unless_retryable(error, started)
        else:
            policy.record_answer()
            return result
        time.sleep(next(pauses))


async def retry_async(
    command: Callable[..., Awaitable[_Result]], *args: Any, policy: RetryPolicy | None = None, action: str = ""
) -> _Result:
    """Return ``await command(*args)``, repeated by default for as long as Redis is unreachable or full.

    The processes of a job wait for their server instead of losing unwritten data: a full server is backpressure.

    Raises:
        redis.RedisError: an error that is not transient, or whatever *policy* raises.
    """
    policy = policy or RetryPolicy(has_answered=True)
    started, pauses = time.monotonic(), policy.pauses()
    while True:
        try:
            result = await command(*args)
        except redis.RedisError as error:
            policy.raise_unless_retryable(error, started, action)
        else:
            policy.record_answer()
            return result
        await asyncio.sleep(next(pauses))


class ClientRetryPolicy(RetryPolicy):
    """The policy of a trainer's client, which raises errors that tell the user what to do.

    Commands are retried while Redis is unreachable, up to a time limit, and for as long as it is full. Until Redis has
    answered once, the limit is at most :data:`FIRST_CONNECTION_S`.

    Args:
        server: name of the server in messages.
        max_outage: seconds that Redis may be unreachable.
    """

    def __init__(self, server: str, max_outage: float) -> None:
        super().__init__(max_outage=min(max_outage, FIRST_CONNECTION_S))
        self._server, self._max_outage_later = server, max_outage

    def record_answer(self) -> None:
        """Record that the server has executed a command for this user; see :class:`RetryPolicy`."""
        super().record_answer()
        self._max_outage = self._max_outage_later

    async def run(self, command: Callable[[], Awaitable[_Result]], *, action: str) -> _Result:
        """Return the result of *command*, which performs *action*.

        Raises:
            RedisUnreachableError: the server was unreachable for too long.
            RedisRefusedError: an error that is not transient.
        """
        return await retry_async(command, policy=self, action=action)

    def _raise(self, error: redis.RedisError, outage: float, action: str) -> NoReturn:
        if not is_transient(error):
            raise RedisRefusedError(_explain_refusal(self._server, action, error)) from error
        if not self._has_answered:
            raise RedisUnreachableError(
                f"this client cannot reach {self._server} to {action} ({type(error).__name__}: {error}). Is the "
                "address correct, and is the server running? Nothing was sent"
            ) from error
        raise RedisUnreachableError(
            f"{self._server} has been unreachable for {outage:.0f} s while this client tried to {action} "
            f"({type(error).__name__}: {error}). Is it running, and is the address correct? Open the same step "
            "again: it receives the finished rollouts and requests the rest"
        ) from error

    def _log_retry(self, error: redis.RedisError, outage: float, action: str) -> None:
        if is_out_of_memory(error):
            logger.warning(
                "%s is out of memory; this client waits to %s and continues once results are released or maxmemory "
                "is raised. (%s)",
                self._server,
                action,
                error,
            )
        else:
            is_unusable = is_refused(error) or lacks_function(error)
            logger.warning(
                "%s %s (%s: %s); retrying to %s for up to %.0f s.",
                self._server,
                "cannot be used yet" if is_unusable else "does not answer",
                type(error).__name__,
                error,
                action,
                (min(self._max_outage, MAX_REFUSAL_S) if is_unusable else self._max_outage) - outage,
            )


def _explain_refusal(server: str, action: str, error: redis.RedisError) -> str:
    if is_refused(error):
        remedy = "correct the user name or password"
    elif lacks_function(error):
        remedy = "then try again"
    elif isinstance(error, redis.exceptions.NoPermissionError):
        remedy = "extend the user's ACL"
    elif isinstance(error, redis.exceptions.AskError):
        remedy = "it is a node of a cluster, but a job's messages need a single server: use the URL of one"
    else:
        remedy = "it must be Redis 7.0 or Valkey 7.2, and permit their ordinary commands"
    return f"{server} refused to {action}: {type(error).__name__}: {error}; {remedy}"


class BatchPacer:
    """Decides how long to wait between two reads of a stream, so that many messages arrive in few batches.

    A few messages arrive at once.
    """

    def __init__(self) -> None:
        self._rate, self._last_read = 0.0, -math.inf
        """Messages per second, and when the last read ended."""

    def pause(self, num_found: int, now: float) -> float:
        """Return the seconds to wait before the next read.

        Args:
            num_found: number of messages of the read that has just ended.
            now: ``time.monotonic()``.
        """
        self._rate = self._rate * math.exp((self._last_read - now) / _WINDOW_S) + num_found / _WINDOW_S
        self._last_read = now
        return min(_MAX_READ_PAUSE_S, num_found * _PAUSE_PER_MESSAGE_S) if self._rate > _MIN_RATE else 0.0
