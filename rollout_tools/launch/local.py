"""Runs a job on this machine: its state directory, Redis, Ray and engines."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import redis

from rollout_api.asyncio_tasks import cancel_and_wait, run_in_daemon_thread
from rollout_api.errors import JobEndedError
from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob
from rollout_api.ports import free_port
from rollout_api.redis_client.address import without_password
from rollout_api.redis_client.connection import RedisUnusableError, check, connect, connect_history, explain_error
from rollout_api.redis_client.retry import is_out_of_memory, retry
from rollout_head.child_services import END_POLL_INTERVAL_S, JobServices
from rollout_head.dataset.report import EpochMode, JobReport
from rollout_head.dataset.source import Dataset, count_finished, load_dataset, run_dataset
from rollout_head.dataset.trainer import DatasetTrainer
from rollout_store.job import JobStore
from rollout_store.job.engines import EngineError
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.setup import JobSetup
from rollout_store.models.model_source import default_cache, load_tokenizer, resolve_model, tokenizer_fingerprint
from rollout_store.runtime.control_groups import usable_cores
from rollout_store.runtime.embedded_redis import EmbeddedRedis
from rollout_store.runtime.output import logging_to_file
from rollout_tools.launch.job_state import (
    RECORDING_FILE,
    REDIS_FILE,
    DeadlineError,
    JobState,
    LastRedis,
    lock_state_directory,
    log_directory,
    save_manifest,
)
from rollout_tools.report.reading import NothingToReportError, read_recording
from rollout_tools.report.recording import save_recording
from rollout_worker.engine_worker.engines import check_ray, engine_logs, running_engines

if TYPE_CHECKING:
    from rollout_worker.engine_worker.fleet import Fleet


logger = logging.getLogger(__name__)

_ENGINES_READY_POLL_INTERVAL_S = 0.2
"""Seconds between two checks whether the engines serve."""
_REDIS_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks whether Redis accepts writes."""
_CLOSE_TIMEOUT_S = 10.0
"""Seconds that a run waits, after its dataset is finished, until its coordinator has closed the job."""
_PROGRESS_INTERVAL_S = 30.0
"""Seconds between two lines about the progress of a job that serves trainers."""
_SHARED_GPU_MEMORY_UTILIZATION = 0.45
"""Share of a GPU's memory for each engine if the job's engines and those of a baseline use the same GPUs."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RunOptions:
    """Options that the user chooses in addition to the manifest."""

    state: Path
    """Directory for the state of all jobs."""
    redis_url: str | None
    """URL of the job's Redis; None to use the manifest's, or else an embedded server."""
    history_url: str
    """URL of the Redis that keeps the history; empty if it is the job's own server."""
    baselines: Sequence[EpochMode]
    """Draft modes for repeating each epoch of a dataset, for comparison."""
    model_cache: Path | None = None
    """Directory of models; None for the default."""


