"""Produces the rollouts that are assigned to this engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any

import redis

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import FinishReason, Partial, Rollout, RolloutRequest, decode
from rollout_api.redis_client.retry import concerns_server, retry_async
from rollout_store.job import Assignment, JobStore, Order, arrival_time
from rollout_store.job.admission_rules import AdmissionError, can_continue
from rollout_store.job.engines import EngineError
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.images import ImageCache
from rollout_worker.engine.response import GenerationResult, UnusableOutputError
from rollout_worker.engine_worker.failures import ends_engine
from rollout_worker.engine_worker.history_prefetcher import HistoryPrefetcher
from rollout_worker.engine_worker.lease import EngineLease
from rollout_worker.engine_worker.published_weights import PublishedWeights
from rollout_worker.engine_worker.running import RunningRollout, RunningRollouts
from rollout_worker.engine_worker.token_streams import CheckpointWriter, TokenStream, TokenStreams

logger = logging.getLogger(__name__)

MAX_CACHED_REQUESTS = 512
"""Number of recently used requests that an engine keeps."""
MAX_FAILED_REQUESTS = 8
"""Number of requests whose rollouts may fail in a row before the engine is taken for faulty."""
MAX_UNUSABLE_REQUESTS = 32
"""The same number for failures that the weights can explain, too: with some weights, the model overflows often."""


class RolloutExecutor:
    """Runs one task for each assigned rollout, from reading its request to recording its result.

    An engine that has stopped, or a Redis server that cannot be used, ends the engine's part in the job. Whatever else
    goes wrong with a rollout concerns that rollout alone, which ends as failed: another engine would most likely end in
    the same way. But if rollouts of many requests fail unexpectedly and none succeeds, the engine is the likely cause.
    Its part ends, too, because it would be assigned more and more rollouts, as it ends them faster than other engines.
    The same applies if its output cannot be used although the weights work elsewhere, because a GPU may compute NaN.
    """

    def __init__(
        self,
        engine: Engine,
        job_store: JobStore,
        *,
        lease: EngineLease,
        running: RunningRollouts,
        requests: RequestCache,
        checkpoints: CheckpointWriter,
        token_streams: TokenStreams,
        prefetcher: HistoryPrefetcher,
        weights: PublishedWeights,
        checkpoint_tokens: int,
    ) -> None:
        self._engine, self._job_store, self._lease = engine, job_store, lease
        self._running, self._requests = running, requests
        self._checkpoints, self._token_streams = checkpoints, token_streams
        self._prefetcher, self._weights, self._checkpoint_tokens = prefetcher, weights, checkpoint_tokens
        self._images = ImageCache(job_store.requests.image)
        self._failed = asyncio.Event()
        self._error: Exception | None = None
        self._clock_offset = 0.0
        self._failed_requests: set[str] = set()
        """Requests whose rollouts have failed unexpectedly since the engine last produced a rollout."""
        self._unusable_requests: set[str] = set()
        """Requests whose rollouts could not be used since the engine last produced finite log-probabilities, or loaded
        other weights."""
        self._unusable_version = -1
        """Weight version of these requests."""

    async def synchronize_clock(self) -> None:
        """Measure how far Redis' clock is ahead of this machine's. Deadlines are counted by Redis' clock."""
        self._clock_offset = await self._job_store.clock() - time.time()

    async def run(self) -> None:
        """Wait until a rollout fails because of the engine or of Redis, and raise its error.

        Raises:
            EngineError: if the engine has died, or is most likely faulty.
            redis.RedisError: if the server cannot be used.
        """
        await self._failed.wait()
        if self._error is not None:
            raise self._error

    async def start(self, order: Order, assignment: Assignment) -> None:
        """Start an assigned rollout; an assignment that was delivered twice is dropped."""
        running = RunningRollout(order, assignment)
        if running.key in self._running:
            await self._acknowledge(running, self._lease.engine_id)
            return
        self._running.add(running)
        running.task = asyncio.ensure_future(self._run_to_end(running))

    async def _run_to_end(self, running: RunningRollout) -> None:
        engine_id = self._lease.engine_id
        try:
            try:
                await self._execute(running, engine_id)
            except Exception as error:
                if ends_engine(error, self._engine):
                    raise
                await self._check_fault(running, error)
                await self._fail(running, engine_id, error)
        except Exception as error:
            if self._error is None:
                self._error = error
            self._failed.set()
        finally:
            if running.deadline is not None:
                running.deadline.cancel()
            self._running.discard(running)
            self._checkpoints.discard(running.key)

    async def _check_fault(self, running: RunningRollout, error: Exception) -> None:
        """Count a rollout that has failed.

        Raises:
            EngineError: if so many have failed in a row that the engine is most likely faulty.
        """
        if _is_too_large(error):  # this concerns the request: every engine would fail, and be restarted
            return
        is_unusable = isinstance(error, UnusableOutputError)
        failed, limit, how = self._failed_requests, MAX_FAILED_REQUESTS, ""
        if is_unusable:
            if self._unusable_version != self._engine.weight_version:
                self._unusable_version = self._engine.weight_version
                self._unusable_requests.clear()
            self._lease.report.unusable_version = self._unusable_version
            failed, limit, how = self._unusable_requests, MAX_UNUSABLE_REQUESTS, " with weights that work elsewhere"
        failed.add(running.assignment.request_id)
        if len(failed) < limit:
            return
        if is_unusable:
            failed.clear()  # it takes as many again before engines are compared again
            if not await self._weights_work():
                return
        raise EngineError(
            f"rollouts of {limit} requests have failed in a row{how}, so that the engine is most likely faulty; "
            f"the last error: {_describe(error)}"
        ) from error

    async def _weights_work(self) -> bool:
        """Return whether another engine has sampled with these weights, and all of its output was finite.

        Otherwise, the weights are the likely cause, maybe with some prompts only, and every engine would fail, and be
        restarted, one after another.
        """
        version, engines = self._engine.weight_version, await retry_async(self._job_store.engines.engines)
        return any(report.sampled_version == version != report.unusable_version for report, _ in engines.values())

    async def _execute(self, running: RunningRollout, engine_id: str) -> None:
        assignment = running.assignment
        if running.order.request:
            self._requests.add(assignment.entry_id, running.order.request)
        if assignment.is_first:
            request = await self._requests.get(assignment.entry_id)
            done = cancelled = False  # a later cancellation has an order of its own
        else:
            request, (done, cancelled) = await asyncio.gather(
                self._requests.get(assignment.entry_id),
                self._job_store.rollouts.start_state(*assignment.key),
            )
        if request is None:  # it was answered in the meantime
            await self._acknowledge(running, engine_id)
            return
        running.request = request
        if self._lease.report.draining:
            await self._return(running, engine_id, "draining")
            return
        if done:
            await self._acknowledge(running, engine_id)
            return
        oldest, resumed = assignment.oldest_version, None
        may_have_tokens = assignment.resumed or (request.stream and not assignment.is_first)
        if may_have_tokens and can_continue(request.sampling):
            [resumed] = await self._job_store.rollouts.partials([(request, assignment.sample)])
        if resumed is not None and _is_older(resumed, oldest):
            resumed = None
        if cancelled:
            running.stop(FinishReason.CANCELLED)
        self._start_deadline(running, request)
        if not await self._prepare(running, request):
            await self._return(running, engine_id, "no weight version that may sample it is served")
            return
        await self._produce(running, request, resumed, engine_id)

    def _start_deadline(self, running: RunningRollout, request: RolloutRequest) -> None:
        if request.deadline_seconds is None:
            return
        now = time.time() + self._clock_offset
        remaining = arrival_time(running.assignment.entry_id) + request.deadline_seconds - now
        loop = asyncio.get_running_loop()
        running.deadline = loop.call_later(max(0.0, remaining), running.stop, FinishReason.DEADLINE)

    async def _prepare(self, running: RunningRollout, request: RolloutRequest) -> bool:
        """Wait for the problem's history; False if no weight version that may sample the rollout is served."""
        pinned = request.weight_version
        if pinned is not None:
            served = await self._weights.serves(pinned)
        else:
            served = await self._weights.serves_since(running.assignment.oldest_version)
        # Set only now, because a weight update waits for all pinned rollouts.
        running.pinned_version = pinned if served else None
        if served and not running.stopped.is_set():
            with self._prefetcher.in_use(request.problem):
                await self._prefetcher.wait_ready(request.problem)
            # Loading an adapter does not wait for pinned rollouts.
            served = pinned is None or self._engine.weight_version == pinned
        return served

    async def _produce(
        self,
        running: RunningRollout,
        request: RolloutRequest,
        resumed: Partial | None,
        engine_id: str,
    ) -> None:
        """Sample the rollout, then record it, or checkpoint it if another engine continues it.

        *resumed* is what another engine has sampled of it.
        """
        prefix = resumed or request.prefix
        sample, order_id = running.assignment.sample, running.order.order_id
        stream: TokenStream | None = None
        if request.stream and can_continue(request.sampling):
            num_streamed = 0 if resumed is None else resumed.num_tokens
            stream = TokenStream(engine_id, order_id, request, sample, num_streamed)
        generated: GenerationResult | None = None
        reason: FinishReason | None
        refusal: dict[str, bool] = {}  # left out of other rollouts, as every field with its default value is
        try:
            _check_age(prefix, running.assignment.oldest_version)
            with self._prefetcher.in_use(request.problem):
                generated = await self._generate(running, request, prefix, stream)
            reason, detail = generated.finish_reason or running.finish_reason, ""
        except AdmissionError as error:
            reason, detail = FinishReason.FAILED, str(error)
            refusal["refused"] = True
        tokens = resumed if stream is not None else None
        if generated is not None:
            tokens = generated.tokens
        if reason is None:  # another engine continues the rollout
            if tokens is not None and stream is not None:
                await retry_async(self._token_streams.complete, stream, tokens)
            elif tokens is not None:
                await self._job_store.rollouts.checkpoint(request, sample, tokens)
            return
        rollout = Rollout.from_request(
            request,
            sample,
            tokens,
            reason,
            detail=detail,
            **refusal,
            num_decoding_steps=generated.num_decoding_steps if generated else 0,
            num_draft_tokens=generated.num_draft_tokens if generated else 0,
            num_accepted_tokens=generated.num_accepted_tokens if generated else 0,
            draft_tokens_by_source=generated.draft_tokens_by_source if generated else {},
            accepted_tokens_by_source=generated.accepted_tokens_by_source if generated else {},
            draft_sources=generated.draft_sources if generated else None,
            length_class=generated.length_class if generated else "",
            engine=engine_id,
            routed_experts=generated.routed_experts if generated else None,
            num_cached_tokens=generated.num_cached_tokens if generated else 0,
            started_at=running.started_at,
            finished_at=time.time(),
        )
        await self._job_store.rollouts.finish(request, rollout, engine=engine_id, order=order_id)
        if generated is not None and generated.num_decoding_steps:
            self._failed_requests.clear()
            if generated.tokens.logprobs:  # without them, NaN would not have been noticed
                self._unusable_requests.clear()
                self._lease.report.sampled_version = generated.tokens.weight_spans[-1].weight_version

    async def _generate(
        self, running: RunningRollout, request: RolloutRequest, prefix: Partial | None, stream: TokenStream | None
    ) -> GenerationResult:
        with nullcontext() if stream is None else self._token_streams.open(stream):
            return await self._engine.generate(
                request,
                running.assignment.sample,
                images=await self._load_images(request),
                prefix=prefix,
                on_partial=partial(self._checkpoints.add, running.key, request),
                # Tokens that are streamed need no other checkpoints.
                partial_interval=self._checkpoint_tokens if stream is None else 0,
                on_tokens=None if stream is None else partial(self._token_streams.add, stream),
                stop_event=running.stopped,
            )

    async def _fail(self, running: RunningRollout, engine_id: str, error: Exception) -> None:
        """End a rollout as failed because of an error that concerns it alone.

        If not even that can be recorded, the coordinator is to do so.
        """
        request, assignment = running.request, running.assignment
        sample, detail = assignment.sample, _describe(error)
        expected = isinstance(error, UnusableOutputError)
        logger.error("Rollout %d of %s has failed: %s", sample, assignment.request_id, detail, exc_info=not expected)
        try:
            if request is None:
                raise error
            tokens = None
            if request.stream:  # what was streamed remains the beginning of the rollout
                [tokens] = await self._job_store.rollouts.partials([(request, sample)])
            rollout = Rollout.from_request(
                request,
                sample,
                tokens,
                FinishReason.FAILED,
                detail=detail,
                engine=engine_id,
                started_at=running.started_at,
                finished_at=time.time(),
            )
            await self._job_store.rollouts.finish(request, rollout, engine=engine_id, order=running.order.order_id)
        except Exception as failure:
            if ends_engine(failure, self._engine):
                raise
            if failure is not error:
                logger.exception("The failure of rollout %d of %s cannot be recorded.", sample, assignment.request_id)
            await self._return(running, engine_id, detail, failed=True)

    async def _load_images(self, request: RolloutRequest) -> list[Any]:
        """Return the decoded images of a request.

        Raises:
            AdmissionError: an image cannot be read or decoded, for whatever reason: it concerns this request alone.
            redis.RedisError: the server cannot be used.
        """
        try:
            return [await self._images.get(digest) for digest in request.images]
        except AdmissionError:
            raise
        except Exception as error:
            if isinstance(error, redis.RedisError) and concerns_server(error):
                raise
            raise AdmissionError(f"an image of the prompt cannot be read: {error}") from error

    async def _acknowledge(self, running: RunningRollout, engine_id: str) -> None:
        """Remove an assignment that needs no work from the inbox."""
        await self._job_store.assignments.acknowledge(engine_id, running.order.order_id)

    async def _return(self, running: RunningRollout, engine_id: str, reason: str, *, failed: bool = False) -> None:
        """Return an assignment to the coordinator, which assigns it again, or ends the rollout if it has *failed*."""
        # First, because the coordinator may assign the rollout to this engine again at once, and that assignment must
        # not be taken for a repetition.
        self._running.discard(running)
        await self._job_store.assignments.return_assignment(
            engine_id, running.order.order_id, running.assignment, reason, failed=failed
        )


