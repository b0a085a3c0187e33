"""One training step: its requests, the rollouts that are received for them, and their acknowledgement."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Any

from typing_extensions import Self

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.groups import GroupCollector, GroupOrder, Groups
from rollout_api.client.job_info import JobInfo, PreparedRequest
from rollout_api.client.job_monitor import JobMonitor
from rollout_api.client.prompts import Prompt, SamplingOverrides, overrides_of, parse_choice
from rollout_api.client.request_sender import RequestSender
from rollout_api.client.result_receiver import ResultReceiver
from rollout_api.client.step_state import PendingRequest, StepState, first_id
from rollout_api.client.trajectory import Trajectory
from rollout_api.errors import InvalidRequestError, RequestRefusedError, RolloutClientError
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Purpose, Rollout, RolloutId
from rollout_api.protocol.status import NO_STATUS, CoordinatorStatus

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0
"""Time between two calls of a progress callback."""
_LAST_BATCH_TIMEOUT_S = 2.0
"""How long a cancellation waits for the batch of requests that is being sent."""
_CANCEL_RETRY_PAUSE_S = 2.0
"""Pause before a cancellation is first repeated; it doubles with each repetition."""
_MAX_CANCEL_RETRY_PAUSE_S = 60.0
"""Longest pause between two repetitions of a cancellation."""


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


class StepRegistry:
    """Records which steps of a client are open, which have ended, and what they have requested.

    Args:
        max_ended: number of ended steps to remember.
        max_requests: number of requests to remember.
    """

    def __init__(self, max_ended: int, max_requests: int) -> None:
        self.job_is_closed = False
        """Whether this client has closed the job, so that no more steps may be opened."""
        self._max_ended, self._max_requests = max_ended, max_requests
        self._num_samples: OrderedDict[str, int] = OrderedDict()
        """Request id → its number of samples."""
        self._open: set[AsyncStep] = set()
        self._ended: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        """Number and hash of the request ids of each step that has ended."""

    @property
    def open_steps(self) -> list[AsyncStep]:
        """Steps that are open."""
        return list(self._open)

    def record_requests(self, requests: Iterable[PreparedRequest]) -> None:
        """Record that steps have sent these requests."""
        for request in requests:
            self._num_samples[request.request_id] = request.n
            self._num_samples.move_to_end(request.request_id)
        while len(self._num_samples) > self._max_requests:
            self._num_samples.popitem(last=False)

    def has_requested(self, rollout_id: RolloutId) -> bool:
        """Return whether a rollout belongs to one of the latest requests."""
        return 0 <= rollout_id.sample < self._num_samples.get(first_id(rollout_id.request_id), 0)

    def open(self, step: AsyncStep, request_ids: Sequence[str]) -> None:
        """Record that a step is being opened with these requests.

        Raises:
            InvalidRequestError: the job is closed, or the step has ended before.
        """
        if self.job_is_closed:
            raise InvalidRequestError(f"step {step.number}: this client has closed the job")
        if request_ids and (step.number, _hash(request_ids)) in self._ended:
            raise InvalidRequestError(
                f"step {step.number} with these prompts has ended: its rollouts were received. To sample the same "
                "prompts again, use the next step number"
            )
        self._open.add(step)

    def close(self, step: AsyncStep, ended_ids: Sequence[str] | None) -> None:
        """Record that a step was left.

        Args:
            step: the step.
            ended_ids: ids of its requests if it has ended, that is, if its results are acknowledged.
        """
        self._open.discard(step)
        if ended_ids is not None:
            self._ended[step.number, _hash(ended_ids)] = None
            if len(self._ended) > self._max_ended:
                self._ended.popitem(last=False)


def _hash(request_ids: Sequence[str]) -> bytes:
    return blake2b("\n".join(request_ids).encode(), digest_size=8).digest()


@dataclass(frozen=True)
class StepContext:
    """What all steps of one client use."""

    client_name: str
    """Name of the client."""
    job: JobInfo
    """Description of the job."""
    monitor: JobMonitor
    """Source of the job's status."""
    sender: RequestSender
    """Sender of requests."""
    results: ResultReceiver
    """Receiver of rollouts."""
    registry: StepRegistry
    """Record of open and ended steps."""


