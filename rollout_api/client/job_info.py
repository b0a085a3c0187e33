"""The description of a job, which a client looks up by name and validates requests against before sending them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, cast

import redis.asyncio
from pydantic import ValidationError
from typing_extensions import Self

from rollout_api.client.prompts import Prompt, images_by_hash, overrides_of, token_list
from rollout_api.errors import InvalidRequestError, JobEndedError, JobNotFoundError, VersionMismatchError
from rollout_api.manifest.field_types import first_error
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_api.protocol.messages import SCHEMA_VERSION, Partial, RolloutRequest, encode
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redis_client.client_connection import server_name
from rollout_api.redis_client.retry import ClientRetryPolicy

_LOOKUP_INTERVAL_S = 0.25
_MAX_LISTED_JOBS = 20
_REQUEST_DEFAULTS = {name: field.default for name, field in RolloutRequest.model_fields.items()}
_NO_OVERRIDES = Sampling()
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?![0-9a-f])")


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is ready to be sent."""

    request_id: str
    """Request id."""
    n: int
    """Number of samples."""
    data: bytes
    """Encoded request."""
    max_tokens: int
    """Largest number of tokens of the prompt and its responses together, without those of images."""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Images of the prompt by hash."""


@dataclass(frozen=True)
class JobInfo:
    """Description of a job, as its coordinator publishes it."""

    uid: str
    """Uid of the job."""
    name: str
    """``namespace/name``, or the uid if the client connected by uid."""
    model: str
    """URI of the model."""
    vocabulary: int
    """Number of token ids."""
    max_model_len: int
    """Maximum number of tokens of a prompt and its response together."""
    max_request_bytes: int
    """Maximum size of an encoded request, in bytes."""
    max_image_bytes: int
    """Maximum size of the encoded images of a request, in bytes; 0 if the job's version supports no images."""
    max_rollouts: int
    """Maximum number of open rollouts of all clients."""
    sampling: Mapping[str, Any]
    """The job's defaults for the settings of :class:`Sampling`."""
    known_sampling: Set[str]
    """Names of the settings that the job's version has."""
    history: str
    """``namespace/name`` of the job's history."""
    has_separate_history_redis: bool
    """Whether the history is on a separate Redis server instead of the job's."""

    @classmethod
    def parse(cls, uid: str, name: str, description: Mapping[str, str]) -> Self:
        """Parse the fields of the job's hash in Redis.

        Raises:
            VersionMismatchError: the job uses another version of the protocol.
        """
        version = description.get("version", "")
        if version != str(SCHEMA_VERSION):
            is_newer = version.isdigit() and int(version) > SCHEMA_VERSION
            remedy = "upgrade das-rollout in the trainer" if is_newer else "upgrade the job's image"
            raise VersionMismatchError(
                f"job {name} uses version {version or '?'} of the protocol, and this client version {SCHEMA_VERSION}; "
                f"{remedy}"
            )
        try:
            sampling = Sampling.model_validate_json(description["sampling"], extra="ignore")
            return cls(
                uid=uid,
                name=name,
                model=description["model"],
                vocabulary=int(description["vocabulary"]),
                max_model_len=int(description["max_model_len"]),
                max_request_bytes=int(description["max_request_bytes"]),
                max_image_bytes=int(description.get("max_image_bytes", 0)),
                max_rollouts=int(description["max_rollouts"]),
                sampling=sampling.model_dump(),
                known_sampling=sampling.model_fields_set,
                history=description["history"],
                has_separate_history_redis=description.get("history_redis") == "own",
            )
        except (KeyError, ValueError) as error:
            raise VersionMismatchError(
                f"the description of job {name} in Redis cannot be parsed ({type(error).__name__}: {error}); do "
                "trainer and job run the same version of das-rollout?"
            ) from None

    def prepare(
        self,
        prompt: Prompt,
        id_prefix: str,
        *,
        client: str,
        where: str,
        step: int | None = None,
        keep_seconds: int | None = None,
        stream: bool = False,
        identity: bytes | None = None,
        traceparent: str | None = None,
    ) -> PreparedRequest:
        """Validate a prompt and return the request for it.

        The request id consists of *id_prefix* and a hash of the request. A restarted trainer thus sends the same ids,
        and one whose prompts have changed does not receive the rollouts of the old ones.

        Args:
            prompt: the prompt.
            id_prefix: beginning of the request id.
            client: name of the client.
            where: name of the prompt in errors.
            step: number of the training step.
            keep_seconds: seconds to keep the rollouts; default: until the client releases them.
            stream: whether the tokens can be read while they are sampled.
            identity: what is hashed instead of the request.
            traceparent: span of the caller; default: the active OpenTelemetry span, if there is one.

        Raises:
            InvalidRequestError: the job cannot serve the prompt; the message says why, and what to do.
        """
        bounds = {"min_weight_version": prompt.min_weight_version, "max_staleness": prompt.max_staleness}
        tokens = token_list(prompt.token_ids, where)
        image_hashes, images = images_by_hash(prompt.images, where)
        self.check_images(images, where)
        overrides, sampling = self._sampling(prompt.sampling, where)
        self._check_tokens(tokens, sampling, prompt.prefix, where)
        if sampling.n > self.max_rollouts:
            raise InvalidRequestError(
                f"{where}: n = {sampling.n}, but the job allows at most {self.max_rollouts} open rollouts "
                "(spec.queue.maxRollouts); reduce n"
            )
        # The hash contains the fields that the rollouts depend on, and no others.
        hashed: dict[str, Any] = {
            "problem_id": prompt.problem_id,
            "purpose": prompt.purpose,
            "weight_version": prompt.weight_version,
            **bounds,
            "trajectory_id": prompt.trajectory_id,
            "turn": prompt.turn,
            "prefix": prompt.prefix,
            "images": image_hashes,
            "image_positions": prompt.image_positions,
        }
        not_hashed: dict[str, Any] = {
            "step": step,
            "priority": prompt.priority,
            "deadline_seconds": prompt.deadline_seconds,
            "draft_mode": prompt.draft_mode,
            "draft_budget": prompt.draft_budget,
            "half_logprobs": prompt.half_logprobs,
            "keep_seconds": keep_seconds,
            "traceparent": traceparent or current_traceparent(),
            "stream": stream,
        }
        ids: dict[str, Any] = {"job_uid": self.uid, "request_id": id_prefix, "reply_to": client}
        try:
            draft = RolloutRequest(**ids, prompt_token_ids=tokens, sampling=overrides, **_without_defaults(hashed))
            hashed_data = encode(draft) if identity is None else identity
            request_id = f"{id_prefix}-{blake2b(hashed_data, digest_size=6).hexdigest()}"
            fields = {**draft.model_dump(exclude_unset=True), **_without_defaults(not_hashed), "request_id": request_id}
            request = RolloutRequest.model_validate(fields)
        except ValidationError as invalid:
            raise InvalidRequestError(f"{where}: {first_error(invalid, RolloutRequest)}") from None
        data = encode(request)
        if len(data) > self.max_request_bytes:
            raise InvalidRequestError(
                f"{where}: the encoded request has {len(data)} bytes, but the job allows at most "
                f"{self.max_request_bytes} (spec.queue.maxRequestBytes); shorten the prompt or raise the limit"
            )
        return PreparedRequest(request_id, sampling.n, data, len(tokens) + sampling.n * sampling.max_tokens, images)

    @cached_property
    def _default_sampling(self) -> Sampling:
        """The job's sampling settings."""
        return Sampling.model_validate(self.sampling)

    def _sampling(self, given: Sampling | Mapping[str, Any], where: str) -> tuple[Sampling, Sampling]:
        """Return the overrides to send, and the settings that result from them and the job's defaults."""
        overrides = overrides_of(given)
        if "min_tokens" in overrides:
            # The receiver validates min_tokens against max_tokens before it knows the job's default for the latter.
            overrides.setdefault("max_tokens", self.sampling["max_tokens"])
        try:
            if not overrides:
                return _NO_OVERRIDES, self._default_sampling
            sent, sampling = Sampling.model_validate(overrides), Sampling.model_validate({**self.sampling, **overrides})
        except ValidationError as invalid:
            raise InvalidRequestError(f"{where}: sampling.{first_error(invalid, Sampling)}") from None
        # The job would not answer a request with a setting that it cannot decode.
        unknown = sent.model_fields_set - self.known_sampling
        if needed := sorted(name for name in unknown if getattr(sent, name) != getattr(_NO_OVERRIDES, name)):
            raise InvalidRequestError(
                f"{where}: the version of the job does not support sampling.{needed[0]}; upgrade the job's image"
            )
        if unknown:
            sent = Sampling.model_validate(sent.model_dump(include=sent.model_fields_set - unknown))
        return sent, sampling

    def check_images(self, images: Mapping[str, bytes], where: str) -> None:
        """Check that the job takes all these images in one request.

        Raises:
            InvalidRequestError: it does not; the message says what to do.
        """
        size = sum(map(len, images.values()))
        if size and not self.max_image_bytes:
            raise InvalidRequestError(f"{where}: the version of the job supports no images; upgrade the job's image")
        if size > self.max_image_bytes:
            raise InvalidRequestError(
                f"{where}: its images have {size} bytes, but the job allows at most {self.max_image_bytes} "
                "(spec.queue.maxImageBytes); scale the images down, send fewer, or raise the limit"
            )

    def _check_tokens(self, tokens: list[int], sampling: Sampling, prefix: Partial | None, where: str) -> None:
        if not tokens:
            raise InvalidRequestError(f"{where}: no token ids")
        if len(tokens) + sampling.max_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"{where}: {len(tokens)} prompt tokens and max_tokens = {sampling.max_tokens} exceed the job's "
                f"{self.max_model_len} (spec.engine.maxModelLen); shorten the prompt or reduce max_tokens"
            )
        for what, ids in (("", tokens), ("prefix: ", prefix.token_ids if prefix is not None else [])):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                position = next(index for index, token in enumerate(ids) if not 0 <= token < self.vocabulary)
                raise InvalidRequestError(
                    f"{where}: {what}token id {ids[position]} at position {position} is not in the vocabulary of "
                    f"{self.model}, which has {self.vocabulary} tokens; was the prompt encoded with its tokenizer?"
                )
        if problem := sampling.kept_tokens_problem():
            raise InvalidRequestError(f"{where}: sampling.kept_tokens: {problem}")
        if outside := sampling.tokens_outside(self.vocabulary):
            setting, token = next(iter(outside.items()))
            raise InvalidRequestError(
                f"{where}: sampling.{setting}: token id {token} is not in the vocabulary of {self.model}, which has "
                f"{self.vocabulary} tokens; remove it"
            )


