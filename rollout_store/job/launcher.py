"""The reads and writes of the processes that launch, watch and end a job. Synchronous."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import redis

from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_api.protocol.messages import CodecError
from rollout_store.job.engines import EngineReport
from rollout_store.job.part import KEYS_PER_SCAN, add_expiry, as_text
from rollout_store.job.requests import META_FIELDS, LedgerEntry

DELETED_JOB_NOTICE_S = 600
"""Seconds to keep the notice for clients that their job was deleted."""
SHUTDOWN_REQUEST_EXPIRY_S = 600
"""Seconds after which a worker's request to its engines to leave expires."""
WRITE_CHECK_EXPIRY_S = 60
"""Seconds after which the key expires that is written to check whether Redis accepts writes."""
LEDGERS_PER_SCAN = 1000
"""Number of keys that Redis examines in one step of a scan for ledgers."""


class HeadFacts(NamedTuple):
    """What a head has to find out about a job's model and dataset before it can coordinate the job."""

    vocabulary_size: int
    tokenizer: str
    """Fingerprint of the tokenizer's vocabulary."""
    total_rollouts: int | None
    """Number of rollouts in all epochs of a dataset source; None for a job that serves trainers."""


class LauncherStore:
    """The part of a job's state that its head, its workers and the command line use directly."""

    def __init__(self, client: redis.Redis, keys: MessageKeys) -> None:
        self._client, self._keys = client, keys

    # The head

    def head_facts(self) -> HeadFacts | None:
        """Return what an earlier head has found out; None if there was none, or Redis has lost its data."""
        found: Any = self._client.hgetall(self._keys.head_facts)
        if not found:
            return None
        fields = {as_text(name): as_text(value) for name, value in found.items()}
        total = fields.get("total_rollouts")
        return HeadFacts(int(fields["vocabulary_size"]), fields["tokenizer"], None if total is None else int(total))

    def set_head_facts(self, facts: HeadFacts) -> None:
        """Store what this head has found out, for its successors."""
        fields: dict[Any, Any] = {name: value for name, value in facts._asdict().items() if value is not None}
        self._client.hset(self._keys.head_facts, mapping=fields)

    # Workers

    def end_leases(self, worker: str, pid: int) -> list[str]:
        """End the leases of an engine's process that has ended, so that its rollouts continue elsewhere at once.

        Returns:
            The ids of the process's registration.
        """
        found: Any = self._client.hgetall(self._keys.engines)
        ended = []
        for engine, data in found.items():
            with suppress(CodecError):  # the coordinator removes an engine whose report cannot be read
                report = EngineReport.read(data)
                if (report.worker, report.pid) == (worker, pid):
                    ended.append(as_text(engine))
        if ended:
            self._client.delete(*(self._keys.lease(engine) for engine in ended))
        return ended

    def report_failed_engines(self, worker: str, errors: Mapping[str, str]) -> None:
        """Report the engines that a worker cannot start, with the reasons; to be repeated while there are any."""
        if errors:
            now: Any = self._client.time()
            report = json.dumps({"time": now[0], "errors": dict(errors)})
            self._client.hset(self._keys.failed_engines, worker, report)
        else:
            self._client.hdel(self._keys.failed_engines, worker)

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

    # Environments

    def environment_results(self) -> dict[str, Any]:
        """Return what the environment returned in earlier runs of the job: rollout → data."""
        found: Any = self._client.hgetall(self._keys.environment_results)
        return {as_text(name): json.loads(result) for name, result in found.items()}

    def store_environment_results(self, results: Mapping[str, Any], outdated: Collection[str], errors: str) -> None:
        """Store what the environment returned.

        The data of *outdated* rollouts no longer apply; *errors* is a summary of all errors for the job's status.
        """
        pipeline = self._client.pipeline(transaction=True)
        if results:
            pipeline.hset(
                self._keys.environment_results, mapping={name: json.dumps(data) for name, data in results.items()}
            )
        if outdated:
            pipeline.hdel(self._keys.environment_results, *outdated)
        pipeline.set(self._keys.environment_errors, errors)
        pipeline.execute()

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

    def num_unrelayed(self) -> int:
        """Return the number of finished rollouts, and of messages with rewards, that are not in the history yet."""
        return int(self._client.xlen(self._keys.outbox)) + int(self._client.xlen(self._keys.rewards))

    def has_unreleased_results(self, client: str) -> bool:
        """Return whether results are kept that this client has not released."""
        return bool(self._client.exists(self._keys.unreleased(client)))

    def num_dead_letters(self) -> int:
        """Return the number of dead letters."""
        return int(self._client.xlen(self._keys.dead_letters))

    def set_failed(self, reason: str) -> None:
        """Record for clients that the job has failed, if it was ever published."""
        if self._client.exists(self._keys.job):
            self._client.hset(self._keys.job, mapping={"state": "failed", "reason": reason})

    def expire_keys(self) -> None:
        """Let all keys of the job expire; until then, clients can read their results."""
        for batch in _key_batches(self._client, self._keys):
            pipeline = self._client.pipeline(transaction=False)
            add_expiry(pipeline, batch)
            pipeline.execute()

    def delete_keys(self, *, keep_notice: bool) -> None:
        """Delete all keys of the job. With *keep_notice*, clients can still read for a while why it has ended."""
        for batch in _key_batches(self._client, self._keys):
            pipeline = self._client.pipeline(transaction=False)
            for key in batch:
                if keep_notice and key == self._keys.job.encode():
                    pipeline.expire(key, DELETED_JOB_NOTICE_S)
                else:
                    pipeline.unlink(key)
            pipeline.execute()

    def release_name(self, name: str) -> None:
        """Delete the entry that clients find the job ``namespace/name`` by, unless another job has taken the name."""
        if self._client.get(job_uid_key(name)) == self._keys.uid.encode():
            self._client.delete(job_uid_key(name))


def _key_batches(client: redis.Redis, keys: MessageKeys) -> Iterator[list[bytes]]:
    """Yield all keys of a job, in batches, so that a job with many keys neither takes much memory nor blocks Redis.

    A key that appears or is deleted meanwhile may or may not be among them.
    """
    found = client.scan_iter(keys.pattern(), count=KEYS_PER_SCAN)
    while batch := list(islice(found, KEYS_PER_SCAN)):
        yield batch
