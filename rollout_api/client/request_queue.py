"""Sends a client's requests as the job has room for them, and cancels them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from rollout_api.client.job_channel import JobChannel
from rollout_api.client.open_request import REQUESTS_PER_BATCH, OpenRequest, OpenRequests, as_client_error, batches
from rollout_api.client.result_reader import ResultReader
from rollout_api.client.stored_images import IMAGE_REFRESH_S, StoredImages
from rollout_api.errors import JobFullError, RolloutClientError
from rollout_api.protocol.keys import MESSAGE_FIELD
from rollout_api.protocol.messages import RolloutRequest, decode, encode
from rollout_api.protocol.status import CoordinatorStatus

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
"""Time between two log messages about the same problem."""
_BATCH_BYTES = 4_000_000
"""Encoded size, in bytes, above which no further request is added to a batch."""
_RETRY_PAUSE_S = 0.2
"""Pause while the job has no room for another request."""
_IMAGE_RETRY_PAUSE_S = 2.0
"""Pause while the job has no room for the images of a request."""
_LAST_BATCH_TIMEOUT_S = 2.0
"""Time that a cancellation waits for the batch of requests that is being sent."""
_FIRST_CANCEL_PAUSE_S, _MAX_CANCEL_PAUSE_S = 2.0, 60.0
"""Pause before a cancellation is first repeated, which doubles with each repetition, and the longest pause."""
_RESAMPLED_SUFFIX = re.compile(r"\.r\d+$")


class RequestQueue:
    """Sends requests in one task. A repetition is harmless, because the job recognizes a request by its id.

    Args:
        channel: channel to the job.
        requests: the open requests.
        reader: reads the results of requests that were sent before.
    """

    def __init__(self, channel: JobChannel, requests: OpenRequests, reader: ResultReader) -> None:
        self._channel, self._job, self._requests, self._reader = channel, channel.job, requests, reader
        self._is_idle = asyncio.Event()
        """Set while no batch is being sent."""
        self._is_idle.set()
        self._open_in_job: int | None = None
        self._num_blocked = 0
        """Number of rollouts of this client that cannot start at the moment, by the job's last status."""
        self._sent_since_status = self._answered_before_status = 0
        self._next_cancellation, self._cancel_pause = 0.0, _FIRST_CANCEL_PAUSE_S
        self._images = StoredImages(channel)
        self._next_image_refresh = 0.0
        """Time at which images are kept for longer; 0 if there are none."""
        self._next_image_attempt = 0.0
        """Time before which requests with images wait, because the job had no room for the images of one."""
        self._next_log = self._next_resampled_log = 0.0

    def observe_status(self, status: CoordinatorStatus | None) -> None:
        """Read from the job's status how many rollouts of all its clients are open."""
        blocked = status.get("blocked", {}) if status else {}
        self._open_in_job = int(status.get("waiting", 0)) + int(status.get("assigned", 0)) if status else None
        if self._open_in_job is not None:
            self._open_in_job -= sum(blocked.values())
        self._num_blocked = min(blocked.get(self._channel.client_name, 0), self._job.max_rollouts)
        self._sent_since_status, self._answered_before_status = 0, self._reader.num_answered

    def _has_room(self, num_rollouts: int, num_in_batch: int) -> bool:
        """Return whether the job takes more rollouts, by the coordinator's count and by this client's.

        Args:
            num_rollouts: number of rollouts of a request.
            num_in_batch: number of rollouts that are about to be sent before.
        """
        # Rollouts that cannot start do not count, so that a client that has died does not keep all others out.
        in_job = max(0, self._requests.num_awaited - self._num_blocked)
        if self._open_in_job is not None:
            # Rollouts that have ended since the job's last status are not open in the job any more.
            num_answered = self._reader.num_answered - self._answered_before_status
            in_job = max(in_job, self._open_in_job + self._sent_since_status - num_answered)
        in_job += num_in_batch
        # A job without open requests takes every request that passed validation.
        return not in_job or in_job + num_rollouts <= self._job.max_rollouts

    async def run(self) -> None:
        """Send requests and cancellations until this task is cancelled."""
        requests = self._requests
        while True:
            with suppress(asyncio.TimeoutError):  # differs from TimeoutError in Python 3.10
                await asyncio.wait_for(requests.has_work.wait(), self._pause())
            requests.has_work.clear()
            while batch := self._next_batch():
                self._is_idle.clear()
                try:
                    await self._send(batch)
                except Exception as error:
                    _fail(batch, error)
                finally:
                    self._is_idle.set()
            lost, requests.lost = requests.lost, []
            for batch in batches(lost):
                try:
                    await self._append(await self._store_images(batch))
                except Exception as error:
                    _fail(batch, error)
            # The job only cancels requests that it has.
            cancelled = [opened.request.request_id for opened in lost if opened.awaits_cancellation]
            abandoned, requests.abandoned = requests.abandoned, []
            await self._try_to_cancel(cancelled + abandoned)
            if self._next_cancellation and time.monotonic() >= self._next_cancellation:
                await self._repeat_cancellations()
            if self._next_image_refresh and time.monotonic() >= self._next_image_refresh:
                await self._refresh_images()

    def _pause(self) -> float | None:
        """Return the seconds after which there is something to do even if no other work comes; None if there is not."""
        pauses = [_RETRY_PAUSE_S] if self._requests.unsent else []
        pauses += [
            max(0.0, due - time.monotonic()) for due in (self._next_cancellation, self._next_image_refresh) if due
        ]
        return min(pauses, default=None)

    # Cancellations.

    async def cancel(self, requests: Iterable[OpenRequest], *, withdrawal: RolloutClientError) -> None:
        """Cancel requests: their rollouts return what they have. This works while Redis is full.

        Args:
            requests: the requests.
            withdrawal: error for those that were not sent; nothing more is expected of them.
        """
        # The batch that is being sent counts as sent, unless Redis is full or unreachable.
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), _LAST_BATCH_TIMEOUT_S)
        missing = [opened for opened in requests if opened.num_unanswered]
        for opened in missing:
            if opened.was_sent:
                opened.is_cancelled = True
            else:
                opened.withdraw(withdrawal)
            self._requests.count(opened)
        self._cancel_pause = _FIRST_CANCEL_PAUSE_S
        self._next_cancellation = time.monotonic() + self._cancel_pause
        self._requests.has_work.set()
        # Those that were not sent are cancelled, too: an earlier trainer may have sent them.
        await self._channel.cancel([opened.request.request_id for opened in missing])

    async def _repeat_cancellations(self) -> None:
        """Cancel requests again that were not answered since, because Redis may lose a cancellation in a crash."""
        ids = [opened.request.request_id for opened in self._requests.sent if opened.awaits_cancellation]
        await self._try_to_cancel(ids)
        self._cancel_pause = min(2 * self._cancel_pause, _MAX_CANCEL_PAUSE_S)
        self._next_cancellation = time.monotonic() + self._cancel_pause if ids else 0.0

    async def _try_to_cancel(self, request_ids: Sequence[str]) -> None:
        try:
            await self._channel.cancel(request_ids)
        except RolloutClientError as error:
            logger.warning("Cannot cancel %d requests: %s", len(request_ids), error)

    # Requests.

    def _next_batch(self) -> list[OpenRequest]:
        """Remove the next requests from the queue: those that the job has room for, and those that may not wait."""
        batch: list[OpenRequest] = []
        waiting: list[OpenRequest] = []
        num_rollouts = size = 0
        is_full = waits_for_images = False
        while self._requests.unsent and len(batch) < REQUESTS_PER_BATCH and size < _BATCH_BYTES:
            opened = self._requests.unsent.popleft()
            if opened.has_ended:
                continue
            if opened.request.images and time.monotonic() < self._next_image_attempt:
                waits_for_images = True  # and so do all that follow, which keep their order
            has_room = not (is_full or waits_for_images) and self._has_room(opened.num_missing, num_rollouts)
            # An ended job needs no room: its requests only fail.
            if has_room or not opened.may_wait or self._requests.ending is not None:
                batch.append(opened)
                num_rollouts += opened.num_missing * has_room
                size += len(opened.request.data)
            else:
                waiting.append(opened)
                is_full = is_full or not waits_for_images
        self._requests.unsent.extendleft(reversed(waiting))
        if is_full and not batch:
            limit = f"Job {self._job.name} has reached its limit of {self._job.max_rollouts} open rollouts"
            self._log_no_room(f"{limit} (spec.queue.maxRollouts)")
        return batch

    def _log_no_room(self, reason: object) -> None:
        """Log at most once a minute that requests wait in this client because the job has no room for them."""
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + LOG_INTERVAL_S
            logger.warning("%s; %d requests wait in this client for room.", reason, len(self._requests.unsent))

    async def _send(self, batch: Sequence[OpenRequest]) -> None:
        await self._find_earlier([opened for opened in batch if opened.may_be_answered])
        batch = [opened for opened in batch if opened.num_missing]
        if batch and self._requests.ending is not None:
            raise self._requests.ending
        admitted: list[OpenRequest] = []
        excess: list[OpenRequest] = []
        known: list[OpenRequest] = []
        num_rollouts = 0
        for opened in batch:
            fits = opened.may_wait or self._has_room(opened.num_missing, num_rollouts)
            (admitted if fits else excess).append(opened)
            num_rollouts += opened.num_missing * fits
        if excess:
            states = await self._reader.ledger_states(excess)
            for opened, (entry, _) in zip(excess, states, strict=True):
                if entry is None:
                    opened.fail(
                        JobFullError(
                            "the job has as many open rollouts as it may have (spec.queue.maxRollouts); try again later"
                        )
                    )
                else:  # another process has sent it before
                    known.append(opened)
        stored = await self._store_images(admitted)
        self._sent_since_status += sum(opened.num_missing for opened in stored)
        await self._append(stored + await self._store_images(known))

    async def _append(self, requests: Sequence[OpenRequest]) -> None:
        """Append requests to the job's stream. Those that end while Redis is full or unreachable are left out."""
        left = list(requests)

        async def append_missing() -> None:
            sent = [opened for opened in left if opened.num_missing]
            if not sent:
                return
            pipeline = self._channel.redis.pipeline(transaction=False)
            for opened in sent:
                pipeline.xadd(self._channel.keys.requests, {MESSAGE_FIELD: opened.request.data})
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            left.clear()
            for opened, reply in zip(sent, replies, strict=True):
                if isinstance(reply, Exception):
                    left.append(opened)
                else:
                    opened.was_sent = True
                    self._requests.count(opened)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply

        await self._channel.policy.run(append_missing, action="send requests")

    async def _store_images(self, requests: Sequence[OpenRequest]) -> list[OpenRequest]:
        """Store the images of requests; return the requests that the job has room for. The others wait, or fail."""
        images = {digest: image for opened in requests for digest, image in opened.request.images.items()}
        if not images:
            return list(requests)
        missing = await self._images.store(images)
        self._next_image_refresh = self._next_image_refresh or time.monotonic() + IMAGE_REFRESH_S
        excess = [opened for opened in requests if missing & opened.request.images.keys()]
        for opened in excess:
            if not opened.may_wait:
                opened.fail(self._images.no_room())
        if waiting := [opened for opened in excess if opened.may_wait]:
            self._next_image_attempt = time.monotonic() + _IMAGE_RETRY_PAUSE_S
            self._requests.unsent.extendleft(reversed(waiting))
            self._log_no_room(self._images.no_room())
        return [opened for opened in requests if opened not in excess]

    async def _refresh_images(self) -> None:
        """Keep the images of open requests."""
        images = {digest: image for opened in self._requests.sent for digest, image in opened.request.images.items()}
        try:
            await self._images.store(images)
            self._next_image_refresh = time.monotonic() + IMAGE_REFRESH_S if images else 0.0
        except RolloutClientError as error:
            self._next_image_refresh = time.monotonic() + IMAGE_REFRESH_S
            logger.warning("Cannot keep the images of open requests for longer: %s", error)

    async def _find_earlier(self, requests: Sequence[OpenRequest]) -> None:
        """Find out which requests were sent before.

        The results of these are read. A request whose results an earlier trainer has released gets another id.
        """
        while requests:
            states = await self._reader.ledger_states(requests)
            released = [opened for opened, (_, mark) in zip(requests, states, strict=True) if mark is not None]
            for opened in released:
                self._rename(opened)
            if released and time.monotonic() >= self._next_resampled_log:
                self._next_resampled_log = time.monotonic() + LOG_INTERVAL_S
                logger.warning(
                    "Results were received and released before, those of %s among them; they are sampled again under "
                    "other request ids.",
                    first_id(released[0].request.request_id),
                )
            known = [
                opened
                for opened, (entry, mark) in zip(requests, states, strict=True)
                if entry is not None and mark is None
            ]
            await self._reader.read_any(known)
            requests = released

    def _rename(self, opened: OpenRequest) -> None:
        """Give a request the next id under which it can be sampled again."""
        old = opened.request.request_id
        first = first_id(old)
        number = 1 + int(old[len(first) + 2 :] or 0)
        message = cast(RolloutRequest, decode(opened.request.data))
        renamed = message.model_copy(update={"request_id": f"{first}.r{number}"})
        self._requests.unregister(opened)
        opened.request = replace(opened.request, request_id=renamed.request_id, data=encode(renamed))
        if self._requests.get(renamed.request_id) is not None:
            opened.fail(RolloutClientError(f"request {renamed.request_id} is open already"))
            return
        self._requests.register(opened)


def first_id(request_id: str) -> str:
    """Return the id that a request had first: each time it is sampled again, it has a suffix, ``.r1``, ``.r2`` etc."""
    return _RESAMPLED_SUFFIX.sub("", request_id)


def _fail(requests: Iterable[OpenRequest], error: Exception) -> None:
    failure = as_client_error(error, "sending requests")
    for opened in requests:
        opened.fail(failure)
