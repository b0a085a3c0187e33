"""Runs a manifest on this machine: state directory, Redis, engines, and the job in between."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis

from rollout_api.asyncio_tasks import end
from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.redis_client.connection import without_password
from rollout_worker.child_process import Reaper
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.engine.model_source import default_cache, load_tokenizer, resolve_model, tokenizer_fingerprint
from rollout_worker.history.connection import check, connect, connect_history, explain_error, retry
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.dataset import DatasetTrainer
from rollout_worker.job.dataset_source import Dataset, done_before, load_dataset, run_dataset
from rollout_worker.job.ending import carry_the_rest
from rollout_worker.job.ray_job import RayJob, start_local_ray, stop_local_ray
from rollout_worker.job.report import JobReport, Mode
from rollout_worker.job.setup import JobSetup

_LOCK_WAIT_S = 10.0
_PROBE_S = 0.5
_POLL_S = 0.2

_Result = TypeVar("_Result")


class DeadlineError(RuntimeError):
    """The job has run for as long as ``lifecycle.activeDeadlineSeconds`` allows."""


class StateError(RuntimeError):
    """The state directory cannot be used; the text says why."""


@dataclass(frozen=True)
class RunOptions:
    """What a person chooses beside the manifest."""

    state: Path
    """Directory in which runs of all jobs leave their state."""
    redis_url: str | None
    """None: the manifest's, else an embedded server."""
    history_url: str
    """Of the server of the job's history; empty: the one of its messages."""
    compare: Sequence[Mode]


async def run_local(
    job: RolloutJob,
    options: RunOptions,
    *,
    say: Callable[[str], None],
    watch: Callable[[DatasetTrainer], Awaitable[None]],
) -> JobReport | None:
    """Run *job* to its end; one that was interrupted goes on where it was.

    Args:
        job: the manifest.
        options: see there.
        say: is told what is being done.
        watch: runs beside a dataset job to show its progress; cancelled when it ends.

    Returns:
        What a dataset job made; None for a job that served trainers.

    Raises:
        ManifestError, ModelError, StateError, RedisUnusableError, HistoryMismatchError, EngineError, DeadlineError:
            each with a text that says what to do.
    """
    _check_machine(job, options)
    directory = options.state / job.metadata.namespace / job.metadata.name
    with _locked(directory) as lock:
        model = resolve_model(job.spec.model, default_cache())
        with _redis_url(job, options, directory, lock, say) as url:
            server = connect(url)
            check(server, url)  # before anything that takes long
            history = connect_history(options.history_url or url)
            check(history, options.history_url or url)
            tokenizer = load_tokenizer(model)
            dataset = load_dataset(job, model, tokenizer)
            state = _JobState.open(directory / "job.json", job, say)
            setup = JobSetup(
                manifest=job.model_dump(mode="json", by_alias=True),
                uid=state.uid,
                redis_url=url,
                history_url=options.history_url,
                vocabulary=len(tokenizer),
                tokenizer=tokenizer_fingerprint(tokenizer),
                engines_per_machine=job.spec.workers.replicas * job.spec.engines_per_worker,
                rollouts=None if dataset is None else dataset.rollouts(job),
                plain_engines=int(dataset is not None and Mode.PLAIN in options.compare),
                overrides=_overrides(job, options),
            )
            try:
                state.clear_previous(server, history, job)
                # before there are engines, which begin with what was left open
                done = done_before(server, setup.keys) if state.resumed else 0
                if done:
                    say(f"Going on with job {state.uid}: {done} rollouts are done.")
                setup.open_history()
                report = await _until_redis_fails(
                    _run_on_ray(setup, dataset, options, server, done, say, watch), server, url, say
                )
                state.finish()
            except redis.RedisError as error:
                raise explain_error(error, url) from error
    return report


async def _run_on_ray(
    setup: JobSetup,
    dataset: Dataset | None,
    options: RunOptions,
    server: redis.Redis,
    done: int,
    say: Callable[[str], None],
    watch: Callable[[DatasetTrainer], Awaitable[None]],
) -> JobReport | None:
    job = setup.job
    say(f"Starting vLLM with {job.spec.model.uri} …")
    engines = job.spec.workers.replicas * job.spec.engines_per_worker + setup.plain_engines
    reaper = Reaper()
    try:
        start_local_ray(engines)
        reaper.know()
        ray_job = RayJob(setup)
        ray_job.start()
        job_store = setup.job_store()
        await ray_job.engines_ready(job_store, engines)
        reaper.know()
        deadline = job.spec.lifecycle.active_deadline_seconds
        work: asyncio.Future[JobReport | None] = asyncio.ensure_future(
            _serve(setup, ray_job, say)
            if dataset is None
            else run_dataset(setup, dataset, server, done=done, compare=_compared(job, options), watch=watch)
        )
        try:
            # not asyncio.timeout, which cancels once: that may be lost
            await asyncio.wait({work}, timeout=deadline)
            if work.done():
                return work.result()
            raise DeadlineError(
                f"the job has run for {deadline} s (spec.lifecycle.activeDeadlineSeconds) and is stopped; what is "
                "done is kept"
            )
        finally:
            await end(work)
    finally:
        # not in threads: whoever cancels this again must not get ahead of it, and end Redis before the engines
        stop_local_ray()
        reaper.close()


async def _serve(setup: JobSetup, ray_job: RayJob, say: Callable[[str], None]) -> JobReport | None:
    """Serve trainers until one of them closes the job."""
    name = f"{setup.job.metadata.namespace}/{setup.job.metadata.name}"
    say(f'Serving trainers: RolloutClient.connect("{without_password(setup.redis_url)}", "{name}").')
    say(f"Status: http://{setup.http_host}:{await ray_job.status_port()}/status")
    while not await ray_job.ended():
        await asyncio.sleep(_POLL_S)
    return None


