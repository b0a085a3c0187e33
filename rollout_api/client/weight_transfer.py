"""Weights that a trainer sends from its memory to a job's engines, through vLLM's weight transfer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from rollout_api.client.job_channel import JobChannel
from rollout_api.client.weight_publisher import Publication, PublishedWeights, WeightPublisher, check_identity
from rollout_api.errors import InvalidRequestError, RolloutClientError, WeightsError, list_reasons
from rollout_api.protocol.messages import (
    InitWeightTransfer,
    TransferStep,
    UpdateMode,
    WeightTransfer,
    WeightUpdate,
    decode,
    encode,
)

if TYPE_CHECKING:
    from rollout_api.weights.in_memory import TensorsInMemory

_POLL_INTERVAL_S = 0.05
_STEPS_EXPIRY_S = 3600
_INIT_AGAIN = "call init_weight_transfer_engine again"
_Result = TypeVar("_Result")


class TransferPublisher:
    """Lets a job's engines receive weights as vLLM's own server does.

    Args:
        channel: channel to the job.
        publisher: publishes weights.
    """

    def __init__(self, channel: JobChannel, publisher: WeightPublisher) -> None:
        self._channel, self._publisher = channel, publisher
        self._client, self._keys, self._policy = channel.redis, channel.keys, channel.policy

    async def backend(self, timeout: float) -> str:
        """See :meth:`rollout_api.AsyncRolloutClient.transfer_backend`."""
        engines = await self._wait_for_engines(timeout)
        backends = {str(report.get("transfer_backend", "")) for report in engines.values()}
        return backends.pop() if len(backends) == 1 else ""

    async def world_size(self, timeout: float) -> int:
        """See :meth:`rollout_api.AsyncRolloutClient.get_world_size`."""
        return sum(report["ranks"] for report in (await self._wait_for_engines(timeout)).values())

    async def _wait_for_engines(self, timeout: float) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + timeout
        while not (engines := await self._channel.engine_reports()):
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"the job has had no engine for {timeout:g} s that could load weights; check that its workers start"
                )
            await asyncio.sleep(_POLL_INTERVAL_S)
        return engines

    async def init(self, init_info: dict[str, Any], *, timeout: float) -> str:
        """See :meth:`rollout_api.AsyncRolloutClient.init_weight_transfer_engine`; return the id of the group.

        If the job has more engines than the group has room for, those without a place wait for the next version.
        """
        engines = await self._channel.engine_reports()
        _backend(engines)
        members = _choose_members(engines, init_info)
        group = InitWeightTransfer(group=secrets.token_hex(8), engines=members, init_info=init_info)
        [entry_id] = await self._channel.append(self._keys.control, [encode(group)], "form a trainer's group")
        try:
            await self._wait_for_members(group, timeout)
        finally:
            # A message that no coordinator has processed must not make engines join later.
            with contextlib.suppress(redis.RedisError):
                await self._client.xdel(self._keys.control, entry_id)
        return group.group

    async def start(
        self,
        version: int | None = None,
        *,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
        update_info: dict[str, Any] | None = None,
        timeout: float,
    ) -> WeightUpdate:
        """See :meth:`rollout_api.AsyncRolloutClient.start_weight_update`.

        If *update_info* describes all tensors, engines check them before they are sent.
        """
        group = await self._check_group()
        version = await self._publisher.newest() + 1 if version is None else version
        before = await self._publisher.engines_before(version)
        current = await self._publisher.current()
        transfer = WeightTransfer(
            group=group.group,
            engines=sorted(group.engines),
            base=0 if current is None else current.weight_version,
            update_info=update_info,
        )
        update = WeightUpdate(
            weight_version=version, uri=f"memory:{secrets.token_hex(8)}", mode=mode, transfer=transfer
        )
        publication = await self._publisher.send(update)
        try:
            await self._wait_for_parts(update, 0, timeout, before=before)
        except BaseException as error:
            await self._publisher.withdraw(publication)
            await self.abort(update, str(error) or type(error).__name__)
            raise
        return update

    async def update(self, update_info: dict[str, Any], *, timeout: float) -> WeightUpdate:
        """See :meth:`rollout_api.AsyncRolloutClient.update_weights`."""
        update = await self._started()
        num_parts = await self._add(update, TransferStep(step="update", update_info=_without_objects(update_info)))
        try:
            await self._wait_for_parts(update, num_parts, timeout)
        except BaseException as error:
            await self.abort(update, str(error) or type(error).__name__)
            raise
        return update

    async def finish(self, *, timeout: float) -> PublishedWeights:
        """See :meth:`rollout_api.AsyncRolloutClient.finish_weight_update`."""
        update = await self._started()
        await self._add(update, TransferStep(step="finish"))
        return await self._publisher.wait(Publication(update, ""), {}, timeout)

    async def abort(self, update: WeightUpdate, reason: str) -> None:
        """Let the engines that wait for a trainer keep their weights."""
        with contextlib.suppress(redis.RedisError, RolloutClientError):
            await self._add(update, TransferStep(step="abort", reason=reason))

    async def publish(
        self, version: int, weights: TensorsInMemory, *, mode: UpdateMode, timeout: float
    ) -> PublishedWeights:
        """Publish weights from this process's memory; see :meth:`rollout_api.AsyncRolloutClient.publish_weights`."""
        calls = _Calls(self, version, mode, weights.update_info, timeout)
        try:
            engines = await self._publisher.engines_before(version)
            if (backend := _backend(engines)) != weights.backend:
                raise InvalidRequestError(
                    f"these weights are sent with {weights.backend}, but the engines receive weights with {backend}"
                )
            check_identity(version, "", engines)
            if not await self._is_complete(weights.group, engines):
                await self._run(version, lambda: weights.connect(calls, 1 + sum(r["ranks"] for r in engines.values())))
                weights.group = calls.group
        except BaseException as error:
            calls.cancel()
            await asyncio.to_thread(weights.abort, str(error) or type(error).__name__)
            raise
        try:
            await self._run(version, lambda: weights.send(calls))
        except BaseException as error:
            calls.cancel()
            if calls.update is not None:
                await self.abort(calls.update, str(error) or type(error).__name__)
            raise
        return calls.published

    async def _run(self, version: int, function: Callable[[], None]) -> None:
        """Run a part of a sender, which blocks, in a thread."""
        try:
            await asyncio.to_thread(function)
        except InvalidRequestError as error:  # the engines have changed meanwhile
            raise WeightsError(str(error)) from error
        except RolloutClientError:
            raise
        except Exception as error:
            raise WeightsError(
                f"weight version {version} was not sent to all engines ({error}); publish the weights again as version "
                f"{version + 1} or later"
            ) from error

    async def _group(self) -> InitWeightTransfer | None:
        """Return the group that was formed last; None if there is none."""
        stored: Any = await self._policy.run(
            lambda: self._client.hget(self._keys.weights, "group"), action="read the trainer's group"
        )
        group = None if stored is None else decode(stored)
        return group if isinstance(group, InitWeightTransfer) else None

    async def _is_complete(self, name: str, engines: Mapping[str, Mapping[str, Any]]) -> bool:
        """Return whether all members of a group are left, and these are all engines."""
        group = await self._group()
        if group is None or group.group != name:
            return False
        return group.engines.keys() == engines.keys() and not _missing_members(group, engines)

    async def _check_group(self) -> InitWeightTransfer:
        """Return the group that was formed last.

        Raises:
            InvalidRequestError: there is none, or the trainer has to form it again.
        """
        group = await self._group()
        if group is None:
            raise InvalidRequestError(f"the job's engines have joined no trainer's group; {_INIT_AGAIN}")
        if lost := _missing_members(group, await self._channel.engine_reports()):
            raise InvalidRequestError(f"the trainer's group has lost members ({list_reasons(lost)}); {_INIT_AGAIN}")
        return group

    async def _started(self) -> WeightUpdate:
        """Return the update that engines are receiving.

        Raises:
            InvalidRequestError: there is none.
        """
        update = await self._publisher.current()
        if update is not None and update.transfer is not None:
            engines = await self._channel.engine_reports()
            if any(report.get("receiving") == update.identity for report in engines.values()):
                return update
        raise InvalidRequestError("no weight update is in progress; call start_weight_update first")

    async def _add(self, update: WeightUpdate, step: TransferStep) -> int:
        """Tell the engines the next step, and return how many there are."""
        key = self._keys.transfer_steps(update.identity)
        await self._channel.append(key, [encode(step)], "send weights")
        await self._policy.run(lambda: self._client.expire(key, _STEPS_EXPIRY_S), action="send weights")
        return int(await self._policy.run(lambda: self._client.xlen(key), action="send weights"))

    async def _wait_for_members(self, group: InitWeightTransfer, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            engines = await self._channel.engine_reports()
            answered = {e for e in group.engines if engines.get(e, {}).get("transfer_group") == group.group}
            lost = _missing_members(group, engines, awaited=group.engines.keys() & engines.keys() - answered)
            if lost:
                raise WeightsError("the trainer's group was not formed", lost)
            if answered == group.engines.keys():
                return
            if time.monotonic() > deadline:
                waiting = ", ".join(sorted(group.engines.keys() - answered))
                raise WeightsError(
                    f"the trainer's group was not formed within {timeout:.0f} s: {waiting} did not answer; check that "
                    "the job's coordinator runs"
                )
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _wait_for_parts(
        self, update: WeightUpdate, num_parts: int, timeout: float, *, before: Mapping[str, Mapping[str, Any]] = {}
    ) -> None:
        """Wait until all engines of a transfer have received a number of its parts.

        Args:
            update: the update.
            num_parts: number of parts; 0 to wait until they are ready.
            timeout: seconds to wait.
            before: reports of the engines from before the update was sent. Failures that they contain are ignored.

        Raises:
            WeightsError: some engine has not; it says why.
        """
        version, deadline = update.weight_version, time.monotonic() + timeout
        while True:
            engines, failed, waiting = await self._channel.engine_reports(), {}, []
            for engine in update.transfer.engines if update.transfer else []:
                report = engines.get(engine)
                if report is None:
                    failed[engine] = "the engine has ended"
                elif report.get("receiving") == update.identity:
                    waiting += [engine] if report["received"] < num_parts else []
                elif version in report["failed"] and report.get("loads", 1) > before.get(engine, {}).get("loads", 0):
                    failed[engine] = str(report["failed"][version])
                else:
                    waiting.append(engine)
            if failed:
                raise WeightsError(f"weight version {version} was not received by all engines", failed)
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"weight version {version} was not received within {timeout:.0f} s by {', '.join(waiting)}; check "
                    "that the job's coordinator runs, and that rollouts pinned to another version end"
                )
            await asyncio.sleep(_POLL_INTERVAL_S)


