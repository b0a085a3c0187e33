"""The relay: it moves finished rollouts and their rewards from a job's streams to the history."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import redis

from rollout_api.protocol.history_encoding import decode_draft_sources
from rollout_api.protocol.keys import CONTEXT_FIELD, TRACE_FIELD, MessageKeys
from rollout_api.protocol.messages import (
    CodecError,
    Rewards,
    Rollout,
    RolloutId,
    decode,
    digest_of,
    encode,
    unpack_tokens,
)
from rollout_api.redis_client.retry import retry
from rollout_head.tracing import SpanData, TraceExporter, span_of_append
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import AppendResult, HistoryStore
from rollout_store.job.requests import LedgerEntry, RequestTrace
from rollout_store.job.streams import MAX_DEAD_LETTER_BYTES, Entry, HistoryStream, Outbox, arrival_time

logger = logging.getLogger(__name__)

_FAILURE_LOG_INTERVAL_S = 30.0
"""Seconds between two log messages about a continuing failure."""
_BATCH_INTERVAL_S = 0.05
"""Seconds for which rollouts are collected before the next batch, unless the last one was full."""
_WAIT_S = 0.5
"""Maximum seconds for which a read waits for the first entry."""
_RETRY_DELAY_S = 1.0
"""Seconds after which a failed batch is repeated."""
_FIRST_BATCH, _MAX_BATCH = 64, 4096
"""Maximum number of entries of a stream in a batch, after one with few entries and at most. A batch takes several round
trips, so it has many entries while they are small.
"""
_BATCH_BYTES = 8_000_000
"""Approximate size of a stream's part of a batch after the first one, unless a single entry is larger."""
_COMPARED_PROBLEMS = 64
"""Maximum number of problems of which a batch reads all rollouts, to compare them with repeated ones. The repeated
rollouts of further problems stay in the outbox for the next batches.
"""
_REWARDS_PER_DEAD_LETTER = 100
"""Maximum number of refused rewards in one dead letter; fewer if their ids are long, so that none of them is cut."""
_STOP_TIMEOUT_S = 15.0
"""Seconds to wait for the batch in progress when the relay is stopped."""
_Message = TypeVar("_Message")


class _OutboxRollout(NamedTuple):
    """A rollout of the outbox."""

    problem_id: str
    record: HistoryRecord
    entry: Entry


class _Later(Enum):
    """In place of the reason why a message is refused: it stays in its stream for the next batch."""

    LATER = auto()


_Outcome = str | _Later | None
"""Why a message is refused, or whether it is stored later; None if it is stored."""


