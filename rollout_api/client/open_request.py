"""The requests whose rollouts a client awaits, in memory. Nothing here performs I/O."""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from rollout_api.client.job_info import PreparedRequest
from rollout_api.errors import RequestRefusedError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.keys import MESSAGE_FIELD
from rollout_api.protocol.messages import CodecError, FinishReason, Partial, Purpose, Refusal, Rollout, decode

logger = logging.getLogger(__name__)

TokensCallback = Callable[[int, Partial], None]
"""Receives a sample, and the tokens that follow those of the previous call for this sample."""

REQUESTS_PER_BATCH = 64
"""Requests that are sent, or whose results are read or released, in one round trip."""
_MAX_DIGESTS = 100_000
"""Rollouts, those received last, whose digests a client remembers for their rewards. They take about 27 MB."""
_MAX_UNTAKEN = 64
"""Rollouts of a step in memory above which further ones stay in Redis until they are taken."""
_LOST_TOKENS = (
    "Redis was restarted and has lost tokens that were streamed; send the request again to receive the rollout that "
    "was sampled instead"
)


class OpenRequest(ABC):
    """A request whose rollouts are awaited.

    Args:
        request: the request.
        may_be_answered: whether it may have been sent before, so that its rollouts may be there already.
        may_wait: whether it may wait while the job has no room for it.
    """

    def __init__(self, request: PreparedRequest, *, may_be_answered: bool = True, may_wait: bool = True) -> None:
        self.request = request
        self.may_be_answered, self.may_wait = may_be_answered, may_wait
        self.was_sent = False
        self.is_cancelled = False
        self.has_ended = False
        """Whether nothing more is expected, because the request was withdrawn, was refused or has failed."""
        self.counted = (0, 0)
        """Number of rollouts, and of bytes, of this request that its owner counts as awaited and as unread."""
        self._received: set[int] = set()
        """Samples that were received, readable or not."""
        self._announced: dict[int, int] = {}
        """Sample that is in Redis and was not read → its bytes."""
        self._may_have_any = False
        """Whether any missing sample, or a refusal, may be in Redis without having been announced."""

    @property
    def num_missing(self) -> int:
        """Number of rollouts that are still expected."""
        return 0 if self.has_ended else self.request.n - len(self._received)

    @property
    def num_unanswered(self) -> int:
        """Number of rollouts that are still expected and are not known to be in Redis."""
        return max(0, self.num_missing - len(self._announced))

    @property
    def awaits_cancellation(self) -> bool:
        """Whether the request was cancelled and is not answered."""
        return self.is_cancelled and self.num_unanswered > 0

    @property
    def is_announced(self) -> bool:
        """Whether something may be in Redis that was not read."""
        return bool(self._announced) or self._may_have_any

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of the rollouts that are known to be in Redis and were not read."""
        return sum(self._announced.values()) if self._announced else 0

    @property
    @abstractmethod
    def is_wanted(self) -> bool:
        """Whether rollouts should be read from Redis as soon as they are announced."""

    @property
    def listeners(self) -> Sequence[TokensCallback]:
        """Callbacks that receive the tokens of unfinished rollouts."""
        return ()

    def announce(self, sample: int, num_bytes: int) -> None:
        """Record that a rollout is in Redis."""
        if sample not in self._received and 0 <= sample < self.request.n and not self.has_ended:
            self._announced[sample] = num_bytes

    def announce_any(self) -> None:
        """Record that anything may be in Redis."""
        self._may_have_any = not self.has_ended

    def take_announced(self) -> tuple[list[int], bool]:
        """Return, once, the samples to read, and whether to look for a refusal."""
        announced, self._announced = list(self._announced), {}
        may_have_any, self._may_have_any = self._may_have_any, False
        if may_have_any:
            announced = [sample for sample in range(self.request.n) if sample not in self._received]
        return announced, may_have_any

    def add(self, samples: Sequence[int], results: Sequence[bytes | None], refusal: bytes | None) -> list[Rollout]:
        """Add what was read.

        Args:
            samples: the samples that were looked for.
            results: their encoded rollouts; None for those that are not there.
            refusal: an encoded refusal that was read before them.

        Returns:
            The rollouts that were not known before.

        Raises:
            CodecError: the refusal cannot be decoded.
        """
        added: list[Rollout] = []
        for sample, data in zip(samples, results, strict=True):
            if data is None or self.has_ended or sample in self._received:
                continue
            self._received.add(sample)
            try:
                message = decode(data)
                if not isinstance(message, Rollout):
                    raise CodecError(f"it is a {message.kind}, not a rollout")
                self._deliver(sample, message)
                added.append(message)
            except CodecError as error:
                self._mark_unreadable(f"{self.request.request_id}, sample {sample}", str(error))
        # If the job has answered the request before, all rollouts that it still keeps are among the results.
        if refusal is not None and self.num_missing:
            message = decode(refusal)
            self._refuse(message.reason if isinstance(message, Refusal) else f"a {message.kind} in place of a refusal")
        return added

    def withdraw(self, error: RolloutClientError) -> None:
        """Stop expecting anything. Whoever waits for the rollouts as a whole gets *error*."""
        self.has_ended = True
        self._announced.clear()
        self._may_have_any = False

    @abstractmethod
    def notify(self) -> None:
        """Tell whoever waits that there may be something to read."""

    @abstractmethod
    def fail(self, error: RolloutClientError) -> None:
        """Let whoever waits raise *error*."""

    @abstractmethod
    def _deliver(self, sample: int, rollout: Rollout) -> None:
        """Pass a rollout on.

        Raises:
            CodecError: it cannot be the rollout that was requested.
        """

    @abstractmethod
    def _mark_unreadable(self, result: str, reason: str) -> None:
        """Record that a result cannot be read."""

    @abstractmethod
    def _refuse(self, reason: str) -> None:
        """Record that the job has refused the request."""


class AwaitedRequest(OpenRequest):
    """A request whose rollouts are awaited together: that of a call, or of a turn of a trajectory."""

    def __init__(self, request: PreparedRequest, *, may_be_answered: bool = True, may_wait: bool = True) -> None:
        super().__init__(request, may_be_answered=may_be_answered, may_wait=may_wait)
        self.answer: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()
        """Receives the rollouts, ordered by sample."""
        self.num_waiters = 0
        self._rollouts: dict[int, Rollout] = {}
        self._listeners: list[TokensCallback] = []
        self._streamed: dict[int, list[Partial]] = {}
        """Sample → its tokens that were streamed."""
        self.num_streamed: Counter[int] = Counter()
        """Sample → number of its tokens that were streamed."""

    @property
    def is_wanted(self) -> bool:
        """Whether rollouts should be read as soon as they are announced: always."""
        return True

    @property
    def listeners(self) -> Sequence[TokensCallback]:
        """Callbacks that receive the tokens of unfinished rollouts."""
        return self._listeners

    @property
    def unfinished(self) -> list[int]:
        """Samples whose tokens may be streamed."""
        return [sample for sample in range(self.request.n) if sample not in self._rollouts]

    def listen(self, listener: TokensCallback) -> None:
        """Pass all tokens of unfinished rollouts to *listener*, beginning with those that have been streamed before."""
        for sample, parts in self._streamed.items():
            for part in parts:
                listener(sample, part)
        self._listeners.append(listener)

    def stop_listening(self, listener: TokensCallback) -> None:
        """Pass nothing more to *listener*."""
        self._listeners.remove(listener)

    def add_tokens(self, sample: int, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Pass on what was read from the stream of a sample's tokens.

        Raises:
            CodecError: an entry cannot be decoded.
        """
        if sample in self._rollouts or self.answer.done():
            return
        for entry_id, fields in entries:
            part = decode(fields[MESSAGE_FIELD.encode()])
            if not isinstance(part, Partial):
                raise CodecError(f"a {part.kind} in place of tokens")
            end, num_streamed = int(entry_id.partition(b"-")[0]), self.num_streamed[sample]
            if end <= num_streamed:  # another task has read it meanwhile
                continue
            if end - part.num_tokens != num_streamed:
                raise CodecError(_LOST_TOKENS)
            self._streamed.setdefault(sample, []).append(part)
            self.num_streamed[sample] = end
            for listener in self._listeners:
                listener(sample, part)

    def notify(self) -> None:
        """Do nothing: what is announced is read at once."""

    def fail(self, error: RolloutClientError) -> None:
        """Let all waiters raise *error*."""
        self.has_ended = True
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # it is no mistake if nobody waits any more

    def withdraw(self, error: RolloutClientError) -> None:
        """Stop expecting anything, and let all waiters raise *error*."""
        super().withdraw(error)
        self.fail(error)

    def _deliver(self, sample: int, rollout: Rollout) -> None:
        streamed = [token for part in self._streamed.get(sample, ()) for token in part.token_ids]
        if rollout.finish_reason is not FinishReason.FAILED and rollout.token_ids[: len(streamed)] != streamed:
            raise CodecError(_LOST_TOKENS)
        self._rollouts[sample] = rollout
        if len(self._rollouts) == self.request.n and not self.answer.done():
            self.answer.set_result([self._rollouts[sample] for sample in range(self.request.n)])

    def _mark_unreadable(self, result: str, reason: str) -> None:
        self.fail(UnreadableResultError({result: reason}))

    def _refuse(self, reason: str) -> None:
        self.fail(RequestRefusedError({self.request.request_id: reason}))


