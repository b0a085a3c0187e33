"""One operator at a time: whoever holds the Lease works, others wait for it."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from rollout_operator.api import ApiError, KubernetesApi

logger = logging.getLogger(__name__)

LEASE_S = 15
_RENEW_S = 2.0
_GIVE_UP_S = 10.0
"""Without a renewal for so long a leader ends: sooner than another one may begin."""


class LostLeaseError(Exception):
    """This operator may not work any more."""


class Leadership:
    """A claim on a Lease (coordination.k8s.io/v1)."""

    def __init__(self, api: KubernetesApi, namespace: str, name: str, identity: str) -> None:
        self.leading = False
        self._api, self._identity = api, identity
        self._about = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": namespace, "name": name},
        }
        self._seen: tuple[Any, float] | None = None
        """The holder's last renewal, and when it was first seen, by this machine's own clock."""

    async def acquire(self) -> None:
        """Return once this operator leads."""
        waiting = False
        while True:
            try:
                if await self._try():
                    self.leading = True
                    logger.info("This operator leads: %s", self._identity)
                    return
            except ApiError as error:
                logger.warning("The Lease cannot be had now: %s", error)
            if not waiting:
                waiting = True
                logger.info("Another operator leads; waiting.")
            await asyncio.sleep(_RENEW_S)

    async def keep(self) -> None:
        """Renew until that fails.

        Raises:
            LostLeaseError: then the process must end at once.
        """
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                async with asyncio.timeout(_GIVE_UP_S / 2):
                    held = await self._try()
            except (ApiError, TimeoutError) as error:
                if time.monotonic() - renewed > _GIVE_UP_S:
                    self.leading = False
                    raise LostLeaseError(f"the Lease could not be renewed for {_GIVE_UP_S:.0f} s: {error}") from error
                continue
            if not held:
                self.leading = False
                raise LostLeaseError("another operator has taken the Lease")
            renewed = time.monotonic()

    async def release(self) -> None:
        """Let another operator lead at once."""
        if not self.leading:
            return
        self.leading = False
        try:
            lease = await self._api.get(self._about)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(lease)
        except ApiError as error:
            logger.warning("The Lease could not be given back; it runs out in %d s: %s", LEASE_S, error)

    async def _try(self) -> bool:
        """Take or renew the Lease; whether it is this operator's."""
        try:
            lease = await self._api.get(self._about)
        except ApiError as error:
            if not error.absent:
                raise
            return await self._write({**self._about, "spec": self._spec({})}, self._api.create)
        spec = lease.get("spec") or {}
        holder: str = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._run_out(spec):
            return False
        return await self._write({**lease, "spec": self._spec(spec)}, self._api.replace)

    def _run_out(self, spec: dict[str, Any]) -> bool:
        """Whether the holder has not renewed for as long as it may take, by this clock: clocks differ."""
        renewal = (spec.get("holderIdentity"), spec.get("renewTime"))
        now = time.monotonic()
        if self._seen is None or self._seen[0] != renewal:
            self._seen = (renewal, now)
        return now - self._seen[1] > float(spec.get("leaseDurationSeconds", LEASE_S))

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_S,
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (not mine),
        }

    async def _write(self, lease: dict[str, Any], how: Any) -> bool:
        try:
            await how(lease)
        except ApiError as error:
            if error.conflict:
                return False
            raise
        return True