class _Reward(NamedTuple):
    """A reward of the reward stream."""

    rollout_id: RolloutId
    value: float
    digest: str
    """Digest of the tokens that were rewarded; empty if it is unknown."""


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
        self._max_entries = dict.fromkeys((HistoryStream.REWARDS, HistoryStream.OUTBOX), _FIRST_BATCH)
        """Stream → maximum number of its entries in the next batch, in the order in which they are read."""
        self._was_full = False
        """Whether the last batch had this many of a stream."""
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
        logged_at, moved = 0.0, 0
        while not self._stopping.is_set():
            try:
                moved = retry(self._move_batch if moved else self._wait_and_move_batch)
                self._failure = None
            except Exception as error:  # the relay must outlive every error; entries wait in Redis meanwhile
                if self._failure is None or time.monotonic() - logged_at > _FAILURE_LOG_INTERVAL_S:
                    logged_at = time.monotonic()
                    logger.error(
                        "Cannot move finished rollouts to the history; retrying: %s: %s", type(error).__name__, error
                    )
                moved, self._failure = 0, error
                # Larger entries may have arrived.
                self._max_entries = {one: min(count, _FIRST_BATCH) for one, count in self._max_entries.items()}
            if self._failure is not None:
                self._stopping.wait(_RETRY_DELAY_S)
            elif not self._was_full:
                self._stopping.wait(_BATCH_INTERVAL_S)

    def _wait_and_move_batch(self) -> int:
        self._outbox.wait(_WAIT_S)
        return self._move_batch()

    def _move_batch(self) -> int:
        """Move the oldest entries; return how many there were."""
        # The rollout of a reward entered the outbox before the reward was reported. Rewards are therefore read first,
        # and stored only when the outbox has been emptied.
        rewards, rollouts = self._outbox.read(self._max_entries)
        is_complete = self._move(HistoryStream.OUTBOX, rollouts, self._decode_rollout, self._append)
        if is_complete and len(rollouts) < self._max_entries[HistoryStream.OUTBOX]:
            self._move(HistoryStream.REWARDS, rewards, _decode_rewards, self._set_rewards)
        self._was_full = any(
            len(entries) >= count
            for entries, count in zip((rewards, rollouts), self._max_entries.values(), strict=True)
        )
        self._max_entries = {
            HistoryStream.REWARDS: _next_max_entries(rewards),
            HistoryStream.OUTBOX: _next_max_entries(rollouts),
        }
        return len(rollouts) + len(rewards)

    def _move(
        self,
        stream: HistoryStream,
        entries: list[Entry],
        decode_entry: Callable[[Entry], _Message],
        store: Callable[[list[_Message]], Sequence[_Outcome]],
    ) -> bool:
        """Store the messages of entries in the history, and delete the entries; return whether none was left for later.

        Args:
            stream: the stream of the entries.
            entries: the entries.
            decode_entry: decodes an entry; raises :class:`CodecError` if it cannot be decoded.
            store: stores messages and returns the outcome for each one.
        """
        decoded: list[tuple[Entry, _Message]] = []
        rejected: list[tuple[Entry, str]] = []
        left: set[str] = set()
        """Ids of the entries that stay."""
        for entry in entries:
            try:
                decoded.append((entry, decode_entry(entry)))
            except CodecError as error:
                rejected.append((entry, str(error)))
        if decoded:
            outcomes = store([message for _, message in decoded])
            for (entry, _), outcome in zip(decoded, outcomes, strict=True):
                if outcome is _Later.LATER:
                    left.add(entry.entry_id)
                elif outcome is not None:
                    rejected.append((entry, outcome))
        for entry, reason in rejected:
            logger.warning("Entry %s of the %s stream is moved to the dead letters: %s", entry.entry_id, stream, reason)
        self._outbox.add_dead_letters(stream, [(entry.data, reason) for entry, reason in rejected])
        self._outbox.delete(stream, [entry for entry in entries if entry.entry_id not in left])
        return not left

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

    def _append(self, rollouts: list[_OutboxRollout]) -> list[_Outcome]:
        results = self._store.append_all([(rollout.problem_id, rollout.record) for rollout in rollouts])
        outcomes: list[_Outcome] = [
            _unusable_keys(result) if isinstance(result, redis.ResponseError) else None for result in results
        ]
        if self._traces is not None:
            now = self._outbox.clock()
            appended = zip(rollouts, results, strict=True)
            self._traces.export(
                self._append_span(rollout, now) for rollout, result in appended if result is AppendResult.APPENDED
            )
        repeated = [index for index, result in enumerate(results) if result is AppendResult.DUPLICATE]
        for index, outcome in zip(repeated, self._compare([rollouts[index] for index in repeated]), strict=True):
            outcomes[index] = outcome
        self.num_appended += sum(not isinstance(result, redis.ResponseError) for result in results) - sum(
            outcome is _Later.LATER for outcome in outcomes
        )
        return outcomes

    def _compare(self, repeated: list[_OutboxRollout]) -> list[_Outcome]:
        """Return for each rollout that the history has already why its tokens are refused; None if they are the same.

        A relay that was killed has left rollouts that are in the history. The tokens differ if the job's Redis has lost
        a rollout in a crash and the history has not: it was sampled again.
        """
        problems = set(islice(dict.fromkeys(rollout.problem_id for rollout in repeated), _COMPARED_PROBLEMS))
        stored = {
            record.rollout_id: digest_of(record.tokens.astype("<u4").tobytes())
            for problem in problems
            for log_slice in self._store.read_all(problem)
            for record in log_slice.records
        }
        outcomes: list[_Outcome] = []
        for problem_id, record, _ in repeated:
            if problem_id not in problems:
                outcomes.append(_Later.LATER)
                continue
            digest = digest_of(record.tokens.astype("<u4").tobytes())
            known = stored.get(record.rollout_id, digest)
            outcomes.append(None if known == digest else "the history has other tokens of this rollout, which it keeps")
            if known != digest:
                rollout_id = RolloutId.parse(record.rollout_id)
                [entry] = self._outbox.ledger_entries([rollout_id])
                if isinstance(entry, LedgerEntry):  # so that no reward for these tokens goes to the others
                    self._outbox.replace_ledger_entry(rollout_id, replace(entry, digest=bytes.fromhex(known)))
                self._outbox.count_conflicts(1)
        return outcomes

    def _append_span(self, rollout: _OutboxRollout, appended_at: float) -> SpanData:
        rollout_id = RolloutId.parse(rollout.record.rollout_id)
        packed = rollout.entry.fields.get(TRACE_FIELD.encode(), b"")
        trace = RequestTrace.unpack(packed, self._run_id, rollout_id.request_id)
        return span_of_append(trace, rollout_id, arrival_time(rollout.entry.entry_id), appended_at)

    def _set_rewards(self, messages: list[list[_Reward]]) -> list[str | None]:
        entries = iter(self._outbox.ledger_entries([reward.rollout_id for rewards in messages for reward in rewards]))
        by_problem: defaultdict[str, dict[str, float]] = defaultdict(dict)
        conflicts: list[_Reward] = []
        reasons: list[str | None] = []
        problems: list[set[str]] = []
        """Problems of the rewards of each message."""
        for rewards in messages:
            found = [(reward, next(entries)) for reward in rewards]
            errors = [str(entry) for _, entry in found if isinstance(entry, CodecError)]
            reasons.append(errors[0] if errors else None)
            problems.append(set())
            for reward, entry in found if not errors else ():
                # If the job does not know a rollout that a trainer has received, Redis has lost it, or it was long ago.
                known = entry.digest.hex() if isinstance(entry, LedgerEntry) else ""
                if reward.digest and reward.digest != known and (known or entry is None):
                    conflicts.append(reward)
                elif not isinstance(entry, LedgerEntry):
                    logger.warning(
                        "Discarded a reward for rollout %s, which this job does not know.", reward.rollout_id
                    )
                else:
                    by_problem[entry.problem_id][str(reward.rollout_id)] = reward.value
                    problems[-1].add(entry.problem_id)
        if conflicts:
            self._reject(conflicts)
        refused = self._store.set_all_rewards(by_problem)
        return [
            reason or next((_unusable_keys(refused[problem]) for problem in found if problem in refused), None)
            for reason, found in zip(reasons, problems, strict=True)
        ]

    def _reject(self, conflicts: list[_Reward]) -> None:
        """Keep rewards for tokens that are not in the history as dead letters."""
        reason = (
            f"{len(conflicts)} rewards, among them that of rollout {conflicts[0].rollout_id}, are for tokens that the "
            "job does not know: Redis has lost the rollouts in a crash, and they may have been sampled again; or they "
            "ended more than seven days ago"
        )
        logger.warning("%s. The rewards are moved to the dead letters.", reason)
        self._outbox.add_dead_letters(HistoryStream.REWARDS, [(data, reason) for data in _encode_rewards(conflicts)])
        self._outbox.count_conflicts(len(conflicts))


