"""Publishing weights: say where they are, and wait until the engines serve them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit

import msgpack
import redis
import redis.asyncio

from rollout_api.asyncio_tasks import end
from rollout_api.client.request_sender import Sender
from rollout_api.errors import InvalidRequestError, WeightsError
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import Broadcast, UpdateMode, WeightsKind, WeightUpdate, decode, encode
from rollout_api.redis_client.connection import RetryPolicy
from rollout_api.weights.checksum import checksum

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_SAY_EVERY_S = 30.0

Checksum = Literal["compute"] | str | None
"""A SHA-256 in hex, ``compute`` to have it computed here, or None for weights that are not to be checked."""


class InMemory(Protocol):
    """Full weights that are broadcast to the engines; see :class:`rollout_api.weights.in_memory.ModelInMemory`."""

    backend: str
    """How: nccl or gloo."""

    def offer(self, engines: Mapping[str, int]) -> tuple[str, Broadcast]:
        """The trainer's address, and what an engine must know to take part.

        Args:
            engines: how many worker processes each has.
        """
        ...

    def send(self, uri: str, offer: Broadcast) -> None:
        """Broadcast the weights; returns when all engines have them.

        Raises:
            RuntimeError: if an engine does not take part, or the offer is withdrawn.
        """
        ...

    def withdraw(self) -> None:
        """Let :meth:`send`, and with it the engines, wait for no engine any more."""
        ...


@dataclass(frozen=True)
class PublishedWeights:
    """What became of published weights."""

    version: int
    loaded: list[str]
    """Engines that serve this version, or a later one, by now."""
    failed: dict[str, str]
    """Engine → why it could not load them; it goes on with what it had."""


@dataclass
class _Publication:
    update: WeightUpdate
    entry: str
    """In the control stream; the coordinator deletes it once the update is the one to serve."""


class Publisher:
    """Publishes weights to one job."""

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, sender: Sender, patience: RetryPolicy) -> None:
        self._client, self._keys, self._sender, self._patience = client, keys, sender, patience

    async def publish(
        self,
        version: int,
        weights: str | Path | InMemory,
        *,
        kind: WeightsKind,
        mode: UpdateMode,
        sha256: Checksum,
        wait: bool,
        timeout: float,
    ) -> PublishedWeights:
        """See :meth:`rollout_api.AsyncRolloutClient.publish_weights`."""
        if version < 1:
            raise InvalidRequestError(
                f"weight version {version}: published versions count from 1 on; 0 is the model that the job began with"
            )
        engines = await self._engines()
        ahead = max((report["version"] for report in engines.values()), default=0)
        if version < ahead:
            raise InvalidRequestError(
                f"weight version {version} is older than {ahead}, which the engines serve; versions only grow, since "
                f"histories are ordered by them: publish restored weights as {ahead + 1} or later"
            )
        if not isinstance(weights, str | Path):
            if kind is not WeightsKind.FULL or not wait:
                raise InvalidRequestError("weights in memory are published whole (kind full), and waited for")
            if mode is UpdateMode.DRAIN:
                raise InvalidRequestError(
                    "engines end their rollouts at different times, and a broadcast reaches all at once: publish "
                    "weights in memory with mode recompute or keep"
                )
            _check_new(version, "", engines)
            return await self._broadcast(version, weights, engines, mode, timeout)
        digest = await _digest(str(weights), sha256)
        update = WeightUpdate(weight_version=version, uri=str(weights), weights=kind, sha256=digest, mode=mode)
        _check_new(version, update.identity, engines)
        publication = await self._send(update)
        if not wait:
            return PublishedWeights(version, [], {})
        return await self._wait(publication, engines, timeout)

    async def _send(self, update: WeightUpdate) -> _Publication:
        [entry] = await self._sender.append(self._keys.control, [encode(update)], "publish weights")
        return _Publication(update, entry)

    async def _broadcast(
        self, version: int, weights: InMemory, engines: dict[str, dict[str, Any]], mode: UpdateMode, timeout: float
    ) -> PublishedWeights:
        if not engines:
            raise WeightsError("the job has no engine to which weights could be broadcast")
        for engine, report in engines.items():
            if report["broadcast"] != weights.backend:
                way = report["broadcast"] or "no broadcast: spec.weights.broadcast of the job is false"
                raise InvalidRequestError(f"these weights are broadcast by {weights.backend}; {engine} takes {way}")
        engines = await self._without_pinned(version, timeout)
        uri, offer = await asyncio.to_thread(weights.offer, {name: one["ranks"] for name, one in engines.items()})
        update = WeightUpdate(weight_version=version, uri=uri, broadcast=offer, mode=mode)
        publication = await self._send(update)
        withdrawn = asyncio.Event()

        def withdraw() -> None:
            withdrawn.set()
            weights.withdraw()

        sending = asyncio.ensure_future(asyncio.to_thread(weights.send, uri, offer))
        waiting = asyncio.ensure_future(self._wait(publication, engines, timeout, on_missing=withdraw))
        try:
            await asyncio.wait((sending, waiting), return_when=asyncio.FIRST_EXCEPTION)
            if withdrawn.is_set():  # the engines say why
                return await waiting
            if sending.done() and (error := sending.exception()) is not None:
                raise WeightsError(
                    f"weight version {version} was not broadcast to all engines ({error}); publish the weights again, "
                    f"as version {version + 1} or later",
                ) from error
            return waiting.result()
        finally:
            weights.withdraw()
            await asyncio.wait((sending,), timeout=_POLL_S)  # its port is then free again
            await end(waiting, sending)
            with contextlib.suppress(redis.RedisError):  # what was not taken up yet is to make nobody wait later
                await self._client.xdel(self._keys.control, publication.entry)

    async def _without_pinned(self, version: int, timeout: float) -> dict[str, dict[str, Any]]:
        """The engines, once none of them makes a rollout that is pinned to a version.

        An engine lets such rollouts end before it takes other weights, and in a broadcast all would wait for it.
        """
        began = time.monotonic()
        while True:
            engines = await self._engines()
            busy = [name for name, report in engines.items() if report.get("pinned")]
            if not busy:
                return engines
            if time.monotonic() - began > timeout:
                raise WeightsError(
                    f"weight version {version} is not broadcast: after {timeout:.0f} s rollouts pinned to another "
                    f"version are still being made by {', '.join(sorted(busy)[:5])}; cancel them, or let them end first"
                )
            await asyncio.sleep(_POLL_S)

    async def _wait(
        self,
        publication: _Publication,
        before: Mapping[str, Mapping[str, Any]],
        timeout: float,
        *,
        on_missing: Callable[[], None] = lambda: None,
    ) -> PublishedWeights:
        """Wait until each engine serves what was published, or has failed to since it reported *before*.

        Calls *on_missing* while one of those before has failed or is gone.
        """
        version = publication.update.weight_version
        began = said = time.monotonic()
        while True:
            taken_up = await self._taken_up(publication)
            engines = await self._engines()
            loaded = [engine for engine, report in engines.items() if report["version"] >= version]
            failed = {
                engine: str(report["failed"][version])
                for engine, report in engines.items()
                if engine not in loaded
                and version in report["failed"]
                and report.get("loads", 1) > before.get(engine, {}).get("loads", 0)
            }
            if before.keys() - engines.keys() or before.keys() & failed.keys():
                on_missing()
            slow = sorted(engines.keys() - failed.keys() - set(loaded))
            if taken_up and engines and not slow:
                break
            now = time.monotonic()
            state = _state(taken_up, engines, slow)
            if now - began > timeout:
                raise WeightsError(f"weight version {version} is not served after {timeout:.0f} s: {state}", failed)
            if now - said > _SAY_EVERY_S:
                said = now
                logger.warning("Weight version %d is not served everywhere yet: %s.", version, state)
            await asyncio.sleep(_POLL_S)
        if not loaded:
            raise WeightsError(
                f"no engine could load weight version {version}; they go on with what they had. Publish mended "
                f"weights as version {version + 1} or later",
                failed,
            )
        for engine, reason in failed.items():
            logger.error("Engine %s could not load weight version %d: %s", engine, version, reason)
        return PublishedWeights(version, sorted(loaded), failed)

    async def newest(self) -> int:
        """The newest version that a coordinator has taken up; 0 if there is none."""
        stored = await self._patience.of(
            lambda: self._client.hmget(self._keys.weights, ["full", "lora"]), what="look which weights are served"
        )
        updates = [decode(data) for data in stored if isinstance(data, bytes)]
        return max((update.weight_version for update in updates if isinstance(update, WeightUpdate)), default=0)

    async def _taken_up(self, publication: _Publication) -> bool:
        """Whether a coordinator has taken up what was published; sent again if Redis has lost it."""
        entry = publication.entry
        waiting = await self._patience.of(
            lambda: self._client.xrange(self._keys.control, min=entry, max=entry), what="watch the engines"
        )
        if not waiting and await self.newest() < publication.update.weight_version:
            logger.warning("Redis has lost weight version %d; it is sent again.", publication.update.weight_version)
            publication.entry = (await self._send(publication.update)).entry
            return False
        return not waiting

    async def _engines(self) -> dict[str, dict[str, Any]]:
        """Reports of the engines that are alive and stay."""

        async def ask() -> dict[str, dict[str, Any]]:
            reports: Any = await self._client.hgetall(self._keys.engines)
            ids = [engine.decode() for engine in reports]
            alive = await self._client.mget([self._keys.lease(engine) for engine in ids]) if ids else []
            read = [msgpack.unpackb(report, strict_map_key=False) for report in reports.values()]
            return {
                engine: report
                for engine, report, lease in zip(ids, read, alive, strict=True)
                if lease is not None and not report.get("draining")
            }

        return await self._patience.of(ask, what="look at the engines")


def _check_new(version: int, identity: str, engines: Mapping[str, Any]) -> None:
    """Refuse other weights under a version that is served: what it sampled would have two laws under one number."""
    if any(report["version"] == version and report.get("weights", "") != identity for report in engines.values()):
        raise InvalidRequestError(
            f"weight version {version} is served already, from other weights; publish these as {version + 1} or later"
        )


def _state(taken_up: bool, engines: Mapping[str, Any], slow: list[str]) -> str:
    if not taken_up:
        return "no coordinator has taken it up; is the job running?"
    if not engines:
        return "the job has no engine"
    return f"{len(slow)} of {len(engines)} engines are still loading: {', '.join(slow[:5])}"


async def _digest(uri: str, sha256: Checksum) -> str | None:
    if sha256 == "compute":
        parts = urlsplit(uri)
        if parts.scheme not in ("", "file"):
            raise InvalidRequestError(
                f"{uri}: a checksum can be computed of a local directory only; give sha256 in hex, or None"
            )
        directory = unquote(parts.path) if parts.scheme else uri
        try:
            return await asyncio.to_thread(checksum, directory)
        except OSError as error:
            raise WeightsError(
                f"the checksum of the weights cannot be computed: {error}; if only the job sees that directory, give "
                "sha256 in hex, or None"
            ) from None
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise InvalidRequestError(f"sha256 {sha256!r} is neither 'compute' nor None nor 64 hexadecimal digits")
    return sha256
