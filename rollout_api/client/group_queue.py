"""A queue that keeps groups of rollouts in flight for a trainer that trains while the job samples."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from typing_extensions import Self

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.groups import GroupOrder
from rollout_api.client.job_info import JobInfo
from rollout_api.client.prompts import Prompt
from rollout_api.client.step import AsyncStep
from rollout_api.errors import InvalidRequestError, RolloutClientError
from rollout_api.protocol.messages import FinishReason, Rollout, RolloutId

logger = logging.getLogger(__name__)

RewardFunction = Callable[[Prompt, list[Rollout]], Sequence[float] | Awaitable[Sequence[float]]]
"""Returns the reward of each rollout of a prompt. A function that is not a coroutine function runs in a thread."""

_MAX_FAILED_IN_A_ROW = 16
"""Groups that may fail one after the other before an error is raised."""
_EQUAL_REWARDS_LOG_INTERVAL = 64
"""Groups with equal rewards, one after the other, after which a warning is logged."""


@dataclass(frozen=True)
class Group:
    """The finished rollouts of one prompt."""

    number: int
    """Number of the group: its position among the prompts, counted from the queue's ``first_step``."""
    prompt: Prompt
    """The prompt."""
    rollouts: list[Rollout]
    """The rollouts, by sample."""
    rewards: list[float] | None
    """Reward of each rollout; None if the queue has no reward function."""
    newest_version: int
    """Newest published weight version when the group was taken."""

    @property
    def staleness(self) -> int:
        """How many weight versions the oldest token of the group is behind the newest version."""
        versions = [rollout.oldest_weight_version for rollout in self.rollouts]
        oldest = min((version for version in versions if version is not None), default=self.newest_version)
        return max(0, self.newest_version - oldest)


class QueueClient(Protocol):
    """What a queue needs of its client."""

    @property
    def job(self) -> JobInfo:
        """Description of the job."""

    def step(self, step: int, prompts: Sequence[Prompt | Sequence[int]]) -> AsyncStep:
        """Return a step."""

    async def weight_version(self) -> int:
        """Return the newest published weight version."""

    async def report_rewards(self, rewards: Mapping[str, float]) -> None:
        """Report rewards to the job."""


@dataclass(eq=False)
class _Slot:
    """A group that was requested and has not been taken."""

    number: int
    prompt: Prompt
    step: AsyncStep
    task: asyncio.Task[None] | None = None
    group: Group | None = None
    """The group, once its rollouts have ended and have their rewards."""
    error: Exception | None = None
    """Why there is no group."""

    @property
    def is_finished(self) -> bool:
        return self.group is not None or self.error is not None


