"""One training step: its requests, their rollouts, and the release of the results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from typing_extensions import Self

from rollout_api.client.groups import GroupCollector, GroupOrder, Groups
from rollout_api.client.job_info import JobInfo, PreparedRequest
from rollout_api.client.job_state import JobMonitor
from rollout_api.client.open_request import AwaitedRequest, Inbox, Leftovers, OpenRequest, PromptRequest
from rollout_api.client.prompts import Prompt, SamplingOverrides, Trajectory, overrides_of, parse_choice
from rollout_api.client.request_queue import first_id
from rollout_api.client.results import Results
from rollout_api.errors import InvalidRequestError, RequestRefusedError, RolloutClientError
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Purpose, Rollout, RolloutId
from rollout_api.protocol.status import NO_STATUS, CoordinatorStatus

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0
"""Time between two calls of a progress callback."""


@dataclass(frozen=True)
class StepProgress:
    """The progress of a step, including the turns of its trajectories."""

    step: int
    """Number of the step."""
    done: int
    """Number of rollouts that were received."""
    total: int
    """Number of rollouts that were requested."""
    tokens: int
    """Number of response tokens that were received."""
    status: CoordinatorStatus
    """Status of the job; empty while no coordinator runs."""


OnProgress = Callable[[StepProgress], None]


@dataclass
class StepContext:
    """What all steps of one client share."""

    client_name: str
    """Name of the client."""
    job: JobInfo
    """Description of the job."""
    monitor: JobMonitor
    """Source of the job's status."""
    results: Results
    """Sends requests and reads their results."""
    leftovers: Leftovers
    """Requests of steps that are not open and whose results are kept."""
    job_is_closed: bool = False
    """Whether this client has closed the job, so that no more steps may be opened."""
    open_steps: set[AsyncStep] = field(default_factory=set)
    """Steps that are open."""
    open_ids: set[str] = field(default_factory=set)
    """First ids of the requests of open steps."""


