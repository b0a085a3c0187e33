"""What a client knows of its job: found by name, and what requests it can serve, checked before anything is sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Self

import redis.asyncio
from pydantic import ValidationError

from rollout_api.client.prompts import Prompt, overrides_of, token_list
from rollout_api.errors import InvalidRequestError, JobEndedError, JobNotFoundError, VersionMismatchError
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import MessageKeys, named
from rollout_api.protocol.messages import SCHEMA_VERSION, Partial, RolloutRequest, encode
from rollout_api.redis_client.connection import RetryPolicy, address

_LOOK_UP_S = 0.25
_SHOWN = 20


@dataclass(frozen=True)
class PreparedRequest:
    """A request as it is sent."""

    request_id: str
    n: int
    data: bytes


@dataclass(frozen=True)
class JobInfo:
    """What a client knows of its job."""

    uid: str
    name: str
    """``namespace/name``; the uid where the client connected by that."""
    model: str
    vocabulary: int
    """Number of token ids."""
    max_model_len: int
    """Most tokens of a prompt and its response together."""
    max_request_bytes: int
    max_rollouts: int
    """Most rollouts that may be asked for and not ended."""
    sampling: Mapping[str, Any]
    """Defaults of :class:`Sampling`."""
    history: str = ""
    """``namespace/name`` of its history; empty where the job is of a version that does not say it."""
    own_history_redis: bool = False
    """Whether the history lies on a server of its own, and not on the job's."""

    @classmethod
    def parse(cls, uid: str, name: str, about: Mapping[str, str]) -> Self:
        """Read the job's hash.

        Raises:
            VersionMismatchError: if it speaks another version of the protocol.
        """
        version = about.get("version", "")
        if version != str(SCHEMA_VERSION):
            newer = version.isdigit() and int(version) > SCHEMA_VERSION
            remedy = "upgrade das-rollout in the trainer" if newer else "upgrade the job's image"
            raise VersionMismatchError(
                f"job {name} speaks version {version or '?'} of the protocol, this client {SCHEMA_VERSION}; {remedy}"
            )
        try:
            return cls(
                uid=uid,
                name=name,
                model=about["model"],
                vocabulary=int(about["vocabulary"]),
                max_model_len=int(about["max_model_len"]),
                max_request_bytes=int(about["max_request_bytes"]),
                max_rollouts=int(about["max_rollouts"]),
                sampling=Sampling.model_validate_json(about["sampling"]).model_dump(),
                history=about.get("history", ""),
                own_history_redis=about.get("history_redis") == "own",
            )
        except (KeyError, ValueError) as error:
            raise VersionMismatchError(
                f"the description of job {name} in Redis cannot be read ({type(error).__name__}: {error}); do trainer "
                "and job run the same version of das-rollout?"
            ) from None

    def prepare(
        self,
        prompt: Prompt,
        name: str,
        *,
        client: str,
        where: str,
        step: int | None = None,
        trajectory_id: str | None = None,
        turn: int = 0,
    ) -> PreparedRequest:
        """The request for a prompt, if the job can serve it.

        Its id is *name* and a hash of what is asked, so that a trainer that is started again asks under the same ids,
        and one whose prompts have changed meanwhile does not get the rollouts of others.

        Args:
            prompt: what is asked.
            name: what the request id begins with.
            client: who gets the rollouts.
            where: names the prompt in errors.
            step: the trainer's.
            trajectory_id: of a multi-turn trajectory.
            turn: its turn.

        Raises:
            InvalidRequestError: naming what the job cannot serve, and what to do.
        """
        tokens = token_list(prompt.token_ids, where)
        overrides, sampling = self._sampling(prompt.sampling, where)
        self._check_tokens(tokens, sampling, prompt.prefix, where)
        if sampling.n > self.max_rollouts:
            raise InvalidRequestError(
                f"{where}: n = {sampling.n}, but the job takes {self.max_rollouts} rollouts at once "
                "(spec.queue.maxRollouts); ask for fewer"
            )
        about: dict[str, Any] = {
            "problem_id": prompt.problem_id,
            "purpose": prompt.purpose,
            "weight_version": prompt.weight_version,
            "trajectory_id": trajectory_id,
            "turn": turn,
            "prefix": prompt.prefix,
        }
        how: dict[str, Any] = {
            "step": step,
            "priority": prompt.priority,
            "deadline_seconds": prompt.deadline_seconds,
            "drafts": prompt.drafts,
            "draft_budget": prompt.draft_budget,
            "half_logprobs": prompt.half_logprobs,
        }
        ids: dict[str, Any] = {"job_uid": self.uid, "request_id": name, "reply_to": client}
        try:
            asked = RolloutRequest(**ids, prompt_token_ids=tokens, sampling=overrides, **_present(about))
            request_id = f"{name}-{blake2b(encode(asked), digest_size=6).hexdigest()}"
            request = RolloutRequest.model_validate(
                {**asked.model_dump(exclude_unset=True), **_present(how), "request_id": request_id}
            )
        except ValidationError as invalid:
            raise InvalidRequestError(f"{where}: {_first(invalid)}") from None
        data = encode(request)
        if len(data) > self.max_request_bytes:
            raise InvalidRequestError(
                f"{where}: {len(data)} bytes as encoded, but the job takes {self.max_request_bytes} "
                "(spec.queue.maxRequestBytes); shorten the prompt or raise that"
            )
        return PreparedRequest(request_id, sampling.n, data)

    def _sampling(self, given: Sampling | Mapping[str, Any], where: str) -> tuple[Sampling, Sampling]:
        """What is sent, and what it comes to with the job's defaults."""
        overrides = overrides_of(given)
        if "min_tokens" in overrides:
            # checked against max_tokens by whoever reads it, who has no other to check against
            overrides.setdefault("max_tokens", self.sampling["max_tokens"])
        try:
            return Sampling.model_validate(overrides), Sampling.model_validate({**self.sampling, **overrides})
        except ValidationError as invalid:
            raise InvalidRequestError(f"{where}: sampling.{_first(invalid)}") from None

    def _check_tokens(self, tokens: list[int], sampling: Sampling, prefix: Partial | None, where: str) -> None:
        if not tokens:
            raise InvalidRequestError(f"{where}: no token ids")
        if len(tokens) + sampling.max_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"{where}: {len(tokens)} prompt tokens and max_tokens = {sampling.max_tokens} exceed the job's "
                f"{self.max_model_len} (spec.engine.maxModelLen); shorten the prompt or lower max_tokens"
            )
        for what, ids in (("", tokens), ("prefix: ", prefix.token_ids if prefix is not None else [])):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                at = next(index for index, token in enumerate(ids) if not 0 <= token < self.vocabulary)
                raise InvalidRequestError(
                    f"{where}: {what}token id {ids[at]} at position {at} is none of {self.model}, which has "
                    f"{self.vocabulary}; was the prompt made with its tokenizer?"
                )
        if outside := sampling.outside(self.vocabulary):
            setting, token = next(iter(outside.items()))
            raise InvalidRequestError(
                f"{where}: sampling.{setting}: token id {token} is none of {self.model}, which has {self.vocabulary}; "
                "take it out"
            )