class Inbox:
    """The rollouts of a step's prompts that have arrived, and what can be said about the others."""

    def __init__(self) -> None:
        self.rollouts: deque[Rollout] = deque()
        """Rollouts in memory that were not taken."""
        self.announced: dict[OpenRequest, None] = {}
        """Requests that may have something in Redis, in the order of the news about them."""
        self.num_waiters = 0
        """Number of consumers that wait for a rollout."""
        self.num_missing = 0
        """Number of rollouts that are still expected."""
        self.num_done = self.num_tokens = self.num_total = 0
        """Number of rollouts and tokens that were received, and of rollouts that were requested."""
        self.refusals: dict[str, str] = {}
        """Request that the job has refused → reason."""
        self.unreadable: dict[str, str] = {}
        """Result that cannot be read → reason."""
        self.failure: RolloutClientError | None = None
        """Why nothing more will be received; None while that is not known."""
        self.changed = asyncio.Event()
        """Set when a consumer may find something new."""

    def take_announced(self) -> list[OpenRequest]:
        """Return, once, the next requests to read."""
        taken = list(islice(self.announced, _MAX_UNTAKEN))
        for request in taken:
            del self.announced[request]
        return taken

    def count(self, rollout: Rollout) -> None:
        """Count a rollout that was received."""
        self.num_done += 1
        self.num_tokens += len(rollout.token_ids)

    def raise_if_incomplete(self) -> None:
        """Raise an error if something is missing although nothing more is expected.

        Raises:
            RequestRefusedError: the job refused requests.
            UnreadableResultError: results could not be read.
        """
        if self.refusals:
            raise RequestRefusedError(self.refusals)
        if self.unreadable:
            raise UnreadableResultError(self.unreadable)

    async def wait_for_change(self, timeout: float) -> None:
        """Wait until a consumer may find something new, but not for longer than *timeout* seconds."""
        self.changed.clear()
        self.num_waiters += 1
        try:
            with suppress(asyncio.TimeoutError):  # differs from TimeoutError in Python 3.10
                await asyncio.wait_for(self.changed.wait(), timeout)
        finally:
            self.num_waiters -= 1


