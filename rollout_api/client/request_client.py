"""A client for processes that send many independent requests, such as servers."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace

from typing_extensions import Self

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.connection import CLOSED, JobConnection
from rollout_api.client.job_info import JobInfo, PreparedRequest, find_job
from rollout_api.client.job_monitor import JobMonitor
from rollout_api.client.job_pauser import JobPauser
from rollout_api.client.open_request import TokensCallback
from rollout_api.client.prompts import Prompt
from rollout_api.client.request_sender import RequestSender
from rollout_api.client.results import Results
from rollout_api.client.server_records import AdapterNames, IdempotencyKeys, TurnRecords
from rollout_api.client.weight_publisher import WeightPublisher
from rollout_api.client.weight_transfer import WeightTransfer
from rollout_api.errors import RolloutClientError
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import Rollout
from rollout_api.protocol.status import NO_STATUS, CoordinatorStatus
from rollout_api.redis_client.client_connection import RedisTarget

CLIENT_NAME = "requests"
"""Name under which all these clients send requests."""
DEFAULT_KEEP_SECONDS = 600
"""Default time to keep the rollouts of a request."""


@dataclass(frozen=True)
class _Session:
    """What an open client has."""

    job: JobInfo
    results: Results
    turns: TurnRecords
    adapters: AdapterNames
    idempotency_keys: IdempotencyKeys
    publisher: WeightPublisher
    transfer: WeightTransfer
    pauser: JobPauser
    monitor: JobMonitor
    monitoring: asyncio.Task[None]


class RequestClient(JobConnection):
    """A connection to one job that requests rollouts by id: ``async with RequestClient.connect(…) as client``.

    Its rollouts stay in Redis for a while, under the id of their request. A call with the same id therefore returns the
    same rollouts, in every process that is connected to the job, and also if the process that made the first call has
    ended. A trainer that samples in steps uses :class:`rollout_api.AsyncRolloutClient`.
    """

    def __init__(
        self, target: RedisTarget, job: str | None, uid: str | None, timeout: float, reconnect_timeout: float
    ) -> None:
        super().__init__(target, job, uid, timeout, reconnect_timeout)
        self._session: _Session | None = None

    @classmethod
    def connect(
        cls,
        redis: RedisTarget,
        job: str | None = None,
        *,
        uid: str | None = None,
        timeout: float = 60.0,
        reconnect_timeout: float = 120.0,
    ) -> Self:
        """Return a client for a job. Nothing is sent before ``async with`` or :meth:`open`.

        Args:
            redis: URL of the job's Redis, or a client whose settings are copied.
            job: ``namespace/name`` of the job.
            uid: uid of the job, instead of *job*.
            timeout: seconds to wait for the job to appear.
            reconnect_timeout: seconds that Redis may be unreachable before requests fail.

        Raises:
            InvalidRequestError: an argument cannot be used.
        """
        return cls(redis, job, uid, timeout, reconnect_timeout)

    async def open(self) -> Self:
        """Wait for the job and read its description. ``async with`` does this on entry.

        Raises:
            JobNotFoundError: the job did not appear in time.
            JobEndedError: the job has ended.
            VersionMismatchError: the job uses another version of the protocol.
            RedisUnreachableError: Redis did not answer for half a minute, or for *reconnect_timeout*.
            RedisRefusedError: the password is wrong, or the user lacks permissions.
        """
        self._check_not_closed()
        try:
            job, ending = await find_job(
                self._redis, self._policy, CLIENT_NAME, self._job_name, self._uid, self._timeout
            )
            if ending is not None:
                raise ending
            keys = MessageKeys(job.uid)
            sender = RequestSender(self._redis, keys, self._policy)
            results = Results(self._redis, job, CLIENT_NAME, sender, self._policy)
            await results.open()
        except BaseException:
            await self._redis.aclose()
            raise
        publisher = WeightPublisher(self._redis, keys, sender, self._policy)
        monitor = JobMonitor(self._redis, job, self._job_name, results)
        self._session = _Session(
            job=job,
            results=results,
            turns=TurnRecords(self._redis, keys, self._policy),
            adapters=AdapterNames(self._redis, keys, self._policy),
            idempotency_keys=IdempotencyKeys(self._redis, keys, self._policy),
            publisher=publisher,
            transfer=WeightTransfer(self._redis, keys, sender, self._policy, publisher),
            pauser=JobPauser(self._redis, job, sender, self._policy),
            monitor=monitor,
            monitoring=asyncio.create_task(monitor.run(), name=f"monitor of job {job.name}"),
        )
        return self

    async def close(self) -> None:
        """Disconnect. Requests stay in the job, and their rollouts are kept; calls that wait for them fail."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await cancel_and_wait(session.monitoring)
            await session.results.close(RolloutClientError(CLOSED))
        await self._redis.aclose()

    @property
    def _connected(self) -> _Session:
        if self._session is None:
            raise self._not_connected()
        return self._session

    @property
    def job(self) -> JobInfo:
        """Description of the job.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.job

    @property
    def turns(self) -> TurnRecords:
        """Records of the turns of conversations.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.turns

    @property
    def adapters(self) -> AdapterNames:
        """Names of adapters.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.adapters

    @property
    def idempotency_keys(self) -> IdempotencyKeys:
        """The requests that idempotency keys belong to.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.idempotency_keys

    @property
    def publisher(self) -> WeightPublisher:
        """Publishes weights to the job.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.publisher

    @property
    def transfer(self) -> WeightTransfer:
        """Lets the engines receive weights as vLLM's own server does.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.transfer

    @property
    def pauser(self) -> JobPauser:
        """Pauses and resumes the job.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.pauser

    @property
    def status(self) -> CoordinatorStatus:
        """Status of the job, about a second old; empty while no coordinator runs.

        A job of another version may lack some of its keys, which are therefore best read with ``get``.
        """
        status = None if self._session is None else self._session.monitor.status
        return status or NO_STATUS

    @property
    def num_awaited(self) -> int:
        """Number of rollouts that this client awaits."""
        return 0 if self._session is None else self._session.results.num_awaited

    async def rollouts(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        keep_seconds: int = DEFAULT_KEEP_SECONDS,
        step: int | None = None,
        trajectory_id: str | None = None,
        turn: int = 0,
        on_tokens: TokensCallback | None = None,
    ) -> list[Rollout]:
        """Return the rollouts of a prompt, ordered by sample.

        Args:
            prompt: the prompt and its settings.
            request_id: id of the request. A call with the same id and prompt returns the same rollouts. Default: a new
                id; the request is then cancelled if this call is.
            keep_seconds: seconds to keep all rollouts after the last one has ended.
            step: number of the training step.
            trajectory_id: id of the multi-turn trajectory that the prompt continues.
            turn: number of the turn within its trajectory.
            on_tokens: called with a sample and its next tokens while they are sampled. The rollout begins with them,
                and may have further tokens.

        Raises:
            InvalidRequestError: the job cannot serve the prompt; nothing was sent.
            RequestRefusedError: the job refused the request, or no longer keeps its rollouts.
            UnreadableResultError: a rollout cannot be decoded, or does not begin with the tokens that were streamed,
                because Redis has lost them.
            JobEndedError: the job has ended.
            RedisUnreachableError: Redis was unreachable for too long.
        """
        prepared = self.prepare(
            prompt,
            request_id=request_id,
            keep_seconds=keep_seconds,
            step=step,
            trajectory_id=trajectory_id,
            turn=turn,
            stream=on_tokens is not None,
        )
        return await self.receive(prepared, may_be_answered=bool(request_id), on_tokens=on_tokens)

    def prepare(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        keep_seconds: int = DEFAULT_KEEP_SECONDS,
        step: int | None = None,
        trajectory_id: str | None = None,
        turn: int = 0,
        stream: bool = False,
        identity: bytes | None = None,
        traceparent: str | None = None,
    ) -> PreparedRequest:
        """Validate a prompt and return the request for it, without sending it. See :meth:`rollouts`.

        Args:
            stream: whether the tokens can be received while they are sampled.
            identity: what must be equal for a call with the same *request_id* to be a repetition; default: the prompt
                and its settings.
            traceparent: span of the caller, as in the HTTP header of W3C Trace Context; default: the active
                OpenTelemetry span, if there is one.

        Raises:
            InvalidRequestError: the job cannot serve the prompt.
        """
        return self.job.prepare(
            replace(prompt, trajectory_id=trajectory_id or prompt.trajectory_id, turn=turn or prompt.turn),
            request_id or uuid.uuid4().hex,
            client=CLIENT_NAME,
            where=f"request {request_id}" if request_id else "request",
            step=step,
            keep_seconds=keep_seconds,
            stream=stream,
            identity=identity,
            traceparent=traceparent,
        )

    async def receive(
        self,
        request: PreparedRequest,
        *,
        may_be_answered: bool,
        on_tokens: TokensCallback | None = None,
        may_wait: bool = True,
    ) -> list[Rollout]:
        """Send a request, and return its rollouts, ordered by sample. See :meth:`rollouts`.

        Args:
            request: the request.
            may_be_answered: whether it may have been sent before. If not, it is cancelled with this call.
            on_tokens: receives tokens while they are sampled.
            may_wait: whether the request may wait in Redis while the job has no room for it.

        Raises:
            JobFullError: the job has no room, and the request may not wait.
        """
        return await self._connected.results.rollouts(
            request, may_be_answered=may_be_answered, on_tokens=on_tokens, may_wait=may_wait
        )
