"""What a bundle is about: the job, where it is in Redis and on this machine, and what is unknown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollout_api.bundle.redaction import is_secret_name, is_secret_value
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.redis_client.address import parse_address
from rollout_api.redis_client.checks import RedisUnusableError
from rollout_worker.cli.job_address import (
    DEFAULT_NAMESPACE,
    FoundJob,
    JobAddressError,
    find_job,
    find_job_directory,
)
from rollout_worker.cli.manifest_file import read_manifest
from rollout_worker.launch.errors import StateError
from rollout_worker.launch.recorded_manifest import read_recorded_manifest
from rollout_worker.launch.recorded_redis import read_recorded_redis


@dataclass(frozen=True)
class Subject:
    """A job about which a bundle is collected."""

    name: str
    """``namespace/name``."""
    job: FoundJob | None
    """The job in Redis; None if it is not there."""
    why_not_found: str
    """Why it is not there; empty if it is."""
    directory: Path | None
    """The directory of the job in the state directory; None if it does not run with ``rollout run`` from there."""
    manifest: RolloutJob | None
    """The manifest that the user has named."""
    redis_url: str | None
    """URL of the job's Redis; None if it is unknown."""
    history_url: str
    """URL of the Redis that keeps the history; empty for the job's own."""

    def manifest_document(self) -> dict[str, Any]:
        """Return the manifest.

        Raises:
            LookupError: if it is unknown.
            StateError: if the recorded one cannot be read.
        """
        if self.manifest is not None:
            return self.manifest.model_dump(mode="json", by_alias=True)
        recorded = None if self.directory is None else read_recorded_manifest(self.directory)
        if recorded is None:
            raise LookupError("only rollout run records it in its state directory; name the manifest with --file")
        return recorded

    def secrets(self) -> set[str]:
        """Return the passwords and tokens that this process knows."""
        found = {
            value
            for name, value in os.environ.items()
            if is_secret_name(name, in_object=True) and is_secret_value(name, value)
        }
        for url in filter(None, [self.redis_url, self.history_url, *self._recorded_urls()]):
            found |= set(_passwords(url))
        return found

    def _recorded_urls(self) -> Iterator[str | None]:
        """Yield the URLs of Redis in the manifest and in the state directory, as far as they can be read."""
        with contextlib.suppress(LookupError, StateError):
            spec = self.manifest_document()["spec"]
            yield spec.get("redis", {}).get("url")
            yield spec.get("history", {}).get("redis", {}).get("url")
        with contextlib.suppress(StateError):
            recorded = None if self.directory is None else read_recorded_redis(self.directory)
            yield None if recorded is None else recorded.url


def find_subject(
    job: str | None,
    *,
    file: Path | None,
    redis_url: str | None,
    history_url: str | None,
    uid: str | None,
    state: Path,
) -> Subject:
    """Find what is known about a job; the arguments are those of :func:`~rollout_worker.cli.job_address.find_job`.

    Raises:
        JobAddressError: if neither Redis nor the state directory knows the job.
        ManifestError, StateError: if the manifest or the state directory cannot be used.
    """
    manifest = None if file is None else read_manifest(file)
    history = history_url or (None if manifest is None else manifest.spec.history.redis.url) or ""
    directory = None
    with contextlib.suppress(JobAddressError):
        directory = find_job_directory(job, file=file, state=state)
    try:
        found = find_job(job, file=file, redis_url=redis_url, uid=uid, state=state)
    except (JobAddressError, RedisUnusableError) as error:
        is_known = directory is not None and uid is None and _uses(directory, redis_url)
        if isinstance(error, JobAddressError) and not is_known:
            raise
        url = redis_url or (None if manifest is None else manifest.spec.redis.url)
        return Subject(_name(job, manifest, directory), None, str(error), directory, manifest, url, history)
    return Subject(found.name, found, "", found.directory, manifest, found.redis_url, history)


def _name(job: str | None, manifest: RolloutJob | None, directory: Path | None) -> str:
    if manifest is not None:
        return f"{manifest.metadata.namespace}/{manifest.metadata.name}"
    if job is not None:
        return job if "/" in job else f"{DEFAULT_NAMESPACE}/{job}"
    return "job" if directory is None else f"{directory.parent.name}/{directory.name}"


def _uses(directory: Path, redis_url: str | None) -> bool:
    """Return whether the job in a state directory uses this Redis; any, if the user has named none."""
    recorded = read_recorded_redis(directory)
    return redis_url is None or (recorded is not None and recorded.url == redis_url)


def _passwords(url: str) -> Iterator[str]:
    """Yield the passwords in a URL of Redis, which may be malformed."""
    with contextlib.suppress(ValueError):
        if password := urlsplit(url).password:
            yield password
    with contextlib.suppress(ValueError):
        address = parse_address(url)
        for options in (address.options, address.sentinel_options):
            if password := options.get("password"):
                yield str(password)
