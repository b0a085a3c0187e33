"""Weights that a trainer sends as to vLLM's own server: it forms a process group once, and sends in it later."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis
import redis.asyncio

from rollout_api.client.engine_reports import read_engine_reports
from rollout_api.client.job_info import JobInfo
from rollout_api.client.request_sender import RequestSender
from rollout_api.client.weight_publisher import PublishedWeights, WeightPublisher
from rollout_api.errors import InvalidRequestError, WeightsError, list_reasons
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import (
    Broadcast,
    JoinGroup,
    TensorSpec,
    WeightsKind,
    decode,
    encode,
)
from rollout_api.redis_client.retry import ClientRetryPolicy

_POLL_INTERVAL_S = 0.05
_FORM_AGAIN = "form the process group again: POST /init_weight_transfer_engine"


class WeightTransfer:
    """Forms a transfer group of a trainer and a job's engines, and lets the engines receive weights in it.

    Args:
        client: connection to Redis.
        job: the job.
        sender: sender of messages.
        policy: how failing commands are retried.
        publisher: publishes the weights.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        job: JobInfo,
        sender: RequestSender,
        policy: ClientRetryPolicy,
        publisher: WeightPublisher,
    ) -> None:
        self._client, self._job, self._sender, self._policy = client, job, sender, policy
        self._keys, self._publisher = MessageKeys(job.uid), publisher

    async def form_group(self, host: str, port: int, world_size: int, *, packed_bytes: int, timeout: float) -> None:
        """Let the engines join the group of a trainer that listens already, and wait until they have.

        If the job has more engines than the group has room for, those without a place receive the weights from others.

        Args:
            host: the trainer's address, which the engines can reach.
            port: the trainer's port.
            world_size: number of processes in the group, of which the trainer is rank 0.
            packed_bytes: what :meth:`update` uses by default.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: the job's engines cannot form such a group.
            WeightsError: some engine has not joined; it says why.
        """
        engines = await self._engines()
        backend, members = _backend(engines), _choose_members(engines, world_size)
        group = JoinGroup(
            group=secrets.token_hex(8),
            uri=f"{backend}://[{host}]:{port}" if ":" in host else f"{backend}://{host}:{port}",
            members=members,
            world_size=world_size,
            packed_bytes=packed_bytes,
        )
        [entry_id] = await self._sender.append(self._keys.control, [encode(group)], "form a process group")
        try:
            await self._wait_for_members(group, timeout)
        finally:
            # A message that no coordinator has processed must not make engines join later.
            with contextlib.suppress(redis.RedisError):
                await self._client.xdel(self._keys.control, entry_id)

    async def check_group(self) -> JoinGroup:
        """Return the group that was formed last.

        Raises:
            InvalidRequestError: there is none, or the trainer has to form it again.
            RolloutClientError: Redis cannot be read.
        """
        stored: Any = await self._policy.run(
            lambda: self._client.hget(self._keys.weights, "group"), action="read the transfer group"
        )
        group = None if stored is None else decode(stored)
        if not isinstance(group, JoinGroup):
            raise InvalidRequestError(f"the job's engines have joined no process group of a trainer; {_FORM_AGAIN}")
        if lost := _missing_members(group, await self._engines()):
            raise InvalidRequestError(
                f"the trainer's process group has lost members ({list_reasons(lost)}); {_FORM_AGAIN}"
            )
        return group

    async def update(
        self, tensors: Sequence[TensorSpec], *, packed_bytes: int | None, timeout: float
    ) -> PublishedWeights:
        """Let the engines receive full weights, as the next weight version, and wait until they serve them.

        Args:
            tensors: what the trainer sends, in this order.
            packed_bytes: see :class:`~rollout_api.protocol.messages.Broadcast`; None for the group's default.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: no group was formed, or it has lost a member.
            WeightsError: some engine has not received or loaded the weights; it says why.
        """
        group = await self.check_group()
        sent = _SentByTrainer(group, tensors, group.packed_bytes if packed_bytes is None else packed_bytes)
        return await self._publisher.publish_next(sent, kind=WeightsKind.FULL, timeout=timeout)

    async def _engines(self) -> dict[str, dict[str, Any]]:
        return await read_engine_reports(self._client, self._keys, self._policy)

    async def _wait_for_members(self, group: JoinGroup, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            engines = await self._engines()
            answered = {engine for engine in group.members if engines.get(engine, {}).get("group") == group.group}
            lost = _missing_members(group, engines, awaited=group.members.keys() & engines.keys() - answered)
            if lost:
                raise WeightsError("the trainer's process group was not formed", lost)
            if answered == group.members.keys():
                return
            if time.monotonic() > deadline:
                waiting = ", ".join(sorted(group.members.keys() - answered))
                raise WeightsError(
                    f"the trainer's process group was not formed within {timeout:.0f} s: {waiting} did not answer; "
                    "check that the job's coordinator runs"
                )
            await asyncio.sleep(_POLL_INTERVAL_S)


class _SentByTrainer:
    """Weights that the trainer sends to the engines by itself; see :class:`InMemoryWeights`."""

    def __init__(self, group: JoinGroup, tensors: Sequence[TensorSpec], packed_bytes: int) -> None:
        self.backend = group.uri.partition(":")[0]
        self._uri = group.uri
        self._broadcast = Broadcast(
            group=group.group,
            ranks=group.members,
            world_size=group.world_size,
            tensors=list(tensors),
            packed_bytes=packed_bytes,
        )

    def offer(self, engines: Mapping[str, int], *, buckets: bool) -> tuple[str, Broadcast]:
        return self._uri, self._broadcast

    def send(self, uri: str, offer: Broadcast) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def withdraw(self) -> None:
        pass


def _backend(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the backend with which all engines receive broadcast weights."""
    if not engines:
        raise InvalidRequestError("the job has no engine yet that could receive weights; wait until GET /health is 200")
    backends = {str(report.get("broadcast", "")) for report in engines.values()}
    if "" in backends:
        raise InvalidRequestError(
            "the job receives no weights from the memory of a trainer, because spec.weights.broadcast is false; set it "
            'to true, or write the weights to a directory and send POST /update_weights {"weight_dir": …}'
        )
    if len(backends) > 1:
        raise InvalidRequestError(f"the engines use different backends: {', '.join(sorted(backends))}")
    return backends.pop()


def _choose_members(engines: Mapping[str, Mapping[str, Any]], world_size: int) -> dict[str, int]:
    """Return the engines that take the places of a group, each with the rank of its first process.

    Raises:
        InvalidRequestError: they cannot take all places.
    """
    ranks, next_rank = {}, 1
    for engine, report in sorted(engines.items()):
        if next_rank + report["ranks"] <= world_size:
            ranks[engine] = next_rank
            next_rank += report["ranks"]
    if next_rank != world_size or not ranks:
        found = sum(report["ranks"] for report in engines.values())
        raise InvalidRequestError(
            f"world_size {world_size} means the trainer and {world_size - 1} processes of engines, but the job's "
            f"{len(engines)} engines have {found}; use world_size {found + 1}, from GET /get_world_size right before"
        )
    return ranks


def _missing_members(
    group: JoinGroup, engines: Mapping[str, Mapping[str, Any]], *, awaited: Sequence[str] | set[str] = ()
) -> dict[str, str]:
    """Return the engines that are no members of a group although they should be, with the reasons.

    Args:
        group: the group.
        engines: reports of the live engines.
        awaited: engines that may still join.
    """
    missing = {}
    for engine in group.members:
        report = engines.get(engine)
        if report is None:
            missing[engine] = "the engine has ended"
        elif engine not in awaited and report.get("group") != group.group:
            missing[engine] = "the engine has joined another group, or was restarted"
        elif report.get("group") == group.group and report["group_error"]:
            missing[engine] = str(report["group_error"])
    return missing
