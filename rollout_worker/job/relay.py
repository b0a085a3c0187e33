"""Carries finished rollouts from a job's outbox into their problems' histories."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import redis

from rollout_api.keys import MessageKeys
from rollout_api.messages import CodecError, Rollout, decode
from rollout_worker.history.connection import persist
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_RETRY_S = 1.0
_BATCH = 64


class Relay:
    """A thread that empties the outbox.

    An entry is deleted after it was appended, and an append is idempotent by rollout id: killed anywhere, the next
    relay repeats the entry without effect.
    """

    def __init__(self, client: redis.Redis, keys: MessageKeys, store: HistoryStore) -> None:
        self.appended = 0
        self.dead = 0
        """Entries that could not be read, moved to the dead-letter stream."""
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
        while not self._stopping.is_set():
            try:
                carried = persist(self._carry_batch)
                self.failure = None
            except Exception as error:  # the runner raises it: the job ends rather than hangs
                carried, self.failure = 0, error
            if not carried:
                self._stopping.wait(_POLL_S if self.failure is None else _RETRY_S)

    def _carry_batch(self) -> int:
        entries: Any = self._client.xrange(self._keys.outbox, count=_BATCH)
        for entry_id, fields in entries:
            self._carry(fields.get(b"d", b""))
            self._client.xdel(self._keys.outbox, entry_id)
        return len(entries)

    def _carry(self, data: bytes) -> None:
        try:
            rollout = decode(data)
            if not isinstance(rollout, Rollout):
                raise CodecError(f"a {rollout.kind} where a rollout belongs")
        except CodecError as error:
            logger.warning("A finished rollout in the outbox cannot be read and goes to the dead letters: %s", error)
            self._client.xadd(self._keys.dead, {"d": data, "reason": str(error)})
            self.dead += 1
            return
        version = rollout.weight_version
        generation = self._generations.get(version)
        if generation is None:
            generation = self._generations[version] = self._store.publish(self._keys.uid, version)
        record = HistoryRecord(
            rollout_id=rollout.rollout_id,
            run=self._keys.uid,
            weight_version=version,
            generation=generation,
            tokens=np.asarray(rollout.token_ids, dtype=np.uint32),
            finish_reason=str(rollout.finish_reason),
            reward=rollout.reward,
        )
        self._store.append(rollout.problem_id, record, newest=self._store.generation())
        self.appended += 1