class PromptRequest(OpenRequest):
    """The request for a prompt of a step, whose rollouts are put into the step's inbox one by one."""

    def __init__(self, request: PreparedRequest, inbox: Inbox, *, may_be_answered: bool) -> None:
        super().__init__(request, may_be_answered=may_be_answered)
        self._inbox = inbox
        inbox.num_missing += request.n
        inbox.num_total += request.n

    @property
    def is_wanted(self) -> bool:
        """Whether a consumer waits for a rollout of the step, and few are in memory."""
        return self._inbox.num_waiters > 0 and len(self._inbox.rollouts) < _MAX_UNTAKEN

    def notify(self) -> None:
        """Tell the step that there may be something to read."""
        self._inbox.announced[self] = None
        self._inbox.changed.set()

    def fail(self, error: RolloutClientError) -> None:
        """Let the step raise *error* once everything else has been taken."""
        self._inbox.failure = self._inbox.failure or error
        self._inbox.changed.set()

    def withdraw(self, error: RolloutClientError) -> None:
        """Stop expecting anything."""
        missing = self.num_missing
        super().withdraw(error)
        self._inbox.num_missing -= missing
        self._inbox.num_total -= missing
        self._inbox.changed.set()

    def _deliver(self, sample: int, rollout: Rollout) -> None:
        self._inbox.rollouts.append(rollout)
        self._inbox.count(rollout)
        self._inbox.num_missing -= 1
        self._inbox.changed.set()

    def _mark_unreadable(self, result: str, reason: str) -> None:
        self._inbox.unreadable[result] = reason
        self._inbox.num_missing -= 1
        self._inbox.changed.set()

    def _refuse(self, reason: str) -> None:
        logger.error("The job refused request %s: %s", self.request.request_id, reason)
        self._inbox.refusals[self.request.request_id] = reason
        self.withdraw(RequestRefusedError(self._inbox.refusals))


class Leftovers:
    """The requests of steps that are not open and whose results are kept, because no trainer has released them.

    An earlier process with the client's name has left them, or this one has left a step by an exception. They are
    released with a later step, because the trainer has then skipped theirs.

    Args:
        client_name: name of the client; its request ids begin with it.
    """

    def __init__(self, client_name: str) -> None:
        self._step_pattern = re.compile(rf"{re.escape(client_name)}:(\d+):")
        self._num_opened = 0
        self._left: dict[str, tuple[int, int]] = {}
        """Request id → number of its step, and number of steps that had been opened when that was left."""

    def add(self, request_ids: Iterable[str], *, when: int | None = None) -> None:
        """Add requests whose step was left; those that are not of a step are ignored.

        Args:
            request_ids: their ids.
            when: number of steps that had been opened then; default: that until now.
        """
        for request_id in request_ids:
            if match := self._step_pattern.match(request_id):
                self._left.setdefault(request_id, (int(match[1]), self._num_opened if when is None else when))

    def open_step(self) -> int:
        """Count a step that is opened, and return the number of those before it."""
        self._num_opened += 1
        return self._num_opened - 1

    def discard(self, request_ids: Iterable[str]) -> None:
        """Remove requests whose step is open again."""
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def take_past(self, step: int, num_opened_before: int) -> list[str]:
        """Return, once, the requests of earlier steps than *step* that were left before *step* was opened.

        Args:
            step: number of the step that ends.
            num_opened_before: number of steps that were opened before it.
        """
        past = [
            request_id
            for request_id, (number, num_opened) in self._left.items()
            if number < step and num_opened <= num_opened_before
        ]
        self.discard(past)
        return past


