"""Runs a manifest on this machine: state directory, Redis, engines, and the job in between."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from rollout_api.job import FieldError, ManifestError, RolloutJob
from rollout_api.keys import HistoryKeys, MessageKeys
from rollout_api.quantity import parse_quantity
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.engine.host import CPU_BASE_TOKENS, GPU_BASE_TOKENS, Drafting, Engine, EngineConfig
from rollout_worker.engine.model_source import ModelError, resolve_checkpoint, resolve_model, tokenizer_fingerprint
from rollout_worker.engine.worker_extension import HistoryBinding
from rollout_worker.history.connection import check, connect, problem
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.ledger import Ledger
from rollout_worker.job.problems import Problem, load_problems
from rollout_worker.job.relay import Relay
from rollout_worker.job.report import JobReport, Mode
from rollout_worker.job.runner import JobRunner

_LOCK_WAIT_S = 10.0


class StateError(RuntimeError):
    """The state directory cannot be used; the text says why."""


@dataclass(frozen=True)
class RunOptions:
    """What a person chooses beside the manifest."""

    state: Path
    """Directory in which runs of all jobs leave their state."""
    model_cache: Path
    redis_url: str | None
    """None: the manifest's, else an embedded server."""
    compare: Sequence[Mode]


async def run_local(
    job: RolloutJob,
    options: RunOptions,
    *,
    say: Callable[[str], None],
    watch: Callable[[JobRunner], Awaitable[None]],
) -> JobReport:
    """Run *job* to its end; one that was interrupted goes on where it was.

    Args:
        job: the manifest.
        options: see there.
        say: is told what is being done.
        watch: runs beside the job to show its progress; cancelled when it ends.

    Raises:
        ManifestError, ModelError, StateError, RedisUnusableError, HistoryMismatchError, EngineError, DeadlineError:
            each with a text that says what to do.
    """
    _check_machine(job)
    directory = options.state / job.metadata.namespace / job.metadata.name
    with _locked(directory) as lock:
        model = resolve_model(job.spec.model, options.model_cache)
        source = job.spec.source.dataset
        checkpoints = [
            resolve_checkpoint(uri, options.model_cache, model, job.spec.weights.allowed_roots)
            for uri in source.checkpoints
        ] or [model] * source.epochs
        with _redis_url(job, options, directory, lock, say) as url:
            client = connect(url)
            check(client, url)  # before anything that takes long
            tokenizer = _load_tokenizer(model)
            problems = load_problems(source, tokenizer)
            _check_requests(job, problems, len(tokenizer))
            state = _JobState.open(directory / "job.json", job, say)
            keys = HistoryKeys(job.metadata.namespace, job.history_name)
            store = HistoryStore(client, keys, window=job.spec.speculation.window)
            relay = Relay(client, MessageKeys(state.uid), store)
            ledger = Ledger(client, MessageKeys(state.uid))
            try:
                state.clear_previous(client, job)
                store.open(tokenizer_fingerprint(tokenizer))
                if state.resumed and (done := len(ledger.done())):
                    say(f"Going on with job {state.uid}: {done} rollouts are done.")
                drafting = None
                if job.spec.speculation.policy != "off":
                    binding = HistoryBinding(url, keys.namespace, keys.name, job.spec.speculation.window)
                    base_tokens = CPU_BASE_TOKENS if job.spec.workers.gpus_per_worker == 0 else GPU_BASE_TOKENS
                    drafting = Drafting(job.spec.speculation.max_draft_tokens, base_tokens, binding)
                say(f"Starting vLLM with {job.spec.model.uri} …")
                engine, plain = await _start_engines(job, model, drafting, Mode.PLAIN in options.compare)
                relay.start()
                try:
                    runner = JobRunner(
                        job,
                        state.uid,
                        problems=problems,
                        checkpoints=checkpoints,
                        tokenizer=tokenizer,
                        ledger=ledger,
                        relay=relay,
                        store=store,
                        engine=engine,
                        plain=plain,
                        compare=options.compare if drafting else [m for m in options.compare if m is not Mode.SELF],
                    )
                    shown = asyncio.ensure_future(watch(runner))
                    try:
                        report = await runner.run()
                    except redis.RedisError as error:
                        say(f"Stopping, since {problem(error, url)}")  # at once: engines take a while to end
                        raise
                    finally:
                        shown.cancel()
                        await asyncio.gather(shown, return_exceptions=True)
                finally:
                    relay.stop()
                    engines = [started for started in (engine, plain) if started is not None]
                    await asyncio.gather(*(asyncio.to_thread(started.close) for started in engines))
                state.finish()
            except redis.RedisError as error:
                raise problem(error, url) from error
    return report


async def _start_engines(
    job: RolloutJob, model: Path, drafting: Drafting | None, with_plain: bool
) -> tuple[Engine, Engine | None]:
    workers = job.spec.workers
    config = EngineConfig(
        model=model,
        spec=job.spec.engine,
        cpu=workers.gpus_per_worker == 0,
        cores=_cores(job),
        drafting=drafting,
    )
    if not with_plain:
        return await Engine.start(config), None
    if not config.cpu:  # both on the same GPUs, of which vLLM would take nine tenths for each
        config = replace(config, overrides={"gpu_memory_utilization": 0.45})
    engine, plain = await asyncio.gather(
        Engine.start(config), Engine.start(replace(config, drafting=None)), return_exceptions=True
    )
    if isinstance(engine, Engine) and isinstance(plain, Engine):
        return engine, plain
    for started in (engine, plain):
        if isinstance(started, Engine):
            started.close()
    raise next(failed for failed in (engine, plain) if isinstance(failed, BaseException))


def _check_requests(job: RolloutJob, problems: Sequence[Problem], vocabulary: int) -> None:
    """Refuse what the engine would refuse, before it is started."""
    sampling, limit = job.spec.sampling, job.spec.engine.max_model_len
    errors = []
    longest = max(len(problem.prompt_token_ids) for problem in problems)
    if longest + sampling.max_tokens > limit:
        message = (
            f"{sampling.max_tokens}, after the longest prompt of {longest} tokens, exceeds engine.maxModelLen, {limit}"
        )
        errors.append(FieldError("spec.sampling.maxTokens", message))
    for field, ids in (
        ("allowedTokenIds", sampling.allowed_token_ids),
        ("stopTokenIds", sampling.stop_token_ids),
        ("logitBias", sampling.logit_bias),
    ):
        if outside := sorted(token for token in ids if token >= vocabulary):
            message = f"{outside[0]} is no token of the model, which has {vocabulary}"
            errors.append(FieldError(f"spec.sampling.{field}", message))
    if errors:
        raise ManifestError(errors)


def _load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer in {model} cannot be loaded: {error}") from None


def _cores(job: RolloutJob) -> int:
    """Cores for an engine to compute with; by default one is left for everything else."""
    asked = job.spec.workers.resources.cpu
    return max(1, int(parse_quantity(asked)) if asked else len(os.sched_getaffinity(0)) - 1)


def _check_machine(job: RolloutJob) -> None:
    """Refuse a worker that is larger than this machine."""
    asked = job.spec.workers.resources
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    errors = []
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

    def clear_previous(self, client: redis.Redis, job: RolloutJob) -> None:
        """Bring what jobs before this one left in their outboxes into their histories, then delete their messages."""
        while self._content["previous"]:
            previous = self._content["previous"][0]
            keys = MessageKeys(previous["uid"])
            history = HistoryKeys(job.metadata.namespace, previous["history"])
            Relay(client, keys, HistoryStore(client, history, window=job.spec.speculation.window)).drain()
            Ledger(client, keys).forget()
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
