"""Loads published weights into the engine, from directories and from a trainer's memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rollout_api.protocol.messages import CodecError, InitWeightTransfer, TransferStep, WeightsKind, WeightUpdate
from rollout_api.weights.checksum import checksum
from rollout_store.job import JobStore
from rollout_store.job.engines import EngineError
from rollout_store.job.store import MAX_BLOCKING_READ_S
from rollout_store.models.model_source import ModelError, resolve_adapter, resolve_checkpoint
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.failures import ends_engine
from rollout_worker.engine_worker.history_prefetcher import HistoryPrefetcher
from rollout_worker.engine_worker.lease import EngineLease
from rollout_worker.engine_worker.running import RunningRollouts

Load = Callable[[Engine], Awaitable[float]]
"""Loads weights into an engine and returns for how many seconds decoding was paused; raises EngineError."""
Checksum = Callable[[Path, str], Awaitable[str]]
"""Returns the checksum of the weights in a directory, given the expected one; raises OSError."""
logger = logging.getLogger(__name__)
TRANSFER_START_TIMEOUT_S = 600.0
"""Seconds for which an engine that is ready waits for a trainer to send weights; other engines may drain meanwhile."""
TRANSFER_IDLE_TIMEOUT_S = 120.0
"""Seconds for which an engine that has received a part of the weights waits for the trainer's next step."""


async def compute_checksum(directory: Path, expected: str) -> str:
    """Return the checksum of the weights in *directory*, whatever is expected; see :data:`Checksum`."""
    return await asyncio.to_thread(checksum, directory)


class UnusableWeightsError(RuntimeError):
    """Published weights cannot be used. The text says which ones, and why."""


class WeightDirectories:
    """Finds and verifies weights in directories that the trainer and the workers share."""

    def __init__(
        self,
        model: Path,
        cache: Path,
        allowed_roots: Sequence[str],
        *,
        model_uri: str = "",
        checksum: Checksum = compute_checksum,
    ) -> None:
        """Allow weights in the model's directory, in the model cache and below certain directories.

        These are the *allowed_roots*, below which trainers may publish weights. The address *model_uri* in the manifest
        means the model's directory.
        """
        self._model, self._cache, self._allowed_roots = model, cache, list(allowed_roots)
        self._model_uri, self._checksum = model_uri, checksum

    async def prepare(self, update: WeightUpdate) -> Load:
        """Verify published weights while the engine continues decoding.

        The first engine takes as long as reading the files.

        Returns:
            A function that loads the weights.

        Raises:
            UnusableWeightsError: if the weights do not exist, are not allowed, or differ from what was published.
        """
        is_adapter, version, mode = update.weights_kind is WeightsKind.LORA, update.weight_version, update.mode
        resolve = resolve_adapter if is_adapter else resolve_checkpoint
        uri = str(self._model) if update.uri == self._model_uri else update.uri
        try:
            directory = await asyncio.to_thread(resolve, uri, self._cache, self._model, self._allowed_roots)
            await self._verify(directory, update)
        except (ModelError, OSError) as error:
            raise UnusableWeightsError(str(error)) from error
        if is_adapter:
            return lambda engine: engine.load_adapter(directory, version)
        return lambda engine: engine.load_weights(directory, version, mode)

    async def _verify(self, directory: Path, update: WeightUpdate) -> None:
        expected = update.sha256
        if expected is None:
            return
        found = await self._checksum(directory, expected)
        if found != expected:
            raise UnusableWeightsError(
                f"{directory} has the checksum {found}, but weight version {update.weight_version} was published with "
                f"{expected}: the files were changed, or are still being written"
            )


