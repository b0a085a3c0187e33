"""Carries ended rollouts and their rewards from a job's streams into their problems' histories."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import redis

from rollout_api.protocol.dead_letters import add_dead_letter
from rollout_api.protocol.keys import CONTEXT, DATA, MessageKeys
from rollout_api.protocol.messages import CodecError, Rewards, Rollout, RolloutId, decode, unpack_tokens
from rollout_worker.history.connection import retry
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.server_functions import concerns_the_server
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.ledger import LedgerEntry

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_RETRY_S = 1.0
_SAY_EVERY_S = 30.0
_BATCH = 64
_Read = TypeVar("_Read")


class Relay:
    """A thread that empties the outbox.

    An entry is deleted after it was carried, and carrying is idempotent by rollout id: killed anywhere, the next
    relay repeats the entry without effect.
    """

    def __init__(self, client: redis.Redis, keys: MessageKeys, store: HistoryStore) -> None:
        self.appended = 0
        self.dead = 0
        """Entries that could not be read, moved to the dead letters."""
        self.failure: Exception | None = None
        """Why entries are not carried, once that has lasted too long to be a hiccup."""
        self._client = client
        self._keys = keys
        self._store = store
        self._generations: dict[int, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Begin; :meth:`stop` ends it."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the batch under way; what is left stays in the outbox."""
        self._stopping.set()
        self._thread.join(timeout=15)

    def drain(self) -> None:
        """Carry everything that is in the outbox now, in this thread.

        Raises:
            redis.RedisError: if Redis fails; what is left stays in the outbox.
        """
        while self._carry_batch():
            pass

    def _run(self) -> None:
        said = 0.0
        while not self._stopping.is_set():
            try:
                carried = retry(self._carry_batch)
                self.failure = None
            except Exception as error:  # it may pass; meanwhile entries wait in the outbox
                if self.failure is None or time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    logger.error("Ended rollouts do not get into their histories: %s: %s", type(error).__name__, error)
                carried, self.failure = 0, error
            if not carried:
                self._stopping.wait(_POLL_S if self.failure is None else _RETRY_S)

    def _carry_batch(self) -> int:
        # whatever a reward is for went into the outbox before it: read rewards first and carry them last
        rewards = self._entries(self._keys.rewards)
        ended = self._entries(self._keys.outbox)
        self._carry(self._keys.outbox, ended, self._read_rollout, self._append)
        if len(ended) < _BATCH:
            self._carry(self._keys.rewards, rewards, self._read_rewards, self._reward)
        return len(ended) + len(rewards)

    def _entries(self, stream: str) -> Any:
        return self._client.xrange(stream, count=_BATCH)

    def _carry(
        self,
        stream: str,
        entries: Any,
        read: Callable[[Mapping[bytes, bytes]], _Read],
        carry: Callable[[list[_Read]], list[redis.ResponseError | None]],
    ) -> None:
        """Bring what *entries* of *stream* hold into the history, and delete them.

        Args:
            stream: where they are.
            entries: as read from it.
            read: what an entry says; raises :class:`CodecError` if it cannot be read.
            carry: for each, None; or the error of a problem whose keys hold something else.
        """
        readable, unreadable = [], []
        for entry_id, fields in entries:
            try:
                readable.append((entry_id, fields, read(fields)))
            except CodecError as error:
                unreadable.append((entry_id, fields, str(error)))
        if readable:
            for (entry_id, fields, _), refused in zip(readable, carry([what for *_, what in readable]), strict=True):
                if refused is not None:
                    unreadable.append((entry_id, fields, f"its problem's keys cannot be written: {refused}"))
        for _, fields, reason in unreadable:
            logger.warning("An entry of %s cannot be carried and goes to the dead letters: %s", stream, reason)
            add_dead_letter(self._client, self._keys.dead, stream=stream, data=_field(fields, DATA), reason=reason)
            self.dead += 1
        if entries:
            self._client.xdel(stream, *(entry_id for entry_id, _ in entries))

    def _read_rollout(self, fields: Mapping[bytes, bytes]) -> tuple[str, HistoryRecord]:
        rollout = decode(_field(fields, DATA))
        if not isinstance(rollout, Rollout) or rollout.weight_version is None:
            raise CodecError(f"a {rollout.kind} where a rollout with tokens belongs")
        version = rollout.weight_version
        generation = self._generations.get(version)
        if generation is None:
            generation = self._generations[version] = self._store.publish(self._keys.uid, version)
        return rollout.problem_id, HistoryRecord(
            rollout_id=rollout.rollout_id,
            run=self._keys.uid,
            weight_version=version,
            generation=generation,
            tokens=np.asarray(rollout.token_ids, dtype=np.uint32),
            finish_reason=str(rollout.finish_reason),
            context=np.asarray(unpack_tokens(_field(fields, CONTEXT)), dtype=np.uint32),
            step=-1 if rollout.step is None else rollout.step,
        )

    def _append(self, rollouts: list[tuple[str, HistoryRecord]]) -> list[redis.ResponseError | None]:
        became = self._store.append_all(rollouts)
        errors = [one if isinstance(one, redis.ResponseError) else None for one in became]
        self.appended += errors.count(None)
        return errors

    def _read_rewards(self, fields: Mapping[bytes, bytes]) -> dict[str, dict[str, float]]:
        message = decode(_field(fields, DATA))
        if not isinstance(message, Rewards):
            raise CodecError(f"a {message.kind} where rewards belong")
        by_problem: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for text, reward in message.rewards.items():
            try:
                rollout_id = RolloutId.parse(text)
            except ValueError as error:
                raise CodecError(str(error)) from None
            entry: Any = self._client.hget(self._keys.ledger(rollout_id.request_id), str(rollout_id.sample))
            if entry is None:
                logger.warning("A reward for rollout %s, which this job does not know, is dropped.", text)
                continue
            by_problem[LedgerEntry.unpack(entry).problem_id][text] = reward
        return by_problem

    def _reward(self, messages: list[dict[str, dict[str, float]]]) -> list[redis.ResponseError | None]:
        errors: list[redis.ResponseError | None] = []
        for by_problem in messages:
            failed = None
            for problem, rewards in by_problem.items():
                try:
                    self._store.reward(problem, rewards)
                except redis.ResponseError as error:
                    if concerns_the_server(error):
                        raise
                    failed = error
            errors.append(failed)
        return errors


def _field(fields: Mapping[bytes, bytes], name: str) -> bytes:
    return fields.get(name.encode(), b"")