async def find_job(
    client: redis.asyncio.Redis,
    policy: ClientRetryPolicy,
    name: str,
    job_name: str | None,
    uid: str | None,
    timeout: float,
) -> tuple[JobInfo, JobEndedError | None]:
    """Wait for a job to appear.

    If the job of the given name has ended, another one may be about to replace it. The function waits for that one,
    unless the old job still has results for this client.

    Args:
        client: connection to Redis.
        policy: how failing commands are retried.
        name: name of the client.
        job_name: ``namespace/name`` of the job.
        uid: uid of the job, if it was given instead of the name.
        timeout: seconds to wait.

    Returns:
        The job, and the error to raise for new requests if it has ended.

    Raises:
        JobNotFoundError: the job did not appear in time.
        JobEndedError: only a job that has ended was found.
        VersionMismatchError: the job uses another version of the protocol.
        RedisUnreachableError: Redis cannot be reached.
        RedisRefusedError: Redis refuses this client.
    """
    action, deadline = "look up the job", time.monotonic() + timeout
    while True:
        found: Any = uid
        if job_name is not None:
            found = await policy.run(lambda: client.get(job_uid_key(job_name)), action=action)
            found = None if found is None else str(found, "utf-8")
        ending: JobEndedError | None = None
        if found is not None:
            keys = MessageKeys(found)
            description = await _read_hash(client, policy, keys.job)
            if description:
                job = JobInfo.parse(found, job_name or found, description)
                ending = ended_error(job.name, description.get("state"), description.get("reason"))
                kept: Any = await policy.run(partial(client.scard, keys.unreleased(name)), action=action)
                if ending is None or uid is not None or kept:
                    return job, ending
        if time.monotonic() > deadline:
            raise ending or await _not_found_error(client, policy, job_name or str(uid), timeout)
        await asyncio.sleep(_LOOKUP_INTERVAL_S)


