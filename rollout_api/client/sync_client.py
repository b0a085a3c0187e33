"""The synchronous client: a thin wrapper that runs the asynchronous client on an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self, Unpack

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.connection import CLOSED
from rollout_api.client.group_queue import AsyncGroupQueue, Group, RewardFunction
from rollout_api.client.groups import GroupCollector, GroupOrder, Groups, without_failures
from rollout_api.client.history_stats import DEFAULT_THRESHOLD, RewardStats
from rollout_api.client.job_info import JobInfo
from rollout_api.client.prompts import Prompt, SamplingOverrides, Trajectory, make_prompts, parse_choice
from rollout_api.client.step import AsyncStep, OnProgress, StepProgress
from rollout_api.client.weight_publisher import Checksum, PublishedWeights
from rollout_api.errors import RolloutClientError
from rollout_api.length_stats import LengthStats
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import DraftMode, PauseMode, Purpose, Rollout, UpdateMode, WeightsKind
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redis_client.client_connection import RedisTarget
from rollout_api.weights.in_memory import TensorsInMemory

_TAKE_LIMIT = 64
"""Rollouts that are handed from the event loop's thread to the caller's at once."""
_Result = TypeVar("_Result")


class _EventLoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of *work*. If the wait for it is interrupted (Ctrl-C), *work* is cancelled.

        Raises:
            RolloutClientError: the thread was stopped.
        """
        if self.is_closed:
            work.close()
            raise RolloutClientError(CLOSED)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the thread was stopped."""
        return self._loop.is_closed()

    def close(self) -> None:
        """Stop the loop and its thread."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Step:
    """The rollouts of some prompts: ``with client.step(17, prompts) as step: for rollout in step: …``.

    The synchronous form of :class:`~rollout_api.client.step.AsyncStep`. Callbacks run in the thread that iterates.
    """

    def __init__(self, step: AsyncStep, loop: _EventLoopThread) -> None:
        self._step, self._loop = step, loop
        self._taken: deque[Rollout] = deque()

    def start(self) -> Self:
        """See :meth:`AsyncStep.start`."""
        self._loop.run(self._step.start())
        self._taken.clear()  # rollouts that were left over before the step was opened again are delivered again
        return self

    def end(self, *, release: bool = True) -> None:
        """See :meth:`AsyncStep.end`."""
        self._loop.run(self._step.end(release=release))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(release=error is None)

    def __iter__(self) -> Iterator[Rollout]:
        """See :meth:`AsyncStep.__aiter__`."""
        while True:
            # Rollouts that an abandoned loop over the step left behind go to the next loop.
            while self._taken:
                yield self._taken.popleft()
            rollouts = self._loop.run(self._step.take(_TAKE_LIMIT))
            self._step.report_progress(is_final=rollouts is None)
            if rollouts is None:
                return
            self._taken += rollouts

    @property
    def progress(self) -> StepProgress:
        """See :attr:`AsyncStep.progress`."""
        return self._step.progress

    def prompt_index(self, rollout: Rollout) -> int:
        """See :meth:`AsyncStep.prompt_index`."""
        return self._step.prompt_index(rollout)

    @property
    def group_sizes(self) -> list[int]:
        """See :attr:`AsyncStep.group_sizes`."""
        return self._step.group_sizes

    def cancel(self) -> None:
        """See :meth:`AsyncStep.cancel`."""
        self._loop.run(self._step.cancel())

    def collect(
        self, min_complete_groups: int | None = None, *, order: GroupOrder | str = GroupOrder.READY_FIRST
    ) -> Groups:
        """See :meth:`AsyncStep.collect`."""
        collector = GroupCollector(self.group_sizes, min_complete_groups, parse_choice(GroupOrder, order, "order"))
        for rollout in self:
            collector.add(self.prompt_index(rollout), rollout)
            if collector.should_stop and not self._step.is_cancelled:
                self.cancel()
        return collector.groups()

    def trajectory(
        self, prompt: Sequence[int], *, problem_id: str = "", purpose: Purpose = Purpose.TRAIN
    ) -> Trajectory:
        """See :meth:`AsyncStep.trajectory`."""
        return self._step.trajectory(prompt, problem_id=problem_id, purpose=purpose)

    def turn(
        self,
        trajectories: Sequence[Trajectory],
        *,
        sampling: Sampling | SamplingOverrides | Mapping[str, Any] | None = None,
        weight_version: int | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> list[Rollout]:
        """See :meth:`AsyncStep.turn`."""
        return self._loop.run(
            self._step.turn(
                trajectories,
                sampling=sampling,
                weight_version=weight_version,
                priority=priority,
                deadline_seconds=deadline_seconds,
            )
        )


class GroupQueue:
    """Keeps groups in flight: ``with client.group_queue(prompts, max_in_flight=64) as queue``.

    The synchronous form of :class:`~rollout_api.client.group_queue.AsyncGroupQueue`. Reward functions run in other
    threads.
    """

    def __init__(self, queue: AsyncGroupQueue, loop: _EventLoopThread) -> None:
        self._queue, self._loop = queue, loop

    def __enter__(self) -> Self:
        self._loop.run(self._queue.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.run(self._queue.end(release=error is None))

    def take(self, count: int) -> list[Group]:
        """See :meth:`AsyncGroupQueue.take`."""
        return self._loop.run(self._queue.take(count))

    def __iter__(self) -> Iterator[Group]:
        """See :meth:`AsyncGroupQueue.__aiter__`."""
        while groups := self.take(1):
            yield groups[0]

    @property
    def num_in_flight(self) -> int:
        """See :attr:`AsyncGroupQueue.num_in_flight`."""
        return self._queue.num_in_flight

    @property
    def num_stale(self) -> int:
        """See :attr:`AsyncGroupQueue.num_stale`."""
        return self._queue.num_stale

    @property
    def num_equal(self) -> int:
        """See :attr:`AsyncGroupQueue.num_equal`."""
        return self._queue.num_equal

    @property
    def num_failed(self) -> int:
        """See :attr:`AsyncGroupQueue.num_failed`."""
        return self._queue.num_failed


class RolloutClient:
    """A trainer's connection to one job: ``with RolloutClient.connect(…) as client``.

    The synchronous form of :class:`~rollout_api.AsyncRolloutClient`, which runs in a thread. Only one thread at a time
    may use a client.

    Args:
        client: client to connect; :meth:`connect` creates it.
    """

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._client = client
        self._loop = _EventLoopThread()
        try:
            self._loop.run(client.open())
        except BaseException:
            self._loop.close()
            raise

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
        """Connect to a job; see :meth:`AsyncRolloutClient.connect` and :meth:`AsyncRolloutClient.open`."""
        return cls(
            AsyncRolloutClient.connect(
                redis,
                job,
                uid=uid,
                name=name,
                timeout=timeout,
                reconnect_timeout=reconnect_timeout,
                history_redis=history_redis,
            )
        )

    def close(self) -> None:
        """See :meth:`AsyncRolloutClient.close`."""
        if self._loop.is_closed:
            return
        try:
            self._loop.run(self._client.close())
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Name of this client."""
        return self._client.name

    @property
    def job(self) -> JobInfo:
        """Description of the job."""
        return self._client.job

    @property
    def status(self) -> CoordinatorStatus:
        """See :attr:`AsyncRolloutClient.status`."""
        return self._client.status

    @property
    def num_awaited(self) -> int:
        """See :attr:`AsyncRolloutClient.num_awaited`."""
        return self._client.num_awaited

    def step(
        self,
        step: int,
        prompts: Sequence[Prompt | Sequence[int]] = (),
        *,
        on_progress: OnProgress | None = None,
    ) -> Step:
        """See :meth:`AsyncRolloutClient.step`."""
        return Step(self._client.step(step, prompts, on_progress=on_progress), self._loop)

    def generate(
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
        """See :meth:`AsyncRolloutClient.generate`."""
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
        with self.step(step, made, on_progress=on_progress) as opened:
            groups = opened.collect()
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
    ) -> GroupQueue:
        """See :meth:`AsyncRolloutClient.group_queue`."""
        queue = self._client.group_queue(
            prompts,
            max_in_flight=max_in_flight,
            order=order,
            max_staleness=max_staleness,
            reward=reward,
            dynamic_sampling=dynamic_sampling,
            first_step=first_step,
        )
        return GroupQueue(queue, self._loop)

    def publish_weights(
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
        """See :meth:`AsyncRolloutClient.publish_weights`."""
        return self._loop.run(
            self._client.publish_weights(
                version, weights, kind=kind, mode=mode, sha256=sha256, wait=wait, timeout=timeout
            )
        )

    def transfer_backend(self, *, timeout: float = 600.0) -> str:
        """See :meth:`AsyncRolloutClient.transfer_backend`."""
        return self._loop.run(self._client.transfer_backend(timeout=timeout))

    def get_world_size(self, *, timeout: float = 600.0) -> int:
        """See :meth:`AsyncRolloutClient.get_world_size`."""
        return self._loop.run(self._client.get_world_size(timeout=timeout))

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float = 600.0) -> None:
        """See :meth:`AsyncRolloutClient.init_weight_transfer_engine`."""
        self._loop.run(self._client.init_weight_transfer_engine(init_info, timeout=timeout))

    def start_weight_update(
        self, version: int | None = None, *, mode: UpdateMode | str = UpdateMode.RECOMPUTE, timeout: float = 600.0
    ) -> None:
        """See :meth:`AsyncRolloutClient.start_weight_update`."""
        self._loop.run(self._client.start_weight_update(version, mode=mode, timeout=timeout))

    def update_weights(self, update_info: dict[str, Any], *, timeout: float = 600.0) -> None:
        """See :meth:`AsyncRolloutClient.update_weights`."""
        self._loop.run(self._client.update_weights(update_info, timeout=timeout))

    def finish_weight_update(self, weight_version: str | None = None, *, timeout: float = 600.0) -> None:
        """See :meth:`AsyncRolloutClient.finish_weight_update`."""
        self._loop.run(self._client.finish_weight_update(weight_version, timeout=timeout))

    def pause(self, mode: PauseMode | str = PauseMode.KEEP, *, timeout: float = 600.0) -> None:
        """See :meth:`AsyncRolloutClient.pause`."""
        self._loop.run(self._client.pause(mode, timeout=timeout))

    def resume(self, *, timeout: float = 600.0) -> None:
        """See :meth:`AsyncRolloutClient.resume`."""
        self._loop.run(self._client.resume(timeout=timeout))

    def weight_version(self, *, timeout: float = 600.0) -> int:
        """See :meth:`AsyncRolloutClient.weight_version`."""
        return self._loop.run(self._client.weight_version(timeout=timeout))

    def report_rewards(self, rewards: Mapping[str, float]) -> None:
        """See :meth:`AsyncRolloutClient.report_rewards`."""
        self._loop.run(self._client.report_rewards(rewards))

    def length_stats(self, problem: str | None = None) -> LengthStats:
        """See :meth:`AsyncRolloutClient.length_stats`."""
        return self._loop.run(self._client.length_stats(problem))

    def reward_stats(
        self, problems: Iterable[str], *, threshold: float = DEFAULT_THRESHOLD, generations: int | None = None
    ) -> dict[str, RewardStats]:
        """See :meth:`AsyncRolloutClient.reward_stats`."""
        return self._loop.run(self._client.reward_stats(problems, threshold=threshold, generations=generations))

    def close_job(self) -> None:
        """See :meth:`AsyncRolloutClient.close_job`."""
        self._loop.run(self._client.close_job())