def _next_max_entries(entries: list[Entry]) -> int:
    """Return how many entries of a stream the next batch may have, given those of this batch.

    The next entries may be larger than these, so their number grows slowly and only while many are waiting.
    """
    largest = max((len(entry.data) for entry in entries), default=0)
    return max(1, min(_MAX_BATCH, max(_FIRST_BATCH, 2 * len(entries)), _BATCH_BYTES // max(1, largest)))


def _encode_rewards(rewards: list[_Reward]) -> Iterator[bytes]:
    """Encode rewards as messages that dead letters keep as a whole."""
    data = encode(
        Rewards(
            rewards={str(reward.rollout_id): reward.value for reward in rewards},
            digests={str(reward.rollout_id): reward.digest for reward in rewards},
        )
    )
    if len(rewards) == 1 or (len(rewards) <= _REWARDS_PER_DEAD_LETTER and len(data) <= MAX_DEAD_LETTER_BYTES):
        yield data
        return
    size = min(_REWARDS_PER_DEAD_LETTER, (len(rewards) + 1) // 2)
    for start in range(0, len(rewards), size):
        yield from _encode_rewards(rewards[start : start + size])


def _decode_rewards(entry: Entry) -> list[_Reward]:
    """Return the rewards of an entry of the reward stream."""
    message = decode(entry.data)
    if not isinstance(message, Rewards):
        raise CodecError(f"a {message.kind} in place of rewards")
    try:
        return [
            _Reward(RolloutId.parse(text), value, message.digests.get(text, ""))
            for text, value in message.rewards.items()
        ]
    except ValueError as error:
        raise CodecError(str(error)) from None


def _unusable_keys(error: redis.ResponseError) -> str:
    return f"the keys of its problem cannot be written: {error}"
