"""Leader election: of several operators, the one that holds the Lease works and the others wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi, reference

logger = logging.getLogger(__name__)

# Lease duration and renewal deadline are the defaults of client-go's leader election.
LEASE_DURATION_S = 15
_RENEW_INTERVAL_S = 2.0
_RENEW_DEADLINE_S = 10.0
"""Seconds without a successful renewal after which a leader ends, before another operator may take the Lease."""


class LostLeaseError(Exception):
    """This operator is no longer the leader and must write nothing."""


class LeaderElection:
    """A candidate for a Lease (``coordination.k8s.io/v1``)."""

    def __init__(self, api: KubernetesApi, namespace: str, name: str, identity: str) -> None:
        self.leading = False
        self._api, self._identity = api, identity
        self._reference = reference("Lease", namespace, name, api_version="coordination.k8s.io/v1")
        self._last_observed: tuple[Any, float] | None = None
        """The last renewal by another holder, and the local time at which it was first observed."""

    async def acquire(self) -> None:
        """Wait until this operator is the leader."""
        logged = False
        while True:
            try:
                if await self._try_acquire():
                    self.leading = True
                    logger.info("This operator is the leader: %s.", self._identity)
                    return
            except ApiError as error:
                logger.warning("The Lease cannot be acquired at the moment: %s", error)
            if not logged:
                logged = True
                logger.info("Another operator is the leader; waiting for its Lease.")
            await asyncio.sleep(_RENEW_INTERVAL_S)

    async def keep(self) -> None:
        """Renew the Lease until cancelled.

        Raises:
            LostLeaseError: if the Lease is lost. The process must then end at once.
        """
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(_RENEW_INTERVAL_S)
            try:
                async with asyncio.timeout(_RENEW_DEADLINE_S / 2):
                    held = await self._try_acquire()
            except (ApiError, TimeoutError) as error:
                if time.monotonic() - renewed > _RENEW_DEADLINE_S:
                    self.leading = False
                    raise LostLeaseError(
                        f"The Lease could not be renewed for {_RENEW_DEADLINE_S:.0f} s: {error}"
                    ) from error
                continue
            if not held:
                self.leading = False
                raise LostLeaseError("Another operator has acquired the Lease.")
            renewed = time.monotonic()

    async def release(self) -> None:
        """Release the Lease, so that another operator can acquire it at once."""
        if not self.leading:
            return
        self.leading = False
        try:
            lease = await self._api.get(self._reference)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(lease)
        except ApiError as error:
            logger.warning("The Lease could not be released and expires in %d s: %s", LEASE_DURATION_S, error)

    async def _try_acquire(self) -> bool:
        """Acquire or renew the Lease, and return whether this operator holds it."""
        try:
            lease = await self._api.get(self._reference)
        except ApiError as error:
            if not error.not_found:
                raise
            return await self._write({**self._reference, "spec": self._spec({})}, self._api.create)
        spec = lease.get("spec") or {}
        holder: str = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._is_expired(spec):
            return False
        return await self._write({**lease, "spec": self._spec(spec)}, self._api.replace)

    def _is_expired(self, spec: dict[str, Any]) -> bool:
        """Return whether the holder has not renewed for the lease duration.

        Measured with the local clock from when a renewal is observed, because the clocks of machines differ.
        """
        renewal = (spec.get("holderIdentity"), spec.get("renewTime"))
        now = time.monotonic()
        if self._last_observed is None or self._last_observed[0] != renewal:
            self._last_observed = (renewal, now)
        return now - self._last_observed[1] > float(spec.get("leaseDurationSeconds", LEASE_DURATION_S))

    def _spec(self, current: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        held = current.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_DURATION_S,
            "acquireTime": current.get("acquireTime", now) if held else now,
            "renewTime": now,
            "leaseTransitions": current.get("leaseTransitions", 0) + (not held),
        }

    async def _write(self, lease: dict[str, Any], request: Callable[[dict[str, Any]], Awaitable[Any]]) -> bool:
        """Write the Lease, and return False if another operator was faster."""
        try:
            await request(lease)
        except ApiError as error:
            if error.conflict:
                return False
            raise
        return True
