"""The asynchronous client: a trainer requests rollouts from a job, publishes weights and reports rewards."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Self, Unpack

from rollout_api.client.connection import JobConnection, JobSession
from rollout_api.client.group_queue import AsyncGroupQueue, RewardFunction
from rollout_api.client.groups import GroupOrder, without_failures
from rollout_api.client.history_stats import (
    DEFAULT_THRESHOLD,
    HistoryClient,
    RewardStats,
    connect_to_history,
    read_length_stats,
    read_reward_stats,
)
from rollout_api.client.job_channel import IDS_PER_MESSAGE, JobChannel
from rollout_api.client.open_request import Leftovers
from rollout_api.client.prompts import Prompt, SamplingOverrides, make_prompts, parse_choice
from rollout_api.client.step import AsyncStep, OnProgress, StepContext
from rollout_api.client.weight_publisher import Checksum, PublishedWeights
from rollout_api.errors import InvalidRequestError, JobEndedError, RolloutClientError
from rollout_api.length_stats import LengthStats
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import (
    CLIENT_PATTERN,
    Close,
    DraftMode,
    PauseMode,
    Purpose,
    Rewards,
    Rollout,
    RolloutId,
    UpdateMode,
    WeightsKind,
    encode,
)
from rollout_api.redis_client.client_connection import RedisTarget
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.weights.in_memory import TensorsInMemory

_STATUS_POLL_INTERVAL_S = 0.05
"""Time between two checks whether the job has published a status."""


class AsyncRolloutClient(JobConnection):
    """A trainer's connection to one job: ``async with AsyncRolloutClient.connect(…) as client``.

    The client sends requests and reads results in tasks on the running event loop, so other work must not block the
    loop for long: after a minute, the job considers the client dead, and prefers the rollouts of other clients. A
    trainer that does not use asyncio uses :class:`rollout_api.RolloutClient`.
    """

    def __init__(
        self,
        target: RedisTarget,
        job: str | None,
        uid: str | None,
        name: str,
        timeout: float,
        reconnect_timeout: float,
        history_redis: RedisTarget | None,
    ) -> None:
        if not re.match(CLIENT_PATTERN, name):
            raise InvalidRequestError(
                f"client name {name!r}: use at most 63 letters, digits, dots, dashes and underscores, beginning with a "
                "letter or digit"
            )
        super().__init__(target, job, uid, name, timeout, reconnect_timeout)
        self._history: tuple[HistoryClient, ClientRetryPolicy] | None = None
        if history_redis is not None:
            history, server = connect_to_history(history_redis)
            self._history = history, ClientRetryPolicy(server, reconnect_timeout)
        self._steps: StepContext
        """What all steps share; set when the client is connected."""

    # Connection.

    @classmethod
    def connect(
        cls,
        redis: RedisTarget,
        job: str | None = None,
        *,
        uid: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        reconnect_timeout: float = 120.0,
        history_redis: RedisTarget | None = None,
    ) -> Self:
        """Return a client for a job. Nothing is sent before ``async with`` or :meth:`open`.

        Args:
            redis: URL of the job's Redis, or a ``redis.Redis`` or ``redis.asyncio.Redis`` whose settings are copied.
            job: ``namespace/name`` of the job.
            uid: uid of the job, instead of *job*.
            name: name of this client. Each trainer rank needs its own name and keeps it across restarts. Default:
                ``trainer``, and for the other ranks of a distributed trainer ``trainer-1`` and so on, by the
                environment variable ``RANK`` or ``SLURM_PROCID``.
            timeout: seconds to wait for the job to appear.
            reconnect_timeout: seconds that Redis may be unreachable before an error is raised.
            history_redis: Redis of the job's history if that is separate (``spec.history.redis``): as *redis*, or the
                URL of a cluster. Only :meth:`length_stats` and :meth:`reward_stats` need it; it is ignored if the
                history is on the job's Redis.

        Raises:
            InvalidRequestError: an argument cannot be used.
        """
        return cls(
            redis, job, uid, _default_name() if name is None else name, timeout, reconnect_timeout, history_redis
        )

    def _make_session(self, channel: JobChannel, ending: JobEndedError | None) -> JobSession:
        leftovers = Leftovers(self.name)
        session = JobSession(channel, self._job_name, leftovers)
        self._steps = StepContext(self.name, channel.job, session.monitor, session.results, leftovers)
        return session

    async def close(self) -> None:
        """Disconnect. The job continues, and results that were not released wait for the next client of this name."""
        if self._session is not None:
            for step in list(self._step_context.open_steps):
                await step.end(release=False)
        await super().close()

    async def _disconnect(self) -> None:
        await super()._disconnect()
        if self._history is not None:
            await self._history[0].aclose()

    @property
    def num_awaited(self) -> int:
        """Number of rollouts that were requested and have not been received, over all open steps."""
        return self._connected.results.num_awaited

    @property
    def _step_context(self) -> StepContext:
        _ = self._connected
        return self._steps

    # Rollouts.

    def step(
        self,
        step: int,
        prompts: Sequence[Prompt | Sequence[int]] = (),
        *,
        on_progress: OnProgress | None = None,
    ) -> AsyncStep:
        """Return a step, which yields the rollouts of *prompts* as they finish.

        See :class:`~rollout_api.client.step.AsyncStep`. Several steps may be open at once; their results are received
        and released separately. A trainer that returns to an earlier checkpoint opens the steps after it again; their
        rollouts whose results were released before are sampled again.

        Args:
            step: number of the training step. Numbers increase; an evaluation may use the number of a training step.
            prompts: prompts to sample. Plain token ids are sampled with the job's settings.
            on_progress: called about once a second while the step is iterated over, and at its end.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return AsyncStep(self._step_context, step, prompts, on_progress)

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
        min_weight_version: int | None = None,
        max_staleness: int | None = None,
        draft_mode: DraftMode | str = DraftMode.HISTORY,
        allow_failed: bool = False,
        on_progress: OnProgress | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> list[list[Rollout]]:
        """Return all rollouts of a step. Their results are released before this method returns.

        If rollouts are requested again that this method has returned before, they are sampled again.

        Args:
            prompts: token ids of each prompt.
            step: number of the training step; see :meth:`step`.
            problem_ids: problem id of each prompt; default: a hash of its token ids.
            sampling: settings that override the job's. The keywords n, temperature, max_tokens and so on do the same.
            purpose: ``train``, or ``eval`` for rollouts that do not enter the history.
            priority: requests with a higher priority start earlier.
            deadline_seconds: seconds after the arrival of a request at which its rollouts end with what they have.
            weight_version: sample with exactly this version; default: the newest.
            min_weight_version: oldest version that may sample a token; default: any.
            max_staleness: how many versions tokens may be behind the newest one at most when an engine starts
                or resumes a rollout; default: any. Weights that are published afterwards do not end a rollout.
            draft_mode: where drafts may come from.
            allow_failed: whether to return rollouts that the job could not produce, with the finish reason ``failed``
                and a ``detail``, instead of raising an error.
            on_progress: called about once a second.

        Returns:
            For each prompt, its rollouts in the order of their samples. If there is a deadline, check their
            ``finish_reason``.

        Raises:
            RolloutsFailedError: the job could not produce some rollouts; the error has all others.
            InvalidRequestError: the job cannot serve a prompt or setting; nothing was sent.
            RequestRefusedError: the job refused some requests.
            JobEndedError: the job has ended.
            JobChangedError: the job was replaced by another one with the same name.
            RedisUnreachableError: Redis was unreachable for too long.
        """
        made = make_prompts(
            prompts,
            problem_ids,
            sampling,
            overrides,
            purpose,
            priority,
            deadline_seconds,
            weight_version,
            min_weight_version,
            max_staleness,
            draft_mode,
        )
        async with self.step(step, made, on_progress=on_progress) as opened:
            groups = await opened.collect()
        return groups.in_order() if allow_failed else without_failures(groups.in_order())

    def group_queue(
        self,
        prompts: Iterable[Prompt | Sequence[int]],
        *,
        max_in_flight: int,
        order: GroupOrder | str = GroupOrder.READY_FIRST,
        max_staleness: int | None = None,
        reward: RewardFunction | None = None,
        dynamic_sampling: bool = False,
        first_step: int = 0,
    ) -> AsyncGroupQueue:
        """Return a queue that keeps groups of rollouts in flight while the trainer trains on finished ones.

        See :class:`~rollout_api.client.group_queue.AsyncGroupQueue`.

        Args:
            prompts: prompts, each for one group; they are read when there is room for them, and may be infinite.
            max_in_flight: number of groups that are requested and not yet taken, whether they are finished or not.
            order: which finished groups are taken first. ``ready_first``: those that have finished; groups with long
                responses are taken later, and with *max_staleness* they are dropped more often. ``in_order``: in the
                order of the prompts, so that a slow group keeps later ones waiting.
            max_staleness: largest staleness of a group; groups that are staler are dropped, and others take their
                place. Default: any.
            reward: computes the rewards of a finished group, which are also reported to the job.
            dynamic_sampling: whether to drop groups whose rewards are all equal (GRPO learns nothing from them) and
                sample others in their place, as in DAPO (arXiv 2503.14476). It needs *reward*.
            first_step: number of the first group. Each group is a step of its own, with the next number.

        Raises:
            InvalidRequestError: an argument cannot be used.
            RolloutClientError: the client is not connected yet.
        """
        _ = self._connected
        return AsyncGroupQueue(
            self,
            prompts,
            max_in_flight=max_in_flight,
            order=parse_choice(GroupOrder, order, "order"),
            max_staleness=max_staleness,
            reward=reward,
            dynamic_sampling=dynamic_sampling,
            first_step=first_step,
        )

    # Weights, rewards, statistics.

    async def publish_weights(
        self,
        version: int,
        weights: str | Path | TensorsInMemory,
        *,
        kind: WeightsKind | str = WeightsKind.FULL,
        mode: UpdateMode | str = UpdateMode.RECOMPUTE,
        sha256: Checksum = "compute",
        wait: bool = True,
        timeout: float = 600.0,
    ) -> PublishedWeights:
        """Make the job sample with these weights from now on.

        Args:
            version: number of the weights, larger than that of all earlier ones.
            weights: directory of the weights (safetensors), as the job sees it; ``spec.weights`` says which directories
                are allowed. Or a :class:`~rollout_api.weights.in_memory.ModelInMemory`, which is sent to the current
                engines through vLLM's weight transfer.
            kind: ``full``, or ``lora`` for an adapter.
            mode: what happens to running rollouts; see :class:`~rollout_api.protocol.messages.UpdateMode`.
            sha256: for a directory, ``compute`` to compute the checksum here and have the job verify it (see
                :func:`rollout_api.weights.checksum.checksum`), the checksum in hex if it is known, or None to have
                the engines load what they find.
            wait: whether to wait until every engine serves the weights or has failed to load them.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: an argument cannot be used; nothing was sent.
            WeightsError: no engine could load the weights, so that all keep their old ones, or some took too long.
        """
        try:
            session = self._connected
            parsed_kind, parsed_mode = parse_choice(WeightsKind, kind, "kind"), parse_choice(UpdateMode, mode, "mode")
            if not isinstance(weights, str | Path) and (parsed_kind is not WeightsKind.FULL or not wait):
                raise InvalidRequestError("weights in memory are always full weights (kind full) and need wait=True")
        except RolloutClientError as error:
            if not isinstance(weights, str | Path):  # the trainer's other processes may be waiting for it
                await asyncio.to_thread(weights.abort, str(error))
            raise
        if not isinstance(weights, str | Path):
            return await session.transfer.publish(version, weights, mode=parsed_mode, timeout=timeout)
        return await session.publisher.publish(
            version, str(weights), kind=parsed_kind, mode=parsed_mode, sha256=sha256, wait=wait, timeout=timeout
        )

    async def transfer_backend(self, *, timeout: float = 600.0) -> str:
        """Return the vLLM backend that the engines use to receive weights from memory, once the job has an engine.

        Args:
            timeout: seconds to wait for an engine.

        Returns:
            ``nccl``, ``sparse_nccl``, ``ipc`` or ``gloo``, or an empty string if weights must be published from a
            directory, because ``spec.weights.transfer`` of the job is none.

        Raises:
            WeightsError: the job had no engine for longer.
        """
        return await self._connected.transfer.backend(timeout)

    async def get_world_size(self, *, timeout: float = 600.0) -> int:
        """Return the number of worker processes of all engines, once there is one.

        With this method and the four below, which have vLLM's names and arguments, a trainer lets the engines receive
        weights as vLLM's own server does. :class:`~rollout_api.RolloutClient` therefore is a client for vLLM's trainer
        engines, for example ``WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=…)``.

        Args:
            timeout: seconds to wait for an engine.

        Raises:
            WeightsError: the job had no engine for longer.
        """
        return await self._connected.transfer.world_size(timeout)

    async def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float = 600.0) -> None:
        """Let the engines join the group of a trainer that listens already, and wait until they have.

        Raises:
            InvalidRequestError: the job's engines cannot form such a group.
            WeightsError: some engine has not joined; it says why.
        """
        await self._connected.transfer.init(init_info, timeout=timeout)

    async def start_weight_update(
        self, version: int | None = None, *, mode: UpdateMode | str = UpdateMode.RECOMPUTE, timeout: float = 600.0
    ) -> None:
        """Begin to publish weights, and return when all engines of the group are ready to receive them.

        Args:
            version: weight version; None for the one after the newest.
            mode: what happens to running rollouts; see :class:`~rollout_api.protocol.messages.UpdateMode`.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: the engines have joined no group, or it has lost a member; or the version cannot be
                used.
            WeightsError: some engine cannot receive the weights; it says why.
        """
        parsed = parse_choice(UpdateMode, mode, "mode")
        await self._connected.transfer.start(version, mode=parsed, timeout=timeout)

    async def update_weights(self, update_info: dict[str, Any], *, timeout: float = 600.0) -> None:
        """Let the engines receive a part of the weights, or all of them, and return when they have.

        Raises:
            InvalidRequestError: no update was started.
            WeightsError: some engine has not received the weights; it says why, and all keep their old ones.
        """
        await self._connected.transfer.update(update_info, timeout=timeout)

    async def finish_weight_update(self, weight_version: str | None = None, *, timeout: float = 600.0) -> None:
        """Make the job sample with the weights that the engines have received.

        Args:
            weight_version: without effect; the version is that of :meth:`start_weight_update`.
            timeout: seconds to wait.

        Raises:
            InvalidRequestError: no update was started.
            WeightsError: some engine could not load the weights; it says why.
        """
        (await self._connected.transfer.finish(timeout=timeout)).raise_if_failed()

    async def pause(self, mode: PauseMode | str = PauseMode.KEEP, *, timeout: float = 600.0) -> None:
        """Pause sampling on all engines of the job, until it is resumed or closed. Requests can be sent meanwhile.

        Weights can be published meanwhile. Engines keep their memory. Deadlines of requests continue to run.

        Args:
            mode: ``keep``: running rollouts stop after their current token, and continue later; ``wait``: they finish
                first, and queued ones start later. :meth:`sleep` also frees memory.
            timeout: seconds to wait until all engines are paused.

        Raises:
            InvalidRequestError: the mode is unknown.
            PauseError: some engines are not paused; they pause as soon as they can.
        """
        await self._connected.pauser.pause(parse_choice(PauseMode, mode, "mode"), timeout)

    async def resume(self, *, timeout: float = 600.0) -> None:
        """Resume sampling. Does nothing if the job is not paused.

        Args:
            timeout: seconds to wait until all engines sample again.

        Raises:
            PauseError: some engines are still paused; they resume as soon as they can.
        """
        await self._connected.pauser.resume(timeout)

    async def sleep(self, level: int = 1, *, timeout: float = 600.0) -> None:
        """Pause sampling as :meth:`pause` does, and free the memory of the engines' GPUs, for example for the trainer.

        Running rollouts continue after :meth:`wake`, and their keys and values are computed again. Weights can only be
        published after it. Engines need ``spec.engine.extraArgs: {enable_sleep_mode: true}``.

        Args:
            level: 1 keeps the weights in main memory. 2 does not; engines read them again when they wake. Engines whose
                weights came from a trainer's memory sleep at level 1.
            timeout: seconds to wait until all engines sleep.

        Raises:
            InvalidRequestError: the level is neither 1 nor 2.
            PauseError: some engines cannot sleep, or do not sleep yet; the latter do so as soon as they can.
        """
        modes = {1: PauseMode.SLEEP, 2: PauseMode.DEEP_SLEEP}
        if level not in modes:
            raise InvalidRequestError(f"level {level}: vLLM has the levels 1 and 2 of sleep")
        await self._connected.pauser.pause(modes[level], timeout)

    async def wake(self, *, timeout: float = 600.0) -> None:
        """Let the engines claim their memory and sample again; see :meth:`resume`."""
        await self.resume(timeout=timeout)

    async def weight_version(self, *, timeout: float = 600.0) -> int:
        """Return the newest weight version that was published to the job; 0 is the model that it started with.

        Versions only increase, and a job outlives its trainers, so a restarted trainer continues from this number.

        Args:
            timeout: seconds that the job may be without a coordinator, which reports the version.

        Raises:
            RolloutClientError: the job had no coordinator for longer.
        """
        session = self._connected
        deadline = time.monotonic() + timeout
        while (status := session.monitor.status) is None:
            if time.monotonic() > deadline:
                raise RolloutClientError(
                    f"job {self.job.name} has had no coordinator for {timeout:g} s, so its weight version is unknown; "
                    "is the job running?"
                )
            await asyncio.sleep(_STATUS_POLL_INTERVAL_S)
        return max(status["weight_version"], await session.publisher.newest())  # the status is up to a second old

    async def report_rewards(self, rewards: Mapping[str, float]) -> None:
        """Report the rewards of rollouts to the job.

        Args:
            rewards: reward by rollout id. If a reward is reported again, the later one counts. If Redis loses a rollout
                in a crash after this client has received it, the history does not have it, or has other tokens that
                were sampled under its id. Its reward is then not recorded but becomes part of a dead letter, and so
                does that of a rollout that ended more than seven days ago.

        Raises:
            InvalidRequestError: a reward is not finite, or the job does not know a rollout; nothing was sent.
        """
        channel = self._connected.channel
        checked = [(rollout_id, self._check_reward(rollout_id, reward)) for rollout_id, reward in rewards.items()]
        digests = self._connected.results.digests
        # Redis may have lost rollouts that were received.
        await self._check_known([RolloutId.parse(rollout_id) for rollout_id, _ in checked if rollout_id not in digests])
        messages = []
        for start in range(0, len(checked), IDS_PER_MESSAGE):
            batch = dict(checked[start : start + IDS_PER_MESSAGE])
            received = {rollout_id: digests[rollout_id] for rollout_id in batch if rollout_id in digests}
            messages.append(encode(Rewards(rewards=batch, digests=received) if received else Rewards(rewards=batch)))
        await channel.append(channel.keys.rewards, messages, "report rewards")

    async def length_stats(self, problem: str | None = None) -> LengthStats:
        """Return how long earlier rollouts were, from the current contents of the job's history.

        Rollouts of other jobs that share the history are included; rollouts for evaluation are not. A rollout is
        included a moment after it has finished.

        Args:
            problem: problem id; if the trainer sets none, it is :func:`rollout_api.problem_id_of` the prompt. Default:
                the last rollouts of all problems, some thousands.

        Returns:
            The statistics. Their ``count`` is 0 if there are no rollouts.

        Raises:
            InvalidRequestError: the history is on a separate Redis server that was not passed to :meth:`connect`.
            RedisUnreachableError: Redis was unreachable for too long.
            RedisRefusedError: the password is wrong, or the user lacks permissions.
        """
        client, policy, keys = self._history_connection("length statistics")
        return await policy.run(lambda: read_length_stats(client, keys, problem), action="read the lengths of rollouts")

    async def reward_stats(
        self, problems: Iterable[str], *, threshold: float = DEFAULT_THRESHOLD, generations: int | None = None
    ) -> dict[str, RewardStats]:
        """Return mean rewards and pass rates of problems, from the current contents of the job's history.

        A reward is included a moment after it was reported (:meth:`report_rewards`), as long as the history keeps the
        rollout. Rollouts of other jobs that share the history are included; rollouts for evaluation are not. Rewards
        are rounded to binary32.

        Args:
            problems: problem ids, as in :attr:`rollout_api.Rollout.problem_id`. They are read in one round trip for
                each 256 problems.
            threshold: lowest reward of a rollout that passes.
            generations: number of generations whose rollouts count, counted per problem: the newest ones in which the
                problem was sampled. Default: all that the history has kept, by default 16 (``speculation.window``).

        Returns:
            Problem id → statistics, in the order of *problems*. Their ``count`` is 0 if there are no rewards.

        Raises:
            InvalidRequestError: an argument is out of range, or the history is on a separate Redis server that was not
                passed to :meth:`connect`.
            RedisUnreachableError: Redis was unreachable for too long.
            RedisRefusedError: the password is wrong, or the user lacks permissions.
        """
        if isinstance(problems, str):
            raise InvalidRequestError(f"reward_stats: problems = {problems!r}; pass a list of problem ids")
        if not math.isfinite(threshold):
            raise InvalidRequestError(f"reward_stats: threshold = {threshold}; it must be finite")
        if generations is not None and generations < 1:
            raise InvalidRequestError(f"reward_stats: generations = {generations}; it must be at least 1, or None")
        ids = list(problems)
        client, policy, keys = self._history_connection("rewards")
        return await policy.run(
            lambda: read_reward_stats(client, keys, ids, threshold=threshold, generations=generations),
            action="read the rewards of rollouts",
        )

    def _history_connection(self, what: str) -> tuple[HistoryClient, ClientRetryPolicy, HistoryKeys]:
        """Return how to read the job's history.

        Args:
            what: what is read, in errors.
        """
        job = self.job
        keys = HistoryKeys.from_full_name(job.history)
        if not job.has_separate_history_redis:
            return self._redis, self._policy, keys
        if self._history is None:
            raise InvalidRequestError(
                f"the history {job.history} of job {job.name} is on a separate Redis server; pass that server to "
                f"connect(…, history_redis=…) to read {what}"
            )
        client, policy = self._history
        return client, policy, keys

    async def close_job(self) -> None:
        """Announce that no more requests will come. The job ends when all open requests are answered."""
        channel = self._connected.channel
        await channel.append(channel.keys.control, [encode(Close())], "close the job")
        self._step_context.job_is_closed = True

    async def _check_known(self, rollout_ids: Sequence[RolloutId]) -> None:
        """Check that the job has finished the rollouts."""
        keys = self._connected.channel.keys
        samples: defaultdict[str, list[RolloutId]] = defaultdict(list)
        for rollout_id in rollout_ids:
            samples[rollout_id.request_id].append(rollout_id)

        async def look_up(batch: Sequence[str]) -> list[Any]:
            pipeline = self._redis.pipeline(transaction=False)
            for request_id in batch:
                pipeline.hmget(keys.ledger(request_id), [str(one.sample) for one in samples[request_id]])
            return list(await pipeline.execute())

        requests = list(samples)
        unknown: list[RolloutId] = []
        for start in range(0, len(requests), IDS_PER_MESSAGE):
            batch = requests[start : start + IDS_PER_MESSAGE]
            found = await self._policy.run(partial(look_up, batch), action="look up rollouts")
            for request_id, entries in zip(batch, found, strict=True):
                pairs = zip(samples[request_id], entries, strict=True)
                unknown += [rollout_id for rollout_id, entry in pairs if entry is None]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise InvalidRequestError(
                f"rewards: job {self.job.name} does not know {unknown[0]}{more}; pass the ids of rollouts that were "
                "received within the last week"
            )

    def _check_reward(self, rollout_id: str, reward: float) -> float:
        try:
            uid = RolloutId.parse(rollout_id).job_uid
        except ValueError as error:
            raise InvalidRequestError(f"rewards: {error}") from None
        if uid != self.job.uid:
            raise InvalidRequestError(f"rewards: {rollout_id} is not a rollout of job {self.job.name} ({self.job.uid})")
        value = float(reward)
        if not math.isfinite(value):
            raise InvalidRequestError(f"rewards: the reward of {rollout_id} is {value}; it must be finite")
        return value


def _default_name() -> str:
    """Return the name of a client that is given none: ``trainer``, or ``trainer-N`` in rank N > 0 of a trainer."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return "trainer" if rank == "0" else f"trainer-{rank}"
