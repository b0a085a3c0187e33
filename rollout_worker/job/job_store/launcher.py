"""What the processes that launch, watch and end a job read and write. Synchronous."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

import redis

from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_worker.job.job_store.encoding import as_text
from rollout_worker.job.job_store.engines import EngineReport
from rollout_worker.job.job_store.job_keys import add_expiry, key_batches
from rollout_worker.job.ledger import META_FIELDS, LedgerEntry
from rollout_worker.job.limits import (
    DELETED_JOB_NOTICE_S,
    LEDGERS_PER_SCAN,
    SHUTDOWN_REQUEST_EXPIRY_S,
    WRITE_CHECK_EXPIRY_S,
)

_TOKEN_BYTES = 32


class LauncherStore:
    """The part of a job's state that its head, its workers and the command line use directly."""

    def __init__(self, client: redis.Redis, keys: MessageKeys) -> None:
        self._client, self._keys = client, keys

    # The head

    def publish_head(self, head: str) -> None:
        """Publish the id of the Ray head that runs the job. The id begins with the head's address and a space."""
        self._client.set(self._keys.head, head)

    def restore_head(self, head: str, ray_token: str) -> None:
        """Publish the head and its token again, unless they are published: Redis may have lost its data."""
        self._client.set(self._keys.head, head, nx=True)
        self._client.set(self._keys.ray_token, ray_token, nx=True)

    def head(self) -> str:
        """Return the id of the Ray head that runs the job; '' if none is published."""
        found: Any = self._client.get(self._keys.head)
        return as_text(found or "")

    def ray_token(self) -> str:
        """Return the token of the job's Ray cluster; create it if there is none."""
        stored: Any = self._client.get(self._keys.ray_token)
        if stored is None:  # an existing token is not written again, because a full server accepts no writes
            self._client.set(self._keys.ray_token, secrets.token_hex(_TOKEN_BYTES), nx=True)
            stored = self._client.get(self._keys.ray_token)
        return as_text(stored)

    # Workers

    def engines_of(self, worker: str) -> list[EngineReport]:
        """Return the last reports of a worker's engines."""
        reports: Any = self._client.hvals(self._keys.engines)
        return [report for report in map(EngineReport.read, reports) if report.worker == worker]

    def request_shutdown(self, worker: str, grace_s: float) -> None:
        """Tell the engines of a worker to leave the job within *grace_s* seconds."""
        self._client.set(self._keys.shutdown_grace(worker), grace_s, ex=SHUTDOWN_REQUEST_EXPIRY_S)

    # Finished rollouts

    def read_ledger(self, request_ids: Sequence[str]) -> dict[str, dict[int, LedgerEntry]]:
        """Return the finished rollouts of requests: request id → sample → entry.

        Raises:
            CodecError: if an entry cannot be decoded.
        """
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hgetall(self._keys.ledger(request_id))
        replies: list[dict[bytes, Any]] = pipeline.execute()
        return {
            request_id: {
                int(sample): LedgerEntry.unpack(entry) for sample, entry in fields.items() if sample not in META_FIELDS
            }
            for request_id, fields in zip(request_ids, replies, strict=True)
        }

    def count_finished_rollouts(self, client_name: str) -> int:
        """Return the number of finished rollouts that a client has requested."""
        pipeline = self._client.pipeline(transaction=False)
        for ledger in self._client.scan_iter(self._keys.ledger(f"{client_name}:*"), count=LEDGERS_PER_SCAN):
            pipeline.hkeys(ledger)
        replies: list[list[bytes]] = pipeline.execute()
        return sum(field not in META_FIELDS for fields in replies for field in fields)

    # The job as a whole

    def check_writable(self) -> None:
        """Write a key that expires soon.

        Raises:
            redis.RedisError: if Redis is unavailable or rejects writes.
        """
        self._client.set(self._keys.write_check, "1", ex=WRITE_CHECK_EXPIRY_S)

    def status(self) -> dict[str, Any] | None:
        """Return the coordinator's last status; None if it has expired.

        Raises:
            ValueError: if it cannot be decoded.
        """
        found: Any = self._client.get(self._keys.status)
        status: dict[str, Any] | None = None if found is None else json.loads(found)
        return status

    def has_ended(self) -> bool:
        """Return whether the job was closed or has failed."""
        return self._client.hget(self._keys.job, "state") in (b"closed", b"failed")

    def outbox_length(self) -> int:
        """Return the number of finished rollouts that are not in the history yet."""
        return int(self._client.xlen(self._keys.outbox))

    def num_dead_letters(self) -> int:
        """Return the number of dead letters."""
        return int(self._client.xlen(self._keys.dead_letters))

    def set_failed(self, reason: str) -> None:
        """Record for clients that the job has failed, if it was ever published."""
        if self._client.exists(self._keys.job):
            self._client.hset(self._keys.job, mapping={"state": "failed", "reason": reason})

    def expire_keys(self) -> None:
        """Let all keys of the job expire; until then, clients can read their results."""
        for batch in key_batches(self._client, self._keys):
            pipeline = self._client.pipeline(transaction=False)
            add_expiry(pipeline, batch)
            pipeline.execute()

    def delete_keys(self, *, keep_notice: bool) -> None:
        """Delete all keys of the job.

        Args:
            keep_notice: whether clients can still read for a while why the job has ended.
        """
        for batch in key_batches(self._client, self._keys):
            pipeline = self._client.pipeline(transaction=False)
            for key in batch:
                if keep_notice and key == self._keys.job.encode():
                    pipeline.expire(key, DELETED_JOB_NOTICE_S)
                else:
                    pipeline.unlink(key)
            pipeline.execute()

    def release_name(self, name: str) -> None:
        """Delete the entry by which clients find the job ``namespace/name``, unless another job has taken the name."""
        if self._client.get(job_uid_key(name)) == self._keys.uid.encode():
            self._client.delete(job_uid_key(name))
