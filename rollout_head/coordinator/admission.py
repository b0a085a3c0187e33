"""Admission of requests: which ones the job can serve, and what is known of those that were admitted before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.messages import CodecError, Refusal, RolloutRequest, decode
from rollout_head.coordinator.open_requests import OpenRequest, SiblingLengths
from rollout_head.coordinator.orders import EngineOrders
from rollout_head.coordinator.state import CoordinatorState
from rollout_store.history.store import LengthLookup
from rollout_store.job import Admission, Entry, JobStore, Stream, arrival_time
from rollout_store.job.admission_rules import AdmissionError, check_admission
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
        state: CoordinatorState,
        job_store: JobStore,
        orders: EngineOrders,
        lengths: LengthLookup,
        job: RolloutJob,
        vocabulary: int,
    ) -> None:
        self._state, self._job_store, self._orders = state, job_store, orders
        self._lengths, self._job, self._vocabulary = lengths, job, vocabulary
        self._num_arrivals = 0

    async def admit(self, entries: Iterable[Entry], held: Mapping[RolloutKey, str] | None = None) -> None:
        """Open the requests in entries of the request stream.

        Args:
            entries: the entries.
            held: request id and sample → engine that already has the assignment; None unless another coordinator may
                have assigned samples of these requests.
        """
        checked = [(entry, request) for entry in entries if (request := await self._check(entry)) is not None]
        if not checked:
            return
        requests = [request for _, request in checked]
        registered, lengths, preferred_engines = await asyncio.gather(  # in one round trip
            # A request that was sent twice has two entries; Redis admits the first one.
            asyncio.gather(*(self._register(entry, request) for entry, request in checked)),
            self._lengths.fetch(request.problem for request in requests),
            self._job_store.requests.trajectory_engines(requests),
        )
        known = [
            request.request_id
            for request, admission in zip(requests, registered, strict=True)
            if admission is Admission.KNOWN
        ]
        progress = await self._job_store.requests.progress(known) if known else []
        progress_of = dict(zip(known, progress, strict=True))
        cancelled_early: list[str] = []
        ended: list[OpenRequest] = []
        for (entry, request), admission, engine in zip(checked, registered, preferred_engines, strict=True):
            if admission not in (Admission.NEW, Admission.KNOWN):
                continue
            done, cancelled = progress_of.get(request.request_id, _NO_PROGRESS)
            self._num_arrivals += 1
            arrived_at = arrival_time(entry.entry_id)
            if self._state.is_cancelled_early(request.request_id, entry.entry_id):
                cancelled_early.append(request.request_id)
                cancelled = True
            opened = OpenRequest(
                entry.entry_id,
                request,
                self._num_arrivals,
                arrived_at + request.deadline_seconds if request.deadline_seconds else None,
                SiblingLengths(lengths[request.problem]),
                set(done),
                cancelled=cancelled,
                recovered=held is not None or admission is Admission.KNOWN,
            )
            self._state.open(opened, held or {}, engine)
            if cancelled:
                ended.append(opened)
        if cancelled_early:
            await self._job_store.requests.mark_cancelled(cancelled_early)
        await self._orders.cancel(ended)

    async def num_admitted(self, entries: Sequence[Entry]) -> int:
        """Return how many of these successive entries end with the last one whose request was admitted before."""
        messages = []
        for index, entry in enumerate(entries, start=1):
            with suppress(CodecError):  # :meth:`admit` moves it to the dead letters
                if isinstance(message := decode(entry.data), RolloutRequest):
                    messages.append((index, entry.entry_id, message.request_id))
        known = await self._job_store.requests.admitted_entries([request_id for _, _, request_id in messages])
        found = zip(messages, known, strict=True)
        return max((index for (index, entry_id, _), admitted in found if admitted == entry_id), default=0)

    async def _check(self, entry: Entry) -> RolloutRequest | None:
        """Return the request of an entry; None if it was refused, or cannot be decoded."""
        try:
            message = decode(entry.data)
            if not isinstance(message, RolloutRequest):
                raise CodecError(f"a {message.kind} in place of a request")
        except CodecError as error:
            await move_to_dead_letters(self._state, self._job_store, Stream.REQUESTS, entry, str(error))
            return None
        try:
            return check_request(
                message, len(entry.data), self._job, uid=self._job_store.keys.uid, vocabulary=self._vocabulary
            )
        except AdmissionError as error:
            logger.warning("Refused request %s of client %s: %s", message.request_id, message.reply_to, error)
            refusal = Refusal(request_id=message.request_id, reason=str(error))
            await self._job_store.results.refuse(message, refusal)
            await self._job_store.incoming.delete(Stream.REQUESTS, entry.entry_id)
            return None

    async def _register(self, entry: Entry, request: RolloutRequest) -> Admission:
        """Open the ledger of a request, or refuse it."""
        admission = await self._job_store.requests.admit(entry.entry_id, request)
        if admission in _REJECTED:
            refusal = Refusal(request_id=request.request_id, reason=_REJECTED[admission])
            await self._job_store.results.refuse(request, refusal)
        return admission


async def move_to_dead_letters(
    state: CoordinatorState, job_store: JobStore, stream: Stream, entry: Entry, reason: str
) -> None:
    """Move an entry of a stream that cannot be decoded or processed."""
    logger.warning("Entry %s of the %s stream is moved to the dead letters: %s", entry.entry_id, stream, reason)
    state.num_dead_letters += 1
    await job_store.incoming.dead_letter(stream, entry, reason)


def check_request(
    request: RolloutRequest, size_bytes: int, job: RolloutJob, *, uid: str, vocabulary: int
) -> RolloutRequest:
    """Check whether a job can serve a request.

    Args:
        request: the request as the client sent it.
        size_bytes: size of the encoded request.
        job: the manifest.
        uid: uid of the job.
        vocabulary: number of token ids that the model knows.

    Returns:
        The request, with the job's sampling settings for all that it leaves open.

    Raises:
        AdmissionError: naming the setting that the job cannot serve.
    """
    spec = job.spec
    if request.job_uid != uid:
        raise AdmissionError(f"the request is for job {request.job_uid}, but this is job {uid}; connect again")
    if size_bytes > (limit := int(parse_quantity(spec.queue.max_request_bytes))):
        raise AdmissionError(f"the request has {size_bytes} bytes, but spec.queue.maxRequestBytes is {limit}")
    try:
        request = request.with_defaults(spec.sampling)
    except ValueError as error:
        raise AdmissionError(f"sampling, combined with the job's spec.sampling: {error}") from None
    check_admission(
        request.sampling,
        len(request.prompt_token_ids),
        max_model_len=spec.engine.max_model_len,
        prefix=request.prefix,
    )
    _check_token_ids(request, vocabulary)
    _check_weight_version(request)
    return request


def _check_token_ids(request: RolloutRequest, vocabulary: int) -> None:
    prefix = request.prefix.token_ids if request.prefix is not None else []
    for name, tokens in (("prompt", request.prompt_token_ids), ("prefix", prefix)):
        for extreme in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= extreme < vocabulary:
                raise _unknown_token(name, extreme, vocabulary)
    for name, token in request.sampling.tokens_outside(vocabulary).items():
        raise _unknown_token(f"sampling.{name}", token, vocabulary)


def _unknown_token(name: str, token: int, vocabulary: int) -> AdmissionError:
    return AdmissionError(
        f"{name}: {token} is not a token of the model, which has {vocabulary}; remove it, or encode the prompt with "
        "the model's tokenizer"
    )


def _check_weight_version(request: RolloutRequest) -> None:
    if request.prefix is None:
        return
    oldest = request.prefix.oldest_weight_version
    if oldest is not None and request.min_weight_version is not None and oldest < request.min_weight_version:
        raise AdmissionError(
            f"min_weight_version is {request.min_weight_version}, but the prefix was sampled with version {oldest}; "
            "lower min_weight_version, or sample the rollout from the beginning"
        )
    if request.weight_version is None:
        return
    others = sorted({span.weight_version for span in request.prefix.weight_spans} - {request.weight_version})
    if others:
        raise AdmissionError(
            f"the request is pinned to weight version {request.weight_version}, but its prefix was sampled with "
            f"version {others[0]}; leave weight_version out, or sample the rollout from the beginning"
        )