async def run_local(
    job: RolloutJob,
    options: RunOptions,
    *,
    notify: Callable[[str], None],
    watch: Callable[[DatasetTrainer], Awaitable[None]],
) -> JobReport | None:
    """Run *job* to its end. A job that was interrupted continues.

    *notify* receives messages for the user. *watch* runs concurrently with a dataset job to show its progress, and is
    cancelled at the end.

    Returns:
        The report of a dataset job; None for a job that served trainers.

    Raises:
        ManifestError, ModelError, StateError, RedisUnusableError, HistoryMismatchError, EngineError, DeadlineError,
        JobEndedError:
            each with a text that tells the user what to do.
    """
    _check_machine(job, options)
    directory = options.state / job.metadata.namespace / job.metadata.name
    logs = log_directory(directory)
    cache = options.model_cache or default_cache()
    with (
        lock_state_directory(directory) as lock,
        logging_to_file(logs, "run"),
        _logged_end(),
        ExitStack() as exit_stack,
    ):
        notify = partial(_notify_and_log, notify)
        model = resolve_model(job.spec.model, cache)
        with _redis_url(job, options, directory, lock, notify) as url:
            # Redis is checked before anything that takes long.
            server = connect(url)
            check(server, url)
            history = connect_history(options.history_url or url)
            check(history, options.history_url or url)
            tokenizer = load_tokenizer(model)
            # In a thread, because an environment may take long, and the job can be interrupted meanwhile.
            dataset = await run_in_daemon_thread(partial(load_dataset, job, model, tokenizer, cache))
            if dataset is not None:
                exit_stack.callback(dataset.close)
                if dataset.samples_itself:  # it asks for its responses itself, and always for drafts from the history
                    options = replace(options, baselines=())
            state = JobState.open(directory / "job.json", job, notify)
            save_manifest(directory, job)
            setup = JobSetup(
                manifest=job.model_dump(mode="json", by_alias=True),
                uid=state.uid,
                redis_url=url,
                history_url=options.history_url,
                model_cache=str(cache.absolute()),
                vocabulary_size=len(tokenizer),
                tokenizer=tokenizer_fingerprint(tokenizer),
                engines_per_machine=job.spec.workers.replicas * job.spec.engines_per_worker,
                total_rollouts=None if dataset is None else dataset.total_rollouts(job),
                non_speculative_engines=int(dataset is not None and EpochMode.NON_SPECULATIVE in options.baselines),
                overrides=_engine_overrides(job, options),
                http_port=free_port(),
                log_directory=str(logs.absolute()),
            )
            try:
                state.clean_up_previous_jobs(server, history, job)
                # Counted before there are engines, which continue the requests that were left open.
                finished = count_finished(server, setup.keys) if state.resumed else 0
                if finished:
                    notify(f"Continuing job {state.uid}: {finished} rollouts are finished.")
                setup.open_history()
                work = _run_on_ray(setup, dataset, options, server, finished, notify, watch)
                with saved_recording(setup, directory, tokenizer, {} if dataset is None else dataset.prompts(), notify):
                    report = await _while_checked(work, _check_redis(LauncherStore(server, setup.keys), url, notify))
                state.mark_finished()
            except JobEndedError as error:
                state.mark_finished()
                raise JobEndedError(
                    f"{error}. It was closed before its dataset was finished, as `rollout cancel` does; its finished "
                    "rollouts are in its history, and the next run starts a new job"
                ) from None
            except redis.RedisError as error:
                raise RedisUnusableError(
                    f"{explain_error(error, url)} (finished rollouts are kept, and the same command continues from "
                    "there)"
                ) from error
    return report


async def _run_on_ray(
    setup: JobSetup,
    dataset: Dataset | None,
    options: RunOptions,
    server: redis.Redis,
    finished: int,
    notify: Callable[[str], None],
    watch: Callable[[DatasetTrainer], Awaitable[None]],
) -> JobReport | None:
    job = setup.job
    engines = "1 vLLM engine" if setup.num_engines == 1 else f"{setup.num_engines} vLLM engines"
    notify(f"Starting {engines} with {job.spec.model.uri} …")
    started = time.monotonic()
    services = JobServices(setup)
    services.start()
    try:
        with engine_logs(Path(setup.log_directory)), running_engines(setup) as fleet:
            try:
                await _wait_engines_ready(setup.job_store(), fleet, setup.num_engines)
                notify(f"Ready after {time.monotonic() - started:.0f} s.")

                async def sample_or_serve() -> JobReport | None:
                    if dataset is None:
                        return await _serve(setup, services, server, notify)
                    report = await run_dataset(
                        setup, dataset, server, finished_before=finished, baselines=options.baselines, watch=watch
                    )
                    # The dataset has closed the job, which the coordinator has to record.
                    await services.wait_ended(_CLOSE_TIMEOUT_S)
                    return report

                limited = _until_deadline(sample_or_serve(), job.spec.lifecycle.active_deadline_seconds)
                return await _while_checked(limited, _check_processes(services, fleet))
            finally:
                # Before the processes that Ray has left behind are killed.
                services.stop()
                if dataset is not None:
                    dataset.close()
    finally:
        services.stop()


async def _wait_engines_ready(job_store: JobStore, fleet: Fleet, count: int) -> None:
    """Wait until *count* engines serve.

    Raises:
        EngineError: as soon as one engine cannot start.
    """
    while True:
        engines = await job_store.once.engines.engines()
        if sum(alive for _, alive in engines.values()) >= count:
            return
        for name, error in fleet.errors.items():
            raise EngineError(f"{name} cannot start: {error}")
        check_ray(fleet)
        await asyncio.sleep(_ENGINES_READY_POLL_INTERVAL_S)


