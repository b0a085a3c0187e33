"""Runs a job on a dataset: asks for rollouts or trajectories of its problems, and scores them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import httpx
import redis
from pydantic.alias_generators import to_camel

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob
from rollout_api.ports import free_port
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import RolloutId
from rollout_api.redis_client.retry import retry
from rollout_head.dataset.problems import (
    DatasetProblem,
    EnvironmentProblem,
    RolloutError,
    load_environment,
    load_problems,
)
from rollout_head.dataset.report import EpochMode, EpochRun, JobReport, RolloutRow
from rollout_head.dataset.trainer import DatasetTrainer
from rollout_head.environment.supervisor import EnvironmentCallError, EnvironmentSupervisor
from rollout_store.job.engines import EngineError
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.requests import LedgerEntry
from rollout_store.job.setup import JobSetup
from rollout_store.models.model_source import resolve_checkpoint
from rollout_store.runtime.child_process import spawn_with_parent

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.5
_RESTART_DELAY_S = 2.0
_STOP_TIMEOUT_S = 10.0
_SHOWN_BYTES = 2000
_MAX_START_FAILURES = 3


class LocalServer:
    """Runs ``rollout serve`` for one client on this machine, and restarts it when it ends.

    Used as a context manager, from the main thread: the server ends with it.

    Args:
        setup: the job.

    Raises:
        EngineError: when the context is entered, if the server cannot start.
    """

    def __init__(self, setup: JobSetup) -> None:
        self._setup, self._port = setup, free_port()
        self.token = secrets.token_hex(24)
        """Token of the only client."""
        self._directory = TemporaryDirectory(prefix="rollout-server-")
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failures = 0
        self._log = ""

    @property
    def url(self) -> str:
        """Base URL of OpenAI's API."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        """Start the server, and wait until it serves."""
        directory = Path(self._directory.name)
        (directory / "job.yaml").write_text(json.dumps(self._setup.manifest))
        tokens = directory / "tokens"
        tokens.mkdir(mode=0o700)
        (tokens / "environment").write_text(self.token)
        self._start()
        self._keeper = asyncio.ensure_future(self._keep_running())
        try:
            await self._wait_until_it_serves()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _wait_until_it_serves(self) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    if (await client.get(f"http://127.0.0.1:{self._port}/health")).is_success:
                        return
                except httpx.TransportError:
                    pass
                if self._failures >= _MAX_START_FAILURES:
                    raise EngineError(
                        "the HTTP server that the environment samples from cannot start; check spec.server.args. The "
                        f"end of its output: {self._log}"
                    )
                await asyncio.sleep(_CHECK_INTERVAL_S)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server."""
        if self._keeper is not None:
            await cancel_and_wait(self._keeper)
        if self._process is not None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._directory.cleanup()

    def _start(self) -> None:
        directory, spec = Path(self._directory.name), self._setup.job.spec
        command = [sys.executable, "-m", "rollout_tools.cli", "serve", f"--file={directory / 'job.yaml'}"]
        command += [f"--uid={self._setup.uid}", "--host=127.0.0.1", f"--port={self._port}"]
        command += [f"--tokens={directory / 'tokens'}"]
        if self._setup.model_cache:
            command.append(f"--model-cache={self._setup.model_cache}")
        command += spec.server.args if spec.server is not None else []
        with (directory / "log").open("wb") as log:
            # The URL may contain a password, which other users could read in the list of processes.
            self._process = spawn_with_parent(
                command,
                env={**os.environ, "ROLLOUT_REDIS_URL": self._setup.redis_url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def _keep_running(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if self._process is not None and (code := self._process.poll()) is not None:
                self._log = (Path(self._directory.name) / "log").read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
                self._failures += 1
                logger.warning("The environment's HTTP server ended with exit code %d:\n%s", code, self._log)
                await asyncio.sleep(_RESTART_DELAY_S)
                self._start()


@dataclass(frozen=True)
class TrajectorySource:
    """Where trajectories take place."""

    environment: EnvironmentSupervisor
    server: LocalServer
    """The server that the environment samples from."""


def _trajectory_name(epoch: int, problem_id: str, sample: int) -> str:
    return f"{epoch}/{sample}/{problem_id}"


class TrajectoryTrainer(DatasetTrainer):
    """One run of a dataset job whose environment runs its rollouts itself.

    The environment samples each turn from the job's HTTP server, under an ``Idempotency-Key`` that follows from epoch,
    problem, sample and conversation. The result of a trajectory is stored; a trajectory without a result is repeated.

    Args:
        source: where trajectories take place.
        arguments: the arguments of :class:`DatasetTrainer`.
    """

    def __init__(self, source: TrajectorySource, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, environment=source.environment, **keywords)
        self._source = source
        self._began = 0.0
        """When the current epoch run began, in seconds since 1970."""
        self._steps = self._accepted = 0

    async def _read_finished(self, epoch: int) -> dict[str, Any]:
        prefix = f"{epoch}/"
        return {name: result for name, result in self._results.trajectories.items() if name.startswith(prefix)}

    def _num_finished_before(self, finished: Mapping[int, Mapping[str, Any]]) -> int:
        return sum(map(len, finished.values()))

    async def _rows_of(self, finished: dict[str, Any]) -> list[RolloutRow]:
        ledger = await self._read_ledger(result["rollouts"] for result in finished.values())
        return [self._row(name, result, ledger, None, None) for name, result in finished.items()]

    async def _sample(self, run: EpochRun, finished: dict[str, Any]) -> None:
        """Run all trajectories of an epoch that have no result, at the same time as far as the environment can."""
        progress, samples = self.progress, range(self._job.spec.sampling.n)
        progress.epoch, progress.mode, progress.done = run.epoch, run.mode, len(finished)
        progress.total, progress.accepted_per_step = len(self._problems) * len(samples), 0.0
        run.rollouts += await self._rows_of(finished)
        self._began, self._steps, self._accepted = time.time(), 0, 0
        calls = []
        for problem in self._problems:
            missing = [s for s in samples if _trajectory_name(run.epoch, problem.problem_id, s) not in finished]
            calls += [self._run_trajectory(run, problem.problem_id, sample) for sample in missing]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)
        run.makespan = max((row.finished for row in run.from_this_run if row.finished is not None), default=0.0)

    async def _run_trajectory(self, run: EpochRun, problem_id: str, sample: int) -> None:
        arguments = {
            "problem": problem_id,
            "sample": sample,
            "epoch": run.epoch,
            "model": self._job.metadata.name,
            "url": self._source.server.url,
            "token": self._source.server.token,
        }
        started = time.time()
        try:
            result = await asyncio.wrap_future(self._source.environment.call("trajectory", arguments))
        except EnvironmentCallError as error:
            result = {"rollouts": [], "error": {"type": str(error.error_type), "message": str(error)}}
        finished = time.time()
        ledger = await self._read_ledger([result["rollouts"]])
        name = _trajectory_name(run.epoch, problem_id, sample)
        kept = {"problem": problem_id, "rollouts": result["rollouts"], "reward": result.get("reward")}
        errors: dict[str, RolloutError] = {}
        if (failure := result.get("error")) is not None:
            errors[name] = RolloutError(failure["type"], problem_id, failure["message"])
        elif result["rollouts"]:
            await self._client.report_rewards(dict.fromkeys(result["rollouts"], result["reward"]))
        await self._results.record_trajectories({name: kept}, errors)
        row = self._row(name, kept, ledger, started - self._began, finished - self._began)
        run.rollouts.append(row)
        self.progress.done += 1
        self.progress.all_done += 1
        self._steps += row.num_decoding_steps
        self._accepted += row.num_accepted_tokens
        self.progress.accepted_per_step = self._accepted / max(1, self._steps)

    async def _read_ledger(self, rollouts: Iterable[list[str]]) -> dict[str, LedgerEntry]:
        """Return the ledger entries of rollouts by their ids."""
        ids = {rollout_id: RolloutId.parse(rollout_id) for one in rollouts for rollout_id in one}
        requests = sorted({rollout.request_id for rollout in ids.values()})
        found = await asyncio.to_thread(retry, self._job_store.read_ledger, requests)
        return {
            rollout_id: entry
            for rollout_id, rollout in ids.items()
            if (entry := found[rollout.request_id].get(rollout.sample)) is not None
        }

    def _row(
        self,
        name: str,
        result: Mapping[str, Any],
        ledger: Mapping[str, LedgerEntry],
        started: float | None,
        finished: float | None,
    ) -> RolloutRow:
        """Build the row of a trajectory, which has the sums over its turns."""
        turns = [ledger[rollout_id] for rollout_id in result["rollouts"] if rollout_id in ledger]
        return RolloutRow(
            result["rollouts"][-1] if result["rollouts"] else name,
            result["problem"],
            sum(turn.length for turn in turns),
            turns[-1].finish_reason if turns else "failed",
            sum(turn.num_decoding_steps for turn in turns),
            sum(turn.num_draft_tokens for turn in turns),
            sum(turn.num_accepted_tokens for turn in turns),
            result["reward"],
            started,
            finished,
            error=self._results.error_text(name),
        )


CLIENT_NAME = "dataset"
"""Name of the client that samples the job's own rollouts, the same in every run of the job."""


