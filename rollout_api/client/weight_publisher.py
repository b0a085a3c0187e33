"""Publishes weights to a job and waits until its engines serve them."""

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

import redis
import redis.asyncio

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.engine_reports import read_engine_reports
from rollout_api.client.job_info import JobInfo
from rollout_api.client.request_sender import RequestSender
from rollout_api.errors import InvalidRequestError, WeightsError
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import (
    Broadcast,
    UpdateMode,
    WeightsKind,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.weights.checksum import checksum
from rollout_api.weights.delta_weights import DeltaWeights

logger = logging.getLogger(__name__)

_MAX_LISTED_ENGINES = 5
_POLL_INTERVAL_S = 0.2
"""Time between two checks whether the engines have loaded published weights."""
_LOG_INTERVAL_S = 30.0
"""Time between two log messages about engines that are still loading weights."""

Checksum = Literal["compute"] | str | None
"""A SHA-256 in hex, ``compute`` to have the client compute it, or None for weights that are not to be verified."""


class InMemoryWeights(Protocol):
    """Full weights that are broadcast to the engines; see :class:`rollout_api.weights.in_memory.ModelInMemory`."""

    backend: str
    """Backend of the broadcast: nccl or gloo."""

    def offer(self, engines: Mapping[str, int], *, buckets: bool) -> tuple[str, Broadcast]:
        """Return the trainer's address, and what an engine needs to know in order to take part.

        Args:
            engines: number of worker processes of each engine.
            buckets: whether the job can receive several tensors at once.
        """
        ...

    def send(self, uri: str, offer: Broadcast) -> None:
        """Broadcast the weights; return when all engines have received them.

        Raises:
            RuntimeError: an engine does not take part, or the offer was withdrawn.
        """
        ...

    def abort(self, reason: str) -> None:
        """Tell the trainer's other processes that :meth:`send` will not be called."""
        ...

    def withdraw(self) -> None:
        """Make :meth:`send`, and with it the engines, stop waiting for engines that are missing."""
        ...


@dataclass(frozen=True)
class PublishedWeights:
    """The outcome of publishing weights."""

    version: int
    """Weight version."""
    loaded: list[str]
    """Engines that serve this version or a later one."""
    failed: dict[str, str]
    """Engines that could not load the weights, each with the reason; they keep their old weights."""

    def raise_if_failed(self) -> None:
        """Raise an error if an engine could not load the weights.

        Raises:
            WeightsError: some engines keep their old weights; it says which, and why.
        """
        if self.failed:
            raise WeightsError(f"weight version {self.version} is not served by all engines", self.failed)


@dataclass
class _Publication:
    """An update that was sent."""

    update: WeightUpdate
    """Message that was sent."""
    entry_id: str
    """Id of its entry in the control stream, which the coordinator deletes once it has adopted the update."""


class WeightPublisher:
    """Publishes weights to one job.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        sender: sender of messages.
        policy: how failing commands are retried.
        job: description of the job.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: MessageKeys,
        sender: RequestSender,
        policy: ClientRetryPolicy,
        job: JobInfo,
    ) -> None:
        self._client, self._keys, self._sender, self._policy, self._job = client, keys, sender, policy, job

    async def publish(
        self,
        version: int,
        weights: str | Path | InMemoryWeights | DeltaWeights,
        *,
        kind: WeightsKind,
        mode: UpdateMode,
        sha256: Checksum,
        wait: bool,
        timeout: float,
    ) -> PublishedWeights:
        """See :meth:`rollout_api.AsyncRolloutClient.publish_weights`."""
        if isinstance(weights, DeltaWeights):
            return await self._publish_deltas(
                version, weights, kind=kind, mode=mode, sha256=sha256, wait=wait, timeout=timeout
            )
        if isinstance(weights, str | Path):
            return await self._publish_directory(
                version, str(weights), kind=kind, mode=mode, sha256=sha256, wait=wait, timeout=timeout
            )
        try:
            engines = await self._engines_before(version)
            if kind is not WeightsKind.FULL or not wait:
                raise InvalidRequestError("weights in memory are always full weights (kind full) and need wait=True")
            if mode is UpdateMode.DRAIN:
                raise InvalidRequestError(
                    "mode drain cannot be used for weights in memory, because a broadcast reaches all engines at once "
                    "and they finish their rollouts at different times: use mode recompute or keep"
                )
            _check_identity(version, "", engines)
            engines, uri, offer = await self._offer(version, weights, engines, timeout)
            publication = await self._send(WeightUpdate(weight_version=version, uri=uri, broadcast=offer, mode=mode))
        except BaseException as error:
            await asyncio.to_thread(weights.abort, str(error) or type(error).__name__)
            raise
        return await self._broadcast(publication, weights, engines, timeout)

    async def _publish_directory(
        self,
        version: int,
        directory: str,
        *,
        kind: WeightsKind,
        mode: UpdateMode,
        sha256: Checksum,
        wait: bool,
        timeout: float,
    ) -> PublishedWeights:
        engines = await self._engines_before(version)
        digest = await _resolve_checksum(directory, sha256)
        update = WeightUpdate(weight_version=version, uri=directory, weights_kind=kind, sha256=digest, mode=mode)
        return await self._publish_update(update, engines, wait=wait, timeout=timeout)

    async def _publish_deltas(
        self,
        version: int,
        weights: DeltaWeights,
        *,
        kind: WeightsKind,
        mode: UpdateMode,
        sha256: Checksum,
        wait: bool,
        timeout: float,
    ) -> PublishedWeights:
        try:
            engines = await self._engines_before(version)
            if kind is not WeightsKind.FULL or sha256 not in ("compute", None):
                raise InvalidRequestError(
                    "weights as differences are always full weights (kind full), and their checksums are computed here "
                    "(sha256 'compute' or None)"
                )
            for engine, report in engines.items():
                if not report.get("deltas"):
                    raise InvalidRequestError(
                        f"engine {engine} cannot apply differences, because it runs on several machines: "
                        "publish a directory or a model in memory instead"
                    )
        except BaseException as error:
            await asyncio.to_thread(weights.abort, str(error) or type(error).__name__)
            raise
        try:
            files = await asyncio.to_thread(weights.write, version, with_checksum=sha256 is not None)
        except OSError as error:
            raise WeightsError(f"weight version {version} cannot be written: {error}") from error
        update = WeightUpdate(
            weight_version=version, uri=str(files.directory), sha256=files.sha256, mode=mode, deltas=files.deltas
        )
        return await self._publish_update(update, engines, wait=wait, timeout=timeout)

    async def _publish_update(
        self, update: WeightUpdate, engines: dict[str, dict[str, Any]], *, wait: bool, timeout: float
    ) -> PublishedWeights:
        """Publish weights that are stored in files."""
        _check_identity(update.weight_version, update.identity, engines)
        publication = await self._send(update)
        if not wait:
            return PublishedWeights(update.weight_version, [], {})
        return await self._wait(publication, engines, timeout)

    async def _engines_before(self, version: int) -> dict[str, dict[str, Any]]:
        """Return the reports of the engines, none of which serves a newer version than the one to be published.

        Raises:
            InvalidRequestError: the version cannot be published.
        """
        if version < 1:
            raise InvalidRequestError(
                f"weight version {version}: published versions start at 1; 0 is the model that the job started with"
            )
        engines = await read_engine_reports(self._client, self._keys, self._policy)
        newest = max((report["version"] for report in engines.values()), default=0)
        if version < newest:
            raise InvalidRequestError(
                f"weight version {version} is older than {newest}, which the engines serve. Versions only increase, "
                f"because histories are ordered by them: publish restored weights as {newest + 1} or later"
            )
        return engines

    async def publish_next(
        self, weights: str | InMemoryWeights, *, kind: WeightsKind, version: int | None = None, timeout: float
    ) -> PublishedWeights:
        """Publish weights, and wait until all engines serve them.

        Args:
            weights: directory of the weights, as the engines see it, or weights that are broadcast.
            kind: what they contain.
            version: weight version; None for the one after the newest.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: the version cannot be used.
            WeightsError: some engine could not load the weights, or took too long.
            RolloutClientError: Redis is unavailable.
        """
        published = await self.publish(
            await self.newest() + 1 if version is None else version,
            weights,
            kind=kind,
            mode=UpdateMode.RECOMPUTE,
            sha256=None,
            wait=True,
            timeout=timeout,
        )
        published.raise_if_failed()
        return published

    async def newest(self) -> int:
        """Return the newest version that a coordinator has adopted; 0 if there is none."""
        stored = await self._policy.run(
            lambda: self._client.hmget(self._keys.weights, ["full", "lora"]), action="read the served weight version"
        )
        updates = [decode(data) for data in stored if isinstance(data, bytes)]
        return max((update.weight_version for update in updates if isinstance(update, WeightUpdate)), default=0)

    async def broadcast_backend(self, timeout: float) -> str:
        """Wait until the job has an engine; see :meth:`rollout_api.AsyncRolloutClient.broadcast_backend`."""
        deadline = time.monotonic() + timeout
        while not (engines := await read_engine_reports(self._client, self._keys, self._policy)):
            if time.monotonic() > deadline:
                raise WeightsError(f"the job has had no engine for {timeout:g} s that could load weights")
            await asyncio.sleep(_POLL_INTERVAL_S)
        backends = {str(report.get("broadcast", "")) for report in engines.values()}
        return backends.pop() if len(backends) == 1 else ""

    async def num_ranks(self) -> int:
        """Return the number of worker processes of all engines."""
        engines = await read_engine_reports(self._client, self._keys, self._policy)
        return sum(report["ranks"] for report in engines.values())

    async def _send(self, update: WeightUpdate) -> _Publication:
        [entry_id] = await self._sender.append(self._keys.control, [encode(update)], "publish weights")
        return _Publication(update, entry_id)

    async def _offer(
        self, version: int, weights: InMemoryWeights, engines: dict[str, dict[str, Any]], timeout: float
    ) -> tuple[dict[str, dict[str, Any]], str, Broadcast]:
        """Return the engines that take part in a broadcast, the trainer's address, and what they need to know."""
        if not engines:
            raise WeightsError("the job has no engine that could receive a broadcast")
        for engine, report in engines.items():
            if report["broadcast"] != weights.backend:
                supported = report["broadcast"] or "none, because spec.weights.broadcast of the job is false"
                raise InvalidRequestError(
                    f"these weights are broadcast with {weights.backend}, but the backend of {engine} is {supported}"
                )
        engines = await self._engines_without_pinned_rollouts(version, timeout)
        sizes = {engine: report["ranks"] for engine, report in engines.items()}
        return engines, *await asyncio.to_thread(weights.offer, sizes, buckets=True)

    async def _broadcast(
        self,
        publication: _Publication,
        weights: InMemoryWeights,
        engines: dict[str, dict[str, Any]],
        timeout: float,
    ) -> PublishedWeights:
        update, offer = publication.update, publication.update.broadcast
        if offer is None:
            raise ValueError("the update has no broadcast")
        version = update.weight_version
        withdrawn = asyncio.Event()

        def withdraw() -> None:
            withdrawn.set()
            weights.withdraw()

        sending = asyncio.ensure_future(asyncio.to_thread(weights.send, update.uri, offer))
        waiting = asyncio.ensure_future(self._wait(publication, engines, timeout, on_missing_engine=withdraw))
        try:
            await asyncio.wait((sending, waiting), return_when=asyncio.FIRST_EXCEPTION)
            if withdrawn.is_set():  # the reports of the engines say why
                return await waiting
            if sending.done() and (error := sending.exception()) is not None:
                raise WeightsError(
                    f"weight version {version} was not broadcast to all engines ({error}); publish the weights again "
                    f"as version {version + 1} or later",
                ) from error
            return waiting.result()
        finally:
            weights.withdraw()
            # Wait briefly for the sender, so that its port is free again.
            await asyncio.wait((sending,), timeout=_POLL_INTERVAL_S)
            await cancel_and_wait(waiting, sending)
            with contextlib.suppress(redis.RedisError):
                # An update that was not adopted yet must not make engines wait for the broadcast later.
                await self._client.xdel(self._keys.control, publication.entry_id)

    async def _engines_without_pinned_rollouts(self, version: int, timeout: float) -> dict[str, dict[str, Any]]:
        """Wait until no engine runs a rollout that is pinned to a weight version, and return all engines' reports.

        An engine finishes such rollouts before it loads other weights, and in a broadcast all engines would wait for
        that one.
        """
        started = time.monotonic()
        while True:
            engines = await read_engine_reports(self._client, self._keys, self._policy)
            busy = [engine for engine, report in engines.items() if report.get("pinned")]
            if not busy:
                return engines
            if time.monotonic() - started > timeout:
                raise WeightsError(
                    f"weight version {version} was not broadcast: after {timeout:.0f} s, rollouts pinned to another "
                    f"version are still running on {', '.join(sorted(busy)[:_MAX_LISTED_ENGINES])}; cancel them or "
                    "wait for them first"
                )
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _wait(
        self,
        publication: _Publication,
        before: Mapping[str, Mapping[str, Any]],
        timeout: float,
        *,
        on_missing_engine: Callable[[], None] = lambda: None,
    ) -> PublishedWeights:
        """Wait until each engine serves the update, or has failed to load it.

        Args:
            publication: the update.
            before: reports of the engines from before the update was sent. Failures that they contain are ignored.
            timeout: seconds to wait.
            on_missing_engine: called repeatedly while an engine of *before* has failed or is gone.
        """
        version = publication.update.weight_version
        started = last_log = time.monotonic()
        while True:
            is_adopted = await self._is_adopted(publication)
            engines = await read_engine_reports(self._client, self._keys, self._policy)
            loaded = [engine for engine, report in engines.items() if report["version"] >= version]
            failed = {
                engine: str(report["failed"][version])
                for engine, report in engines.items()
                if engine not in loaded
                and version in report["failed"]
                and report.get("loads", 1) > before.get(engine, {}).get("loads", 0)
            }
            if before.keys() - engines.keys() or before.keys() & failed.keys():
                on_missing_engine()
            loading = sorted(engines.keys() - failed.keys() - set(loaded))
            if is_adopted and engines and not loading:
                break
            now = time.monotonic()
            state = _describe_state(is_adopted, engines, loading)
            if now - started > timeout:
                raise WeightsError(f"weight version {version} is not served after {timeout:.0f} s: {state}", failed)
            if now - last_log > _LOG_INTERVAL_S:
                last_log = now
                logger.warning("Weight version %d is not served by all engines yet: %s.", version, state)
            await asyncio.sleep(_POLL_INTERVAL_S)
        if not loaded:
            raise WeightsError(
                f"no engine could load weight version {version}, and all keep their old weights. Publish corrected "
                f"weights as version {version + 1} or later",
                failed,
            )
        for engine, reason in failed.items():
            logger.error("Engine %s could not load weight version %d: %s", engine, version, reason)
        return PublishedWeights(version, sorted(loaded), failed)

    async def _is_adopted(self, publication: _Publication) -> bool:
        """Return whether a coordinator has adopted the update. If Redis has lost the update, send it again."""
        entry_id = publication.entry_id
        waiting = await self._policy.run(
            lambda: self._client.xrange(self._keys.control, min=entry_id, max=entry_id), action="watch the engines"
        )
        if not waiting and await self.newest() < publication.update.weight_version:
            logger.warning("Redis has lost weight version %d; sending it again.", publication.update.weight_version)
            publication.entry_id = (await self._send(publication.update)).entry_id
            return False
        return not waiting


def _check_identity(version: int, identity: str, engines: Mapping[str, Any]) -> None:
    """Reject other weights under a version that is served: a version must identify one policy.

    Raises:
        InvalidRequestError: an engine serves other weights under this version.
    """
    if any(report["version"] == version and report.get("weights", "") != identity for report in engines.values()):
        raise InvalidRequestError(
            f"weight version {version} is already served with other weights; publish these as {version + 1} or later"
        )


def _describe_state(is_adopted: bool, engines: Mapping[str, Any], loading: list[str]) -> str:
    if not is_adopted:
        return "no coordinator has adopted it; is the job running?"
    if not engines:
        return "the job has no engine"
    listed = ", ".join(loading[:_MAX_LISTED_ENGINES])
    paused = "; the job is paused" if any(report.get("paused") for report in engines.values()) else ""
    return f"{len(loading)} of {len(engines)} engines are still loading: {listed}{paused}"


async def _resolve_checksum(uri: str, sha256: Checksum) -> str | None:
    """Return the checksum to publish; None if the engines should not verify the weights."""
    if sha256 == "compute":
        parts = urlsplit(uri)
        if parts.scheme not in ("", "file"):
            raise InvalidRequestError(
                f"{uri}: a checksum can only be computed for a local directory; pass sha256 in hex, or None"
            )
        directory = unquote(parts.path) if parts.scheme else uri
        try:
            return await asyncio.to_thread(checksum, directory)
        except OSError as error:
            raise WeightsError(
                f"the checksum of the weights cannot be computed: {error}; if only the job sees that directory, pass "
                "sha256 in hex, or None"
            ) from None
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise InvalidRequestError(f"sha256 {sha256!r} is neither 'compute' nor None nor 64 hexadecimal digits")
    return sha256
