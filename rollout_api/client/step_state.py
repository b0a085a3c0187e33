"""The requests and the received rollouts of one step."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from rollout_api.errors import RequestRefusedError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.messages import CodecError, Refusal, Rollout, RolloutRequest, decode, encode

logger = logging.getLogger(__name__)

_FETCH_BATCH = 64
_RESUBMISSION_SUFFIX = re.compile(r"\.r\d+$")

Entries = list[tuple[str, bytes | None]]
"""Ids of stream entries, each with its message; None where the entry was deleted."""


@dataclass
class PendingRequest:
    """A request of a step, and what was received for it."""

    prompt_index: int
    """Index of its prompt among the step's prompts; -1 for a turn of a trajectory."""
    request_id: str
    """Current request id; see :func:`first_id`."""
    n: int
    """Number of samples."""
    data: bytes
    """Encoded request; empty once nothing more is expected."""
    answer: asyncio.Future[Rollout] | None = None
    """Receives the rollout of a trajectory's turn; None for the request of a prompt."""
    entry_id: str | None = None
    """Id of its entry in the stream of requests; None until it was sent."""
    received: set[int] = field(default_factory=set)
    """Samples that were received, readable or not."""
    abandoned: bool = False
    """Whether it was refused or withdrawn, so that no more samples are expected."""
    refusal: tuple[str, Refusal] | None = None
    """A refusal of the current request id, with the id of the refusal's entry."""
    num_resubmissions: int = 0
    """How often it was given a new id because it had been answered before."""

    @property
    def num_open(self) -> int:
        """Number of rollouts that are still expected."""
        return 0 if self.abandoned else self.n - len(self.received)


class DeferredResult(NamedTuple):
    """A result that was received but is still only in Redis."""

    entry_id: str
    """Id of its entry in the result stream."""
    request_id: str
    """Request id under which it was produced."""
    sample: int
    """Index of the sample."""


class UnreadableEntry(NamedTuple):
    """A stream entry that cannot be decoded."""

    entry_id: str
    """Id of the entry."""
    data: bytes
    """Content of the entry."""
    reason: str
    """Why it cannot be decoded."""


