"""Lets the engine join the transfer group of a trainer."""

from __future__ import annotations

import asyncio
import logging

from rollout_api.protocol.messages import JoinGroup
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.errors import EngineError
from rollout_worker.engine.transfer_group import GroupMembership
from rollout_worker.job.engine_worker.lease import EngineLease
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.weight_transport import broadcast_address

logger = logging.getLogger(__name__)


class GroupJoiner:
    """Joins the transfer group in the job's record if the engine is one of its members, and reports the outcome."""

    def __init__(self, engine: Engine, job_store: JobStore, lease: EngineLease) -> None:
        self._engine, self._job_store, self._lease = engine, job_store, lease
        self._requested = asyncio.Event()

    def request_update(self) -> None:
        """Join the group in the job's record soon."""
        self._requested.set()

    async def run(self) -> None:
        """Join a group whenever it is requested, until cancelled.

        Raises:
            EngineError: if the engine has stopped.
        """
        while True:
            await self._requested.wait()
            self._requested.clear()
            group, report = await self._job_store.job.transfer_group(), self._lease.report
            if group is None or self._lease.engine_id not in group.members or group.group == report.group:
                continue
            error = await self._join(group)
            if error:
                logger.warning("The engine has not joined a transfer group: %s", error)
            else:
                logger.info("The engine has joined the transfer group of the trainer at %s.", group.uri)
            report.group, report.group_error = group.group, error
            await self._lease.renew()

    async def _join(self, group: JoinGroup) -> str:
        """Join a group; return '' or why it was not joined."""
        address = broadcast_address(group.uri)
        if not self._lease.report.broadcast:
            return "this job does not accept broadcast weights: spec.weights.broadcast is false"
        if address is None or address[0] != self._lease.report.broadcast:
            return f"{group.uri} is not the address of a group: it must be {self._lease.report.broadcast}://host:port"
        rank = group.members[self._lease.engine_id]
        try:
            await self._engine.join_transfer_group(GroupMembership(group.group, *address, rank, group.world_size))
        except EngineError as error:
            if self._engine.stopped:
                raise
            return str(error)
        return ""