def _describe(error: Exception) -> str:
    """Return why a rollout has failed, for the client."""
    if isinstance(error, EngineError | UnusableOutputError):
        return str(error)
    if _is_too_large(error):
        return (
            f"its result is larger than Redis accepts ({error}); request less of it, such as fewer tokens, "
            "log-probabilities or routed experts, or raise Redis' proto-max-bulk-len"
        )
    return f"the engine cannot produce or record it: {type(error).__name__}: {error}"


def _is_too_large(error: Exception) -> bool:
    """Return whether Redis has refused a result because of its size."""
    return isinstance(error, redis.ResponseError) and "bulk length" in str(error)


def _is_older(tokens: Partial, version: int) -> bool:
    """Return whether a weight version before *version* has sampled some of the tokens."""
    oldest = tokens.oldest_weight_version
    return oldest is not None and oldest < version


def _check_age(prefix: Partial | None, oldest_version: int) -> None:
    """Check that a request's prefix is not too stale.

    Raises:
        AdmissionError: a weight version before *oldest_version* has sampled some of its tokens.
    """
    if prefix is not None and _is_older(prefix, oldest_version):
        raise AdmissionError(
            f"its prefix was sampled with weight version {prefix.oldest_weight_version}, but max_staleness requires "
            f"version {oldest_version} or later by now; sample it from the beginning, or raise max_staleness"
        )


