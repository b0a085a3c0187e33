"""The ledger of a job: which rollouts are done. What is in it is never done again."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import msgpack
import redis

from rollout_api.keys import MessageKeys
from rollout_api.messages import Purpose, Rollout, encode
from rollout_worker.history.connection import server_function


@dataclass(frozen=True)
class LedgerEntry:
    """What the ledger keeps of a finished rollout; its tokens are in the history."""

    length: int
    finish_reason: str
    weight_version: int
    drafted: int
    accepted: int
    reward: float | None

    @classmethod
    def of(cls, rollout: Rollout) -> LedgerEntry:
        """The entry for *rollout*."""
        return cls(
            len(rollout.token_ids),
            str(rollout.finish_reason),
            rollout.weight_version,
            rollout.drafted,
            rollout.accepted,
            rollout.reward,
        )


class Ledger:
    """One job's ledger and the way into the outbox behind it.

    Every method may raise :class:`redis.RedisError`; none leaves a half-done write behind.
    """

    def __init__(self, client: redis.Redis, keys: MessageKeys) -> None:
        self._client = client
        self._keys = keys
        self._finish = server_function(client, __package__, "finish")

    def finish(self, rollout: Rollout) -> bool:
        """Record *rollout* as done and queue it for its history (training rollouts only), in one atomic step.

        Returns:
            False if it was done before; nothing is changed then.
        """
        entry: bytes = msgpack.packb(astuple(LedgerEntry.of(rollout)))
        for_history = encode(rollout) if rollout.purpose is Purpose.TRAIN else b""
        return bool(
            self._finish(keys=[self._keys.ledger, self._keys.outbox], args=[rollout.rollout_id, entry, for_history])
        )

    def done(self) -> dict[str, LedgerEntry]:
        """All finished rollouts by rollout id."""
        entries: Any = self._client.hgetall(self._keys.ledger)
        return {rollout_id.decode(): LedgerEntry(*msgpack.unpackb(entry)) for rollout_id, entry in entries.items()}

    def waiting(self) -> int:
        """Finished rollouts that have not reached their history yet."""
        return int(self._client.xlen(self._keys.outbox))

    def forget(self) -> None:
        """Delete the job's message plane; its history stays.

        Raises:
            RuntimeError: while rollouts wait for their way into the history.
        """
        if waiting := self.waiting():
            raise RuntimeError(f"{waiting} rollouts of job {self._keys.uid} have not reached their history yet")
        self._client.delete(self._keys.ledger, self._keys.outbox, self._keys.dead)
