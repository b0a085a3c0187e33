"""A client for processes that send many independent requests, such as servers."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace

from typing_extensions import Self

from rollout_api.client.connection import JobConnection, JobSession
from rollout_api.client.job_channel import JobChannel
from rollout_api.client.job_info import PreparedRequest
from rollout_api.client.job_state import JobPauser
from rollout_api.client.open_request import TokensCallback
from rollout_api.client.prompts import Prompt
from rollout_api.client.server_records import AdapterNames, IdempotencyKeys, TurnRecords
from rollout_api.client.stored_images import StoredImages
from rollout_api.client.weight_publisher import WeightPublisher
from rollout_api.client.weight_transfer import TransferPublisher
from rollout_api.errors import JobEndedError, JobNotFoundError
from rollout_api.protocol.messages import Rollout
from rollout_api.redis_client.client_connection import RedisTarget

logger = logging.getLogger(__name__)

CLIENT_NAME = "requests"
"""Name under which all these clients send requests."""
DEFAULT_KEEP_SECONDS = 600
"""Default time to keep the rollouts of a request."""


class RequestClient(JobConnection):
    """A connection to one job that requests rollouts by id: ``async with RequestClient.connect(…) as client``.

    Its rollouts stay in Redis for a while, under the id of their request. A call with the same id therefore returns the
    same rollouts, in every process that is connected to the job, and also if the process that made the first call has
    ended. A trainer that samples in steps uses :class:`rollout_api.AsyncRolloutClient`.
    """

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
        return cls(redis, job, uid, CLIENT_NAME, timeout, reconnect_timeout)

    @classmethod
    async def wait_for_job(
        cls, redis: RedisTarget, job: str | None = None, *, uid: str | None = None, log_interval: float = 10.0
    ) -> Self:
        """Return an open client for a job, however long the job takes to appear.

        If the job *job* has ended, another one with its name may follow, which is waited for.

        Args:
            redis: as for :meth:`connect`.
            job: ``namespace/name`` of the job.
            uid: uid of the job, instead of *job*.
            log_interval: seconds between two messages that the client waits.

        Raises:
            JobEndedError: the job *uid* has ended.
            InvalidRequestError, VersionMismatchError, RedisUnreachableError, RedisRefusedError: as for :meth:`connect`
                and :meth:`open`.
        """
        while True:
            try:
                return await cls.connect(redis, job, uid=uid, timeout=log_interval).open()
            except JobNotFoundError as error:
                logger.warning("Waiting: %s", error)
            except JobEndedError as error:
                if uid is not None:
                    raise
                logger.warning("Waiting for the next job with this name: %s", error)

    def _make_session(self, channel: JobChannel, ending: JobEndedError | None) -> JobSession:
        if ending is not None:
            raise ending
        return JobSession(channel, self._job_name)

    @property
    def turns(self) -> TurnRecords:
        """Records of the turns of conversations."""
        return TurnRecords(self._connected.channel)

    @property
    def adapters(self) -> AdapterNames:
        """Names of adapters."""
        return AdapterNames(self._connected.channel)

    @property
    def idempotency_keys(self) -> IdempotencyKeys:
        """The requests that idempotency keys belong to."""
        return IdempotencyKeys(self._connected.channel)

    @property
    def images(self) -> StoredImages:
        """Images of prompts."""
        return StoredImages(self._connected.channel)

    @property
    def publisher(self) -> WeightPublisher:
        """Publishes weights to the job."""
        return self._connected.publisher

    @property
    def transfer(self) -> TransferPublisher:
        """Lets the engines receive weights as vLLM's own server does."""
        return self._connected.transfer

    @property
    def pauser(self) -> JobPauser:
        """Pauses and resumes the job."""
        return self._connected.pauser

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
            JobFullError: the job has no room for the request or its images, and the request may not wait.
            RolloutClientError: under the same conditions as :meth:`rollouts`.
        """
        return await self._connected.results.rollouts(
            request, may_be_answered=may_be_answered, on_tokens=on_tokens, may_wait=may_wait
        )
