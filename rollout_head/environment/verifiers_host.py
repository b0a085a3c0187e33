"""Runs environments of ``verifiers`` in an environment's process. The environments themselves are unmodified.

An environment runs its agents and their scoring itself. What an agent's program asks of the model goes through
verifiers' interception server, whose client sends it to the job's HTTP server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import verifiers.v1 as vf
from environment_host import (
    RETRIED_STATUSES,
    RETRY_DELAYS_S,
    CallError,
    RolloutRecord,
    TimeBudget,
    UsageError,
    as_error,
    as_reward,
    check_header,
)
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import server as interception_server
from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config

_TOKEN_VARIABLE = "ROLLOUT_ENVIRONMENT_API_KEY"  # noqa: S105  # the name of a variable
"""Variable with the server's token. Because of API_KEY in its name, verifiers does not pass it to agents' programs."""


class JobClient(EvalClient):
    """Sends the requests of agents to the job.

    Args:
        config: address of the job's HTTP server.
        records: id of a trace of verifiers → the rollout that it belongs to.
    """

    def __init__(self, config: EvalClientConfig, records: Mapping[str, RolloutRecord]) -> None:
        super().__init__(config)
        self._records = records

    async def _request(self, url: str, body: dict[str, Any], headers: Any, *, stream: bool = False) -> Any:
        """Send a request until the job answers, and return the whole response, also if it is a stream.

        The events of a stream are passed on when the response is complete anyway.
        """
        record = self._records.get(headers.get(SESSION_ID_HEADER, ""))
        if record is not None:
            headers.update(record.headers(json.dumps(body, sort_keys=True).encode()))
        with nullcontext() if record is None else record.budget.paused():
            for delay in itertools.chain(RETRY_DELAYS_S, itertools.repeat(RETRY_DELAYS_S[-1])):
                try:
                    response = await super()._request(url, body, headers)
                    break
                except ProviderError as error:
                    if error.status_code not in RETRIED_STATUSES:
                        raise
                await asyncio.sleep(delay)
        if record is not None:
            record.record(response.headers)
        return response


class VerifiersEnvironment:
    """An environment of ``verifiers``."""

    samples_itself = True

    def __init__(self, name: str, environment: Any) -> None:
        self._name, self._environment = name, environment
        self._tasks: dict[str, Any] = {}
        self._records: dict[str, RolloutRecord] = {}
        self._clients: set[tuple[str, str]] = set()
        self._services = AsyncExitStack()

    @classmethod
    def create(cls, name: str, arguments: Mapping[str, Any]) -> VerifiersEnvironment:
        """Load the environment of the taskset with the id *name*; *arguments* is the configuration of the environment.

        Raises:
            UsageError: if it is not installed.
            Exception: what loading it raises.
        """
        try:
            import_taskset(name)
        except ModuleNotFoundError as error:
            module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
            cause = error.__cause__
            if not isinstance(cause, ModuleNotFoundError) or cause.name != module:
                raise
            raise UsageError(
                f"verifiers finds no environment {name!r}, because there is no module {module}; install its package "
                "into an image that is based on the worker's (spec.image), or add its directory to PYTHONPATH"
            ) from None
        taskset = {**arguments.get("taskset", {}), "id": name}
        return cls(name, load_environment(resolve_env_config({**arguments, "taskset": taskset})))

    async def load_problems(self, limit: int | None) -> list[dict[str, Any]]:
        """Return the ids of the problems, and start the services that all rollouts share.

        The prompts of the problems are only known to the environment.

        Raises:
            UsageError: if two problems have the same id, or there is no end of them.
        """
        taskset = self._environment.taskset
        if limit is None and not taskset.bounded:
            raise UsageError(f"the taskset {self._name!r} has no end; set maxProblems")
        for task in taskset if limit is None else taskset.take(limit):
            number = task.data.idx if task.data.id is None else task.data.id
            problem = f"{self._name}/{number}"
            check_header(problem)
            if problem in self._tasks:
                raise UsageError(f"two tasks of the taskset have the id {number!r}")
            self._tasks[problem] = task
        await self._services.enter_async_context(self._environment.serving())
        return [{"id": problem, "prompt": []} for problem in self._tasks]

    async def trajectory(self, call: Mapping[str, Any], budget: TimeBudget) -> dict[str, Any]:
        """Run an episode; return its rollouts, and its reward or its error."""
        task = self._tasks.get(call["problem"])
        if task is None:
            raise CallError("exception", f"the taskset has no task {call['problem']!r} since the process restarted")
        record = RolloutRecord(call, budget)
        context = ModelContext(call["model"], self._client_config(call["url"], call["token"]))
        traces: list[str] = []

        def start(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._records[trace.id] = record

        try:
            episode = await self._environment.run_episode(task, context, on_trace=start)
        finally:
            for trace in traces:
                self._records.pop(trace)
        result: dict[str, Any] = {"rollouts": record.rollout_ids}
        try:
            if not episode.ok:
                errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
                reasons = [f"{error.type}: {error.message}" for error in errors]
                raise CallError("exception", reasons[-1] if reasons else "the episode has ended without a result")
            trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
            result["reward"] = as_reward(sum(trace.reward for trace in trained))
        except CallError as error:
            result["error"] = as_error(error)
        return result

    def _client_config(self, url: str, token: str) -> EvalClientConfig:
        """Return the configuration of the client for a server of the job."""
        os.environ[_TOKEN_VARIABLE] = token
        config = EvalClientConfig(base_url=url, api_key_var=_TOKEN_VARIABLE)
        if (url, token) not in self._clients:
            self._clients.add((url, token))
            resolve_client = interception_server.resolve_client

            def resolve(other: Any) -> Any:
                return JobClient(config, self._records) if other == config else resolve_client(other)

            # verifiers has no parameter for a client of one's own.
            interception_server.resolve_client = resolve
        return config
