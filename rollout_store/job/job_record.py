"""The record of the job as a whole: its description, status, weights and canary test."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack
import redis.asyncio

from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys, job_uid_key
from rollout_api.protocol.messages import (
    SCHEMA_VERSION,
    CodecError,
    InitWeightTransfer,
    PauseMode,
    TransferStep,
    WeightsKind,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.redis_client.retry import retry_async
from rollout_api.weights.checksum import checksum, weight_files
from rollout_store.job.part import KEYS_PER_SCAN, StorePart, add_expiry, as_text, check_current

STATUS_EXPIRY_S = 10
"""Seconds after which a status that is not renewed expires."""
WEIGHT_CHECKSUM_EXPIRY_S = 3600
"""Seconds to remember the checksum of published files."""
WEIGHT_CHECKSUM_CLAIM_S = 30
"""Seconds that engines wait for another one to compute a checksum; afterwards, one more engine computes it."""
WEIGHT_CHECKSUM_POLL_INTERVAL_S = 0.05
"""Time between two checks whether another engine has computed a checksum."""


@dataclass(frozen=True)
class JobDescription:
    """What a client must know about a job before its first request (see docs/protocol.md)."""

    model: str
    vocabulary: int
    sampling: str
    """The job's sampling settings as JSON."""
    max_model_len: int
    max_request_bytes: int
    max_image_bytes: int
    max_rollouts: int
    history: str
    """Full name of the history."""
    history_redis: str
    """``own`` if the history has a Redis server of its own, else ''."""
    version: int = SCHEMA_VERSION


class JobRecord(StorePart):
    """Reads and writes what belongs to the whole job.

    Only the newest coordinator writes; it gives its number to each method. A late write of another one would undo what
    the newest one has written, so it raises :class:`StaleCoordinatorError` and has no effect.
    """

    async def publish(self, coordinator: int, name: str, description: JobDescription) -> None:
        """Publish the job ``namespace/name``, so that clients find it."""
        fields = [str(part) for field in asdict(description).items() for part in field]
        await self._write(coordinator, "HSET", self._keys.job, *fields)
        await self._client.hsetnx(self._keys.job, "state", "running")
        await self._client.set(job_uid_key(name), self._keys.uid)

    async def is_closing(self) -> bool:
        """Return whether a client has closed the job."""
        return bool(await self._client.hget(self._keys.job, "closing") == b"1")

    async def set_closing(self, coordinator: int) -> None:
        """Record that a client has closed the job."""
        await self._write(coordinator, "HSET", self._keys.job, "closing", "1")

    async def set_pause(self, coordinator: int, mode: PauseMode | None) -> None:
        """Record how the job is paused; None resumes it."""
        await self._write(coordinator, "HSET", self._keys.job, "pause", mode or "")

    async def pause(self) -> PauseMode | None:
        """Return how the job is paused; None if it is not."""
        mode: Any = await self._client.hget(self._keys.job, "pause")
        return PauseMode(as_text(mode)) if mode else None

    async def set_closed(self, coordinator: int) -> None:
        """Record that all requests of a closed job are answered, and let the job's keys expire.

        Clients can still read their results for :data:`~rollout_head.limits.JOB_RETENTION_S`.
        """
        await self._write(coordinator, "HSET", self._keys.job, "state", "closed")
        pipeline = self._client.pipeline(transaction=False)
        async for key in self._client.scan_iter(self._keys.pattern(), count=KEYS_PER_SCAN):
            add_expiry(pipeline, [key])
            if len(pipeline) >= KEYS_PER_SCAN:
                await pipeline.execute()
        await pipeline.execute()

    async def set_status(self, coordinator: int, status: bytes) -> None:
        """Publish the coordinator's status, which expires if it is not renewed."""
        await self._write(coordinator, "SET", self._keys.status, status, "EX", str(STATUS_EXPIRY_S))

    async def set_canaries(self, coordinator: int, state: str) -> None:
        """Store the state of the canary test."""
        await self._write(coordinator, "SET", self._keys.canaries, state)

    async def canaries(self) -> str | None:
        """Return the stored state of the canary test; None if there is none."""
        state = await self._client.get(self._keys.canaries)
        return None if state is None else as_text(state)

    async def environment_errors(self) -> dict[str, Any]:
        """Return the summary of the errors of the job's environment; empty if there are none."""
        summary = await self._client.get(self._keys.environment_errors)
        return {} if summary is None else dict(json.loads(summary))

    async def set_weights(self, coordinator: int, update: WeightUpdate) -> None:
        """Store the weights that engines should serve, unless newer ones are stored.

        Full weights replace an earlier adapter.
        """
        replaced = WeightsKind.LORA.value if update.weights_kind is WeightsKind.FULL else ""
        reply = await self._call(
            "set_weights",
            keys=[self._keys.fencing_token, self._keys.weights],
            args=[coordinator, update.weight_version, update.weights_kind.value, encode(update), replaced],
        )
        check_current(reply)

    async def weights(self) -> list[WeightUpdate]:
        """Return the weights to serve: full weights, if any were published, and an adapter published after them."""
        stored = await self._client.hmget(self._keys.weights, [WeightsKind.FULL.value, WeightsKind.LORA.value])
        updates = [decode(data) for data in stored if isinstance(data, bytes)]
        return [update for update in updates if isinstance(update, WeightUpdate)]

    async def set_transfer_group(self, coordinator: int, group: InitWeightTransfer) -> None:
        """Store the trainer's group that engines should have joined."""
        await self._write(coordinator, "HSET", self._keys.weights, "group", encode(group))

    async def transfer_group(self) -> InitWeightTransfer | None:
        """Return the trainer's group that engines should have joined; None if there is none."""
        stored: Any = await self._client.hget(self._keys.weights, "group")
        group = None if stored is None else decode(stored)
        return group if isinstance(group, InitWeightTransfer) else None

    async def transfer_step(self, weights: str, cursor: str, *, timeout_s: float) -> tuple[TransferStep, str] | None:
        """Return the next step of a transfer of weights, and its cursor; None if there is none within *timeout_s*.

        Raises:
            CodecError: it is no such step.
        """
        streams: Any = {self._keys.transfer_steps(weights): cursor}
        replies: Any = await self._client.xread(streams, count=1, block=max(1, int(timeout_s * 1000)))
        for _, entries in replies:
            [(entry_id, fields)] = entries
            step = decode(fields.get(MESSAGE_FIELD.encode(), b""))
            if not isinstance(step, TransferStep):
                raise CodecError(f"{step.kind} in place of a step")
            return step, as_text(entry_id)
        return None

    async def _write(self, coordinator: int, command: str, key: str, *args: str | bytes) -> None:
        """Execute a command on *key* for a coordinator."""
        packed = msgpack.packb([command, key, *args], use_bin_type=False)  # the server's msgpack does not know bin
        keys = [self._keys.fencing_token, key]
        check_current(await self._call("write_as_coordinator", keys=keys, args=[coordinator, packed]))


