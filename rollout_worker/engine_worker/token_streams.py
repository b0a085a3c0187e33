"""Writes the tokens of running rollouts to Redis, as checkpoints and for clients, without making the rollouts wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollout_api.protocol.messages import Partial, RolloutRequest
from rollout_store.job import JobStore
from rollout_store.job.assignments import RolloutKey
from rollout_store.job.rollouts import AppendedTokens
from rollout_worker.engine.response import TokensSoFar

logger = logging.getLogger(__name__)

TOKEN_STREAM_INTERVAL_S = 0.05
"""Pause between two writes of the tokens of rollouts that are streamed. Each write takes processor time of the engine,
Redis, the client and the HTTP server, which delays the first tokens of other rollouts.
"""
Tokens = TokensSoFar | Partial
"""The tokens of a response so far."""


class CheckpointWriter:
    """Writes the newest partial of each running rollout to Redis, without making the rollouts wait."""

    def __init__(self, job_store: JobStore) -> None:
        self._job_store = job_store
        self._pending: dict[RolloutKey, tuple[RolloutRequest, Partial]] = {}
        self._added = asyncio.Event()

    def add(self, key: RolloutKey, request: RolloutRequest, partial: Partial) -> None:
        """Schedule a partial to be written; it replaces an older one that is not written yet."""
        self._pending[key] = (request, partial)
        self._added.set()

    def discard(self, key: RolloutKey) -> None:
        """Forget the unwritten partial of a rollout that has ended."""
        self._pending.pop(key, None)

    def clear(self) -> None:
        """Forget all unwritten partials."""
        self._pending.clear()

    async def run(self) -> None:
        """Write partials until cancelled. A failed write is not repeated: a later partial supersedes it."""
        failing = False
        while True:
            await self._added.wait()
            self._added.clear()
            pending, self._pending = self._pending, {}
            writes = (
                self._job_store.once.rollouts.checkpoint(request, key[1], partial)
                for key, (request, partial) in pending.items()
            )
            outcomes = await asyncio.gather(*writes, return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if failures and not failing:
                logger.warning(
                    "Cannot write checkpoints of running rollouts: %s. Later checkpoints will be tried.", failures[0]
                )
            failing = bool(failures)


class TokenStream:
    """The tokens of one rollout. What was written remains the beginning of the rollout.

    The first *written* tokens are in Redis.
    """

    def __init__(self, engine: str, order: str, request: RolloutRequest, sample: int, written: int) -> None:
        self.written = written
        self.unwritten: Tokens | None = None
        """The newest tokens; None if all are written."""
        self.is_owned = True
        """Whether the rollout still belongs to this engine."""
        self._engine, self._order, self._request, self._sample = engine, order, request, sample

    def next_append(self, unwritten: Tokens) -> AppendedTokens:
        """Return what is to be appended."""
        tokens = unwritten.since(self.written)
        return AppendedTokens(self._engine, self._order, self._request, self._sample, self.written, tokens)

    def record(self, length: int) -> None:
        """Record the reply to an append: the number of tokens in Redis, or -1 if the engine has lost the rollout.

        Redis may have fewer tokens than before, if it was restarted.
        """
        self.is_owned = self.is_owned and length >= 0
        self.written = max(0, length)
        if not self.is_owned or (self.unwritten is not None and self.written >= self.unwritten.num_tokens):
            self.unwritten = None


class TokenStreams:
    """Writes the new tokens of all rollouts that are streamed, together, without making the rollouts wait."""

    def __init__(self, job_store: JobStore) -> None:
        self._job_store = job_store
        self._open: set[TokenStream] = set()
        self._added, self._urgent = asyncio.Event(), asyncio.Event()

    @contextmanager
    def open(self, stream: TokenStream) -> Iterator[None]:
        """Write the tokens that are added to *stream* within this context; those that are unwritten at its end are not.

        The finished rollout contains them.
        """
        self._open.add(stream)
        try:
            yield
        finally:
            self._open.discard(stream)

    def add(self, stream: TokenStream, tokens: Tokens) -> None:
        """Schedule the tokens of a rollout to be written."""
        if stream.is_owned:
            stream.unwritten = tokens
            self._added.set()
            if not stream.written:
                self._urgent.set()

    async def complete(self, stream: TokenStream, tokens: Tokens) -> None:
        """Write all tokens of a rollout that another engine continues.

        Raises:
            redis.RedisError: Redis fails. The call can be repeated.
        """
        while stream.is_owned and stream.written < tokens.num_tokens:
            stream.unwritten = tokens
            await self._write([stream])

    async def run(self) -> None:
        """Write tokens until cancelled: the first ones of a rollout at once, and others after short pauses."""
        is_failing = False
        while True:
            await self._added.wait()
            self._added.clear()
            self._urgent.clear()
            try:
                await self._write(list(self._open))
                is_failing = False
            except Exception as error:  # what was not written is written with later tokens
                self._added.set()
                if not is_failing:
                    logger.warning("Cannot stream the tokens of running rollouts: %s. Will try again.", error)
                is_failing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOKEN_STREAM_INTERVAL_S):
                    await self._urgent.wait()

    async def _write(self, streams: Sequence[TokenStream]) -> None:
        appended, failures = [], []
        for stream in streams:
            if stream.unwritten is not None:
                try:
                    appended.append((stream, stream.next_append(stream.unwritten)))
                except Exception as error:  # it concerns this rollout alone
                    failures.append(error)
        replies = await self._job_store.rollouts.append_tokens([one for _, one in appended]) if appended else []
        for (stream, _), reply in zip(appended, replies, strict=True):
            if isinstance(reply, Exception):
                failures.append(reply)
            else:
                stream.record(reply)
            if stream.unwritten is not None:
                self._added.set()
        if failures:
            raise failures[0]
