"""A trainer's side of a job: ask for rollouts, publish weights, report rewards."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import redis.asyncio

from rollout_api.asyncio_tasks import end
from rollout_api.client.groups import Gathering
from rollout_api.client.job_info import JobInfo, ended, find_job, parse_status
from rollout_api.client.length_stats_reader import HistoryClient, connection_to_history, read_length_stats
from rollout_api.client.prompts import Prompt, SamplingOverrides, make_prompts, one_of
from rollout_api.client.request_sender import Sender
from rollout_api.client.result_stream import ResultStream
from rollout_api.client.step import AsyncStep, OnProgress
from rollout_api.client.step_state import Asked
from rollout_api.client.weight_publisher import Checksum, InMemory, PublishedWeights, Publisher
from rollout_api.errors import (
    InvalidRequestError,
    JobChangedError,
    JobEndedError,
    NameInUseError,
    RolloutClientError,
    VersionMismatchError,
)
from rollout_api.length_stats import LengthStats
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import CLIENT_LEASE_MS, MessageKeys, history_of, named
from rollout_api.protocol.messages import (
    CLIENT_PATTERN,
    Cancel,
    Close,
    Drafts,
    Purpose,
    Rewards,
    Rollout,
    RolloutId,
    UpdateMode,
    WeightsKind,
    encode,
)
from rollout_api.redis_client.connection import RedisTarget, RetryPolicy, address, connection_to, even_when_full

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_STATUS_POLL_S = 0.05
_NAME_PAUSE_S = 0.25
_SAY_EVERY_S = 60.0
_COORDINATOR_GRACE_S = 5.0
_AT_ONCE = 1000
_ENDED_STEPS_KEPT = 10_000


class AsyncRolloutClient:
    """A trainer's connection to one job, on one event loop: ``async with AsyncRolloutClient.connect(…) as client``.

    It reads results in a task of its own, so the loop must not be blocked for long by other work; a trainer that is
    not asynchronous uses :class:`rollout_api.RolloutClient`.
    """

    name: str
    results: ResultStream

    def __init__(
        self,
        target: RedisTarget,
        job: str | None,
        uid: str | None,
        name: str,
        timeout: float,
        patience: float,
        history_redis: RedisTarget | None,
    ) -> None:
        if (job is None) == (uid is None):
            raise InvalidRequestError("name the job ('namespace/name'), or give its uid, but not both")
        if not re.match(CLIENT_PATTERN, name):
            raise InvalidRequestError(
                f"client name {name!r}: at most 63 letters, digits, dots, dashes and underscores, the "
                "first a letter or digit"
            )
        self.name = name
        self._job_name = None if job is None else (job if "/" in job else f"default/{job}")
        self._uid, self._timeout = uid, timeout
        self._redis = connection_to(target)
        self._patience = RetryPolicy(address(self._redis), patience)
        self._history: tuple[HistoryClient, RetryPolicy] | None = None
        if history_redis is not None:
            history, where = connection_to_history(history_redis)
            self._history = history, RetryPolicy(where, patience)
        self._token = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._job: JobInfo | None = None
        self._status: dict[str, Any] = {}
        self._status_at = time.monotonic()
        self._said_no_coordinator = 0.0
        self._steps: set[AsyncStep] = set()
        self._ended_steps: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        """The last ones, by their numbers and what they asked."""
        self._closed_job = False
        self._watcher: asyncio.Task[None] | None = None

    # its life

    @classmethod
    def connect(
        cls,
        redis: RedisTarget,
        job: str | None = None,
        *,
        uid: str | None = None,
        name: str = "trainer",
        timeout: float = 60.0,
        patience: float = 120.0,
        history_redis: RedisTarget | None = None,
    ) -> Self:
        """A client for a job; nothing is sent before ``async with``, or :meth:`open`.

        Args:
            redis: URL of the job's server, or a ``redis.Redis`` or ``redis.asyncio.Redis`` whose settings are copied.
            job: ``namespace/name``.
            uid: the job's uid, instead of *job*.
            name: of this client, one for each trainer rank; a rank that is started again keeps its name.
            timeout: seconds to wait for the job to appear.
            patience: seconds for which Redis may be away before an error says so.
            history_redis: where the history lies if it has a server or cluster of its own (``spec.history.redis``), as
                *redis*, or the URL of a cluster; needed for :meth:`length_stats` alone, and not used where the history
                lies on the job's server.

        Raises:
            InvalidRequestError: if an argument cannot be used.
        """
        return cls(redis, job, uid, name, timeout, patience, history_redis)

    async def open(self) -> Self:
        """Wait for the job, and learn what it can serve: what ``async with`` does.

        Raises:
            JobNotFoundError: no such job appeared in time.
            JobEndedError: the job of this name has ended, and no other appeared in time.
            VersionMismatchError: the job speaks another version of the protocol.
            NameInUseError: another process is connected under this name.
            RedisAwayError: Redis cannot be reached.
            RedisRefusedError: wrong password, or missing rights.
        """
        try:
            self._job, has_ended = await find_job(
                self._redis, self._patience, self.name, self._job_name, self._uid, self._timeout
            )
            keys = self._keys = MessageKeys(self._job.uid)
            await self._take_name()
            self.results = ResultStream(self._redis, keys, self.name, self._patience, self._send_again)
            self.results.ending = has_ended
            self._sender = Sender(self._redis, keys, self._job, self._patience)
            self._publisher = Publisher(self._redis, keys, self._sender, self._patience)
            await self.results.open()
            self._watcher = asyncio.create_task(self._watch(), name=f"watch over job {self._job.name}")
        except BaseException:
            await self._disconnect()
            raise
        return self

    async def close(self) -> None:
        """Disconnect. The job goes on; results that are not acknowledged wait for the next client of this name."""
        for step in list(self._steps):
            await step.end(acknowledge=False)
        if self._watcher is not None:
            await end(self._watcher)
            await self.results.close()
            try:
                if await self._redis.get(self._keys.client(self.name)) == self._token.encode():
                    await self._redis.delete(self._keys.client(self.name))
            except redis.RedisError:
                pass  # it expires
        await self._disconnect()

    async def _disconnect(self) -> None:
        await self._redis.aclose()
        if self._history is not None:
            await self._history[0].aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def job(self) -> JobInfo:
        """What the job can serve.

        Raises:
            RolloutClientError: before the client is connected.
        """
        if self._job is None:
            raise RolloutClientError("the client is not connected yet: use it in 'async with', or await client.open()")
        return self._job

    @property
    def status(self) -> dict[str, Any]:
        """The job's status, about a second old (see docs/protocol.md); empty while no coordinator runs."""
        return self._status

    # rollouts

    def step(
        self,
        step: int,
        prompts: Sequence[Prompt | Sequence[int]] = (),
        *,
        on_progress: OnProgress | None = None,
    ) -> AsyncStep:
        """The rollouts of *prompts*, as they end. See :class:`~rollout_api.client.step.AsyncStep`.

        Several steps may be open at once. Their results are routed, and acknowledged, separately. A trainer that goes
        back to an earlier checkpoint asks for its steps again; what was acknowledged of them is sampled anew.

        Args:
            step: number of the trainer's step; it only grows (an evaluation may have its step's).
            prompts: what to sample; token ids alone are sampled with the job's settings.
            on_progress: called about once a second while the step is iterated over, and at its end.
        """
        return AsyncStep(self, step, prompts, on_progress)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        problem_ids: Sequence[str] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        purpose: Purpose | str = Purpose.TRAIN,
        priority: int = 0,
        deadline_seconds: float | None = None,
        weight_version: int | None = None,
        drafts: Drafts | str = Drafts.HISTORY,
        on_progress: OnProgress | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> list[list[Rollout]]:
        """A whole step: all rollouts of all prompts, acknowledged when they are returned.

        A trainer that is started again, and asks again for what was returned, has it sampled anew.

        Args:
            prompts: token ids of each prompt.
            step: number of the trainer's step; see :meth:`step`.
            problem_ids: one for each prompt; default: a hash of its token ids.
            sampling: overrides the job's settings; so do n, temperature, max_tokens, … as keywords.
            purpose: ``train``, or ``eval`` for rollouts that enter no history.
            priority: higher starts earlier.
            deadline_seconds: rollouts end as they are so many seconds after their request arrived.
            weight_version: sample with exactly this version; default: the newest.
            drafts: what rollouts may be drafted from.
            on_progress: called about once a second.

        Returns:
            In the order of *prompts*, each prompt's rollouts in the order of their samples. Look at their
            ``finish_reason`` if there is a deadline; a rollout that cannot be made is ``failed``, with a ``detail``.

        Raises:
            InvalidRequestError: for something that the job cannot serve; nothing was sent.
            RequestRefusedError: the job refused some of it.
            JobEndedError: the job has ended.
            JobChangedError: another job has its name now.
            RedisAwayError: Redis was away for too long.
        """
        asked = make_prompts(
            prompts, problem_ids, sampling, overrides, purpose, priority, deadline_seconds, weight_version, drafts
        )
        async with self.step(step, asked, on_progress=on_progress) as one:
            gathering = Gathering(one.sizes)
            async for rollout in one:
                gathering.add(one.index(rollout), rollout)
        return gathering.in_order()

    # what else a trainer says

    async def publish_weights(
        self,
        version: int,
        weights: str | Path | InMemory,
        *,
        kind: WeightsKind | str = WeightsKind.FULL,
        mode: UpdateMode | str = UpdateMode.RECOMPUTE,
        sha256: Checksum = "compute",
        wait: bool = True,
        timeout: float = 600.0,
    ) -> PublishedWeights:
        """Sample with these weights from now on.

        Args:
            version: number of the weights; it only grows.
            weights: their directory (safetensors), as the job sees it; see ``spec.weights`` for what is allowed. Or a
                :class:`~rollout_api.weights.in_memory.ModelInMemory`, which is broadcast to the engines that there are.
            kind: ``full``, or ``lora`` for an adapter.
            mode: what becomes of rollouts that run; see :class:`~rollout_api.protocol.messages.UpdateMode`.
            sha256: ``compute`` reads the directory here and has the engines compare; see
                :func:`rollout_api.weights.checksum.checksum`. Hex, if it is known; None: they load what they find.
            wait: until every engine serves them or has said why it cannot.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: for an argument that cannot be used; nothing was sent.
            WeightsError: no engine could load them (all go on with what they had), or not all did in time.
        """
        return await self._publisher.publish(
            version,
            weights,
            kind=one_of(WeightsKind, kind, "kind"),
            mode=one_of(UpdateMode, mode, "mode"),
            sha256=sha256,
            wait=wait,
            timeout=timeout,
        )

    async def weight_version(self, *, timeout: float = 600.0) -> int:
        """The newest weight version that the job was told to serve; 0 is the model that it began with.

        Versions only grow, and a job outlives its trainers: one that starts counts on from here.

        Args:
            timeout: seconds for which the job may be without a coordinator, who says it.

        Raises:
            RolloutClientError: it was so for longer.
        """
        until = time.monotonic() + timeout
        while (version := self._status.get("weight_version")) is None:
            if time.monotonic() > until:
                raise RolloutClientError(
                    f"job {self.job.name} has had no coordinator for {timeout:g} s, which would say what weight "
                    "version it serves; is the job running?"
                )
            await asyncio.sleep(_STATUS_POLL_S)
        return max(int(version), await self._publisher.newest())  # the status is a second old

    async def report_rewards(self, rewards: Mapping[str, float]) -> None:
        """Tell the job the rewards of rollouts: rollout id → reward. Said again, the later one counts.

        Raises:
            InvalidRequestError: for a reward that is not finite, or a rollout of another job; nothing was sent.
        """
        checked = {rollout_id: self._reward(rollout_id, reward) for rollout_id, reward in rewards.items()}
        items = list(checked.items())
        messages = [encode(Rewards(rewards=dict(items[at : at + _AT_ONCE]))) for at in range(0, len(items), _AT_ONCE)]
        await self._sender.append(self._keys.rewards, messages, "report rewards")

    async def length_stats(self, problem: str | None = None) -> LengthStats:
        """How long earlier rollouts were, read from the job's history as it is now.

        Rollouts of other jobs that share the history count, evaluation rollouts do not. A rollout that ended is in it
        a moment later.

        Args:
            problem: id of the problem; where the trainer names none, it is :func:`rollout_api.problem_id_of` the
                prompt. Default: the last rollouts of all problems, some thousands.

        Returns:
            Its ``count`` is 0 if there are none.

        Raises:
            InvalidRequestError: the history lies on a server of its own, and ``connect`` was not told which.
            VersionMismatchError: the job is of an older version, which does not say what history it has.
            RedisAwayError: Redis was away for too long.
            RedisRefusedError: wrong password, or missing rights.
        """
        job = self.job
        client: HistoryClient = self._redis
        patience = self._patience
        if not job.history:
            raise VersionMismatchError(
                f"job {job.name} does not say what history it has, as jobs of older versions do not; upgrade the job's "
                "image to read length statistics"
            )
        if job.own_history_redis:
            if self._history is None:
                raise InvalidRequestError(
                    f"the history {job.history} of job {job.name} lies on a Redis of its own: name that server in "
                    "connect(…, history_redis=…) to read length statistics"
                )
            client, patience = self._history
        keys = history_of(job.history)
        return await patience.of(lambda: read_length_stats(client, keys, problem), what="read the lengths of rollouts")

    async def close_job(self) -> None:
        """No more requests will come: the job ends when all that are open are answered."""
        await self._sender.append(self._keys.control, [encode(Close())], "close the job")
        self._closed_job = True

    def _reward(self, rollout_id: str, reward: float) -> float:
        try:
            uid = RolloutId.parse(rollout_id).job_uid
        except ValueError as error:
            raise InvalidRequestError(f"rewards: {error}") from None
        if uid != self.job.uid:
            raise InvalidRequestError(f"rewards: {rollout_id} is no rollout of job {self.job.name} ({self.job.uid})")
        value = float(reward)
        if not math.isfinite(value):
            raise InvalidRequestError(f"rewards: the reward of {rollout_id} is {value}; it must be finite")
        return value

    # what steps use

    async def submit(
        self, asked: Sequence[Asked], sent: Callable[[Asked, str], None], go_on: Callable[[], bool]
    ) -> None:
        """See :class:`rollout_api.client.step.Office`."""
        await self._sender.submit(
            asked,
            sent,
            lambda: go_on() and self.results.ending is None,
            lambda: self.results.awaited,
        )

    async def send_cancel(self, request_ids: Sequence[str]) -> None:
        """See :class:`rollout_api.client.step.Office`."""
        messages = [
            encode(Cancel(request_ids=list(request_ids[at : at + _AT_ONCE])))
            for at in range(0, len(request_ids), _AT_ONCE)
        ]
        await self._sender.cancel(messages)

    def enter(self, step: AsyncStep, request_ids: Sequence[str]) -> None:
        """See :class:`rollout_api.client.step.Office`."""
        if self._closed_job:
            raise InvalidRequestError(f"step {step.number}: this client has closed the job")
        if any(self.results.asks(request_id) for request_id in request_ids):
            raise InvalidRequestError(f"step {step.number} with these prompts is open already")
        if request_ids and (step.number, _digest(request_ids)) in self._ended_steps:
            raise InvalidRequestError(
                f"step {step.number} with these prompts has ended: its rollouts were received. To sample the same "
                "prompts again, count the step up"
            )
        self._steps.add(step)

    def leave(self, step: AsyncStep, *, ended: bool) -> None:
        """See :class:`rollout_api.client.step.Office`."""
        self._steps.discard(step)
        if ended:
            self._ended_steps[step.number, _digest(step.request_ids)] = None
            if len(self._ended_steps) > _ENDED_STEPS_KEPT:
                self._ended_steps.popitem(last=False)

    async def _send_again(self) -> None:
        for step in self._steps:
            step.send_again()

    # the job

    async def _take_name(self) -> None:
        """Make sure that no other process reads this name's results; one that was killed is waited out."""
        key, until = self._keys.client(self.name), time.monotonic() + CLIENT_LEASE_MS / 1000 + 2
        waited = False
        while not await self._patience.of(self._hold_name, what="register the client"):
            holder: Any = await self._patience.of(lambda: self._redis.get(key), what="register the client")
            if time.monotonic() > until:
                raise NameInUseError(self._name_taken(holder))
            if not waited and holder is not None:
                waited = True
                logger.info("Client name %s is held by %s; waiting for that to end.", self.name, holder.decode())
            await asyncio.sleep(_NAME_PAUSE_S)

    async def _hold_name(self) -> bool:
        """Take the name if nobody has it."""
        key = self._keys.client(self.name)
        return bool(await even_when_full(self._redis, key, "SET", key, self._token, "PX", CLIENT_LEASE_MS, "NX"))

    def _name_taken(self, holder: bytes | None) -> str:
        where = f" (host/process {holder.decode().rpartition('/')[0]})" if holder else ""
        return (
            f"another process is connected to job {self.job.name} as {self.name!r}{where}; two of one name would take "
            "each other's results: give each trainer rank a name of its own"
        )

    async def _watch(self) -> None:
        """Once a second: is the job still there, what does it say, is the name still ours."""
        while True:
            try:
                await self._look()
            except redis.RedisError:
                pass  # whoever reads or writes says so
            except Exception:
                logger.exception("Watching over the job failed; trying again.")
            await asyncio.sleep(_WATCH_S)

    async def _look(self) -> None:
        keys, name = self._keys, self.job.name
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(keys.status)
        pipeline.hmget(keys.job, ["state", "reason"])
        pipeline.get(keys.client(self.name))
        if self._job_name is not None:
            pipeline.get(named(self._job_name))
        status, about, holder, *found = await pipeline.execute()
        uid = found[0] if found else None
        self._status = parse_status(status)
        self._sender.learn(self._status)
        self._say_if_no_coordinator()
        state, reason = (None if value is None else value.decode() for value in about)
        ending: RolloutClientError | None = None
        if uid is not None and uid.decode() != self.job.uid:
            ending = JobChangedError(
                f"{name} is another job now (uid {uid.decode()}, was {self.job.uid}); connect again, and ask again for "
                "what is missing"
            )
        elif state is None:
            ending = JobEndedError(f"job {name} is gone from Redis, with what was asked of it")
        else:
            ending = ended(name, state, reason)
        if holder is not None and holder != self._token.encode():
            ending = NameInUseError(self._name_taken(holder))
        self.results.ending = ending
        if holder is None:
            await self._hold_name()
        elif holder == self._token.encode():
            await self._redis.pexpire(keys.client(self.name), CLIENT_LEASE_MS)

    def _say_if_no_coordinator(self) -> None:
        now = time.monotonic()
        if self._status:
            self._status_at = now
        waited = self.results.awaited
        away = now - self._status_at
        if away > _COORDINATOR_GRACE_S and waited and now - self._said_no_coordinator > _SAY_EVERY_S:
            self._said_no_coordinator = now
            logger.warning(
                "Job %s has had no coordinator for %.0f s; %d rollouts are kept in Redis and come when it is back.",
                self.job.name,
                away,
                waited,
            )


def _digest(request_ids: Sequence[str]) -> bytes:
    return blake2b("\n".join(request_ids).encode(), digest_size=8).digest()
