"""Orders to engines, under this coordinator's fencing token."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_store.job import JobStore, Order, StaleCoordinatorError


class FencedOrders:
    """Sends orders to engines, and reclaims those of lost engines, for as long as this coordinator is the newest."""

    def __init__(self, job_store: JobStore) -> None:
        self.coordinator = 0
        """Number of this coordinator; 0 before it has taken over."""
        self._job_store = job_store

    async def take_over(self) -> None:
        """Become the job's coordinator."""
        self.coordinator = await self._job_store.assignments.take_over()

    async def check_current(self) -> None:
        """Check that no other coordinator has taken over.

        Raises:
            StaleCoordinatorError: if one has.
        """
        if await self._job_store.assignments.current_coordinator() > self.coordinator:
            raise StaleCoordinatorError("another coordinator has taken over")

    async def send(self, engine: str, orders: Sequence[Order]) -> bool:
        """Send orders to an engine; return False if its lease has expired.

        Raises:
            StaleCoordinatorError: if another coordinator has taken over.
        """
        return await self._job_store.assignments.send(self.coordinator, engine, orders)

    async def reclaim(self, engine: str) -> list[Order] | None:
        """Remove an engine whose lease has expired; return its orders, or None if it has a lease again.

        Raises:
            StaleCoordinatorError: if another coordinator has taken over.
        """
        return await self._job_store.assignments.reclaim(self.coordinator, engine)
