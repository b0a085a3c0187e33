"""The synchronous client: a thin wrapper that runs the asynchronous client on an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from typing_extensions import Self, Unpack

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.connection import CLOSED
from rollout_api.client.group_queue import AsyncGroupQueue, Group, RewardFunction
from rollout_api.client.groups import GroupCollector, GroupOrder, Groups, without_failures
from rollout_api.client.job_info import JobInfo
from rollout_api.client.prompts import Prompt, SamplingOverrides, Trajectory, make_prompts, parse_choice
from rollout_api.client.step import AsyncStep, OnProgress, StepProgress
from rollout_api.errors import RolloutClientError
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import DraftMode, Purpose, Rollout
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redis_client.client_connection import RedisTarget

_TAKE_LIMIT = 64
"""Rollouts that are handed from the event loop's thread to the caller's at once."""
_Arguments = ParamSpec("_Arguments")
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


def _synchronous(
    method: Callable[Concatenate[Any, _Arguments], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """Return the synchronous form of a method of the asynchronous object that a synchronous one wraps."""

    @wraps(method)
    def run(self: Any, /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        loop: _EventLoopThread = self._loop
        return loop.run(method(self._wrapped, *args, **options))

    return run


class Step:
    """The rollouts of some prompts: ``with client.step(17, prompts) as step: for rollout in step: …``.

    The synchronous form of :class:`~rollout_api.client.step.AsyncStep`. Callbacks run in the thread that iterates.
    """

    def __init__(self, step: AsyncStep, loop: _EventLoopThread) -> None:
        self._wrapped, self._loop = step, loop
        self._taken: deque[Rollout] = deque()

    def start(self) -> Self:
        """See :meth:`AsyncStep.start`."""
        self._loop.run(self._wrapped.start())
        self._taken.clear()  # rollouts that were left over before the step was opened again are delivered again
        return self

    end = _synchronous(AsyncStep.end)

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
            rollouts = self._loop.run(self._wrapped.take(_TAKE_LIMIT))
            self._wrapped.report_progress(is_final=rollouts is None)
            if rollouts is None:
                return
            self._taken += rollouts

    @property
    def progress(self) -> StepProgress:
        """See :attr:`AsyncStep.progress`."""
        return self._wrapped.progress

    def prompt_index(self, rollout: Rollout) -> int:
        """See :meth:`AsyncStep.prompt_index`."""
        return self._wrapped.prompt_index(rollout)

    @property
    def group_sizes(self) -> list[int]:
        """See :attr:`AsyncStep.group_sizes`."""
        return self._wrapped.group_sizes

    cancel = _synchronous(AsyncStep.cancel)

    def collect(
        self, min_complete_groups: int | None = None, *, order: GroupOrder | str = GroupOrder.READY_FIRST
    ) -> Groups:
        """See :meth:`AsyncStep.collect`."""
        collector = GroupCollector(self.group_sizes, min_complete_groups, parse_choice(GroupOrder, order, "order"))
        for rollout in self:
            collector.add(self.prompt_index(rollout), rollout)
            if collector.should_stop and not self._wrapped.is_cancelled:
                self.cancel()
        return collector.groups()

    def trajectory(
        self,
        prompt: Sequence[int],
        *,
        problem_id: str = "",
        purpose: Purpose = Purpose.TRAIN,
        images: Sequence[bytes] = (),
    ) -> Trajectory:
        """See :meth:`AsyncStep.trajectory`."""
        return self._wrapped.trajectory(prompt, problem_id=problem_id, purpose=purpose, images=images)

    turn = _synchronous(AsyncStep.turn)


class GroupQueue:
    """Keeps groups in flight: ``with client.group_queue(prompts, max_in_flight=64) as queue``.

    The synchronous form of :class:`~rollout_api.client.group_queue.AsyncGroupQueue`. Reward functions run in other
    threads.
    """

    def __init__(self, queue: AsyncGroupQueue, loop: _EventLoopThread) -> None:
        self._wrapped, self._loop = queue, loop

    def __enter__(self) -> Self:
        self._loop.run(self._wrapped.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.run(self._wrapped.end(release=error is None))

    take = _synchronous(AsyncGroupQueue.take)

    def __iter__(self) -> Iterator[Group]:
        """See :meth:`AsyncGroupQueue.__aiter__`."""
        while groups := self.take(1):
            yield groups[0]

    @property
    def num_in_flight(self) -> int:
        """See :attr:`AsyncGroupQueue.num_in_flight`."""
        return self._wrapped.num_in_flight

    @property
    def num_stale(self) -> int:
        """See :attr:`AsyncGroupQueue.num_stale`."""
        return self._wrapped.num_stale

    @property
    def num_equal(self) -> int:
        """See :attr:`AsyncGroupQueue.num_equal`."""
        return self._wrapped.num_equal

    @property
    def num_failed(self) -> int:
        """See :attr:`AsyncGroupQueue.num_failed`."""
        return self._wrapped.num_failed


class RolloutClient:
    """A trainer's connection to one job: ``with RolloutClient.connect(…) as client``.

    The synchronous form of :class:`~rollout_api.AsyncRolloutClient`, which runs in a thread. Only one thread at a time
    may use a client.

    Args:
        client: client to connect; :meth:`connect` creates it.
    """

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._wrapped = client
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
            self._loop.run(self._wrapped.close())
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
        return self._wrapped.name

    @property
    def job(self) -> JobInfo:
        """Description of the job."""
        return self._wrapped.job

    @property
    def status(self) -> CoordinatorStatus:
        """See :attr:`AsyncRolloutClient.status`."""
        return self._wrapped.status

    @property
    def num_awaited(self) -> int:
        """See :attr:`AsyncRolloutClient.num_awaited`."""
        return self._wrapped.num_awaited

    def step(
        self,
        step: int,
        prompts: Sequence[Prompt | Sequence[int]] = (),
        *,
        on_progress: OnProgress | None = None,
    ) -> Step:
        """See :meth:`AsyncRolloutClient.step`."""
        return Step(self._wrapped.step(step, prompts, on_progress=on_progress), self._loop)

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
        queue = self._wrapped.group_queue(
            prompts,
            max_in_flight=max_in_flight,
            order=order,
            max_staleness=max_staleness,
            reward=reward,
            dynamic_sampling=dynamic_sampling,
            first_step=first_step,
        )
        return GroupQueue(queue, self._loop)

    publish_weights = _synchronous(AsyncRolloutClient.publish_weights)
    transfer_backend = _synchronous(AsyncRolloutClient.transfer_backend)
    get_world_size = _synchronous(AsyncRolloutClient.get_world_size)
    init_weight_transfer_engine = _synchronous(AsyncRolloutClient.init_weight_transfer_engine)
    start_weight_update = _synchronous(AsyncRolloutClient.start_weight_update)
    update_weights = _synchronous(AsyncRolloutClient.update_weights)
    finish_weight_update = _synchronous(AsyncRolloutClient.finish_weight_update)
    pause = _synchronous(AsyncRolloutClient.pause)
    resume = _synchronous(AsyncRolloutClient.resume)
    sleep = _synchronous(AsyncRolloutClient.sleep)
    wake = _synchronous(AsyncRolloutClient.wake)
    weight_version = _synchronous(AsyncRolloutClient.weight_version)
    report_rewards = _synchronous(AsyncRolloutClient.report_rewards)
    length_stats = _synchronous(AsyncRolloutClient.length_stats)
    reward_stats = _synchronous(AsyncRolloutClient.reward_stats)
    close_job = _synchronous(AsyncRolloutClient.close_job)