class RequestCache:
    """Reads each request once for all its samples; recently used requests are kept."""

    def __init__(self, job_store: JobStore, defaults: Sampling) -> None:
        """Create an empty cache. *defaults* apply to what a request leaves open."""
        self._job_store, self._defaults = job_store, defaults
        self._reads: OrderedDict[str, asyncio.Future[RolloutRequest | None]] = OrderedDict()

    async def get(self, entry: str) -> RolloutRequest | None:
        """Return the request in an entry of the request stream; None once it has been answered."""
        read = self._reads.get(entry)
        if read is None:
            read = asyncio.ensure_future(self._read(entry))
            self._keep(entry, read)
        else:
            self._reads.move_to_end(entry)
        return read.result() if read.done() else await asyncio.shield(read)

    def add(self, entry: str, encoded: bytes) -> None:
        """Keep a request that has arrived with an order."""
        request = decode(encoded)
        if isinstance(request, RolloutRequest) and entry not in self._reads:
            known: asyncio.Future[RolloutRequest | None] = asyncio.get_running_loop().create_future()
            known.set_result(request.with_defaults(self._defaults))
            self._keep(entry, known)

    def _keep(self, entry: str, read: asyncio.Future[RolloutRequest | None]) -> None:
        self._reads[entry] = read
        while len(self._reads) > MAX_CACHED_REQUESTS:
            self._reads.popitem(last=False)

    async def _read(self, entry: str) -> RolloutRequest | None:
        request = await self._job_store.requests.read(entry)
        return request.with_defaults(self._defaults) if request is not None else None
