"""Rollouts: their partials while they run, and their results once they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from rollout_api.protocol.keys import LEDGER_RETENTION_S, MESSAGE_FIELD
from rollout_api.protocol.messages import (
    MAX_KEEP_SECONDS,
    Partial,
    Purpose,
    Rollout,
    RolloutId,
    RolloutRequest,
    decode,
    encode,
    pack_tokens,
)
from rollout_api.protocol.timeline import EndedRollout
from rollout_store.history.records import CONTEXT_TOKENS
from rollout_store.job.canary import measure
from rollout_store.job.part import MAX_EVENTS, StorePart, as_text
from rollout_store.job.requests import LedgerEntry, pack_trace

TRAJECTORY_RETENTION_S = 3600
"""Seconds to remember the engine that has a trajectory's prefix cached."""
MAX_TIMELINE_ENTRIES = 100_000
"""Number of latest rollouts that the timeline keeps. They take about 20 MB."""


class StartState(NamedTuple):
    """What an engine must know before it starts a rollout."""

    ended: bool
    """Whether the rollout is already in the ledger."""
    cancelled: bool
    """Whether its request was cancelled."""


class AppendedTokens(NamedTuple):
    """Tokens to append to the stream of a rollout."""

    engine: str
    """Id of the engine that has sampled them."""
    order: str
    """Id of its order for the rollout."""
    request: RolloutRequest
    sample: int
    start: int
    """Number of tokens before these."""
    tokens: Partial


