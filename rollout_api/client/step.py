"""One step of a trainer: its requests, the rollouts that come back, and their acknowledgement together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from rollout_api.asyncio_tasks import end
from rollout_api.client.groups import Gathering, Groups
from rollout_api.client.job_info import JobInfo, PreparedRequest
from rollout_api.client.prompts import Prompt, SamplingOverrides, overrides_of
from rollout_api.client.result_stream import ResultStream
from rollout_api.client.step_state import Asked, Inbox, first_id
from rollout_api.client.trajectory import Trajectory
from rollout_api.errors import InvalidRequestError, RequestRefusedError, RolloutClientError
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Purpose, Rollout, RolloutId

logger = logging.getLogger(__name__)

PROGRESS_S = 1.0
"""How often a progress callback is called."""
_LAST_BATCH_S = 2.0
_CANCEL_AGAIN_S = 2.0
_CANCEL_AGAIN_AT_MOST_S = 60.0


@dataclass(frozen=True)
class Progress:
    """How far a step is."""

    step: int
    done: int
    """Rollouts that came back."""
    total: int
    """Rollouts that were asked for."""
    tokens: int
    """Response tokens of those that came back."""
    status: Mapping[str, Any]
    """The job's own status (see docs/protocol.md); empty while no coordinator runs."""


OnProgress = Callable[[Progress], None]


class Office(Protocol):
    """A client, as its steps see it."""

    name: str
    results: ResultStream

    @property
    def job(self) -> JobInfo:
        """What is known of the job."""

    @property
    def status(self) -> dict[str, Any]:
        """The job's last status."""

    async def submit(
        self, asked: Sequence[Asked], sent: Callable[[Asked, str], None], go_on: Callable[[], bool]
    ) -> None:
        """Send what is open of *asked* as there is room for it, until all is sent or *go_on* says no."""

    async def send_cancel(self, request_ids: Sequence[str]) -> None:
        """Ask for the end of requests."""

    def enter(self, step: AsyncStep, request_ids: Sequence[str]) -> None:
        """A step begins; InvalidRequestError if it may not."""

    def leave(self, step: AsyncStep, *, ended: bool) -> None:
        """A step is left, *ended* if its results are acknowledged."""