@dataclass
class _Calls:
    """What the sender of one weight version calls, from other threads."""

    transfer: TransferPublisher
    version: int
    mode: UpdateMode
    update_info: dict[str, Any]
    timeout: float

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.group = ""
        self._waiting: Future[Any] | None = None
        self._cancelled = False
        self.update: WeightUpdate | None = None
        self.published = PublishedWeights(self.version, [], {})

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.group = self._wait(self.transfer.init(init_info, timeout=self.timeout))

    def start_weight_update(self) -> None:
        start = self.transfer.start(self.version, mode=self.mode, update_info=self.update_info, timeout=self.timeout)
        self.update = self._wait(start)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._wait(self.transfer.update(update_info, timeout=self.timeout))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.published = self._wait(self.transfer.finish(timeout=self.timeout))

    def cancel(self) -> None:
        """End the call that the sender waits for, which withdraws its message, and let later ones fail."""
        self._cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()

    def _wait(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        self._waiting = waiting = asyncio.run_coroutine_threadsafe(call, self._loop)
        if self._cancelled:
            waiting.cancel()
        return waiting.result()


def _without_objects(update_info: dict[str, Any]) -> dict[str, Any]:
    """Pickle handles of GPU memory (backend ipc), as vLLM's client for HTTP does."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    pickled = base64.b64encode(pickle.dumps(handles)).decode()
    return {name: value for name, value in update_info.items() if name != "ipc_handles"} | {
        "ipc_handles_pickled": pickled
    }


def _backend(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the backend that all engines use to receive weights from a trainer's memory.

    Raises:
        InvalidRequestError: they have none, or different ones.
        WeightsError: there are no engines.
    """
    if not engines:
        raise WeightsError("the job has no engine that could receive weights")
    backends = {str(report.get("transfer_backend", "")) for report in engines.values()}
    if "" in backends:
        raise InvalidRequestError(
            "the job takes no weights from a trainer's memory, because spec.weights.transfer is none; change it, or "
            "publish the weights from a directory"
        )
    if len(backends) > 1:
        raise InvalidRequestError(f"the engines use different backends: {', '.join(sorted(backends))}")
    return backends.pop()


def _choose_members(engines: Mapping[str, Mapping[str, Any]], init_info: Mapping[str, Any]) -> dict[str, int]:
    """Return the engines that are members of a group, each with the rank of its first process.

    Raises:
        InvalidRequestError: they cannot take all places.
    """
    world_size = init_info.get("world_size")
    if world_size is None:  # a backend without ranks
        return dict.fromkeys(engines, 0)
    if not isinstance(world_size, int):
        raise InvalidRequestError(f"world_size is {world_size!r}, but must be a number")
    if init_info.get("rank_offset", 1) != 1:
        raise InvalidRequestError(
            f"rank_offset is {init_info['rank_offset']}, but must be 1: the trainer has rank 0 and the job's engines "
            "have all others"
        )
    ranks, next_rank = {}, 1
    for engine, report in sorted(engines.items()):
        if next_rank + report["ranks"] <= world_size:
            ranks[engine] = next_rank
            next_rank += report["ranks"]
    if next_rank != world_size or not ranks:
        found = sum(report["ranks"] for report in engines.values())
        raise InvalidRequestError(
            f"world_size {world_size} means the trainer and {world_size - 1} processes of engines, but the job's "
            f"{len(engines)} engines have {found}; use world_size {found + 1}, from get_world_size right before"
        )
    return ranks


def _missing_members(
    group: InitWeightTransfer,
    engines: Mapping[str, Mapping[str, Any]],
    *,
    awaited: set[str] | frozenset[str] = frozenset(),
) -> dict[str, str]:
    """Return the engines that are no members of a group although they should be, with the reasons.

    Args:
        group: the group.
        engines: reports of the live engines.
        awaited: engines that may still join.
    """
    missing = {}
    for engine in group.engines:
        report = engines.get(engine)
        if report is None:
            missing[engine] = "the engine has ended"
        elif engine not in awaited and report.get("transfer_group") != group.group:
            missing[engine] = "the engine has joined another group, or was restarted"
        elif report.get("transfer_group") == group.group and report.get("transfer_error"):
            missing[engine] = str(report["transfer_error"])
    return missing
