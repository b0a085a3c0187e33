"""Publishes weights to a job and waits until its engines serve them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import redis

from rollout_api.client.job_channel import JobChannel
from rollout_api.errors import InvalidRequestError, WeightsError
from rollout_api.protocol.messages import (
    UpdateMode,
    WeightsKind,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.weights.checksum import checksum

logger = logging.getLogger(__name__)

_MAX_LISTED_ENGINES = 5
_POLL_INTERVAL_S = 0.2
"""Time between two checks whether the engines have loaded published weights."""
_LOG_INTERVAL_S = 30.0
"""Time between two log messages about engines that are still loading weights."""

Checksum = Literal["compute"] | str | None
"""A SHA-256 in hex, ``compute`` to have the client compute it, or None for weights that are not to be verified."""


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
class Publication:
    """An update that was sent."""

    update: WeightUpdate
    """Message that was sent."""
    entry_id: str
    """Id of its entry in the control stream, which the coordinator deletes once it has adopted the update; '' if it has
    adopted it."""


class WeightPublisher:
    """Publishes weights to one job.

    Args:
        channel: channel to the job.
    """

    def __init__(self, channel: JobChannel) -> None:
        self._channel = channel
        self._client, self._keys, self._policy = channel.redis, channel.keys, channel.policy

    async def publish(
        self,
        version: int,
        directory: str,
        *,
        kind: WeightsKind = WeightsKind.FULL,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
        sha256: Checksum = None,
        wait: bool = True,
        timeout: float,
    ) -> PublishedWeights:
        """Publish a directory; see :meth:`rollout_api.AsyncRolloutClient.publish_weights`."""
        engines = await self.engines_before(version)
        digest = await _resolve_checksum(directory, sha256)
        update = WeightUpdate(weight_version=version, uri=directory, weights_kind=kind, sha256=digest, mode=mode)
        check_identity(version, update.identity, engines)
        publication = await self.send(update)
        if not wait:
            return PublishedWeights(version, [], {})
        return await self.wait(publication, engines, timeout)

    async def engines_before(self, version: int) -> dict[str, dict[str, Any]]:
        """Return the reports of the engines, and check that none serves a newer version than the one to be published.

        Raises:
            InvalidRequestError: the version cannot be published.
            WeightsError: the engines sleep.
        """
        if version < 1:
            raise InvalidRequestError(
                f"weight version {version}: published versions start at 1; 0 is the model that the job started with"
            )
        engines = await self._channel.engine_reports()
        if any(report.get("paused", "").endswith("sleep") for report in engines.values()):
            raise WeightsError("the engines sleep and have no memory for weights; wake the job first (client.wake())")
        newest = max((report["version"] for report in engines.values()), default=0)
        if version < newest:
            raise InvalidRequestError(
                f"weight version {version} is older than {newest}, which the engines serve. Versions only increase, "
                f"because histories are ordered by them: publish restored weights as {newest + 1} or later"
            )
        return engines

    async def publish_next(
        self, directory: str, *, kind: WeightsKind, version: int | None = None, timeout: float
    ) -> PublishedWeights:
        """Publish a directory, and wait until all engines serve it.

        Args:
            directory: directory of the weights, as the engines see it.
            kind: what it contains.
            version: weight version; None for the one after the newest.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: the version cannot be used.
            WeightsError: some engine could not load the weights, or took too long.
            RolloutClientError: Redis is unavailable.
        """
        version = await self.newest() + 1 if version is None else version
        published = await self.publish(version, directory, kind=kind, timeout=timeout)
        published.raise_if_failed()
        return published

    async def newest(self) -> int:
        """Return the newest version that a coordinator has adopted; 0 if there is none."""
        stored = await self._policy.run(
            lambda: self._client.hmget(self._keys.weights, ["full", "lora"]), action="read the served weight version"
        )
        updates = [decode(data) for data in stored if isinstance(data, bytes)]
        return max((update.weight_version for update in updates if isinstance(update, WeightUpdate)), default=0)

    async def current(self) -> WeightUpdate | None:
        """Return the update of full weights that a coordinator has adopted last; None if there is none."""
        stored: Any = await self._policy.run(
            lambda: self._client.hget(self._keys.weights, "full"), action="read the served weights"
        )
        update = None if stored is None else decode(stored)
        return update if isinstance(update, WeightUpdate) else None

    async def send(self, update: WeightUpdate) -> Publication:
        """Send an update to the coordinator."""
        [entry_id] = await self._channel.append(self._keys.control, [encode(update)], "publish weights")
        return Publication(update, entry_id)

    async def withdraw(self, publication: Publication) -> None:
        """Withdraw an update that no coordinator has adopted yet."""
        with contextlib.suppress(redis.RedisError):
            await self._client.xdel(self._keys.control, publication.entry_id)

    async def wait(
        self,
        publication: Publication,
        before: Mapping[str, Mapping[str, Any]],
        timeout: float,
    ) -> PublishedWeights:
        """Wait until each engine serves the update, or has failed to load it.

        Args:
            publication: the update.
            before: reports of the engines from before the update was sent. Failures that they contain are ignored.
            timeout: seconds to wait.

        Returns:
            The outcome, for weights from a trainer's memory only that of the engines that take part.
        """
        version, transfer = publication.update.weight_version, publication.update.transfer
        started = last_log = time.monotonic()
        while True:
            is_adopted = await self._is_adopted(publication)
            engines, ended = await self._channel.engine_reports(), {}
            if transfer is not None:
                ended = dict.fromkeys(set(transfer.engines) - engines.keys(), "the engine has ended")
                engines = {engine: report for engine, report in engines.items() if engine in transfer.engines}
            loaded = [engine for engine, report in engines.items() if report["version"] >= version]
            failed = {
                engine: str(report["failed"][version])
                for engine, report in engines.items()
                if engine not in loaded
                and version in report["failed"]
                and report.get("loads", 1) > before.get(engine, {}).get("loads", 0)
            }
            loading = sorted(engines.keys() - failed.keys() - set(loaded))
            failed |= ended
            if is_adopted and (engines or ended) and not loading:
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

    async def _is_adopted(self, publication: Publication) -> bool:
        """Return whether a coordinator has adopted the update. If Redis has lost the update, send it again."""
        entry_id = publication.entry_id
        if not entry_id:
            return True
        is_processed = await self._channel.is_processed(entry_id, "watch the engines")
        if is_processed and await self.newest() < publication.update.weight_version:
            logger.warning("Redis has lost weight version %d; sending it again.", publication.update.weight_version)
            publication.entry_id = (await self.send(publication.update)).entry_id
            return False
        return is_processed


def check_identity(version: int, identity: str, engines: Mapping[str, Any]) -> None:
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