class OpenRequests:
    """The open requests of a client, which one task sends and another one reads the results of.

    Args:
        leftovers: receives the requests with results that no step awaits; None if the results expire.
    """

    def __init__(self, leftovers: Leftovers | None = None) -> None:
        self.ending: RolloutClientError | None = None
        """Why no further results will come; None while they may. Results that are in Redis are still read."""
        self.num_awaited = 0
        """Number of rollouts that were requested and have not been received."""
        self.num_unread_bytes = 0
        """Bytes of the results that were announced and not read."""
        self.unsent: deque[OpenRequest] = deque()
        """Requests to send when the job has room for them."""
        self.lost: list[OpenRequest] = []
        """Requests that were sent and that Redis may have lost."""
        self.abandoned: list[str] = []
        """Ids of requests to cancel, because nobody awaits their rollouts any more."""
        self.has_work = asyncio.Event()
        """Set when something is to be sent."""
        self.digests: OrderedDict[str, str] = OrderedDict()
        """Rollout id → digest of its tokens, of training rollouts that a trainer has received; oldest first."""
        self._leftovers = leftovers
        self._open: dict[str, OpenRequest] = {}

    def get(self, request_id: str) -> OpenRequest | None:
        """Return the open request with this id; None if there is none."""
        return self._open.get(request_id)

    @property
    def sent(self) -> list[OpenRequest]:
        """Requests that were sent and whose rollouts are expected."""
        return [opened for opened in self._open.values() if opened.was_sent and opened.num_missing]

    def note_received(self, rollout: Rollout) -> None:
        """Remember which tokens of a rollout were received, because it may be sampled again if Redis loses it."""
        if self._leftovers is None or rollout.purpose is not Purpose.TRAIN or not rollout.token_ids:
            return
        self.digests[rollout.rollout_id] = rollout.digest
        self.digests.move_to_end(rollout.rollout_id)
        if len(self.digests) > _MAX_DIGESTS:
            self.digests.popitem(last=False)

    def register(self, opened: OpenRequest) -> None:
        """Open a request."""
        request_id = opened.request.request_id
        self._open[request_id] = opened
        if self._leftovers is not None:
            self._leftovers.discard([request_id])

    def unregister(self, opened: OpenRequest, *, keep: bool = False) -> None:
        """Close a request, if it is open under its id.

        Args:
            opened: the request.
            keep: whether to remember that its results may be there for a later step.
        """
        request_id = opened.request.request_id
        if self._open.get(request_id) is opened:
            del self._open[request_id]
            if keep:
                self.note_leftover(request_id)

    def note_leftover(self, request_id: str) -> None:
        """Remember that a request that is not open has results."""
        if self._leftovers is not None:
            self._leftovers.add([request_id])

    def count(self, opened: OpenRequest) -> None:
        """Update the number of awaited rollouts and of unread bytes after a change of *opened*."""
        is_open = self._open.get(opened.request.request_id) is opened
        counted = opened.num_missing if is_open and opened.was_sent else 0, opened.num_unread_bytes if is_open else 0
        self.num_awaited += counted[0] - opened.counted[0]
        self.num_unread_bytes += counted[1] - opened.counted[1]
        opened.counted = counted

    def fail_all(self, error: RolloutClientError) -> None:
        """Let all who wait raise *error*."""
        for opened in self._open.values():
            opened.fail(error)


def batches(requests: Iterable[OpenRequest]) -> Iterator[list[OpenRequest]]:
    """Divide requests into those that are sent, or read, in one round trip."""
    listed = list(requests)
    for start in range(0, len(listed), REQUESTS_PER_BATCH):
        yield listed[start : start + REQUESTS_PER_BATCH]


def as_client_error(error: Exception, action: str) -> RolloutClientError:
    """Return the error for the callers of failed requests; an unexpected one is logged."""
    if isinstance(error, RolloutClientError):
        return error
    logger.error("%s failed.", action.capitalize(), exc_info=error)
    return RolloutClientError(f"{action} failed: {type(error).__name__}: {error}")