async def _check_processes(services: JobServices, fleet: Fleet) -> NoReturn:
    """Check the job's processes until one of them cannot continue.

    Raises:
        EngineError: if Ray does not answer any more, or another process coordinates the job.
    """
    while True:
        services.ended()
        check_ray(fleet)
        await asyncio.sleep(END_POLL_INTERVAL_S)


async def _until_deadline(work: Coroutine[Any, Any, _Result], deadline: int | None) -> _Result:
    """Await *work* for at most *deadline* seconds; None means without a limit.

    Raises:
        DeadlineError: if it takes longer.
    """
    task = asyncio.ensure_future(work)
    try:
        # asyncio.timeout would cancel the work only once, and a library may swallow that cancellation.
        await asyncio.wait({task}, timeout=deadline)
        if task.done():
            return task.result()
        raise DeadlineError(
            f"the job was stopped after {deadline} s (spec.lifecycle.activeDeadlineSeconds); finished rollouts are kept"
        )
    finally:
        await cancel_and_wait(task)


async def _serve(
    setup: JobSetup, services: JobServices, server: redis.Redis, notify: Callable[[str], None]
) -> JobReport | None:
    """Serve trainers until one of them closes the job, and say now and then what has happened."""
    name = f"{setup.job.metadata.namespace}/{setup.job.metadata.name}"
    notify(f'Serving trainers. Connect with RolloutClient.connect("{without_password(setup.redis_url)}", "{name}").')
    notify(f"Status: `rollout status {name}`, `rollout top {name}`, http://{setup.http_host}:{setup.http_port}/status")
    store, done, next_line = LauncherStore(server, setup.keys), 0, time.monotonic() + _PROGRESS_INTERVAL_S
    while not services.ended():
        await asyncio.sleep(END_POLL_INTERVAL_S)
        if time.monotonic() < next_line:
            continue
        next_line = time.monotonic() + _PROGRESS_INTERVAL_S
        try:
            status = await run_in_daemon_thread(partial(retry, store.status))  # Ctrl-C does not have to wait for Redis
        except ValueError:  # a defect; the next status may be readable
            continue
        if status is not None and status["state"] == "closing" and not status["requests"]:
            waiting = await run_in_daemon_thread(partial(retry, store.num_unrelayed))
            notify(f"The job is closed. It ends once {waiting:,} rollouts or rewards are in the history.")
        elif status is not None and status["done"] != done:
            done = status["done"]
            notify(
                f"weight version {status['weight_version']}: {done:,} rollouts, {status['assigned']:,} running, "
                f"{status['tokens_per_second']:,.0f} tokens/s, {status['accepted_per_step']:.2f} accepted per step"
            )
    return None