async def _until_redis_fails(
    work: Coroutine[Any, Any, _Result], server: redis.Redis, url: str, say: Callable[[str], None]
) -> _Result:
    """Await *work*, unless Redis refuses a write or is away for longer than a hiccup: then a person is told at once.

    The job itself would wait for its server for ever, as it should on a cluster.
    """
    task, probe = asyncio.ensure_future(work), asyncio.ensure_future(_probe(server))
    try:
        await asyncio.wait({task, probe}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            try:
                await probe
            except redis.RedisError as error:
                say(f"Stopping, since {explain_error(error, url)}")
                raise
        return await task
    finally:
        await end(task, probe)


async def _probe(server: redis.Redis) -> None:
    while True:
        await asyncio.to_thread(retry, _write, server)
        await asyncio.sleep(_PROBE_S)


def _write(server: redis.Redis) -> None:
    server.set("rollout:probe", "1", ex=60)


def _compared(job: RolloutJob, options: RunOptions) -> list[Mode]:
    return [mode for mode in options.compare if mode is not Mode.SELF or job.spec.speculation.policy != "off"]


def _overrides(job: RolloutJob, options: RunOptions) -> dict[str, Any]:
    if job.spec.workers.gpus_per_worker and Mode.PLAIN in options.compare:
        return {"gpu_memory_utilization": 0.45}  # both engines on the same GPUs
    return {}


def _check_machine(job: RolloutJob, options: RunOptions) -> None:
    """Refuse a worker that is larger than this machine, and what only a cluster can do."""
    asked = job.spec.workers.resources
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    errors = []
    for field, only_there in (("urlFrom", job.spec.redis.url_from is not None), ("managed", job.spec.redis.managed)):
        if only_there and options.redis_url is None:
            message = "no Secret can be read here; give the URL with --redis or in ROLLOUT_REDIS_URL"
            errors.append(FieldError(f"spec.redis.{field}", message))
    if job.spec.lifecycle.suspend:
        message = "the job is suspended; set it to false to run it here"
        errors.append(FieldError("spec.lifecycle.suspend", message))
    if asked.cpu and parse_quantity(asked.cpu) > cores:
        errors.append(FieldError("spec.workers.resources.cpu", f"{asked.cpu} asked for, this machine has {cores}"))
    if asked.memory and parse_quantity(asked.memory) > memory:
        have = f"{memory / 2**30:.1f}Gi"
        errors.append(FieldError("spec.workers.resources.memory", f"{asked.memory} asked for, this machine has {have}"))
    if errors:
        raise ManifestError(errors)


@contextmanager
def _redis_url(
    job: RolloutJob, options: RunOptions, directory: Path, lock: int, say: Callable[[str], None]
) -> Iterator[str]:
    named = options.redis_url or job.spec.redis.url
    if named:
        yield named
        return
    server = EmbeddedRedis(directory / "redis", keep_open=lock)
    say(f"Starting redis-server on a free port; its data are kept in {directory / 'redis'}.")
    try:
        yield server.start()
    finally:
        server.stop()


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Hold the state directory; its Redis server, if any, holds it too until it is gone."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StateError(f"the state directory {directory} cannot be used: {error.strerror}") from None
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StateError(
                        f"another run of this job holds {directory}; wait for it, stop it, or give another --state-dir"
                    ) from None
                time.sleep(0.1)
        yield lock
    finally:
        os.close(lock)


class _JobState:
    """Identity of the job that a state directory belongs to, kept in one small file."""

    def __init__(self, path: Path, content: dict[str, Any], resumed: bool) -> None:
        self.resumed = resumed
        self._path, self._content = path, content

    @property
    def uid(self) -> str:
        return str(self._content["uid"])

    @classmethod
    def open(cls, path: Path, job: RolloutJob, say: Callable[[str], None]) -> _JobState:
        """Go on with the job in *path* if it is unfinished and the same; else begin a new one."""
        spec = job.spec.model_dump_json(include={"source", "model", "sampling", "history"})
        digest = hashlib.blake2b(spec.encode(), digest_size=16).hexdigest()
        previous: list[dict[str, str]] = []
        if path.is_file():
            try:
                known = json.loads(path.read_text())
                if not known["finished"] and known["digest"] == digest:
                    return cls(path, known, resumed=True)
                previous = [*known["previous"], {"uid": known["uid"], "history": known["history"]}]
                if not known["finished"]:
                    say(f"The manifest has changed: job {known['uid']} is given up; its rollouts stay in its history.")
            except (ValueError, KeyError, TypeError):
                raise StateError(f"{path} cannot be read; remove it to begin anew (the history is kept)") from None
        content = {
            "uid": str(uuid.uuid4()),
            "digest": digest,
            "history": job.history_name,
            "finished": False,
            "previous": previous,
        }
        state = cls(path, content, resumed=False)
        state._save()
        return state

    def clear_previous(self, server: redis.Redis, history: redis.Redis | redis.RedisCluster, job: RolloutJob) -> None:
        """Bring what jobs before this one left in their outboxes into their histories, then delete their messages."""
        while self._content["previous"]:
            previous = self._content["previous"][0]
            keys = MessageKeys(previous["uid"])
            history_keys = HistoryKeys(job.metadata.namespace, previous["history"])
            carry_the_rest(server, keys, HistoryStore(history, history_keys, window=job.spec.speculation.window))
            for key in server.scan_iter(keys.every(), count=1000):
                server.unlink(key)
            del self._content["previous"][0]
            self._save()

    def finish(self) -> None:
        """The job has ended; the next run of its manifest is a new one."""
        self._content["finished"] = True
        self._save()

    def _save(self) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._content, indent=1))
        beside.replace(self._path)