class AsyncStep:
    """The rollouts of some prompts: ``async with client.step(17, prompts) as step: async for rollout in step: …``.

    Leaving the block normally acknowledges the results: they are not delivered again, and rollouts that are still
    missing are cancelled and dropped. Leaving it by an exception acknowledges nothing. If the step is then opened again
    with the same prompts, for example by a restarted trainer, it receives the rollouts that were delivered before, and
    then the rest; nothing is sampled twice. Rollouts that an earlier trainer with this name acknowledged have been
    deleted; if they are requested again, they are sampled again.
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
        self._state = StepState(number)
        self._is_running = False
        self._is_cancelled = False
        self._num_trajectories = 0
        self._submission: asyncio.Task[None] | None = None
        self._sending_again: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # Opening and leaving.

    async def start(self) -> Self:
        """Validate all prompts and start sending them. ``async with`` does this on entry.

        Raises:
            InvalidRequestError: the job cannot serve a prompt, or the step is open or has ended; nothing was sent.
        """
        if self._is_running:
            raise InvalidRequestError(f"step {self.number} is open already")
        prepared = await asyncio.to_thread(self.prepare_requests)
        request_ids = [request.request_id for request in prepared]
        if any(self._context.results.is_registered(request_id) for request_id in request_ids):
            raise InvalidRequestError(f"step {self.number} with these prompts is open already")
        self._context.registry.open(self, request_ids)
        self._is_running, self._is_cancelled = True, False
        self._state = StepState(self.number)
        for index, request in enumerate(prepared):
            self._state.add(PendingRequest(index, request.request_id, request.n, request.data))
        self._context.registry.record_requests(prepared)
        self._context.results.register(self._state, request_ids)
        self._context.results.start()
        self._sending_again = self._run(self._send_again_when_needed())
        self._submission = self._run(self._submit(list(self._state.requests.values())))
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

    async def end(self, *, acknowledge: bool = True) -> None:
        """Leave the step. ``async with`` does this on exit.

        Args:
            acknowledge: whether to acknowledge the results; False leaves the step as an exception does.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; unacknowledged results are delivered again.
        """
        if not self._is_running:
            return
        self._is_running = False
        self._num_trajectories = 0
        has_ended = False
        try:
            if acknowledge:
                await self._cancel_and_acknowledge()
                has_ended = True
        finally:
            await cancel_and_wait(*self._tasks)
            self._state.close()
            if not has_ended:
                self._context.results.release(self._state)
            self._context.registry.close(self, list(self._state.prompt_requests) if has_ended else None)

    async def _cancel_and_acknowledge(self) -> None:
        state = self._state
        if state.num_open and not self._is_cancelled:
            logger.warning(
                "Step %d was left with %d of %d rollouts not received; they are cancelled, and dropped when they "
                "arrive.",
                self.number,
                state.num_open,
                state.num_total,
            )
        if self._submission is not None:
            # While Redis is full, the submission would wait for memory. The batch in flight is cancelled below.
            await cancel_and_wait(self._submission)
        if state.num_open or state.num_open_turns:
            await self.cancel()
        if self._sending_again is not None:
            # Once the step is finished, this task would register it again.
            await cancel_and_wait(self._sending_again)
        await self._context.results.finish(state)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end(acknowledge=error is None)

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
        state, results = self._state, self._context.results
        deadline = time.monotonic() + (_PROGRESS_INTERVAL_S if timeout is None else timeout)
        while True:
            if rollouts := state.take_ready(limit):
                results.notify_demand()
                return rollouts
            if state.has_deferred:
                await self._fetch_deferred(state)
                continue
            state.raise_if_failed()
            if state.is_complete:
                state.raise_if_incomplete()
                return None
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return []
            results.notify_demand()
            if not await state.wait_for_change(remaining):
                return []

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
        """Return the index of the prompt to which *rollout* responds, among the step's prompts.

        Raises:
            KeyError: the rollout does not belong to this step.
        """
        return self._state.requests[first_id(RolloutId.parse(rollout.rollout_id).request_id)].prompt_index

    @property
    def group_sizes(self) -> list[int]:
        """Number of rollouts that each of the step's prompts asks for."""
        return [request.n for request in self._state.prompt_requests.values()]

    @property
    def is_cancelled(self) -> bool:
        """Whether :meth:`cancel` was called since the step was opened."""
        return self._is_cancelled

    @property
    def num_unread(self) -> int:
        """Number of rollouts in memory that have not been consumed."""
        return self._state.num_unread

    @property
    def progress(self) -> StepProgress:
        """Progress of the step, including the turns of its trajectories."""
        state = self._state
        return StepProgress(
            self.number, state.num_done, state.num_total, state.num_tokens, self._context.monitor.status or NO_STATUS
        )

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
        is_first, self._is_cancelled = not self._is_cancelled, True
        state = self._state
        if self._submission is not None:
            # The batch that is being sent counts as sent, unless Redis is full or unreachable.
            await asyncio.wait([self._submission], timeout=_LAST_BATCH_TIMEOUT_S)
            await cancel_and_wait(self._submission)
        # Requests that were not sent are included: an earlier trainer may have sent them.
        open_ids = state.open_ids
        state.withdraw_unsent(list(state.requests.values()))
        if open_ids:
            await self._context.sender.cancel(open_ids)
            if is_first and self._is_running:
                self._run(self._repeat_cancellation())

    async def _repeat_cancellation(self) -> None:
        """Repeat the cancellation while requests are open, because Redis may lose it in a crash."""
        pause = _CANCEL_RETRY_PAUSE_S
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_CANCEL_RETRY_PAUSE_S)
            if open_ids := self._state.open_ids:
                await self._context.sender.cancel(open_ids)

    # Trajectories.

    def trajectory(
        self, prompt: Sequence[int], *, problem_id: str = "", purpose: Purpose = Purpose.TRAIN
    ) -> Trajectory:
        """Begin a multi-turn trajectory. For a group, begin several with the same prompt.

        A restarted trainer must begin its trajectories in the same order.
        """
        trajectory_id = f"{self._context.client_name}:{self.number}:t{self._num_trajectories}"
        self._num_trajectories += 1
        return Trajectory(trajectory_id, prompt, problem_id=problem_id, purpose=purpose)

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
        state = self._state
        ids = [request.request_id for request in prepared]
        if len(set(ids)) < len(ids) or not state.requests.keys().isdisjoint(ids):
            raise InvalidRequestError(f"step {self.number}: a turn of a trajectory was requested twice")
        answers: list[asyncio.Future[Rollout]] = []
        requests = []
        for request in prepared:
            answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
            answers.append(answer)
            requests.append(PendingRequest(-1, request.request_id, request.n, request.data, answer))
            state.add(requests[-1])
        self._context.registry.record_requests(prepared)
        self._register(ids)
        await self._submit(requests)
        if self._is_cancelled:
            state.withdraw_unsent(requests)
        return await asyncio.gather(*answers, return_exceptions=True)

    # Sending.

    async def _submit(self, requests: Sequence[PendingRequest], *, even_if_cancelled: bool = False) -> None:
        """Send requests as the job has capacity for them, until all are sent or the step is cancelled."""
        state, results = self._state, self._context.results
        queue = deque(requests)
        while queue and results.ending is None and (even_if_cancelled or not self._is_cancelled):
            for request, entry_id in await self._context.sender.send_batch(queue, results.num_awaited):
                state.mark_sent(request, entry_id)

    async def _send_again_when_needed(self) -> None:
        """Send requests that got another id, and all open ones after Redis may have lost them."""
        state = self._state
        while True:
            await state.has_work.wait()
            state.has_work.clear()
            if requests := state.take_resubmissions():
                # An earlier trainer may have used the new ids too, and ended before it acknowledged the results.
                self._register([request.request_id for request in requests])
                if self._is_cancelled:
                    state.withdraw_unsent(requests)
                else:
                    self._run(self._submit(requests))
            if state.take_resend():
                self._run(self._resend())

    async def _resend(self) -> None:
        """Send everything open again: Redis was unreachable and may have lost it. Repetitions are harmless."""
        state = self._state
        sent = [request for request in state.requests.values() if request.entry_id is not None and request.num_open]
        # Requests of a cancelled step are sent too: the job only answers requests that it has.
        await self._submit(sent, even_if_cancelled=True)
        if self._is_cancelled and (open_ids := state.open_ids):
            await self._context.sender.cancel(open_ids)

    # Internals.

    def _check_running(self) -> None:
        if not self._is_running:
            raise RolloutClientError(f"step {self.number} is not open: use it in 'with client.step(…) as step'")

    def _register(self, request_ids: Sequence[str]) -> None:
        """Route the results of requests to this step; fetch those that are held for turns immediately."""
        self._context.results.register(self._state, request_ids)
        if self._state.has_deferred_turns:
            self._run(self._fetch_deferred_turns())

    async def _fetch_deferred_turns(self) -> None:
        state = self._state
        while state.has_deferred_turns:
            await self._fetch_deferred(state)

    async def _fetch_deferred(self, state: StepState) -> None:
        """Read some deferred results from Redis."""
        deferred = state.take_deferred()
        try:
            found = await self._context.results.fetch(deferred)
        except BaseException:
            state.return_deferred(deferred)
            raise
        for unreadable in state.deliver_fetched(deferred, found):
            self._run(self._context.results.dead_letter(*unreadable))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run *work* in a separate task; if it fails, the step fails."""
        state = self._state

        async def run_or_fail() -> None:
            try:
                await work
            except RolloutClientError as error:
                state.fail(error)
            except Exception as error:
                logger.exception("Step %d failed.", self.number)
                state.fail(RolloutClientError(f"step {self.number} failed: {type(error).__name__}: {error}"))

        task = asyncio.create_task(run_or_fail(), name=f"step {self.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # If the task is cancelled before it starts, the coroutine was never awaited.
        task.add_done_callback(lambda _: work.close())
        return task


def _raise_failed_turns(errors: Sequence[BaseException]) -> None:
    refused = [error for error in errors if isinstance(error, RequestRefusedError)]
    if refused:
        raise RequestRefusedError({name: reason for error in refused for name, reason in error.refusals.items()})
    if errors:
        raise errors[0]