async def _while_checked(work: Coroutine[Any, Any, _Result], check: Coroutine[Any, Any, NoReturn]) -> _Result:
    """Await *work*, but stop it and raise the error of *check* if that fails first."""
    task, checks = asyncio.ensure_future(work), asyncio.ensure_future(check)
    try:
        await asyncio.wait({task, checks}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await checks
        return await task
    finally:
        await cancel_and_wait(task, checks)


async def _check_redis(job_store: LauncherStore, url: str, notify: Callable[[str], None]) -> NoReturn:
    """Check Redis until it denies access or is unavailable for more than a moment.

    A job waits for Redis forever, which is right for a cluster. Here it is better to tell the user at once. While the
    server is full, the job waits here, too: whoever operates the server can give it memory.
    """
    is_full = False
    while True:
        try:
            await asyncio.to_thread(retry, job_store.check_writable)
            if is_full:
                notify("Redis has memory again; the job continues.")
            is_full = False
        except redis.RedisError as error:
            if not is_out_of_memory(error):
                notify(f"Stopping the job: {explain_error(error, url)}")
                raise
            if not is_full:
                notify(f"The job waits: {explain_error(error, url)}")
            is_full = True
        await asyncio.sleep(_REDIS_CHECK_INTERVAL_S)


def _engine_overrides(job: RolloutJob, options: RunOptions) -> dict[str, Any]:
    if job.spec.workers.gpus_per_worker and EpochMode.NON_SPECULATIVE in options.baselines:
        return {"gpu_memory_utilization": _SHARED_GPU_MEMORY_UTILIZATION}
    return {}


def _check_machine(job: RolloutJob, options: RunOptions) -> None:
    """Reject a worker that is larger than this machine, and settings that only a cluster can fulfil."""
    requested = job.spec.workers.resources
    cores = usable_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    errors = []
    for field, is_set in (("urlFrom", job.spec.redis.url_from is not None), ("managed", job.spec.redis.managed)):
        if is_set and options.redis_url is None:
            message = "only the operator can use this; set the URL with --redis or ROLLOUT_REDIS_URL"
            errors.append(FieldError(f"spec.redis.{field}", message))
    if job.spec.lifecycle.suspend:
        message = "the job is suspended; set this to false to run it here"
        errors.append(FieldError("spec.lifecycle.suspend", message))
    if requested.cpu and parse_quantity(requested.cpu) > cores:
        message = f"{requested.cpu} cores are requested, but this machine has {cores:g}"
        errors.append(FieldError("spec.workers.resources.cpu", message))
    if requested.memory and parse_quantity(requested.memory) > memory:
        message = f"{requested.memory} is requested, but this machine has {memory / 2**30:.1f}Gi"
        errors.append(FieldError("spec.workers.resources.memory", message))
    if errors:
        raise ManifestError(errors)


@contextmanager
def _logged_end() -> Iterator[None]:
    """Log how the run has ended."""
    try:
        yield
    except Exception as error:
        logger.info("The run has ended with an error: %s", error)
        raise
    except BaseException:
        logger.info("The run was interrupted.")
        raise
    logger.info("The run has ended.")


def _notify_and_log(notify: Callable[[str], None], text: str) -> None:
    """Tell the user something, and keep it in the job's log."""
    notify(text)
    logger.info(text)


@contextmanager
def _redis_url(
    job: RolloutJob, options: RunOptions, directory: Path, lock: int, notify: Callable[[str], None]
) -> Iterator[str]:
    """Provide the URL of the job's Redis; start an embedded server if neither options nor manifest name one."""
    url = options.redis_url or job.spec.redis.url
    if url:
        LastRedis(url, embedded=False).save(directory)
        yield url
        return
    server = EmbeddedRedis(directory / "redis", keep_open=lock)
    notify(
        f"Starting redis-server on a free port. Its data is kept in {directory / 'redis'}, and its URL with its "
        f"password in {directory / REDIS_FILE}."
    )
    try:
        url = server.start()
        LastRedis(url, embedded=True).save(directory)
        yield url
    finally:
        server.stop()


@contextmanager
def saved_recording(
    setup: JobSetup,
    directory: Path,
    tokenizer: Any,
    prompts: Mapping[str, Sequence[int]],
    notify: Callable[[str], None],
) -> Iterator[None]:
    """Save the recording of a job to *directory* at the end of the context, unless Redis has failed in it.

    *prompts* are token ids by problem, as far as they are known. *notify* receives a message for the user if the
    recording cannot be saved.
    """
    name = f"{setup.job.metadata.namespace}/{setup.job.metadata.name}"

    def save() -> None:
        reading = read_recording(
            setup.redis_url,
            setup.uid,
            name=name,
            history_url=setup.history_url,
            tokenizer_of=lambda _: tokenizer,
            prompts=prompts,
        )
        try:
            # In an event loop of its own, because that of the job may be about to be cancelled again.
            with ThreadPoolExecutor(1) as executor:
                recording = executor.submit(asyncio.run, reading).result()
            save_recording(recording, directory / RECORDING_FILE)
        except NothingToReportError:
            return
        except Exception as error:  # the rollouts are finished, and the job must not fail because of its report
            is_expected = isinstance(error, redis.RedisError | RedisUnusableError | OSError)
            logger.warning("Cannot record job %s", name, exc_info=not is_expected)
            notify(f"The recording of the job, from which reports are made, cannot be saved: {error}")

    has_redis = True
    try:
        yield
    except redis.RedisError:
        has_redis = False
        raise
    finally:
        if has_redis:
            save()
