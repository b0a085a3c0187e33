"""What a step has asked for and what came of it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from rollout_api.client.result_stream import ResultStream
from rollout_api.errors import RequestRefusedError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.messages import CodecError, Refusal, Rollout, RolloutRequest, decode, encode

logger = logging.getLogger(__name__)

_FETCHED_AT_ONCE = 64
_ANEW = re.compile(r"\.r\d+$")


@dataclass
class Asked:
    """A request of a step, and what came of it."""

    index: int
    """Of its prompt; -1 for a trajectory's turn."""
    request_id: str
    """Under which it is asked for now; see :func:`first_id`."""
    n: int
    data: bytes
    answer: asyncio.Future[Rollout] | None = None
    """Where a trajectory's turn is waited for."""
    entry: str | None = None
    """In the requests stream, once it was sent."""
    got: set[int] = field(default_factory=set)
    over: bool = False
    """Refused, or taken back before it was sent: nothing is waited for any more."""
    refusal: tuple[str, Refusal] | None = None
    """Of this id, and its entry."""
    times_anew: int = 0
    """How often it turned out to have been answered before, and was given another id."""

    @property
    def open(self) -> int:
        """Rollouts that are still waited for."""
        return 0 if self.over else self.n - len(self.got)


class Inbox:
    """One step's requests and rollouts; the result stream fills it, whoever iterates over the step empties it."""

    def __init__(
        self,
        number: int,
        results: Callable[[], ResultStream],
        beside: Callable[..., object],
        send_anew: Callable[[Asked], None],
    ) -> None:
        """Take what it works with.

        Args:
            number: of the step.
            results: the result stream.
            beside: runs a coroutine, and fails the step with it.
            send_anew: sends a request that has another id now.
        """
        self.number = number
        self.asked: dict[str, Asked] = {}
        """By the id under which each was asked for first."""
        self.ids: list[str] = []
        """All under which something was asked for."""
        self.entries: dict[str, dict[str, int]] = {}
        """Request id → entry → sample: what is to be acknowledged."""
        self.open = 0
        """Rollouts of prompts that are still waited for."""
        self.open_turns = 0
        """The same, of trajectories' turns."""
        self.done = 0
        self.total = 0
        self.tokens = 0
        self.failure: RolloutClientError | None = None
        self._results, self._beside, self._send_anew = results, beside, send_anew
        self._ready: deque[Rollout] = deque()
        self._deferred: deque[tuple[str, str, int]] = deque()
        """Entry, request id and sample of what is to be fetched when somebody wants it."""
        self._fetching = 0
        self._waiting = 0
        self._moved = asyncio.Event()
        self._refusals: dict[str, str] = {}
        self._unreadable: dict[str, str] = {}
        self._some_anew = False

    # what the step tells it

    def add(self, one: Asked) -> None:
        """A request is made."""
        self.asked[one.request_id] = one
        self.ids.append(one.request_id)
        self.total += one.n
        if one.answer is None:
            self.open += one.n
        else:
            self.open_turns += one.n
            if self.failure is not None:
                one.answer.set_exception(self.failure)

    def sent(self, one: Asked, entry: str) -> None:
        """A request is in its stream."""
        if one.entry is None:
            self._results().awaited += one.open
        one.entry = entry
        self._settle(one)

    def give_up(self, one: Asked, error: RolloutClientError) -> None:
        """Wait no longer for a request; whoever waits for it as a turn gets *error*."""
        left, one.over = one.open, True
        self.total -= left
        self._less(one, left)
        if one.answer is not None and not one.answer.done():
            one.answer.set_exception(error)
        self._moved.set()

    async def take(self, most: int, timeout: float) -> list[Rollout] | None:
        """At least one rollout and at most *most*; none if none comes within *timeout* seconds; None at the end.

        Raises:
            RolloutClientError: nothing more will come, or, at the end, something was refused or could not be read.
        """
        until = time.monotonic() + timeout
        while True:
            if self._ready:
                taken = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
                self._results().moved()
                return taken
            if self._deferred:
                await self._fetch()
                continue
            if not self._fetching:
                if self.failure is not None and self.open:
                    raise self.failure
                if not self.open:
                    self._raise_what_is_missing()
                    return None
            left = until - time.monotonic()
            if left <= 0 or not await self._something(left):
                return []

    def close(self) -> None:
        """The step is left: wait for nothing any more."""
        for one in self.asked.values():
            left, one.over = one.open, True
            self._less(one, left)
            if one.answer is not None:
                one.answer.cancel()

    # what the result stream tells it (results.Reader)

    @property
    def hungry(self) -> bool:
        """Whether somebody waits for a rollout."""
        return self._waiting > 0 or self.open_turns > 0

    @property
    def unread(self) -> int:
        """Rollouts in memory that nobody has taken yet."""
        return len(self._ready)

    def receive(self, entry: str, request_id: str, sample: int, rollout: Rollout | None) -> None:
        """Take a rollout; None: it is to be fetched from its entry when somebody wants it."""
        one = self._of(request_id)
        self.entries.setdefault(request_id, {})[entry] = sample
        if sample in one.got:
            return  # a repetition
        if not 0 <= sample < one.n:
            self.spoil(request_id, sample, f"the request was for {one.n} samples")
            return
        awaited = bool(one.open)
        self._came(one, sample)
        if not awaited:
            return  # it was taken back; acknowledged all the same
        crowded = one.answer is None and not self._waiting and self._results().full
        if rollout is not None and not crowded:
            self._deliver(one, rollout)
            return
        self._deferred.append((entry, request_id, sample))
        if one.answer is not None:
            self._beside(self._fetch())
        self._moved.set()

    def refuse(self, entry: str, refusal: Refusal) -> None:
        """Learn that a request was refused."""
        one = self._of(refusal.request_id)
        if refusal.request_id == one.request_id:
            one.refusal = (entry, refusal)
            self._settle(one)

    def spoil(self, request_id: str, sample: int, reason: str) -> None:
        """Learn that a result cannot be read."""
        one = self._of(request_id)
        name = f"{request_id}, sample {sample}"
        self._unreadable[name] = reason
        self._came(one, sample)
        if one.answer is not None and not one.answer.done():
            one.answer.set_exception(UnreadableResultError({name: reason}))
        self._moved.set()

    def fail(self, error: RolloutClientError) -> None:
        """Learn that nothing will come any more."""
        self.failure = self.failure or error
        for one in self.asked.values():
            if one.answer is not None and not one.answer.done():
                one.answer.set_exception(self.failure)
        self._moved.set()

    # within

    def _of(self, request_id: str) -> Asked:
        return self.asked[first_id(request_id)]

    def _came(self, one: Asked, sample: int) -> None:
        before = one.open
        one.got.add(sample)
        self.done += before - one.open
        self._less(one, before - one.open)

    def _less(self, one: Asked, count: int) -> None:
        if one.answer is None:
            self.open -= count
        else:
            self.open_turns -= count
        if one.entry is not None:
            self._results().awaited -= count
        if not one.open:
            one.data = b""

    def _settle(self, one: Asked) -> None:
        """Heed a refusal, unless it was of an earlier sending, or of a repetition of what has been answered."""
        if one.refusal is None or one.entry is None or not one.open:
            return
        entry, refusal = one.refusal
        if _arrival(entry) < _arrival(one.entry):
            return
        if refusal.answered and not one.got:
            self._ask_anew(one)
            return
        logger.error("The job refused request %s: %s", one.request_id, refusal.reason)
        if one.answer is None:
            self._refusals[one.request_id] = refusal.reason
        self.give_up(one, RequestRefusedError({one.request_id: refusal.reason}))

    def _ask_anew(self, one: Asked) -> None:
        """Give a request another id: whoever asked under this one has received and acknowledged its rollouts."""
        if not self._some_anew:
            self._some_anew = True
            logger.warning(
                "Step %d: rollouts that it asks for were received by an earlier trainer of this name; they are "
                "sampled again, under other ids.",
                self.number,
            )
        self._results().awaited -= one.open
        one.entry = one.refusal = None
        one.times_anew += 1
        one.request_id = f"{first_id(one.request_id)}.r{one.times_anew}"
        request = cast(RolloutRequest, decode(one.data))
        one.data = encode(request.model_copy(update={"request_id": one.request_id}))
        self.ids.append(one.request_id)
        # an earlier trainer may have asked anew, too, and ended before it acknowledged what came
        self._results().add(self, [one.request_id])
        if one.open:
            self._send_anew(one)

    def _deliver(self, one: Asked, rollout: Rollout) -> None:
        self.tokens += len(rollout.token_ids)
        if one.answer is None:
            self._ready.append(rollout)
        elif not one.answer.done():
            one.answer.set_result(rollout)
        self._moved.set()

    async def _fetch(self) -> None:
        """Bring some of what was deferred into memory."""
        wanted = [self._deferred.popleft() for _ in range(min(_FETCHED_AT_ONCE, len(self._deferred)))]
        self._fetching += 1
        try:
            found = await self._results().fetch([entry for entry, _, _ in wanted])
        except BaseException:
            self._deferred.extendleft(reversed(wanted))
            raise
        finally:
            self._fetching -= 1
            self._moved.set()
        for (_, request_id, sample), (entry, data) in zip(wanted, found, strict=True):
            try:
                rollout = _rollout(data)
            except CodecError as error:
                self.spoil(request_id, sample, str(error))
                if data is not None:
                    self._beside(self._results().bury(entry, data, str(error)))
            else:
                self._deliver(self._of(request_id), rollout)

    async def _something(self, timeout: float) -> bool:
        """Wait until something has happened; False if nothing does."""
        self._moved.clear()
        self._waiting += 1
        self._results().moved()
        try:
            await asyncio.wait_for(self._moved.wait(), timeout)
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    def _raise_what_is_missing(self) -> None:
        if self._refusals:
            raise RequestRefusedError(self._refusals)
        if self._unreadable:
            raise UnreadableResultError(self._unreadable)


def first_id(request_id: str) -> str:
    """The id under which a request was asked for first; where that was answered before, ``.r1`` and so on follow it."""
    return _ANEW.sub("", request_id)


def _rollout(data: bytes | None) -> Rollout:
    if data is None:
        raise CodecError("its entry was deleted from the result stream by somebody else")
    message = decode(data)
    if not isinstance(message, Rollout):
        raise CodecError(f"a {message.kind} where a rollout belongs")
    return message


def _arrival(entry: str) -> int:
    """When a stream entry arrived, in milliseconds of Redis' clock, which all streams share."""
    return int(entry.partition("-")[0])