class RolloutStore(StorePart):
    """Checkpoints running rollouts and records finished ones."""

    async def finish(self, request: RolloutRequest, rollout: Rollout, *, engine: str = "", order: str = "") -> bool:
        """Record an ended rollout, keep it for the client and queue it for the history, in one atomic operation.

        The *order* of the *engine* that produced it is deleted from the engine's inbox; both are '' if none did.

        Returns:
            False, without any effect, if the rollout was recorded before or its request is unknown.
        """
        keys, rollout_id = self._keys, RolloutId.parse(rollout.rollout_id)
        for_history = rollout.purpose is Purpose.TRAIN and bool(rollout.token_ids)
        context = request.prompt_token_ids[-CONTEXT_TOKENS:] if request.turn else []
        fields = {
            "client": request.reply_to,
            "request_id": request.request_id,
            "rollout_id": rollout.rollout_id,
            "sample": rollout_id.sample,
            "engine": engine,
            "order": order,
            "ledger_entry": LedgerEntry.of(rollout).pack(),
            "result": encode(rollout, half_logprobs=request.half_logprobs),
            "timeline_entry": EndedRollout.of(request, rollout, rollout_id.sample).pack(),
            "history_entry": encode(rollout.without_logprobs()) if for_history else b"",
            "context": pack_tokens(context),
            "trace": pack_trace(request),
            "measurement": measure(request, rollout, rollout_id.sample),
            "tokens": len(rollout.token_ids),
            "decoding_steps": rollout.num_decoding_steps,
            "draft_tokens": rollout.num_draft_tokens,
            "accepted_tokens": rollout.num_accepted_tokens,
            "keep_s": request.keep_seconds or 0,
            "streamed": request.stream,
            # The servers that send requests whose results expire remember idempotency keys for a day.
            "ledger_s": LEDGER_RETENTION_S if request.keep_seconds is None else MAX_KEEP_SECONDS,
            "trajectory_s": TRAJECTORY_RETENTION_S if request.trajectory_id else 0,
            "max_events": MAX_EVENTS,
            "max_timeline": MAX_TIMELINE_ENTRIES,
        }
        recorded = await self._call(
            "finish",
            keys=[
                keys.ledger(request.request_id),
                keys.requests,
                keys.results(request.request_id),
                keys.result_updates(request.reply_to),
                keys.unreleased(request.reply_to),
                keys.results_written,
                keys.outbox,
                keys.partials,
                keys.attempts,
                keys.events,
                keys.inbox(engine),
                keys.trajectory(request.trajectory_id or ""),
                keys.totals,
                keys.tokens(request.request_id, rollout_id.sample),
                keys.timeline,
            ],
            args=[msgpack.packb(fields, use_bin_type=False)],  # the server's msgpack does not know bin
        )
        return bool(recorded == 1)

    async def finish_all(self, ended: Sequence[tuple[RolloutRequest, Rollout]]) -> None:
        """Record several rollouts that no engine produced, each in an atomic operation of its own."""
        await asyncio.gather(*(self.finish(request, rollout) for request, rollout in ended))

    async def totals(self) -> dict[str, int]:
        """Return the job's totals: rollouts, tokens, decoding_steps, draft_tokens and accepted_tokens."""
        return {as_text(key): int(value) for key, value in (await self._client.hgetall(self._keys.totals)).items()}

    async def checkpoint(self, request: RolloutRequest, sample: int, partial: Partial) -> bool:
        """Store the partial of a running rollout; return False if the rollout has ended."""
        stored = await self._call(
            "checkpoint",
            keys=[self._keys.ledger(request.request_id), self._keys.partials, self._keys.attempts],
            args=[str(request.rollout_id(sample)), sample, encode(partial)],
        )
        return bool(stored)

    async def append_tokens(self, appended: Sequence[AppendedTokens]) -> list[int | Exception]:
        """Append tokens to the streams of running rollouts.

        Returns:
            For each, the number of tokens in the stream; they are appended only if it was ``start``. -1 if the rollout
            has ended or belongs to another engine. The error for those that could not be appended.
        """
        replies: list[Any] = await asyncio.gather(*map(self._append_tokens, appended), return_exceptions=True)
        return [reply if isinstance(reply, Exception) else int(reply) for reply in replies]

    async def _append_tokens(self, appended: AppendedTokens) -> Any:
        keys, request_id, sample = self._keys, appended.request.request_id, appended.sample
        return await self._call(
            "append_tokens",
            keys=[
                keys.ledger(request_id),
                keys.inbox(appended.engine),
                keys.tokens(request_id, sample),
                keys.attempts,
                keys.token_updates,
            ],
            args=[
                str(appended.request.rollout_id(sample)),
                sample,
                appended.order,
                appended.start,
                appended.start + len(appended.tokens.token_ids),
                encode(appended.tokens),
                request_id,
                MAX_EVENTS,
            ],
        )

    async def partials(self, samples: Sequence[tuple[RolloutRequest, int]]) -> list[Partial | None]:
        """Return the last partial of each sample."""
        pipeline = self._client.pipeline(transaction=False)
        for request, sample in samples:
            if request.stream:
                pipeline.xrange(self._keys.tokens(request.request_id, sample))
            else:
                pipeline.hget(self._keys.partials, str(request.rollout_id(sample)))
        return [_decode_partial(data) for data in await pipeline.execute()]

    async def partial_ids(self) -> set[str]:
        """Return the ids of all rollouts that have a partial."""
        return {as_text(key) for key in await self._client.hkeys(self._keys.partials)}

    async def start_state(self, request_id: str, sample: int) -> StartState:
        """Return what an engine must know before it starts a rollout."""
        entry, cancelled = await self._client.hmget(self._keys.ledger(request_id), [str(sample), "cancelled"])
        return StartState(entry is not None, cancelled == b"1")


def _decode_partial(reply: bytes | list[tuple[bytes, dict[bytes, bytes]]] | None) -> Partial | None:
    """Return the partial in a checkpoint, or in the entries of a stream of tokens."""
    if not reply:
        return None
    encoded = [reply] if isinstance(reply, bytes) else [fields[MESSAGE_FIELD.encode()] for _, fields in reply]
    parts = [part for data in encoded if isinstance(part := decode(data), Partial)]
    return Partial.join(parts) if len(parts) > 1 else next(iter(parts), None)