class AsyncStep:
    """The rollouts of some prompts: ``async with client.step(17, prompts) as step: async for rollout in step: …``.

    Leaving it normally acknowledges its results: they are not delivered again, and what had not come yet is cancelled
    and dropped. Leaving it by an exception acknowledges nothing: the same step with the same prompts, opened again (by
    a trainer that was started again, say), gets what was delivered before, then the rest; nothing is sampled twice.
    What an earlier trainer of this name acknowledged is gone: asked for again, it is sampled anew.
    """

    def __init__(
        self,
        office: Office,
        number: int,
        prompts: Sequence[Prompt | Sequence[int]] = (),
        on_progress: OnProgress | None = None,
    ) -> None:
        if number < 0:
            raise InvalidRequestError(f"step {number}: steps are numbered from 0 on")
        self.number = number
        self._office = office
        self._prompts = [one if isinstance(one, Prompt) else Prompt(one) for one in prompts]
        self._on_progress = on_progress
        self._said = 0.0
        self._inbox = self._new_inbox()
        self._anew: list[Asked] = []
        self._cancelled = False
        self._trajectories = 0
        self._submitting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False

    # its life

    async def start(self) -> Self:
        """Check all prompts and begin to send them: what ``async with`` does at its beginning.

        Raises:
            InvalidRequestError: for a prompt that the job cannot serve, or a step that is open or has ended already;
                nothing was sent.
        """
        if self._running:
            raise InvalidRequestError(f"step {self.number} is open already")
        prepared = await asyncio.to_thread(self.prepare)
        self._office.enter(self, [one.request_id for one in prepared])
        self._running, self._cancelled = True, False
        self._inbox, self._anew = self._new_inbox(), []
        for index, one in enumerate(prepared):
            self._inbox.add(Asked(index, one.request_id, one.n, one.data))
        self._office.results.add(self._inbox, [one.request_id for one in prepared])
        self._office.results.start()
        self._submitting = self._run(self._submit(list(self._asked.values())))
        return self

    def prepare(self) -> list[PreparedRequest]:
        """The requests of the step's prompts, as they are sent; nothing is sent yet.

        Raises:
            InvalidRequestError: for a prompt that the job cannot serve.
        """
        job, client = self._office.job, self._office.name
        return [
            job.prepare(
                prompt,
                f"{client}:{self.number}:{index}",
                client=client,
                where=f"step {self.number}, prompt {index}",
                step=self.number,
            )
            for index, prompt in enumerate(self._prompts)
        ]

    async def end(self, *, acknowledge: bool = True) -> None:
        """What ``async with`` does at its end: normally, or with *acknowledge* False, as by an exception.

        Raises:
            RedisAwayError: what was not acknowledged will be delivered again.
        """
        if not self._running:
            return
        self._running = False
        self._trajectories = 0
        ended = False
        try:
            if acknowledge:
                await self._end_well()
                ended = True
        finally:
            await end(*self._tasks)
            self._inbox.close()
            if not ended:
                self._office.results.give_back(self._inbox, self._inbox.ids, self._inbox.entries)
            self._office.leave(self, ended=ended)

    async def _end_well(self) -> None:
        if self._inbox.open and not self._cancelled:
            logger.warning(
                "Step %d was left with %d of %d rollouts not received: they are cancelled, and dropped when they come.",
                self.number,
                self._inbox.open,
                self._inbox.total,
            )
        if self._submitting is not None:
            # a full Redis would not let it end before there is room; what it is sending now is cancelled as the rest
            await end(self._submitting)
        if self._inbox.open or self._inbox.open_turns:
            await self.cancel()
        missing = [one.request_id for one in self._asked.values() if len(one.got) < one.n]
        await self._office.results.end(self._inbox, self._inbox.ids, missing, self._inbox.entries)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.end(acknowledge=error is None)

    # what a trainer does with it

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        """Rollouts of the step's prompts as they end, in any order.

        Raises:
            RequestRefusedError: after all others have come; it lists all refusals.
            UnreadableResultError: likewise.
            JobEndedError: nothing more will come.
            JobChangedError: likewise.
            RedisAwayError: Redis was away for too long.
        """
        while (rollouts := await self.take(1, PROGRESS_S)) is not None:
            self.report_progress(final=False)
            for rollout in rollouts:
                yield rollout
        self.report_progress(final=True)

    async def take(self, most: int, timeout: float) -> list[Rollout] | None:
        """At least one rollout and at most *most*; none if none comes within *timeout* seconds; None at the end.

        Raises:
            RolloutClientError: as iterating does.
        """
        self._check_running()
        return await self._inbox.take(most, timeout)

    @property
    def progress(self) -> Progress:
        """How far the step is, its trajectories' turns included."""
        inbox = self._inbox
        return Progress(self.number, inbox.done, inbox.total, inbox.tokens, self._office.status)

    def report_progress(self, *, final: bool) -> None:
        """Call the progress callback, if it is time to; iterating does so."""
        now = time.monotonic()
        if self._on_progress is not None and (final or now - self._said >= PROGRESS_S):
            self._said = now
            self._on_progress(self.progress)

    def index(self, rollout: Rollout) -> int:
        """Which of the step's prompts *rollout* is of.

        Raises:
            KeyError: if it is of none.
        """
        return self._asked[first_id(RolloutId.parse(rollout.rollout_id).request_id)].index

    @property
    def sizes(self) -> list[int]:
        """How many rollouts each of the step's prompts asks for."""
        return [one.n for one in self._asked.values() if one.index >= 0]

    async def cancel(self) -> None:
        """End all that is open: it comes back soon, as it is, with ``finish_reason`` cancelled.

        What was not sent yet is not sent any more, and does not come back.
        """
        first, self._cancelled = not self._cancelled, True
        if self._submitting is not None:
            # what it is sending now counts as sent, unless Redis is full or away
            await asyncio.wait([self._submitting], timeout=_LAST_BATCH_S)
            await end(self._submitting)
        # an earlier trainer may have sent what this one has not
        open_ids = self._open_ids()
        self._give_up_unsent(self._asked.values())
        if open_ids:
            await self._office.send_cancel(open_ids)
            if first and self._running:
                self._run(self._cancel_again())

    async def collect(self, at_least: int | None = None) -> Groups:
        """All the step's rollouts; with *at_least*, until so many groups are complete: then the rest is cancelled.

        Raises:
            RolloutClientError: as iterating does.
        """
        gathering = Gathering(self.sizes)
        async for rollout in self:
            gathering.add(self.index(rollout), rollout)
            if at_least is not None and gathering.complete >= at_least and not self._cancelled:
                await self.cancel()
        return gathering.groups()

    # trajectories

    def trajectory(
        self, prompt: Sequence[int], *, problem_id: str = "", purpose: Purpose = Purpose.TRAIN
    ) -> Trajectory:
        """Begin a multi-turn trajectory; for a group, begin several with the same prompt.

        A trainer that is started again must begin them in the same order.
        """
        trajectory_id = f"{self._office.name}:{self.number}:t{self._trajectories}"
        self._trajectories += 1
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
        """Let the model speak next in each of *trajectories*, which get its tokens, and wait for all.

        Returns:
            What was said, in the order of *trajectories*. Look at each ``finish_reason``. To bound a turn, give it
            *deadline_seconds*: one that is broken off (by ``asyncio.wait_for``, say) cannot be asked for again.

        Raises:
            InvalidRequestError: for a context that the job cannot serve; nothing was sent.
            RolloutClientError: as iterating does; trajectories whose turn came have it.
        """
        self._check_running()
        job, client = self._office.job, self._office.name
        prepared = []
        for one in trajectories:
            turn = len(one.turns)
            prompt = Prompt(
                one.context,
                problem_id=one.problem_id,
                sampling=overrides_of(sampling or {}) | {"n": 1},
                purpose=one.purpose,
                priority=priority,
                deadline_seconds=deadline_seconds,
                weight_version=weight_version,
            )
            name = f"{one.trajectory_id}.{turn}"
            where = f"trajectory {one.trajectory_id}, turn {turn}"
            prepared.append(
                job.prepare(
                    prompt,
                    name,
                    client=client,
                    where=where,
                    step=self.number,
                    trajectory_id=one.trajectory_id,
                    turn=turn,
                )
            )
        said = await self._ask_turns(prepared)
        for trajectory, answer in zip(trajectories, said, strict=True):
            if isinstance(answer, Rollout):
                trajectory.append(answer)
        self._raise_failed_turns([answer for answer in said if isinstance(answer, BaseException)])
        return [answer for answer in said if isinstance(answer, Rollout)]

    async def _ask_turns(self, prepared: Sequence[PreparedRequest]) -> list[Rollout | BaseException]:
        ids = [one.request_id for one in prepared]
        if len(set(ids)) < len(ids) or not self._asked.keys().isdisjoint(ids):
            raise InvalidRequestError(f"step {self.number}: a turn of a trajectory was asked for twice")
        answers: list[asyncio.Future[Rollout]] = []
        asked = []
        for request in prepared:
            answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
            answers.append(answer)
            asked.append(Asked(-1, request.request_id, request.n, request.data, answer))
            self._inbox.add(asked[-1])
        self._office.results.add(self._inbox, ids)
        await self._submit(asked)
        if self._cancelled:
            self._give_up_unsent(asked)
        return await asyncio.gather(*answers, return_exceptions=True)

    def _raise_failed_turns(self, errors: Sequence[BaseException]) -> None:
        refused = [error for error in errors if isinstance(error, RequestRefusedError)]
        if refused:
            raise RequestRefusedError({name: why for error in refused for name, why in error.refusals.items()})
        if errors:
            raise errors[0]

    # what the client tells it, and asks

    @property
    def unread(self) -> int:
        """Rollouts in memory that nobody has taken yet."""
        return self._inbox.unread

    def send_again(self) -> None:
        """Redis was away and may have lost what was sent: send what is open again, which is harmless if it did not."""
        self._run(self._submit_again())

    @property
    def request_ids(self) -> list[str]:
        """Of its prompts."""
        return [request_id for request_id, one in self._asked.items() if one.index >= 0]

    # within

    @property
    def _asked(self) -> dict[str, Asked]:
        return self._inbox.asked

    def _new_inbox(self) -> Inbox:
        return Inbox(self.number, lambda: self._office.results, self._run, self._send_anew)

    def _check_running(self) -> None:
        if not self._running:
            raise RolloutClientError(f"step {self.number} is not open: use it in 'with client.step(…) as step'")

    async def _submit(self, asked: Sequence[Asked]) -> None:
        await self._office.submit(asked, self._inbox.sent, lambda: not self._cancelled)

    async def _submit_again(self) -> None:
        sent = [one for one in self._asked.values() if one.entry is not None and one.open]
        # of a cancelled step, too: a job that does not know a request cannot end it
        await self._office.submit(sent, self._inbox.sent, lambda: True)
        if self._cancelled and (open_ids := self._open_ids()):
            await self._office.send_cancel(open_ids)

    def _send_anew(self, one: Asked) -> None:
        """Send a request under its new id, together with those of which the same is learned now."""
        if self._cancelled:
            self._give_up_unsent([one])
            return
        self._anew.append(one)
        if len(self._anew) == 1:
            self._run(self._submit_anew())

    async def _submit_anew(self) -> None:
        asked, self._anew = self._anew, []
        await self._submit(asked)

    def _open_ids(self) -> list[str]:
        return [one.request_id for one in self._asked.values() if one.open]

    def _give_up_unsent(self, asked: Iterable[Asked]) -> None:
        for one in asked:
            if one.entry is None:
                self._inbox.give_up(
                    one, RolloutClientError(f"step {self.number} was cancelled before this turn was sent")
                )

    async def _cancel_again(self) -> None:
        """A cancellation may overtake its request, which then is not known yet."""
        pause = _CANCEL_AGAIN_S
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _CANCEL_AGAIN_AT_MOST_S)
            if open_ids := self._open_ids():
                await self._office.send_cancel(open_ids)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do *work* beside; if it fails, so does the step."""

        async def watched() -> None:
            try:
                await work
            except RolloutClientError as error:
                self._inbox.fail(error)
            except Exception as error:
                logger.exception("Step %d failed.", self.number)
                self._inbox.fail(RolloutClientError(f"step {self.number} failed: {type(error).__name__}: {error}"))

        task = asyncio.create_task(watched(), name=f"step {self.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # which has not begun if the task was stopped at once
        return task