class SharedChecksums:
    """Computes checksums of directories, and takes those that another engine of the job has computed.

    Another engine has seen the same files if their directory, names, sizes, times of modification and inode numbers are
    the same. A checksum that is not the expected one is always computed here.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys) -> None:
        self._client, self._keys = client, keys

    async def __call__(self, directory: Path, expected: str) -> str:
        """Return the checksum of the weights in *directory*. The weights were published with the checksum *expected*.

        Raises:
            OSError: there are no weights, or they cannot be read.
        """
        files = await asyncio.to_thread(_identify, directory)
        claim = self._keys.weight_checksum_claim(files)
        while True:
            known = await retry_async(self._client.get, self._keys.weight_checksum(files))
            if known is not None:
                known = as_text(known)
                return known if known == expected else await asyncio.to_thread(checksum, directory)
            if await retry_async(lambda: self._client.set(claim, "1", nx=True, ex=WEIGHT_CHECKSUM_CLAIM_S)):
                break
            await asyncio.sleep(WEIGHT_CHECKSUM_POLL_INTERVAL_S)
        try:
            found = await asyncio.to_thread(checksum, directory)
            if files == await asyncio.to_thread(_identify, directory):
                key = self._keys.weight_checksum(files)
                await retry_async(lambda: self._client.set(key, found, ex=WEIGHT_CHECKSUM_EXPIRY_S))
        finally:
            await retry_async(self._client.delete, claim)
        return found


def _identify(directory: Path) -> str:
    """Return a text that is the same for other engines if they see the same files."""
    seen = [str(directory)]
    for path in weight_files(directory):
        stat = path.stat()
        seen.append(json.dumps([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino]))
    return blake2b("\n".join(seen).encode(), digest_size=16).hexdigest()