async def _read_hash(client: redis.asyncio.Redis, policy: ClientRetryPolicy, key: str) -> dict[str, str]:
    found: Any = await policy.run(lambda: client.hgetall(key), action="look up the job")
    return {name.decode(): value.decode() for name, value in found.items()}


async def _first_keys(client: redis.asyncio.Redis, pattern: str) -> list[bytes]:
    """Return some keys that match *pattern*: no more than an error message should list."""
    found: list[bytes] = []
    async for key in client.scan_iter(pattern, count=1000):
        found.append(key)
        if len(found) >= _MAX_LISTED_JOBS:
            break
    return found


async def _not_found_error(
    client: redis.asyncio.Redis, policy: ClientRetryPolicy, name: str, timeout: float
) -> JobNotFoundError:
    prefix = job_uid_key("")
    known = await policy.run(lambda: _first_keys(client, f"{prefix}*"), action="list jobs")
    names = ", ".join(sorted(key.decode().removeprefix(prefix) for key in known))
    jobs = f"jobs on this server: {names}" if names else "this server has no jobs"
    return JobNotFoundError(
        f"job {name} did not appear within {timeout:.0f} s at {server_name(client)}; {jobs}. Is it running, and is "
        "this its server?"
    )


def ended_error(name: str, state: str | None, reason: str | None) -> JobEndedError | None:
    """Return the error to raise for a job that has ended; None if *state* says that it still answers requests."""
    if state not in ("closed", "failed"):
        return None
    return JobEndedError(f"job {name} is {state}{f': {reason}' if reason else ''}; it answers no more requests")


def parse_status(data: bytes | None) -> CoordinatorStatus | None:
    """Parse the job's status; None while no coordinator runs."""
    status = json.loads(data) if data else None
    return cast(CoordinatorStatus, status) if isinstance(status, dict) else None


def _without_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that have their default values: messages stay small."""
    return {name: value for name, value in fields.items() if value != _REQUEST_DEFAULTS[name]}


def current_traceparent() -> str | None:
    """Return the ``traceparent`` of the active span; None if there is none.

    This never imports OpenTelemetry: a process that has an active span has done so itself.
    """
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers.get("traceparent")


def parse_traceparent(header: str) -> str | None:
    """Return the HTTP header ``traceparent`` in version 00 of its format; None if it is missing or invalid."""
    parsed = _HEADER.match(header)
    return None if parsed is None else "-".join(["00", *parsed.groups()])