@dataclass(frozen=True)
class Dataset:
    """The loaded dataset source of a manifest."""

    problems: Sequence[DatasetProblem | EnvironmentProblem]
    checkpoints: Sequence[str]
    """Address of each epoch's weights."""
    tokenizer: Any
    environment: EnvironmentSupervisor | None = None
    """The environment that the problems belong to."""
    samples_itself: bool = False
    """Whether the environment itself asks for the responses, turn by turn."""

    def close(self) -> None:
        """End the environment's process."""
        if self.environment is not None:
            self.environment.close()

    def prompts(self) -> dict[str, list[int]]:
        """Return the token ids of each problem's prompt; empty ones if only the environment knows them."""
        return {problem.problem_id: list(problem.prompt_token_ids) for problem in self.problems}

    def total_rollouts(self, job: RolloutJob) -> int | None:
        """Return the number of rollouts in all epochs; None if the number of turns is unknown."""
        if self.samples_itself:
            return None
        return len(self.problems) * job.spec.sampling.n * len(self.checkpoints)


def load_dataset(job: RolloutJob, model: Path, tokenizer: Any, cache: Path) -> Dataset | None:
    """Load and check the dataset source of a job; return None for a job that serves trainers.

    Args:
        job: the manifest.
        model: directory of the job's model.
        tokenizer: the model's tokenizer.
        cache: the model cache, for checkpoints.

    Raises:
        ManifestError: naming each field with a value that cannot be used.
        ModelError: if a checkpoint cannot be found.
    """
    source = job.spec.source.dataset
    if source is None:
        return None
    for uri in source.checkpoints:
        resolve_checkpoint(uri, cache, model, job.spec.weights.allowed_roots)
    checkpoints = list(source.checkpoints) or [job.spec.model.uri] * source.epochs
    if source.environment is None:
        problems = load_problems(source, tokenizer)
        _check_requests(job, problems, len(tokenizer))
        return Dataset(problems, checkpoints, tokenizer)
    loaded = load_environment(source.environment, tokenizer)
    dataset = Dataset(
        loaded.problems,
        checkpoints,
        tokenizer,
        loaded.environment,
        samples_itself=loaded.samples_itself,
    )
    try:
        _check_requests(job, loaded.problems, len(tokenizer))
    except ManifestError:
        dataset.close()
        raise
    return dataset


