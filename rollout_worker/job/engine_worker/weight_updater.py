"""Loads published weights into the engine, and passes them on to engines that have missed them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress

from rollout_api.protocol.messages import WeightsKind, WeightUpdate
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.errors import EngineError
from rollout_worker.engine.weight_loading import PassedWeights
from rollout_worker.job.engine_worker.announcer import HistoryAnnouncer
from rollout_worker.job.engine_worker.lease import EngineLease
from rollout_worker.job.engine_worker.running import RunningRollouts
from rollout_worker.job.job_store import JobStore, WeightOffer
from rollout_worker.job.limits import MAX_PASSING_ATTEMPTS, WEIGHT_OFFER_POLL_INTERVAL_S
from rollout_worker.job.weight_transport import Load, MissedBroadcastError, UnusableWeightsError, WeightTransport

logger = logging.getLogger(__name__)


class WeightUpdater:
    """Makes the engine serve the published weights. When they cannot be loaded, it keeps the weights that it has.

    If the engine has missed a broadcast, the coordinator orders another engine to pass the weights on, whose offer this
    class waits for. If there is no such engine, the coordinator tells this one, which reports a failure and waits for
    the next version.
    """

    def __init__(
        self,
        engine: Engine,
        job_store: JobStore,
        transport: WeightTransport,
        lease: EngineLease,
        running: RunningRollouts,
        announcer: HistoryAnnouncer,
    ) -> None:
        self._engine, self._job_store, self._transport = engine, job_store, transport
        self._lease, self._running, self._announcer = lease, running, announcer
        self._requested = asyncio.Event()
        self._updating = asyncio.Lock()
        self._passing_attempts = 0
        """Number of failed attempts to receive the missed weights from another engine."""
        self._last_offer = ""
        """Token of the last offer that was tried."""
        self._passing_requests: dict[str, int] = {}
        """Engine to which weights are to be passed on → the version."""
        self._passing_requested = asyncio.Event()

    def request_update(self) -> None:
        """Load the published weights soon; weights that could not be loaded before are tried again."""
        self._lease.report.failed.clear()
        self._passing_attempts = 0
        self._requested.set()

    def request_passing(self, target: str, version: int) -> None:
        """Pass the full weights on to the engine *target* soon, if they are still those of *version*."""
        self._passing_requests[target] = version
        self._passing_requested.set()

    async def report_missing_source(self, version: int) -> None:
        """Report the failure to load missed weights that no other engine has, if they are still missed."""
        report = self._lease.report
        if version != report.missed or version in report.failed or report.loading is not None:
            return
        reason = (
            f"weight version {version} was broadcast before this engine joined, and no other engine of the job has it; "
            "the engine loads the next version, or these weights when they are published from a directory under a "
            "later version"
        )
        logger.warning("Cannot load weight version %d: %s", version, reason)
        report.failed[version] = reason
        report.loads += 1
        await self._lease.renew()

    async def run(self) -> None:
        """Load weights whenever an update is requested or missed weights are offered, until cancelled.

        Raises:
            EngineError: if the engine has stopped while it loaded weights.
        """
        while True:
            if self._lease.report.missed is None:
                await self._requested.wait()
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._requested.wait(), WEIGHT_OFFER_POLL_INTERVAL_S)
            if self._requested.is_set():
                self._requested.clear()
                await self.update()
            else:
                await self._receive_missed()

    async def pass_on(self) -> None:
        """Pass weights on to other engines whenever it is requested, until cancelled."""
        while True:
            await self._passing_requested.wait()
            if not self._passing_requests:
                self._passing_requested.clear()
                continue
            target = next(iter(self._passing_requests))
            version = self._passing_requests.pop(target)
            report = await self._job_store.engines.report(target)
            if report is None or report.missed != version:
                continue  # it has received them meanwhile, or has ended
            offer = await self._make_offer(version)
            if offer.error:
                logger.warning("Engine %s gets no weights from this engine: %s", target, offer.error)
            await self._job_store.weight_offers.offer(target, offer)

    async def serves(self, version: int) -> bool:
        """Return whether new rollouts are sampled with *version*, once the current update has finished."""
        if version != self._lease.report.upcoming_version:
            return False
        async with self._updating:
            return self._lease.report.version == version

    async def serves_since(self, version: int) -> bool:
        """Return whether new rollouts are sampled with *version* or a later one, once the current update has finished.

        It does not wait for the update if the weights that are served now are new enough.
        """
        report = self._lease.report
        if report.version >= version:
            return True
        if report.upcoming_version < version:
            return False
        async with self._updating:
            return report.version >= version

    async def update(self) -> None:
        """Load the published weights that are not served yet, and report the outcome.

        Raises:
            EngineError: if the engine has stopped while it loaded weights.
        """
        async with self._updating:
            await self._update()

    async def _update(self, offer: WeightOffer | None = None) -> None:
        """Load the published weights that are not served yet.

        Args:
            offer: where another engine passes missed weights on.
        """
        report = self._lease.report
        updates = await self._job_store.job.weights()
        if report.missed is not None and report.missed not in [update.weight_version for update in updates]:
            report.missed, self._passing_attempts = None, 0
        for update in updates:
            version, full = update.weight_version, update.weights_kind is WeightsKind.FULL
            served = self._engine.full_weight_version if full else self._engine.weight_version
            is_offered = offer is not None and offer.version == version == report.missed
            if version == served or (version in report.failed and not is_offered):
                continue
            base = updates[0].weight_version
            if not full and base not in (version, self._engine.full_weight_version):
                if base != report.missed or base in report.failed:
                    report.loads += 1
                    report.failed[version] = (
                        f"the adapter needs the full weights of version {base}, which are not loaded"
                    )
                continue
            await self._try_update(update, served, offer if is_offered else None)
        await self._lease.renew()

    async def _try_update(self, update: WeightUpdate, served: int, offer: WeightOffer | None) -> None:
        version, report = update.weight_version, self._lease.report
        started = time.monotonic()
        report.loading = version
        await self._lease.renew()
        try:
            gap = await self._load(update, offer)
            report.weights, report.full_version = update.identity, self._engine.full_weight_version
            logger.info("Serving weight version %d; decoding was paused for %.3f s.", version, gap)
            report.counters["weights_gap_seconds"] = gap
            report.counters["weights_update_seconds"] = time.monotonic() - started
            if version == report.missed:
                report.missed, self._passing_attempts = None, 0
                report.failed.clear()  # an adapter may have failed because it needs these weights
        except MissedBroadcastError as error:
            logger.info("Cannot load weight version %d; waiting for another engine to pass it on: %s.", version, error)
            report.missed = version
        except (UnusableWeightsError, EngineError) as error:
            if self._engine.stopped:
                raise
            logger.warning("Cannot load weight version %d; still serving version %d: %s", version, served, error)
            self._record_failure(update, str(error), was_offered=offer is not None)
        report.loads += 1
        report.version, report.loading = self._engine.weight_version, None

    def _record_failure(self, update: WeightUpdate, error: str, *, was_offered: bool) -> None:
        version, report = update.weight_version, self._lease.report
        if not was_offered:
            report.failed[version] = error
            if update.broadcast is not None and report.broadcast:
                report.missed = version  # others may have received what this engine has not
                if update.broadcast.group == report.group:
                    report.group_error = error  # the trainer's next tensors may be those of this update
            return
        self._passing_attempts += 1
        if self._passing_attempts == MAX_PASSING_ATTEMPTS:
            report.missed, self._passing_attempts = None, 0
            report.failed[version] = error

    async def _load(self, update: WeightUpdate, offer: WeightOffer | None) -> float:
        if offer is None:
            load = await self._transport.prepare(update, self._lease.engine_id)
        else:
            load = self._prepare_passed(update, offer)
        if update.weights_kind is WeightsKind.FULL:
            # Rollouts that are pinned to another version must end with that version.
            await self._running.wait_pinned_to_others(update.weight_version)
        gap = await load(self._engine)
        self._announcer.publish(update.weight_version)
        return gap

    def _prepare_passed(self, update: WeightUpdate, offer: WeightOffer) -> Load:
        if offer.error:
            raise UnusableWeightsError(
                f"engine {offer.source} cannot pass weight version {offer.version} on: {offer.error}; publish the next "
                "version, from a directory if this happens again"
            )
        passed = PassedWeights(offer.version, offer.token, offer.addresses)
        return lambda engine: engine.receive_passed_weights(passed, update.mode)

    async def _receive_missed(self) -> None:
        """Receive the missed weights if another engine offers them."""
        offer = await self._job_store.weight_offers.read(self._lease.engine_id)
        async with self._updating:
            if offer is not None and offer.token != self._last_offer:
                self._last_offer = offer.token
                await self._update(offer)

    async def _make_offer(self, version: int) -> WeightOffer:
        source = self._lease.engine_id
        try:
            passed = await self._engine.pass_weights()
            if passed.version == version:
                return WeightOffer(source, version, passed.token, passed.addresses)
            error = f"it has version {passed.version} by now"
        except EngineError as failure:
            error = str(failure)
        return WeightOffer(source, version, secrets.token_hex(16), error=error)
