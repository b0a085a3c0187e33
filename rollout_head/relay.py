"""The relay: it moves finished rollouts and their rewards from a job's streams to the history."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import redis

from rollout_api.protocol.history_encoding import decode_draft_sources
from rollout_api.protocol.keys import CONTEXT_FIELD, TRACE_FIELD, MessageKeys
from rollout_api.protocol.messages import CodecError, Rewards, Rollout, RolloutId, decode, unpack_tokens
from rollout_api.redis_client.retry import concerns_server, retry
from rollout_head.tracing import SpanData, TraceExporter, span_of_append
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import AppendResult, HistoryStore
from rollout_store.job.requests import RequestTrace
from rollout_store.job.streams import Entry, HistoryStream, Outbox, arrival_time

logger = logging.getLogger(__name__)

_FAILURE_LOG_INTERVAL_S = 30.0
"""Seconds between two log messages about a continuing failure."""
_BATCH_INTERVAL_S = 0.05
"""Seconds for which rollouts are collected before the next batch, unless the last one was full."""
_WAIT_S = 0.5
"""Maximum seconds for which a read waits for the first entry."""
_RETRY_DELAY_S = 1.0
"""Seconds after which a failed batch is repeated."""
_BATCH = 256
"""Maximum number of entries of each stream in one batch."""
_STOP_TIMEOUT_S = 15.0
"""Seconds to wait for the batch in progress when the relay is stopped."""
_Message = TypeVar("_Message")
_RewardsByProblem = dict[str, dict[str, float]]
"""Problem id → rollout id → reward."""


class _OutboxRollout(NamedTuple):
    """A rollout of the outbox."""

    problem_id: str
    record: HistoryRecord
    entry: Entry


class Relay:
    """A thread that moves entries of the outbox and the reward stream to the history.

    An entry is deleted after the history contains it, and the history ignores repeated rollout ids. A relay can
    therefore be killed at any time; the next one repeats the entry without effect.
    """

    def __init__(
        self, client: redis.Redis, keys: MessageKeys, store: HistoryStore, traces: TraceExporter | None = None
    ) -> None:
        self.num_appended = 0
        """Number of rollouts that were appended to the history."""
        self._outbox, self._run_id, self._store, self._traces = Outbox(client, keys), keys.uid, store, traces
        self._failure: Exception | None = None
        """The error of the last batch; None if it succeeded."""
        self._generations: dict[int, int] = {}
        """Weight version → its generation in the history."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current batch; the remaining entries stay in Redis."""
        self._stopping.set()
        self._thread.join(timeout=_STOP_TIMEOUT_S)

    def drain(self) -> None:
        """Move all current entries, in the calling thread.

        Raises:
            redis.RedisError: if Redis fails; the remaining entries stay in Redis.
        """
        while self._move_batch():
            pass

    def _run(self) -> None:
        logged_at = 0.0
        while not self._stopping.is_set():
            try:
                moved = retry(self._wait_and_move_batch)
                self._failure = None
            except Exception as error:  # the relay must outlive every error; entries wait in Redis meanwhile
                if self._failure is None or time.monotonic() - logged_at > _FAILURE_LOG_INTERVAL_S:
                    logged_at = time.monotonic()
                    logger.error(
                        "Cannot move finished rollouts to the history; retrying: %s: %s", type(error).__name__, error
                    )
                moved, self._failure = 0, error
            if self._failure is not None:
                self._stopping.wait(_RETRY_DELAY_S)
            elif moved < _BATCH:
                self._stopping.wait(_BATCH_INTERVAL_S)

    def _wait_and_move_batch(self) -> int:
        self._outbox.wait(_WAIT_S)
        return self._move_batch()

    def _move_batch(self) -> int:
        """Move the oldest entries; return how many there were."""
        # The rollout of a reward entered the outbox before the reward was reported. Rewards are therefore read first,
        # and stored only when the outbox has been emptied.
        rewards, rollouts = self._outbox.read([HistoryStream.REWARDS, HistoryStream.OUTBOX], max_entries=_BATCH)
        self._move(HistoryStream.OUTBOX, rollouts, self._decode_rollout, self._append)
        if len(rollouts) < _BATCH:
            self._move(HistoryStream.REWARDS, rewards, self._decode_rewards, self._set_rewards)
        return len(rollouts) + len(rewards)

    def _move(
        self,
        stream: HistoryStream,
        entries: list[Entry],
        decode_entry: Callable[[Entry], _Message],
        store: Callable[[list[_Message]], list[redis.ResponseError | None]],
    ) -> None:
        """Store the messages of entries in the history, and delete the entries.

        Args:
            stream: the stream of the entries.
            entries: the entries.
            decode_entry: decodes an entry; raises :class:`CodecError` if it cannot be decoded.
            store: stores messages and returns an error for each one whose problem has unusable keys.
        """
        decoded: list[tuple[Entry, _Message]] = []
        rejected: list[tuple[Entry, str]] = []
        for entry in entries:
            try:
                decoded.append((entry, decode_entry(entry)))
            except CodecError as error:
                rejected.append((entry, str(error)))
        if decoded:
            errors = store([message for _, message in decoded])
            for (entry, _), refusal in zip(decoded, errors, strict=True):
                if refusal is not None:
                    rejected.append((entry, f"the keys of its problem cannot be written: {refusal}"))
        for entry, reason in rejected:
            logger.warning("Entry %s of the %s stream is moved to the dead letters: %s", entry.entry_id, stream, reason)
            self._outbox.add_dead_letter(stream, entry, reason)
        self._outbox.delete(stream, entries)

    def _decode_rollout(self, entry: Entry) -> _OutboxRollout:
        """Return the rollout of an outbox entry."""
        rollout = decode(entry.data)
        if not isinstance(rollout, Rollout):
            raise CodecError(f"a {rollout.kind} in place of a rollout")
        if rollout.weight_version is None:
            raise CodecError("a rollout without tokens")
        version = rollout.weight_version
        generation = self._generations.get(version)
        if generation is None:
            generation = self._generations[version] = self._store.metadata.publish(self._run_id, version)
        context = unpack_tokens(entry.fields.get(CONTEXT_FIELD.encode(), b""))
        record = HistoryRecord(
            rollout_id=rollout.rollout_id,
            run=self._run_id,
            weight_version=version,
            generation=generation,
            tokens=np.asarray(rollout.token_ids, dtype=np.uint32),
            finish_reason=str(rollout.finish_reason),
            context=np.asarray(context, dtype=np.uint32),
            step=-1 if rollout.step is None else rollout.step,
            draft_sources=decode_draft_sources(rollout.draft_sources or b""),
        )
        return _OutboxRollout(rollout.problem_id, record, entry)

    def _append(self, rollouts: list[_OutboxRollout]) -> list[redis.ResponseError | None]:
        results = self._store.append_all([(rollout.problem_id, rollout.record) for rollout in rollouts])
        errors = [result if isinstance(result, redis.ResponseError) else None for result in results]
        self.num_appended += errors.count(None)
        if self._traces is not None:
            now = self._outbox.clock()
            appended = zip(rollouts, results, strict=True)
            self._traces.export(
                self._append_span(rollout, now) for rollout, result in appended if result is AppendResult.APPENDED
            )
        return errors

    def _append_span(self, rollout: _OutboxRollout, appended_at: float) -> SpanData:
        rollout_id = RolloutId.parse(rollout.record.rollout_id)
        packed = rollout.entry.fields.get(TRACE_FIELD.encode(), b"")
        trace = RequestTrace.unpack(packed, self._run_id, rollout_id.request_id)
        return span_of_append(trace, rollout_id, arrival_time(rollout.entry.entry_id), appended_at)

    def _decode_rewards(self, entry: Entry) -> _RewardsByProblem:
        message = decode(entry.data)
        if not isinstance(message, Rewards):
            raise CodecError(f"a {message.kind} in place of rewards")
        by_problem: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for text, reward in message.rewards.items():
            try:
                rollout_id = RolloutId.parse(text)
            except ValueError as error:
                raise CodecError(str(error)) from None
            problem = self._outbox.problem_of(rollout_id)
            if problem is None:
                logger.warning("Discarded a reward for rollout %s, which this job does not know.", text)
                continue
            by_problem[problem][text] = reward
        return by_problem

    def _set_rewards(self, messages: list[_RewardsByProblem]) -> list[redis.ResponseError | None]:
        errors: list[redis.ResponseError | None] = []
        for by_problem in messages:
            failure = None
            for problem, rewards in by_problem.items():
                try:
                    self._store.set_rewards(problem, rewards)
                except redis.ResponseError as error:
                    if concerns_server(error):
                        raise
                    failure = error
            errors.append(failure)
        return errors