async def find_job(
    client: redis.asyncio.Redis, patience: RetryPolicy, name: str, job_name: str | None, uid: str | None, timeout: float
) -> tuple[JobInfo, JobEndedError | None]:
    """Wait for a job to appear.

    A job of this name that has ended may be the predecessor of one that is about to come, so it is waited for that,
    unless results of the old one are still there for this client.

    Args:
        client: connection to Redis.
        patience: with it.
        name: of the client.
        job_name: ``namespace/name``.
        uid: the job's uid, where it was given instead.
        timeout: seconds to wait.

    Returns:
        The job, and what to say if it has ended.

    Raises:
        JobNotFoundError: no such job appeared in time.
        JobEndedError: only one that has ended.
        VersionMismatchError: it speaks another version of the protocol.
        RedisAwayError: Redis cannot be reached.
        RedisRefusedError: Redis refuses this client.
    """
    look, deadline = "look the job up", time.monotonic() + timeout
    while True:
        found: Any = uid
        if job_name is not None:
            found = await patience.of(lambda: client.get(named(job_name)), what=look)
            found = None if found is None else str(found, "utf-8")
        over: JobEndedError | None = None
        if found is not None:
            keys = MessageKeys(found)
            about = await _texts(client, patience, keys.job)
            if about:
                job = JobInfo.parse(found, job_name or found, about)
                over = ended(job.name, about.get("state"), about.get("reason"))
                results = keys.results(name)
                unread: Any = await patience.of(partial(client.xlen, results), what=look)
                if over is None or uid is not None or unread:
                    return job, over
        if time.monotonic() > deadline:
            raise over or await _not_found(client, patience, job_name or str(uid), timeout)
        await asyncio.sleep(_LOOK_UP_S)


async def _texts(client: redis.asyncio.Redis, patience: RetryPolicy, key: str) -> dict[str, str]:
    found: Any = await patience.of(lambda: client.hgetall(key), what="look the job up")
    return {name.decode(): value.decode() for name, value in found.items()}


async def _first_keys(client: redis.asyncio.Redis, pattern: str) -> list[bytes]:
    """Some keys: more than anybody reads are not asked for."""
    found: list[bytes] = []
    async for key in client.scan_iter(pattern, count=1000):
        found.append(key)
        if len(found) >= _SHOWN:
            break
    return found


async def _not_found(client: redis.asyncio.Redis, patience: RetryPolicy, name: str, timeout: float) -> JobNotFoundError:
    prefix = named("")
    known = await patience.of(lambda: _first_keys(client, f"{prefix}*"), what="look for jobs")
    names = ", ".join(sorted(key.decode().removeprefix(prefix) for key in known))
    there = f"jobs on this server: {names}" if names else "this server knows no job"
    return JobNotFoundError(
        f"job {name} did not appear within {timeout:.0f} s at {address(client)}; {there}. Is it running, and is this "
        "its server?"
    )


def ended(name: str, state: str | None, reason: str | None) -> JobEndedError | None:
    """The error of a job that answers nothing more; None while it may."""
    if state not in ("closed", "failed"):
        return None
    return JobEndedError(f"job {name} is {state}{f': {reason}' if reason else ''}; it answers nothing more")


def parse_status(data: bytes | None) -> dict[str, Any]:
    """The job's status; empty where there is no coordinator."""
    status = json.loads(data) if data else {}
    return status if isinstance(status, dict) else {}


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that differ from what a request has anyway: messages stay small, and readable to older readers."""
    return {name: value for name, value in fields.items() if value != RolloutRequest.model_fields[name].default}


def _first(invalid: ValidationError) -> str:
    error = invalid.errors(include_url=False)[0]
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else str(error["msg"])
