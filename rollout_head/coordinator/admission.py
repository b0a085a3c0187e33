"""Admission of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.messages import CodecError, Refusal, RolloutRequest, decode
from rollout_head.coordinator.cancellations import Cancellations
from rollout_head.coordinator.dead_letters import DeadLetters
from rollout_head.coordinator.open_request import OpenRequest
from rollout_head.coordinator.request_checks import check_request
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.coordinator.sibling_lengths import SiblingLengths
from rollout_store.history.store import LengthLookup
from rollout_store.job import Admission, Entry, JobStore, Stream, arrival_time
from rollout_store.job.admission_rules import AdmissionError
from rollout_store.job.assignments import RolloutKey
from rollout_store.job.requests import RequestProgress

logger = logging.getLogger(__name__)

_REJECTED = {
    Admission.ANSWERED: "it was answered before; to sample it again, send it with another request id",
    Admission.CONFLICT: (
        "a request with this id is open and asks for another number of samples; send it with another request id"
    ),
}
"""Outcome of an admission → reason that the client is told."""
_NO_PROGRESS = RequestProgress(frozenset(), cancelled=False)


class RequestAdmission:
    """Admits requests, refuses those that the job cannot serve, and drops repetitions."""

    def __init__(
        self,
        job: RolloutJob,
        job_store: JobStore,
        lengths: LengthLookup,
        *,
        vocabulary: int,
        tracker: RolloutTracker,
        cancellations: Cancellations,
        dead_letters: DeadLetters,
    ) -> None:
        self._job, self._job_store, self._lengths, self._vocabulary = job, job_store, lengths, vocabulary
        self._tracker, self._cancellations = tracker, cancellations
        self._dead_letters = dead_letters
        self._num_arrivals = 0

    async def admit(self, entries: Iterable[Entry], held: Mapping[RolloutKey, str] | None = None) -> None:
        """Open the requests in entries of the request stream.

        Args:
            entries: the entries.
            held: request id and sample → engine that already has the assignment; None unless another coordinator may
                have assigned samples of these requests.
        """
        checked = [(entry, request) for entry in entries if (request := await self._check(entry)) is not None]
        # A request that was sent twice has two entries, of which Redis admits the first.
        registered = await asyncio.gather(*(self._register(entry, request) for entry, request in checked))
        admitted = {
            entry.entry_id: request
            for (entry, request), admission in zip(checked, registered, strict=True)
            if admission in (Admission.NEW, Admission.KNOWN)
        }
        known = [
            request.request_id
            for (_, request), admission in zip(checked, registered, strict=True)
            if admission is Admission.KNOWN
        ]
        if admitted:
            await self._open(admitted, known, held)

    async def _check(self, entry: Entry) -> RolloutRequest | None:
        """Return the request of an entry; None if it was moved to the dead letters."""
        try:
            message = decode(entry.data)
            if not isinstance(message, RolloutRequest):
                raise CodecError(f"a {message.kind} in place of a request")
        except CodecError as error:
            await self._dead_letters.add(Stream.REQUESTS, entry, str(error))
            return None
        try:
            return check_request(
                message, len(entry.data), self._job, uid=self._job_store.keys.uid, vocabulary=self._vocabulary
            )
        except AdmissionError as error:
            logger.warning("Refused request %s of client %s: %s", message.request_id, message.reply_to, error)
            refusal = Refusal(request_id=message.request_id, reason=str(error))
            await self._job_store.results.refuse(message, refusal)
            await self._dead_letters.add(Stream.REQUESTS, entry, str(error))
            return None

    async def _register(self, entry: Entry, request: RolloutRequest) -> Admission:
        """Open the ledger of a request, or refuse it."""
        admission = await self._job_store.requests.admit(entry.entry_id, request)
        if admission in _REJECTED:
            refusal = Refusal(request_id=request.request_id, reason=_REJECTED[admission])
            await self._job_store.results.refuse(request, refusal)
        return admission

    async def _open(
        self, admitted: Mapping[str, RolloutRequest], known: Sequence[str], held: Mapping[RolloutKey, str] | None
    ) -> None:
        """Add admitted requests.

        Args:
            admitted: entry id → request.
            known: ids of those requests that were admitted before.
            held: see :meth:`admit`.
        """
        requests = list(admitted.values())
        progress, lengths, preferred_engines = await asyncio.gather(
            self._job_store.requests.progress(known),
            self._lengths.fetch(request.problem for request in requests),
            self._job_store.requests.trajectory_engines(requests),
        )
        progress_of = dict(zip(known, progress, strict=True))
        cancelled_early: list[str] = []
        ended: list[OpenRequest] = []
        for (entry_id, request), preferred_engine in zip(admitted.items(), preferred_engines, strict=True):
            done, cancelled = progress_of.get(request.request_id, _NO_PROGRESS)
            self._num_arrivals += 1
            if self._cancellations.is_cancelled_early(request.request_id, entry_id):
                cancelled_early.append(request.request_id)
                cancelled = True
            opened = OpenRequest(
                entry_id,
                request,
                self._num_arrivals,
                arrival_time(entry_id) + request.deadline_seconds if request.deadline_seconds else None,
                SiblingLengths(lengths[request.problem]),
                set(done),
                cancelled=cancelled,
                recovered=held is not None,
            )
            self._tracker.open(opened, held or {}, preferred_engine)
            if cancelled:
                ended.append(opened)
        if cancelled_early:
            await self._job_store.requests.mark_cancelled(cancelled_early)
        await self._cancellations.end(ended)