def count_finished(server: redis.Redis, keys: MessageKeys) -> int:
    """Count the dataset's rollouts that earlier runs of the job have finished."""
    return retry(LauncherStore(server, keys).count_finished_rollouts, CLIENT_NAME)


async def run_dataset(
    setup: JobSetup,
    dataset: Dataset,
    server: redis.Redis,
    *,
    finished_before: int,
    baselines: Sequence[EpochMode] = (),
    watch: Callable[[DatasetTrainer], Awaitable[None]] | None = None,
) -> JobReport:
    """Sample the rollouts that are not finished yet, and close the job.

    Args:
        setup: the job, which is running.
        dataset: the problems to sample.
        server: the job's Redis.
        finished_before: number of rollouts that earlier runs have finished.
        baselines: modes that repeat each epoch for comparison; none for an environment that asks for its
            responses itself.
        watch: runs concurrently to show the progress; cancelled at the end.

    Raises:
        RolloutClientError: if the job rejects a request.
        redis.RedisError: if Redis is unavailable for long. Finished rollouts are kept, and the call can be repeated.
    """
    comparison = f"compare-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            AsyncRolloutClient.connect(setup.redis_url, uid=setup.uid, name=CLIENT_NAME)
        )
        comparison_client = await stack.enter_async_context(
            AsyncRolloutClient.connect(setup.redis_url, uid=setup.uid, name=comparison)
        )
        arguments: dict[str, Any] = {
            "problems": dataset.problems,
            "checkpoints": dataset.checkpoints,
            "tokenizer": dataset.tokenizer,
            "client": client,
            "comparison_client": comparison_client,
            "server": server,
            "keys": setup.keys,
            "store": setup.history_store(),
            "finished_before": finished_before,
        }
        if dataset.environment is not None and dataset.samples_itself:
            local_server = await stack.enter_async_context(LocalServer(setup))
            source = TrajectorySource(dataset.environment, local_server)
            trainer: DatasetTrainer = TrajectoryTrainer(source, setup.job, baselines=(), **arguments)
        else:
            trainer = DatasetTrainer(setup.job, environment=dataset.environment, baselines=baselines, **arguments)
        watching = [asyncio.ensure_future(watch(trainer))] if watch is not None else []
        try:
            return await trainer.run()
        finally:
            await cancel_and_wait(*watching)


def _check_requests(
    job: RolloutJob, problems: Sequence[DatasetProblem | EnvironmentProblem], vocabulary_size: int
) -> None:
    """Reject requests that the engines would reject, before any engine is started."""
    sampling, limit = job.spec.sampling, job.spec.engine.max_model_len
    errors = []
    longest = max(len(problem.prompt_token_ids) for problem in problems)
    if longest + sampling.max_tokens > limit:
        message = (
            f"{sampling.max_tokens} tokens after the longest prompt, which has {longest}, exceed "
            f"engine.maxModelLen ({limit})"
        )
        errors.append(FieldError("spec.sampling.maxTokens", message))
    for setting, token in sampling.tokens_outside(vocabulary_size).items():
        message = f"token id {token} is outside of the model's vocabulary, which has {vocabulary_size} tokens"
        errors.append(FieldError(f"spec.sampling.{to_camel(setting)}", message))
    if errors:
        raise ManifestError(errors)