class AsyncGroupQueue:
    """Keeps groups in flight: ``async with client.group_queue(prompts, max_in_flight=64) as queue``.

    The trainer takes finished groups, trains on them, and publishes weights, while the job samples other groups.
    Running rollouts continue across weight updates, so a group may contain tokens of several weight versions.

    Each group is a step of its own, whose number is the position of its prompt. The results of a group that is taken
    are released. Leaving the block normally cancels all other groups. If it is left by an exception, they stay: a
    trainer that then requests the same prompts under the same numbers receives the rollouts that were not taken, and
    nothing is sampled twice.

    Args:
        client: client of the job.
        prompts: prompts, each for one group; they are read when there is room for them, and may be infinite.
        max_in_flight: number of groups that are requested and not yet taken, whether they are finished or not.
        order: which finished groups are taken first.
        max_staleness: largest staleness of a group; others are dropped. Default: any.
        reward: computes the rewards of a finished group, which are also reported to the job.
        dynamic_sampling: whether to drop groups whose rewards are all equal.
        first_step: number of the first group.

    Raises:
        InvalidRequestError: an argument cannot be used.
    """

    def __init__(
        self,
        client: QueueClient,
        prompts: Iterable[Prompt | Sequence[int]],
        *,
        max_in_flight: int,
        order: GroupOrder = GroupOrder.READY_FIRST,
        max_staleness: int | None = None,
        reward: RewardFunction | None = None,
        dynamic_sampling: bool = False,
        first_step: int = 0,
    ) -> None:
        if max_in_flight < 1:
            raise InvalidRequestError(f"max_in_flight = {max_in_flight}: at least one group must be in flight")
        if max_staleness is not None and max_staleness < 0:
            raise InvalidRequestError(f"max_staleness = {max_staleness}: it must be 0 or more")
        if dynamic_sampling and reward is None:
            raise InvalidRequestError("dynamic_sampling compares the rewards of a group; pass a reward function")
        self.num_stale = 0
        """Number of groups that were dropped because they were too stale."""
        self.num_equal = 0
        """Number of groups that were dropped because all their rewards were equal."""
        self.num_failed = 0
        """Number of groups that were dropped because the job could not produce all their rollouts."""
        self._client, self._prompts = client, iter(prompts)
        self._max_in_flight, self._order, self._max_staleness = max_in_flight, order, max_staleness
        self._reward, self._dynamic_sampling = reward, dynamic_sampling
        self._next_number = first_step
        self._next_prompt: Prompt | None = None
        """A prompt that was read and is not requested yet."""
        self._slots: dict[int, _Slot] = {}
        """Groups that were requested and have not been taken, by number."""
        self._filling, self._taking = asyncio.Lock(), asyncio.Lock()
        self._changed = asyncio.Event()
        self._taken: deque[Group] = deque()
        """Groups that an interrupted call has taken."""
        self._num_failed_in_a_row = self._num_equal_in_a_row = 0
        self._is_open = False

    # Opening and leaving.

    async def start(self) -> Self:
        """Request the first groups. ``async with`` does this on entry.

        Raises:
            InvalidRequestError: the job cannot serve a prompt.
        """
        self._is_open = True
        try:
            await self._fill()
        except BaseException:
            await self.end(release=False)
            raise
        return self

    async def end(self, *, release: bool = True) -> None:
        """Leave the queue. ``async with`` does this on exit.

        Args:
            release: whether to cancel the groups that were not taken; False leaves them for the next trainer.
        """
        self._is_open = False
        self._changed.set()
        slots = list(self._slots.values())
        self._slots.clear()
        await cancel_and_wait(*(slot.task for slot in slots if slot.task is not None))
        for slot in slots:
            if release:
                await slot.step.cancel()
        for slot in slots:
            await slot.step.end(release=release)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end(release=error is None)

    # Taking groups.

    async def take(self, count: int) -> list[Group]:
        """Wait for *count* groups, and return them; fewer if there are no more prompts.

        A call that is interrupted or raises an error loses no group: the next call returns those that it has taken.

        Raises:
            RolloutClientError: under the same conditions as when iterating over a step, or because many groups in a row
                have failed.
        """
        groups = [self._taken.popleft() for _ in range(min(count, len(self._taken)))]
        try:
            async with self._taking:
                while len(groups) < count and (group := await self._take_next()) is not None:
                    groups.append(group)
                await self._fill()
        except BaseException:
            self._taken.extendleft(reversed(groups))
            raise
        return groups

    async def __aiter__(self) -> AsyncIterator[Group]:
        """Yield groups until there are no more prompts.

        Raises:
            RolloutClientError: under the same conditions as :meth:`take`.
        """
        while groups := await self.take(1):
            yield groups[0]

    @property
    def num_in_flight(self) -> int:
        """Number of groups that were requested and have not been taken."""
        return len(self._slots)

    async def _take_next(self) -> Group | None:
        while True:
            if not self._is_open:
                raise RolloutClientError("the queue is not open: use it in 'async with client.group_queue(…) as queue'")
            await self._fill()
            if not self._slots:
                return None
            slot = self._next_finished()
            if slot is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            newest = await self._client.weight_version()
            await self._end(slot, release=slot.group is not None)
            if slot.error is not None or slot.group is None:
                raise slot.error or RolloutClientError(f"group {slot.number} was not sampled")
            group = replace(slot.group, newest_version=newest)
            if not self._is_too_stale(group):
                return group

    def _next_finished(self) -> _Slot | None:
        """Return the finished group that is next; None if it has not finished."""
        if self._order is GroupOrder.IN_ORDER:
            first = self._slots[min(self._slots)]
            return first if first.is_finished else None
        # The oldest one, because it becomes too stale first.
        return min(
            (slot for slot in self._slots.values() if slot.is_finished), key=lambda slot: slot.number, default=None
        )

    def _is_too_stale(self, group: Group) -> bool:
        if self._max_staleness is None or group.staleness <= self._max_staleness:
            return False
        self.num_stale += 1
        logger.info(
            "Group %d is dropped: it is %d weight versions behind version %d, and at most %d are allowed.",
            group.number,
            group.staleness,
            group.newest_version,
            self._max_staleness,
        )
        return True

    # Sampling groups.

    async def _fill(self) -> None:
        """Request groups until enough are in flight."""
        async with self._filling:
            while self._is_open and len(self._slots) < self._max_in_flight:
                if self._next_prompt is None and (prompt := next(self._prompts, None)) is not None:
                    self._next_prompt = self._bounded(prompt if isinstance(prompt, Prompt) else Prompt(prompt))
                if self._next_prompt is None:
                    return
                number = self._next_number
                try:
                    step = await self._client.step(number, [self._next_prompt]).start()
                except Exception:
                    # The job cannot serve the prompt. After an interruption, in contrast, it is requested again.
                    self._next_number, self._next_prompt = number + 1, None
                    raise
                slot = self._slots[number] = _Slot(number, self._next_prompt, step)
                slot.task = asyncio.create_task(self._run(slot), name=f"group {number}")
                self._next_number, self._next_prompt = number + 1, None

    def _bounded(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the bound for its dispatch, if it sets none itself."""
        if prompt.weight_version is not None or prompt.max_staleness is not None:
            return prompt
        return replace(prompt, max_staleness=self._max_staleness)

    async def _run(self, slot: _Slot) -> None:
        """Receive the rollouts of a group; if it is not usable, request another one in its place."""
        try:
            group = await self._receive(slot)
            is_usable = self._is_usable(group)
            if is_usable:
                slot.group = group
            else:
                await self._end(slot, release=True)
                await self._fill()
        except Exception as error:
            slot.error = error
            self._slots[slot.number] = slot  # although its step may have ended: the error is raised when it is taken
        self._changed.set()

    async def _receive(self, slot: _Slot) -> Group:
        rollouts = [rollout async for rollout in slot.step]
        rollouts.sort(key=lambda rollout: RolloutId.parse(rollout.rollout_id).sample)
        rewards = None
        if self._reward is not None and not _failed(rollouts):
            rewards = await self._rewards(slot.prompt, rollouts, self._reward)
        return Group(slot.number, slot.prompt, rollouts, rewards, newest_version=0)

    async def _rewards(self, prompt: Prompt, rollouts: list[Rollout], reward: RewardFunction) -> list[float]:
        if inspect.iscoroutinefunction(reward):
            found = await reward(prompt, rollouts)
        else:
            result = await asyncio.to_thread(reward, prompt, rollouts)
            found = await result if inspect.isawaitable(result) else result
        rewards = [float(value) for value in found]
        if len(rewards) != len(rollouts):
            raise InvalidRequestError(
                f"the reward function returned {len(rewards)} rewards for {len(rollouts)} rollouts"
            )
        ids = [rollout.rollout_id for rollout in rollouts]
        await self._client.report_rewards(dict(zip(ids, rewards, strict=True)))
        return rewards

    def _is_usable(self, group: Group) -> bool:
        """Return whether a group is complete and not filtered out; count it if it is not.

        Raises:
            RolloutClientError: too many groups in a row have failed.
        """
        if failed := _failed(group.rollouts):
            self.num_failed += 1
            self._num_failed_in_a_row += 1
            logger.warning(
                "Group %d is dropped: rollout %s failed: %s", group.number, failed[0].rollout_id, failed[0].detail
            )
            if self._num_failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
                raise RolloutClientError(
                    f"the last {self._num_failed_in_a_row} groups have failed; the last of them because "
                    f"{failed[0].rollout_id}: {failed[0].detail}"
                )
            return False
        self._num_failed_in_a_row = 0
        if self._dynamic_sampling and group.rewards is not None and len(set(group.rewards)) == 1:
            self.num_equal += 1
            self._num_equal_in_a_row += 1
            if self._num_equal_in_a_row % _EQUAL_REWARDS_LOG_INTERVAL == 0:
                logger.warning(
                    "The last %d groups had equal rewards and were dropped; are the prompts too easy or too hard?",
                    self._num_equal_in_a_row,
                )
            return False
        self._num_equal_in_a_row = 0
        return True

    async def _end(self, slot: _Slot, *, release: bool) -> None:
        await slot.step.end(release=release)
        self._slots.pop(slot.number, None)


def _failed(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that the job could not produce."""
    return [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.FAILED]