class StepState:
    """The requests and rollouts of one step.

    It performs no I/O and calls no other class: the result router puts results in, and the step takes them out. Two
    events tell the step that there is something to take or to send.

    Args:
        number: number of the step.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        """Number of the step."""
        self.requests: dict[str, PendingRequest] = {}
        """Requests by the id that each had first."""
        self.request_ids: list[str] = []
        """All ids under which something was requested."""
        self.entry_ids: dict[str, dict[str, int]] = {}
        """Results to acknowledge: request id → id of the entry → sample."""
        self.num_open = 0
        """Number of rollouts of prompts that are still expected."""
        self.num_open_turns = 0
        """Number of rollouts of turns that are still expected."""
        self.num_awaited = 0
        """Number of rollouts that are still expected and whose requests were sent."""
        self.num_done = 0
        """Number of rollouts that were received."""
        self.num_total = 0
        """Number of rollouts that were requested."""
        self.num_tokens = 0
        """Number of response tokens that were received."""
        self.failure: RolloutClientError | None = None
        """Why nothing more will be received; None while that is not known."""
        self.changed = asyncio.Event()
        """Set when a consumer may find something new."""
        self.has_work = asyncio.Event()
        """Set when requests have to be sent again."""
        self._ready: deque[Rollout] = deque()
        self._deferred: deque[DeferredResult] = deque()
        self._deferred_turns: deque[DeferredResult] = deque()
        self._num_fetching = 0
        self._num_waiters = 0
        self._refusals: dict[str, str] = {}
        self._unreadable: dict[str, str] = {}
        self._resubmissions: list[PendingRequest] = []
        self._resend_needed = False
        self._resubmission_logged = False

    # Requests.

    def add(self, request: PendingRequest) -> None:
        """Add a request that is about to be sent."""
        self.requests[request.request_id] = request
        self.request_ids.append(request.request_id)
        self.num_total += request.n
        if request.answer is None:
            self.num_open += request.n
        else:
            self.num_open_turns += request.n
            if self.failure is not None:
                request.answer.set_exception(self.failure)

    def mark_sent(self, request: PendingRequest, entry_id: str) -> None:
        """Record that a request was sent, and the id of its entry."""
        if request.entry_id is None:
            self.num_awaited += request.num_open
        request.entry_id = entry_id
        self._apply_refusal(request)

    def withdraw_unsent(self, requests: Sequence[PendingRequest]) -> None:
        """Stop expecting anything from those of *requests* that were never sent."""
        for request in requests:
            if request.entry_id is None:
                error = RolloutClientError(f"step {self.number} was cancelled before this turn was sent")
                self._abandon(request, error)

    def take_resubmissions(self) -> list[PendingRequest]:
        """Return, once, the requests that were given a new id and must be sent under it."""
        requests, self._resubmissions = self._resubmissions, []
        return requests

    def take_resend(self) -> bool:
        """Return, once, whether everything that is open must be sent again."""
        resend, self._resend_needed = self._resend_needed, False
        return resend

    @property
    def open_ids(self) -> list[str]:
        """Ids of the requests of which rollouts are still expected."""
        return [request.request_id for request in self.requests.values() if request.num_open]

    @property
    def incomplete_ids(self) -> list[str]:
        """Ids of the requests of which not all rollouts were received, expected or not."""
        return [request.request_id for request in self.requests.values() if len(request.received) < request.n]

    @property
    def prompt_requests(self) -> dict[str, PendingRequest]:
        """Requests of the step's prompts, by their first ids and in the order of the prompts."""
        return {first: request for first, request in self.requests.items() if request.prompt_index >= 0}

    def close(self) -> None:
        """Stop expecting anything: the step was left."""
        for request in self.requests.values():
            num_open, request.abandoned = request.num_open, True
            self._reduce_open(request, num_open)
            if request.answer is not None:
                request.answer.cancel()

    # Consumption.

    @property
    def num_unread(self) -> int:
        """Number of rollouts in memory that have not been consumed."""
        return len(self._ready)

    @property
    def has_waiter(self) -> bool:
        """Whether a consumer waits for a rollout of this step."""
        return self._num_waiters > 0 or self.num_open_turns > 0

    @property
    def has_deferred(self) -> bool:
        """Whether there are results that have to be fetched before they can be consumed."""
        return bool(self._deferred or self._deferred_turns)

    @property
    def has_deferred_turns(self) -> bool:
        """Whether there are such results for turns."""
        return bool(self._deferred_turns)

    @property
    def is_complete(self) -> bool:
        """Whether no more rollouts of the step's prompts will become available."""
        return not (self._ready or self.has_deferred or self._num_fetching or self.num_open)

    def take_ready(self, limit: int) -> list[Rollout]:
        """Return, once, up to *limit* rollouts that are in memory."""
        return [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]

    def raise_if_failed(self) -> None:
        """Raise the failure if rollouts are missing because of it.

        Raises:
            RolloutClientError: nothing more will be received.
        """
        if self.failure is not None and self.num_open and not self._num_fetching:
            raise self.failure

    def raise_if_incomplete(self) -> None:
        """Raise an error if results are missing from a step that is complete otherwise.

        Raises:
            RequestRefusedError: the job refused requests.
            UnreadableResultError: results could not be read.
        """
        if self._refusals:
            raise RequestRefusedError(self._refusals)
        if self._unreadable:
            raise UnreadableResultError(self._unreadable)

    async def wait_for_change(self, timeout: float) -> bool:
        """Wait until a consumer may find something new; return False if that takes longer than *timeout* seconds."""
        self.changed.clear()
        self._num_waiters += 1
        try:
            await asyncio.wait_for(self.changed.wait(), timeout)
        except asyncio.TimeoutError:  # differs from TimeoutError in Python 3.10
            return False
        finally:
            self._num_waiters -= 1
        return True

    # Results.

    def receive(self, entry_id: str, request_id: str, sample: int, rollout: Rollout | None, *, is_full: bool) -> None:
        """Record a rollout.

        Args:
            entry_id: id of its entry in the result stream.
            request_id: request id under which it was produced.
            sample: index of the sample.
            rollout: the rollout; None if it has to be fetched from its entry.
            is_full: whether as many rollouts are unread as may be in memory, so that this one should stay in Redis
                unless a consumer waits for it.
        """
        request = self.requests[first_id(request_id)]
        self.entry_ids.setdefault(request_id, {})[entry_id] = sample
        if sample in request.received:
            return  # a repetition
        if not 0 <= sample < request.n:
            self.mark_unreadable(request_id, sample, f"the request was for {request.n} samples")
            return
        was_expected = bool(request.num_open)
        self._mark_received(request, sample)
        if not was_expected:
            return  # the request was withdrawn; its result is acknowledged nevertheless
        is_turn = request.answer is not None
        if rollout is not None and (is_turn or self._num_waiters or not is_full):
            self._deliver(request, rollout)
            return
        (self._deferred_turns if is_turn else self._deferred).append(DeferredResult(entry_id, request_id, sample))
        self.changed.set()

    def refuse(self, entry_id: str, refusal: Refusal) -> None:
        """Record that the job refused a request; *entry_id* is the id of the refusal's entry."""
        request = self.requests[first_id(refusal.request_id)]
        if refusal.request_id == request.request_id:
            request.refusal = (entry_id, refusal)
            self._apply_refusal(request)

    def mark_unreadable(self, request_id: str, sample: int, reason: str) -> None:
        """Record that a result cannot be read."""
        request = self.requests[first_id(request_id)]
        name = f"{request_id}, sample {sample}"
        self._unreadable[name] = reason
        self._mark_received(request, sample)
        if request.answer is not None and not request.answer.done():
            request.answer.set_exception(UnreadableResultError({name: reason}))
        self.changed.set()

    def mark_acknowledged(self, request_id: str) -> None:
        """Record that all results of a request are acknowledged."""
        del self.entry_ids[request_id]

    def fail(self, error: RolloutClientError) -> None:
        """Record that nothing more will be received."""
        self.failure = self.failure or error
        for request in self.requests.values():
            if request.answer is not None and not request.answer.done():
                request.answer.set_exception(self.failure)
        self.changed.set()

    def request_resend(self) -> None:
        """Record that Redis may have lost requests, so that all open ones must be sent again."""
        self._resend_needed = True
        self.has_work.set()

    # Deferred results.

    def take_deferred(self) -> list[DeferredResult]:
        """Return the next results to fetch; pass them to :meth:`deliver_fetched` or :meth:`return_deferred`."""
        source = self._deferred_turns or self._deferred
        results = [source.popleft() for _ in range(min(_FETCH_BATCH, len(source)))]
        self._num_fetching += len(results)
        return results

    def return_deferred(self, results: Sequence[DeferredResult]) -> None:
        """Put back results that could not be fetched."""
        self._num_fetching -= len(results)
        for result in reversed(results):
            is_turn = self.requests[first_id(result.request_id)].answer is not None
            (self._deferred_turns if is_turn else self._deferred).appendleft(result)
        self.changed.set()

    def deliver_fetched(self, results: Sequence[DeferredResult], found: Entries) -> list[UnreadableEntry]:
        """Make fetched results available, and return those entries that cannot be decoded.

        Args:
            results: what was taken with :meth:`take_deferred`.
            found: the entry of each result.
        """
        self._num_fetching -= len(results)
        self.changed.set()
        unreadable: list[UnreadableEntry] = []
        for result, (entry_id, data) in zip(results, found, strict=True):
            try:
                rollout = _decode_rollout(data)
            except CodecError as error:
                self.mark_unreadable(result.request_id, result.sample, str(error))
                if data is not None:
                    unreadable.append(UnreadableEntry(entry_id, data, str(error)))
            else:
                self._deliver(self.requests[first_id(result.request_id)], rollout)
        return unreadable

    # Internals.

    def _mark_received(self, request: PendingRequest, sample: int) -> None:
        num_open = request.num_open
        request.received.add(sample)
        self.num_done += num_open - request.num_open
        self._reduce_open(request, num_open - request.num_open)

    def _reduce_open(self, request: PendingRequest, count: int) -> None:
        if request.answer is None:
            self.num_open -= count
        else:
            self.num_open_turns -= count
        if request.entry_id is not None:
            self.num_awaited -= count
        if not request.num_open:
            request.data = b""

    def _abandon(self, request: PendingRequest, error: RolloutClientError) -> None:
        """Stop expecting anything from a request; if it is a turn, its waiter gets *error*."""
        num_open, request.abandoned = request.num_open, True
        self.num_total -= num_open
        self._reduce_open(request, num_open)
        if request.answer is not None and not request.answer.done():
            request.answer.set_exception(error)
        self.changed.set()

    def _apply_refusal(self, request: PendingRequest) -> None:
        """Act on a refusal, unless it concerns an earlier transmission or a repetition of an answered request."""
        if request.refusal is None or request.entry_id is None or not request.num_open:
            return
        entry_id, refusal = request.refusal
        if _arrival_ms(entry_id) < _arrival_ms(request.entry_id):
            return
        if refusal.already_answered and not request.received:
            self._resubmit(request)
            return
        logger.error("The job refused request %s: %s", request.request_id, refusal.reason)
        if request.answer is None:
            self._refusals[request.request_id] = refusal.reason
        self._abandon(request, RequestRefusedError({request.request_id: refusal.reason}))

    def _resubmit(self, request: PendingRequest) -> None:
        """Give a new id to a request whose rollouts were received and acknowledged under the old one."""
        if not self._resubmission_logged:
            self._resubmission_logged = True
            logger.warning(
                "Step %d: an earlier trainer with this name has received some of the requested rollouts; they are "
                "sampled again under other request ids.",
                self.number,
            )
        self.num_awaited -= request.num_open
        request.entry_id = request.refusal = None
        request.num_resubmissions += 1
        request.request_id = f"{first_id(request.request_id)}.r{request.num_resubmissions}"
        message = cast(RolloutRequest, decode(request.data))
        request.data = encode(message.model_copy(update={"request_id": request.request_id}))
        self.request_ids.append(request.request_id)
        self._resubmissions.append(request)
        self.has_work.set()

    def _deliver(self, request: PendingRequest, rollout: Rollout) -> None:
        self.num_tokens += len(rollout.token_ids)
        if request.answer is None:
            self._ready.append(rollout)
        elif not request.answer.done():
            request.answer.set_result(rollout)
        self.changed.set()


def first_id(request_id: str) -> str:
    """Return the id that a request had first: each resubmission appends another suffix, ``.r1``, ``.r2`` and so on."""
    return _RESUBMISSION_SUFFIX.sub("", request_id)


def _decode_rollout(data: bytes | None) -> Rollout:
    if data is None:
        raise CodecError("another process has deleted its entry from the result stream")
    message = decode(data)
    if not isinstance(message, Rollout):
        raise CodecError(f"it is a {message.kind}, not a rollout")
    return message


def _arrival_ms(entry_id: str) -> int:
    """Return when a stream entry arrived, in milliseconds of Redis' clock, which is the same for all streams."""
    return int(entry_id.partition("-")[0])