class AsyncStep:
    """The rollouts of some prompts: ``async with client.step(17, prompts) as step: async for rollout in step: …``.

    Leaving the block normally releases the results: the job deletes them, and rollouts that are still missing are
    cancelled and dropped. Leaving it by an exception releases nothing. If the step is then opened again with the same
    prompts, for example by a restarted trainer, it receives the rollouts that there are, and then the rest; nothing is
    sampled twice. If a step is opened again whose results were released, its rollouts are sampled again.
    """

    def __init__(
        self,
        context: StepContext,
        number: int,
        prompts: Sequence[Prompt | Sequence[int]] = (),
        on_progress: OnProgress | None = None,
    ) -> None:
        if number < 0:
            raise InvalidRequestError(f"step {number}: step numbers start at 0")
        self.number = number
        """Number of the step."""
        self._context = context
        self._prompts = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
        self._on_progress = on_progress
        self._last_progress = 0.0
        self._inbox = Inbox()
        self._requests: list[PromptRequest] = []
        """Requests of the prompts, in their order."""
        self._turns: dict[AwaitedRequest, None] = {}
        """Requests of turns that are awaited."""
        self._ended_turns: list[str] = []
        """Ids of the requests of all other turns."""
        self._ids: dict[str, int] = {}
        """First id of each request → index of its prompt; -1 for a turn."""
        self._is_running = False
        self._is_cancelled = False
        self._may_be_answered = True
        """Whether the step, or one after it, was opened before under the client's name."""
        self._num_opened_before = 0
        self._num_trajectories = 0

    # Opening and leaving.

    async def start(self) -> Self:
        """Validate all prompts and start sending them. ``async with`` does this on entry.

        Raises:
            InvalidRequestError: the job cannot serve a prompt, or the step is open; nothing was sent.
        """
        if self._is_running:
            raise InvalidRequestError(f"step {self.number} is open already")
        prepared = await asyncio.to_thread(self.prepare_requests)
        context = self._context
        may_be_answered = await context.results.open_step(self.number)
        if context.job_is_closed:
            raise InvalidRequestError(f"step {self.number}: this client has closed the job")
        ids = {request.request_id: index for index, request in enumerate(prepared)}
        if not context.open_ids.isdisjoint(ids):
            raise InvalidRequestError(f"step {self.number} with these prompts is open already")
        self._inbox, self._ids, self._ended_turns, self._num_trajectories = Inbox(), ids, [], 0
        self._is_running, self._is_cancelled, self._may_be_answered = True, False, may_be_answered
        self._requests = [PromptRequest(request, self._inbox, may_be_answered=may_be_answered) for request in prepared]
        self._turns = {}
        self._num_opened_before = context.leftovers.open_step()
        context.open_ids.update(ids)
        context.open_steps.add(self)
        context.results.add(self._requests)
        return self

    def prepare_requests(self) -> list[PreparedRequest]:
        """Return the encoded requests for the step's prompts, without sending them.

        Raises:
            InvalidRequestError: the job cannot serve a prompt.
        """
        name = self._context.client_name
        return [
            self._context.job.prepare(
                prompt,
                f"{name}:{self.number}:{index}",
                client=name,
                where=f"step {self.number}, prompt {index}",
                step=self.number,
            )
            for index, prompt in enumerate(self._prompts)
        ]

    async def end(self, *, release: bool = True) -> None:
        """Leave the step. ``async with`` does this on exit.

        Args:
            release: whether to release the results; False leaves the step as an exception does.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; results that were not released are kept.
        """
        if not self._is_running:
            return
        self._is_running = False
        context = self._context
        is_released = False
        try:
            if release:
                await self._cancel_and_release()
                is_released = True
        finally:
            context.results.remove(self._open_requests, keep=not is_released)
            if not is_released:
                context.leftovers.add(self._ended_turns)
            for turn in self._turns:
                turn.answer.cancel()
            context.open_ids.difference_update(self._ids)
            context.open_steps.discard(self)

    async def _cancel_and_release(self) -> None:
        inbox, context = self._inbox, self._context
        if inbox.num_missing and not self._is_cancelled:
            logger.warning(
                "Step %d was left with %d of %d rollouts not received; they are cancelled and dropped.",
                self.number,
                inbox.num_missing,
                inbox.num_total,
            )
        if any(request.num_unanswered for request in self._open_requests):
            await self.cancel()
        past = context.leftovers.take_past(self.number, self._num_opened_before)
        if past:
            logger.info("Released the results of %d requests of earlier steps, which no step has opened.", len(past))
        own = [*(request.request.request_id for request in self._open_requests), *self._ended_turns]
        await context.results.release([*own, *past])

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end(release=error is None)

    # Consuming rollouts.

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        """Yield the rollouts of the step's prompts as they finish, in any order.

        Raises:
            RequestRefusedError: after all other rollouts have been yielded; it lists all refusals.
            UnreadableResultError: likewise, for results that could not be read.
            JobEndedError: no more rollouts will come.
            JobChangedError: likewise, because the job was replaced.
            RedisUnreachableError: Redis was unreachable for too long.
        """
        while (rollouts := await self.take(1)) is not None:
            self.report_progress(is_final=False)
            for rollout in rollouts:
                yield rollout
        self.report_progress(is_final=True)

    async def take(self, limit: int, timeout: float | None = None) -> list[Rollout] | None:
        """Wait for rollouts and return up to *limit* of them; None once there are no more.

        Args:
            limit: largest number of rollouts to return.
            timeout: seconds after which an empty list is returned; default: the interval of progress callbacks.

        Raises:
            RolloutClientError: under the same conditions as when iterating.
        """
        self._check_running()
        inbox, results = self._inbox, self._context.results
        deadline = time.monotonic() + (_PROGRESS_INTERVAL_S if timeout is None else timeout)
        while True:
            if inbox.rollouts:
                return [inbox.rollouts.popleft() for _ in range(min(limit, len(inbox.rollouts)))]
            if announced := inbox.take_announced():
                await results.read(announced)
                continue
            if not inbox.num_missing:
                inbox.raise_if_incomplete()
                return None
            if inbox.failure is not None:
                raise inbox.failure
            if (remaining := deadline - time.monotonic()) <= 0:
                return []
            await inbox.wait_for_change(remaining)

    async def collect(
        self, min_complete_groups: int | None = None, *, order: GroupOrder | str = GroupOrder.READY_FIRST
    ) -> Groups:
        """Return all rollouts of the step by group.

        Args:
            min_complete_groups: number of complete groups after which the rest of the step is cancelled; default: wait
                for all.
            order: which complete groups count. ``ready_first`` is the fastest and prefers short responses;
                ``in_order`` waits for the groups of the first prompts, whatever the lengths of their responses.

        Raises:
            InvalidRequestError: the order is unknown.
            RolloutClientError: under the same conditions as when iterating.
        """
        collector = GroupCollector(self.group_sizes, min_complete_groups, parse_choice(GroupOrder, order, "order"))
        async for rollout in self:
            collector.add(self.prompt_index(rollout), rollout)
            if collector.should_stop and not self._is_cancelled:
                await self.cancel()
        return collector.groups()

    def prompt_index(self, rollout: Rollout) -> int:
        """Return the index of the prompt that *rollout* responds to, among the step's prompts.

        Raises:
            KeyError: the rollout does not belong to this step.
        """
        return self._ids[first_id(RolloutId.parse(rollout.rollout_id).request_id)]

    @property
    def group_sizes(self) -> list[int]:
        """Number of rollouts that each of the step's prompts asks for."""
        return [request.request.n for request in self._requests]

    @property
    def is_cancelled(self) -> bool:
        """Whether :meth:`cancel` was called since the step was opened."""
        return self._is_cancelled

    @property
    def progress(self) -> StepProgress:
        """Progress of the step, including the turns of its trajectories."""
        inbox, status = self._inbox, self._context.monitor.status or NO_STATUS
        return StepProgress(self.number, inbox.num_done, inbox.num_total, inbox.num_tokens, status)

    def report_progress(self, *, is_final: bool) -> None:
        """Call the progress callback if it is due. Iterating does this."""
        now = time.monotonic()
        is_due = is_final or now - self._last_progress >= _PROGRESS_INTERVAL_S
        if self._on_progress is not None and is_due:
            self._last_progress = now
            self._on_progress(self.progress)

    # Cancellation.

    async def cancel(self) -> None:
        """Cancel all open requests.

        Running samples return their partial output, with the finish reason ``cancelled``. Requests that were not sent
        yet are withdrawn and return nothing.
        """
        self._is_cancelled = True
        withdrawal = RolloutClientError(f"step {self.number} was cancelled before this turn was sent")
        await self._context.results.cancel(self._open_requests, withdrawal=withdrawal)

    # Trajectories.

    def trajectory(
        self,
        prompt: Sequence[int],
        *,
        problem_id: str = "",
        purpose: Purpose = Purpose.TRAIN,
        images: Sequence[bytes] = (),
    ) -> Trajectory:
        """Begin a multi-turn trajectory. For a group, begin several with the same prompt.

        A restarted trainer must begin its trajectories in the same order.
        """
        trajectory_id = f"{self._context.client_name}:{self.number}:t{self._num_trajectories}"
        self._num_trajectories += 1
        return Trajectory(trajectory_id, prompt, problem_id=problem_id, purpose=purpose, images=images)

    async def turn(
        self,
        trajectories: Sequence[Trajectory],
        *,
        sampling: Sampling | SamplingOverrides | Mapping[str, Any] | None = None,
        weight_version: int | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> list[Rollout]:
        """Sample the model's next turn in each of *trajectories*, append it there, and wait for all of them.

        A turn that is interrupted, for example by ``asyncio.wait_for``, cannot be requested again. To bound a turn's
        duration, set *deadline_seconds*.

        Returns:
            The rollouts in the order of *trajectories*. Check each ``finish_reason``.

        Raises:
            InvalidRequestError: the job cannot serve a context; nothing was sent.
            RolloutClientError: under the same conditions as when iterating; the turns that were received are appended.
        """
        self._check_running()
        overrides = overrides_of(sampling or {}) | {"n": 1}
        prepared = []
        for trajectory in trajectories:
            turn = len(trajectory.turns)
            prompt = Prompt(
                trajectory.context,
                problem_id=trajectory.problem_id,
                sampling=overrides,
                purpose=trajectory.purpose,
                priority=priority,
                deadline_seconds=deadline_seconds,
                weight_version=weight_version,
                trajectory_id=trajectory.trajectory_id,
                turn=turn,
                images=trajectory.images,
            )
            prepared.append(
                self._context.job.prepare(
                    prompt,
                    f"{trajectory.trajectory_id}.{turn}",
                    client=self._context.client_name,
                    where=f"trajectory {trajectory.trajectory_id}, turn {turn}",
                    step=self.number,
                )
            )
        answers = await self._request_turns(prepared)
        for trajectory, answer in zip(trajectories, answers, strict=True):
            if isinstance(answer, Rollout):
                trajectory.append(answer)
        _raise_failed_turns([answer for answer in answers if isinstance(answer, BaseException)])
        return [answer for answer in answers if isinstance(answer, Rollout)]

    async def _request_turns(self, prepared: Sequence[PreparedRequest]) -> list[Rollout | BaseException]:
        ids = dict.fromkeys((request.request_id for request in prepared), -1)
        if len(ids) < len(prepared) or not self._context.open_ids.isdisjoint(ids):
            raise InvalidRequestError(f"step {self.number}: a turn of a trajectory was requested twice")
        if self._is_cancelled:
            raise RolloutClientError(f"step {self.number} was cancelled before this turn was sent")
        self._ids |= ids
        self._context.open_ids.update(ids)
        requests = [AwaitedRequest(request, may_be_answered=self._may_be_answered) for request in prepared]
        self._turns |= dict.fromkeys(requests)
        self._inbox.num_total += len(requests)
        self._context.results.add(requests)
        answers = await asyncio.gather(*(request.answer for request in requests), return_exceptions=True)
        turns = [answer if isinstance(answer, BaseException) else answer[0] for answer in answers]
        for turn in turns:
            if isinstance(turn, Rollout):
                self._inbox.count(turn)
        # The step may have very many turns, so their rollouts are not kept in memory.
        self._context.results.remove(requests)
        for request in requests:
            self._turns.pop(request, None)
            self._ended_turns.append(request.request.request_id)
        return turns

    @property
    def _open_requests(self) -> list[OpenRequest]:
        return [*self._requests, *self._turns]

    def _check_running(self) -> None:
        if not self._is_running:
            raise RolloutClientError(f"step {self.number} is not open: use it in 'with client.step(…) as step'")


def _raise_failed_turns(errors: Sequence[BaseException]) -> None:
    refused = [error for error in errors if isinstance(error, RequestRefusedError)]
    if refused:
        raise RequestRefusedError({name: reason for error in refused for name, reason in error.refusals.items()})
    if errors:
        raise errors[0]
