"""Runs environments of ``verifiers`` in an environment's process. The environments themselves are unmodified.

An environment runs its rollouts and their scoring itself, and samples with a client that sends its requests to the
job's HTTP server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import verifiers as vf
from environment_host import (
    CallError,
    RolloutRecord,
    TimeBudget,
    UsageError,
    as_error,
    as_reward,
    check_header,
    current_rollout,
)
from verifiers.clients import OpenAIChatCompletionsClient

_TOKEN_VARIABLE = "ROLLOUT_ENVIRONMENT_TOKEN"  # noqa: S105  # the name of a variable
_MAX_RETRIES = 1000
"""Number of times a request is repeated while the job's HTTP server is restarted or has no room."""
_TIMEOUT_S = 7 * 24 * 3600.0
"""Time limit of a request, which may wait until there are workers."""


class JobClient(OpenAIChatCompletionsClient):
    """Samples the responses of rollouts from the job."""

    def __init__(self, url: str, token: str) -> None:
        os.environ[_TOKEN_VARIABLE] = token
        super().__init__(
            vf.ClientConfig(api_base_url=url, api_key_var=_TOKEN_VARIABLE, max_retries=_MAX_RETRIES, timeout=_TIMEOUT_S)
        )
        # There is no public way to read the headers of responses that openai has parsed.
        self.client._client.event_hooks["response"].append(self._record)

    async def get_response(self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **kwargs: Any) -> Any:
        """Sample the next response of a rollout."""
        record = current_rollout.get()
        if isinstance(record, Group):
            # Each rollout is a task, with a context of its own.
            record = record.record_of(str(kwargs["state"]["trajectory_id"]))
            current_rollout.set(record)
        with record.budget.paused():
            return await super().get_response(prompt, model, sampling_args, tools, **kwargs)

    async def get_native_response(
        self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Any:
        """Send a request. openai's client repeats it with the same headers."""
        body = json.dumps([prompt, sampling_args, tools], sort_keys=True, default=str).encode()
        headers = {**(kwargs.pop("extra_headers", None) or {}), **current_rollout.get().headers(body)}
        return await super().get_native_response(prompt, model, sampling_args, tools, extra_headers=headers, **kwargs)

    async def _record(self, response: Any) -> None:
        if response.status_code == 200:
            current_rollout.get().record(response.headers)


class Group:
    """The rollouts of one call, which are those of one problem."""

    def __init__(self, call: Mapping[str, Any], budget: TimeBudget) -> None:
        self._records = [RolloutRecord(call, sample, budget) for sample in call["samples"]]
        self._by_trajectory: dict[str, RolloutRecord] = {}

    def record_of(self, trajectory: str) -> RolloutRecord:
        """Return the rollout that verifiers knows under this id. The rollouts of a group begin alike."""
        if trajectory not in self._by_trajectory:
            self._by_trajectory[trajectory] = self._records[len(self._by_trajectory)]
        return self._by_trajectory[trajectory]


class VerifiersEnvironment:
    """An environment of ``verifiers``."""

    samples_itself = True

    def __init__(self, name: str, environment: Any) -> None:
        self._name, self._environment = name, environment
        self._rows: dict[str, dict[str, Any]] = {}
        self._client: JobClient | None = None
        self._client_key = ("", "")

    @classmethod
    def create(cls, name: str, arguments: Mapping[str, Any]) -> VerifiersEnvironment:
        """Load the environment with the id *name*.

        Raises:
            UsageError: if it is not installed.
            Exception: what loading it raises.
        """
        module = name.replace("-", "_").rpartition("/")[2]
        try:
            return cls(name, vf.load_environment(name, **arguments))
        except (ModuleNotFoundError, ValueError) as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ModuleNotFoundError):
                cause = cause.__cause__ or cause.__context__
            if cause is None or cause.name != module:
                raise
            raise UsageError(
                f"verifiers finds no environment {name!r}, because there is no module {module}; install its package "
                "into an image that is based on the worker's (spec.image), or add its directory to PYTHONPATH"
            ) from None

    @property
    def scores_groups(self) -> bool:
        """Whether rewards compare the rollouts of a problem."""
        return bool(self._environment.requires_group_rollouts)

    async def load_problems(self, limit: int | None) -> list[dict[str, Any]]:
        """Return the ids of the problems. Their prompts are only known to the environment.

        Raises:
            UsageError: if two have the same id.
        """
        for row in self._environment.get_dataset(n=-1 if limit is None else limit):
            problem = f"{self._name}/{row['example_id']}"
            check_header(problem)
            if problem in self._rows:
                raise UsageError(f"two problems of the dataset have the example_id {row['example_id']!r}")
            self._rows[problem] = dict(row)
        return [{"id": problem, "prompt": []} for problem in self._rows]

    async def trajectories(self, call: Mapping[str, Any], budget: TimeBudget) -> list[dict[str, Any]]:
        """Run the trajectories of one problem; return the reward or the error of each."""
        row = self._rows.get(call["problem"])
        if row is None:
            raise CallError("exception", f"the dataset has no problem {call['problem']!r} since the process restarted")
        client = self._client_of(call["url"], call["token"])
        group = Group(call, budget)
        current_rollout.set(group)
        inputs: list[Any] = [row for _ in call["samples"]]
        options = {"sampling_args": {}, "state_columns": ["trajectory_id"]}
        if self.scores_groups:
            outputs = await self._environment.run_group(inputs, client, call["model"], **options)
        else:
            outputs = [await self._environment.run_rollout(inputs[0], client, call["model"], **options)]
        results = []
        for sample, output in zip(call["samples"], outputs, strict=True):
            result = {"sample": sample, "rollouts": group.record_of(output["trajectory_id"]).rollout_ids}
            try:
                if output.get("error") is not None:
                    raise CallError("exception", _error_text(output["error"]))
                result["reward"] = as_reward(output["reward"])
            except CallError as error:
                result["error"] = as_error(error)
            results.append(result)
        return results

    def _client_of(self, url: str, token: str) -> JobClient:
        if self._client is None or self._client_key != (url, token):
            self._client, self._client_key = JobClient(url, token), (url, token)
        return self._client


def _error_text(error: Any) -> str:
    if isinstance(error, Mapping):
        return str(error.get("error_chain_str") or error.get("error_chain_repr") or error.get("error") or error)
    return str(error)
