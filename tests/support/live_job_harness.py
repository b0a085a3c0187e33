"""Runs scenarios on jobs with shared engines: each scenario gets a new job and engines with the initial weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rollout_api import AsyncRolloutClient, Prompt, Rollout, RolloutId
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.worker import EngineWorker
from tests.support.in_process_job import LiveJob, live, manifest
from tests.support.reference_model import EOS, VOCABULARY, LoopThread
from tests.support.waiting import wait_for_async

ENDLESS = list(range(EOS))
"""Allowed token ids with which a rollout continues until max_tokens, because the end token is not among them."""

Scenario = Callable[[LiveJob, AsyncRolloutClient], Coroutine[Any, Any, None]]


class JobHarness:
    """Runs scenarios on jobs with the given engines, whose initial weights are in ``models/0``."""

    def __init__(self, loop: LoopThread, engines: dict[str, Engine], models: Path, url: str) -> None:
        self.engines, self.models, self.url = engines, models, url
        self._loop = loop

    def with_redis(self, url: str) -> JobHarness:
        """Return a harness with the same engines and another Redis."""
        return JobHarness(self._loop, self.engines, self.models, url)

    def with_engines(self, engines: dict[str, Engine]) -> JobHarness:
        """Return a harness with other engines and the same Redis."""
        return JobHarness(self._loop, engines, self.models, self.url)

    def run(self, scenario: Scenario, *, job: RolloutJob | None = None, seconds: float = 120) -> None:
        """Run a scenario once all engines are registered."""
        self._loop.run(self._run(scenario, job or manifest()), timeout=seconds)

    async def _run(self, scenario: Scenario, job: RolloutJob) -> None:
        try:
            async with (
                live(self.url, job, self.models / "0", VOCABULARY, self.engines) as running,
                AsyncRolloutClient.connect(self.url, uid=running.uid) as client,
            ):
                await running.until(lambda: running.redis.hlen(running.keys.engines) == len(self.engines))
                await scenario(running, client)
        finally:
            for engine in self.engines.values():  # restored for the next scenario
                if not engine.stopped:
                    await engine.resume()
                if engine.weight_version != 0 and not engine.stopped:
                    await engine.load_weights(self.models / "0", 0)


async def lose(running: LiveJob, name: str) -> None:
    """Kill an engine's worker, and let its lease expire at once."""
    engine_id = running.workers[name].engine_id
    await running.kill(name)
    running.redis.delete(running.keys.lease(engine_id))
    if "coordinator" in running.tasks:
        await running.until(lambda: engine_id.encode() not in running.redis.hkeys(running.keys.engines))


async def replace_engine(running: LiveJob, job_harness: JobHarness, name: str, *, lost: bool = True) -> EngineWorker:
    """Replace an engine, which is killed unless *lost* is False, by one with the weights of the model's directory."""
    if lost:
        await lose(running, name)
    engine = job_harness.engines[name]
    await engine.load_weights(job_harness.models / "0", 0)
    return running.start_worker(name, engine)


def prompts(count: int, length: int = 4, **fields: Any) -> list[Prompt]:
    """Return prompts of different problems."""
    return [
        Prompt([(7 * index + place) % EOS for place in range(length)], f"p{index}", **fields) for index in range(count)
    ]


def prompt_index(rollout: Rollout) -> int:
    """Return the position of a rollout's prompt within its step."""
    return int(RolloutId.parse(rollout.rollout_id).request_id.split(":")[2].split("-")[0])


async def gather(client: AsyncRolloutClient, step: int, prompts: list[Prompt]) -> list[Rollout]:
    """Return all rollouts of a step."""
    async with client.step(step, prompts) as running:
        return [rollout async for rollout in running]


async def wait_for_status(client: AsyncRolloutClient, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Wait until the job's status, which is published once a second, fulfils a condition."""
    await wait_for_async(lambda: client.status and condition(client.status), 20, lambda: f"status: {client.status}")
    return client.status


def assert_delivered_once(running: LiveJob, rollouts: list[Rollout], expected: int) -> None:
    """Check that *expected* rollouts were delivered and stored once, and that no request or partial remains."""
    assert expected == len({rollout.rollout_id for rollout in rollouts}) == len(rollouts)
    assert Counter(rollout.rollout_id for rollout in rollouts if rollout.token_ids) == running.in_history()
    assert 0 == running.redis.xlen(running.keys.requests)
    assert 0 == running.redis.hlen(running.keys.partials)
