"""What an environment returned, kept in Redis so that a later run of the job and the job's status have it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollout_api.protocol.status import EnvironmentErrors
from rollout_api.redis_client.retry import retry
from rollout_worker.job.job_store.launcher import LauncherStore


@dataclass(frozen=True)
class RolloutError:
    """Why a rollout has no reward."""

    error_type: str
    problem_id: str
    message: str

    @property
    def text(self) -> str:
        """The error in one text."""
        return f"{self.error_type}: {self.message}"


class EnvironmentResults:
    """The errors of an environment, and the results of its trajectories. All methods run in one event loop.

    Args:
        job_store: the job's state in Redis.
    """

    def __init__(self, job_store: LauncherStore) -> None:
        self._job_store, self._lock = job_store, asyncio.Lock()
        self._errors: dict[str, RolloutError] = {}
        self._summary: dict[str, EnvironmentErrors] = {}
        self.trajectories: dict[str, dict[str, Any]] = {}
        """Name of each trajectory that has ended → its result."""

    async def restore(self) -> None:
        """Read the results of earlier runs of the job."""
        stored = await asyncio.to_thread(retry, self._job_store.environment_results)
        for name, result in stored.items():
            if (error := result.get("error")) is not None:
                self._add(name, RolloutError(**error))
            if "rollouts" in result:
                self.trajectories[name] = result

    def error_text(self, name: str) -> str | None:
        """Return the error of a rollout or trajectory; None if it has none."""
        error = self._errors.get(name)
        return None if error is None else error.text

    async def record(self, errors: Mapping[str, RolloutError], *, succeeded: Collection[str] = ()) -> None:
        """Record rollouts that got no reward, and those that got one, which may have had none in an earlier run."""
        outdated = [name for name in succeeded if name in self._errors]
        if not errors and not outdated:
            return
        if outdated or not self._errors.keys().isdisjoint(errors):
            kept = {name: error for name, error in self._errors.items() if name not in outdated and name not in errors}
            self._errors, self._summary = {}, {}
            for name, error in kept.items():
                self._add(name, error)
        for name, error in errors.items():
            self._add(name, error)
        await self._store({name: {"error": asdict(error)} for name, error in errors.items()}, outdated)

    async def record_trajectories(
        self, results: Mapping[str, dict[str, Any]], errors: Mapping[str, RolloutError]
    ) -> None:
        """Record the results of trajectories, which are then never repeated; either all of them or none.

        Args:
            results: name of each trajectory → its reward and the ids of its rollouts, as data for JSON.
            errors: names of those that have no reward → the reason.
        """
        for name, error in errors.items():
            self._add(name, error)
        complete = {
            name: {**result, "error": asdict(errors[name])} if name in errors else result
            for name, result in results.items()
        }
        self.trajectories |= complete
        await self._store(complete, ())

    def summary(self) -> dict[str, EnvironmentErrors]:
        """Return the errors by type, each with the first one."""
        return self._summary

    async def _store(self, results: Mapping[str, Any], outdated: Collection[str]) -> None:
        async with self._lock:  # so that an older summary does not replace a newer one
            summary = json.dumps(self._summary)
            await asyncio.to_thread(retry, self._job_store.store_environment_results, results, outdated, summary)

    def _add(self, name: str, error: RolloutError) -> None:
        self._errors[name] = error
        first: EnvironmentErrors = {"count": 0, "problem": error.problem_id, "message": error.message}
        self._summary.setdefault(error.error_type, first)["count"] += 1