class PublishedWeights:
    """Makes the engine serve the published weights. When they cannot be loaded, it keeps the weights that it has.

    An engine that has missed weights from a trainer's memory reports so and waits for the next version. The coordinator
    gives it no rollouts meanwhile, unless no other engine has these weights either.
    """

    def __init__(
        self,
        engine: Engine,
        job_store: JobStore,
        directories: WeightDirectories,
        lease: EngineLease,
        running: RunningRollouts,
        prefetcher: HistoryPrefetcher,
    ) -> None:
        self._engine, self._job_store, self._directories = engine, job_store, directories
        self._lease, self._running, self._prefetcher = lease, running, prefetcher
        self._requested, self._init_requested = asyncio.Event(), asyncio.Event()
        self._loading = asyncio.Lock()
        self._is_sending = False
        """Whether the trainer has begun to send the weights of the last transfer."""

    def request_load(self) -> None:
        """Load the published weights soon; weights that could not be loaded before are tried again."""
        self._lease.report.failed.clear()
        self._requested.set()

    def request_transfer_init(self) -> None:
        """Join the trainer's group in the job's record soon."""
        self._init_requested.set()

    async def run(self) -> None:
        """Load weights whenever that is requested, until cancelled.

        Raises:
            EngineError: if the engine has stopped while it loaded weights.
            redis.RedisError: if the server cannot be used.
        """
        while True:
            await self._requested.wait()
            self._requested.clear()
            await self.load()

    async def run_transfer_inits(self) -> None:
        """Join a trainer's group whenever it is requested, until cancelled.

        Raises:
            EngineError: if the engine has stopped.
        """
        while True:
            await self._init_requested.wait()
            self._init_requested.clear()
            try:
                await self._join_requested()
            except CodecError as error:
                logger.error("The job's record of the trainer's group cannot be read: %s", error)

    async def _join_requested(self) -> None:
        """Join the group in the job's record, unless that was tried before, and report the outcome."""
        group, report = await self._job_store.job.transfer_group(), self._lease.report
        if group is None or self._lease.engine_id not in group.engines or group.group == report.transfer_group:
            return
        error = await self._join(group)
        if error:
            logger.warning("The engine has not joined the trainer's group: %s", error)
        else:
            logger.info("The engine has joined the trainer's group.")
        report.transfer_group, report.transfer_error = group.group, error
        await self._lease.renew()

    async def _join(self, group: InitWeightTransfer) -> str:
        """Join a group; return '' or why it was not joined."""
        if not self._lease.report.transfer_backend:
            return "this job takes no weights from a trainer's memory: spec.weights.transfer is none"
        init_info = dict(group.init_info)
        if "rank_offset" in init_info:
            init_info["rank_offset"] = group.engines[self._lease.engine_id]
        try:
            await self._engine.init_weight_transfer(init_info)
        except Exception as error:
            if ends_engine(error, self._engine):
                raise
            return _describe(error)
        return ""

    async def serves(self, version: int) -> bool:
        """Return whether new rollouts are sampled with *version*, once the current load has finished."""
        if version != self._lease.report.upcoming_version:
            return False
        async with self._loading:
            return self._lease.report.version == version

    async def serves_since(self, version: int) -> bool:
        """Return whether new rollouts are sampled with *version* or a later one, once the current load has finished.

        It does not wait for it if the weights that are served now are new enough.
        """
        report = self._lease.report
        if report.version >= version:
            return True
        if report.upcoming_version < version:
            return False
        async with self._loading:
            return report.version >= version

    async def load(self) -> None:
        """Load the published weights that are not served yet, and report the outcome.

        Raises:
            EngineError: if the engine has stopped while it loaded weights.
        """
        async with self._loading:
            try:
                await self._load_published()
            except CodecError as error:
                logger.error("The job's record of published weights cannot be read: %s", error)

    async def _load_published(self) -> None:
        report = self._lease.report
        updates = await self._job_store.job.weights()
        if report.missed is not None and report.missed not in [update.weight_version for update in updates]:
            report.missed = None
        for update in updates:
            version, full = update.weight_version, update.weights_kind is WeightsKind.FULL
            served = self._engine.full_weight_version if full else self._engine.weight_version
            if version == served or version in report.failed:
                continue
            base = updates[0].weight_version
            if not full and base not in (version, self._engine.full_weight_version):
                report.loads += 1
                report.failed[version] = f"the adapter needs the full weights of version {base}, which are not loaded"
                continue
            await self._try_load(update, served)
        await self._lease.renew()

    async def _try_load(self, update: WeightUpdate, served: int) -> None:
        version, report = update.weight_version, self._lease.report
        started, self._is_sending = time.monotonic(), False
        report.loading = version
        await self._lease.renew()
        try:
            gap = await self._load(update)
            report.weights, report.full_version = update.identity, self._engine.full_weight_version
            logger.info("Serving weight version %d; decoding was paused for %.3f s.", version, gap)
            report.counters["weights_gap_seconds"] = gap
            report.counters["weights_update_seconds"] = time.monotonic() - started
            if version == report.missed:
                report.missed = None
        except Exception as error:  # what a trainer has published can cause errors of any type
            if ends_engine(error, self._engine):
                raise
            reason = _describe(error)
            logger.warning("Cannot load weight version %d; still serving version %d: %s", version, served, reason)
            report.failed[version] = reason
            if update.transfer is not None:
                report.missed = version  # others may have received what this engine has not
                if self._is_sending and update.transfer.group == report.transfer_group:
                    report.transfer_error = reason  # the trainer's next tensors may be those of this update
        report.loads += 1
        report.version, report.loading, report.receiving = self._engine.weight_version, None, ""

    async def _load(self, update: WeightUpdate) -> float:
        load = self._prepare_transfer(update) if update.transfer else await self._directories.prepare(update)
        if update.weights_kind is WeightsKind.FULL:
            # Rollouts that are pinned to another version must end with that version.
            await self._running.wait_pinned_to_others(update.weight_version)
        gap = await load(self._engine)
        self._prefetcher.publish(update.weight_version)
        return gap

    def _prepare_transfer(self, update: WeightUpdate) -> Load:
        transfer, report, version = update.transfer, self._lease.report, update.weight_version
        if transfer is None:
            raise ValueError("the weights are in a directory")
        if self._lease.engine_id not in transfer.engines:
            raise UnusableWeightsError(
                f"weight version {version} was sent from a trainer's memory before this engine joined. It waits for "
                "the next version, or for these weights from a directory under a later version, and takes no rollouts "
                "meanwhile if another engine has them"
            )
        if transfer.group != report.transfer_group or report.transfer_error:
            raise UnusableWeightsError(
                f"the engine is no member of the trainer's group{report.transfer_error and ': '}{report.transfer_error}"
            )
        if self._engine.config.sends_differences and transfer.base != self._engine.full_weight_version:
            raise UnusableWeightsError(
                f"the trainer sends differences to weight version {transfer.base}, which the engine does not have; "
                "publish all weights from a directory"
            )
        return lambda engine: engine.load_transferred(
            self._transfer_updates(update), version, update.mode, transfer.update_info
        )

    async def _transfer_updates(self, update: WeightUpdate) -> AsyncIterator[dict[str, Any]]:
        """Yield what the trainer announces, until it has sent all weights.

        Raises:
            EngineError: if the trainer aborts the transfer, or does not continue it.
        """
        report, cursor, timeout_s = self._lease.report, "0", TRANSFER_START_TIMEOUT_S
        report.receiving, report.received = update.identity, 0
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._lease.renew()
                    step, cursor = await self._next_step(update, cursor)
            except TimeoutError:
                raise EngineError("the trainer does not continue the transfer") from None
            except CodecError as error:
                raise EngineError(f"what the trainer announces cannot be decoded: {error}") from error
            if step.step == "abort":
                raise EngineError(f"the trainer has aborted the transfer: {step.reason}")
            if step.step == "finish":
                return
            self._is_sending = True
            yield step.update_info or {}
            report.received, timeout_s = report.received + 1, TRANSFER_IDLE_TIMEOUT_S

    async def _next_step(self, update: WeightUpdate, cursor: str) -> tuple[TransferStep, str]:
        """Return the trainer's next step and its cursor.

        Raises:
            EngineError: if the trainer has begun anew.
        """
        job = self._job_store.job
        while True:
            found = await job.transfer_step(update.identity, cursor, timeout_s=MAX_BLOCKING_READ_S)
            if found is not None:
                return found
            updates, group = await job.weights(), await job.transfer_group()
            is_current = any(one.identity == update.identity for one in updates)
            if not is_current or (update.transfer and group and group.group != update.transfer.group):
                raise EngineError("the trainer has begun another transfer")


def _describe(error: Exception) -> str:
    """Return why weights cannot be used, for the trainer."""
    if isinstance(error, UnusableWeightsError | EngineError):
        return str(error)
    return f"they cannot be read or loaded: {type(error).__name__}: {error}"
