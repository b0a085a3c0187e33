"""What goes wrong with one rollout or one weight version ends neither its engine nor others. The engine is a stub."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_api import AsyncRolloutClient, FinishReason, Rollout, RolloutRequest, WeightsError
from rollout_api.protocol.messages import WeightSpan
from rollout_store.job import EngineReport, Order
from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.engine import EngineCounters
from rollout_worker.engine.response import GenerationResult, NotFiniteError, ResponseBuilder, UnusableOutputError
from rollout_worker.engine_worker import lease
from rollout_worker.engine_worker.executor import MAX_FAILED_REQUESTS
from rollout_worker.engine_worker.running import RunningRollouts
from rollout_worker.policy.governor import SpeculationCutoff
from tests.support.in_process_job import LiveJob, live, manifest
from tests.support.live_job_harness import gather, prompts

VOCABULARY = 24
NUM_ROLLOUTS = 4
"""Number of rollouts of a prompt."""


def result(num_tokens: int = 3) -> GenerationResult:
    return GenerationResult(
        token_ids=[1] * num_tokens,
        logprobs=[-0.5] * num_tokens,
        ranks=None,
        top_logprobs=None,
        kept_token_ids=None,
        weight_spans=[WeightSpan(start=0, weight_version=0)],
        finish_reason=FinishReason.LENGTH,
        num_decoding_steps=num_tokens,
        draft_tokens_by_source={},
        accepted_tokens_by_source={},
        draft_sources=None,
        num_cached_tokens=0,
        started=time.monotonic(),
        finished=time.monotonic(),
    )


class StubEngine:
    """What a worker uses of an engine. *generate* generates the rollouts of the failing problems."""

    weight_version = full_weight_version = 0
    stopped = False

    def __init__(self, generate: Callable[[], GenerationResult]) -> None:
        self.config = EngineConfig(model=Path("/model"), spec=manifest().spec.engine, cpu=True)
        self.counters = EngineCounters()
        self.failing = {"p0"}
        self._generate = generate

    async def generate(self, request: RolloutRequest, sample: int, **_: Any) -> GenerationResult:
        return self._generate() if request.problem in self.failing else result()

    async def load_weights(self, directory: Path, version: int, mode: Any) -> float:
        if version == 1:
            raise RecursionError("maximum recursion depth exceeded")
        self.weight_version = self.full_weight_version = version
        return 0.0

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        raise OverflowError("port must be 0-65535")

    async def stats(self) -> dict[str, Any]:
        raise EngineError("vLLM failed while reading statistics: division by zero")

    def running_tokens(self) -> dict[str, int]:
        return {}


def run(
    url: str,
    engine: Any,
    scenario: Callable[[LiveJob, AsyncRolloutClient], Awaitable[None]],
    model: Path = Path("/model"),
) -> None:
    """Run a scenario on a job with one engine."""

    async def run_job() -> None:
        async with (
            live(url, manifest(), model, VOCABULARY, {"engine": engine}) as job,
            AsyncRolloutClient.connect(url, uid=job.uid) as client,
        ):
            await job.until(lambda: bool(job.redis.hlen(job.keys.engines)))
            await scenario(job, client)

    asyncio.run(asyncio.wait_for(run_job(), 60))


def assert_failed(rollouts: list[Rollout], reason: str) -> None:
    """Check that the rollouts of the first problem have failed for a *reason*, and no others."""
    failed = [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.FAILED]
    assert {"p0"} == {rollout.problem_id for rollout in failed}
    assert NUM_ROLLOUTS == len(failed)
    assert all(reason in rollout.detail for rollout in failed), failed[0].detail
    assert 3 * NUM_ROLLOUTS == len(rollouts)


def raising(error: Exception) -> Callable[[], GenerationResult]:
    def generate() -> GenerationResult:
        raise error

    return generate


@pytest.mark.parametrize(
    ("generate", "reason"),
    [
        (raising(UnusableOutputError("weight version 3 has NaN")), "weight version 3 has NaN"),
        (raising(EngineError("vLLM ended a response unexpectedly: error")), "vLLM ended a response unexpectedly"),
        (raising(ZeroDivisionError("division by zero")), "ZeroDivisionError: division by zero"),
        (lambda: result(400_000), "raise Redis' proto-max-bulk-len"),
    ],
    ids=["unusable output", "vLLM's error", "other error", "large result"],
)
def test_an_error_of_a_rollout_ends_only_this_rollout(
    redis_url: str, generate: Callable[[], GenerationResult], reason: str
) -> None:
    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        engine_id = job.workers["engine"].engine_id
        job.redis.config_set("proto-max-bulk-len", 2**20)
        try:
            assert_failed(await gather(client, 1, prompts(3)), reason)
        finally:
            job.redis.config_set("proto-max-bulk-len", 2**29)
        job.check()
        assert engine_id == job.workers["engine"].engine_id
        await job.until_nothing_is_open()

    run(redis_url, StubEngine(generate), scenario)


def test_rollouts_that_fail_between_others_do_not_end_the_engine(redis_url: str) -> None:
    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        for step in range(1, MAX_FAILED_REQUESTS + 2):
            assert_failed(await gather(client, step, prompts(3)), "ZeroDivisionError")
        job.check()

    run(redis_url, StubEngine(raising(ZeroDivisionError("division by zero"))), scenario)


def test_an_engine_with_which_everything_fails_leaves_its_rollouts_to_others(redis_url: str) -> None:
    engine = StubEngine(raising(ZeroDivisionError("division by zero")))
    engine.failing = {f"p{index}" for index in range(20)}

    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        async with client.step(1, prompts(20)) as step:
            with pytest.raises(EngineError, match=r"8 requests have failed in a row.*ZeroDivisionError"):
                await job.tasks.pop("engine")
            del job.workers["engine"]
            job.start_worker("other", StubEngine(result))  # type: ignore[arg-type]
            rollouts = [rollout async for rollout in step]
        failed = {one.problem_id for one in rollouts if one.finish_reason is FinishReason.FAILED}
        assert 0 < len(failed) < MAX_FAILED_REQUESTS
        assert 20 * NUM_ROLLOUTS == len(rollouts)

    run(redis_url, engine, scenario)


NOT_FINITE = UnusableOutputError("some are NaN")
NUM_REQUESTS = 200


def engine_of_not_finite() -> StubEngine:
    engine = StubEngine(raising(NOT_FINITE))
    engine.failing = {f"p{index}" for index in range(NUM_REQUESTS)}
    return engine


async def assert_ends(engine: str, job: LiveJob, client: AsyncRolloutClient) -> None:
    """Check that an engine ends once it has failed with many requests, and that others get those that follow."""
    async with client.step(2, prompts(NUM_REQUESTS)) as step:
        with pytest.raises(
            EngineError, match=r"rollouts of 32 requests .* with weights that work elsewhere.*some are NaN"
        ):
            await job.tasks.pop(engine)
        del job.workers[engine]
        job.start_worker("next", StubEngine(result))  # type: ignore[arg-type]
        rollouts = [rollout async for rollout in step]
    failed = {one.problem_id for one in rollouts if one.finish_reason is FinishReason.FAILED}
    assert 0 < len(failed) < NUM_REQUESTS
    assert NUM_REQUESTS * NUM_ROLLOUTS == len(rollouts)


def test_weights_with_which_everything_fails_end_no_engine(redis_url: str) -> None:
    """An engine in the place of another one would load the same weights."""

    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        job.start_worker("other", engine_of_not_finite())  # type: ignore[arg-type]
        rollouts = await gather(client, 1, prompts(NUM_REQUESTS))
        assert {FinishReason.FAILED} == {rollout.finish_reason for rollout in rollouts}
        assert NUM_REQUESTS * NUM_ROLLOUTS == len(rollouts)
        job.check()

    run(redis_url, engine_of_not_finite(), scenario)


def test_an_engine_that_fails_with_weights_that_work_elsewhere_is_faulty(redis_url: str) -> None:
    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        healthy = job.workers["engine"].engine_id
        await gather(client, 1, prompts(3))
        await job.until(lambda: 0 == EngineReport.read(job.redis.hget(job.keys.engines, healthy)).sampled_version)
        job.start_worker("faulty", engine_of_not_finite())  # type: ignore[arg-type]
        await assert_ends("faulty", job, client)

    run(redis_url, StubEngine(result), scenario)


def test_weights_with_which_the_model_sometimes_overflows_end_no_engine(redis_url: str) -> None:
    """A request that fails does so at once, so that many may fail before any other ends."""
    overflowing = engine_of_not_finite()
    overflowing.failing = {"p3"}

    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        engine = job.workers["engine"].engine_id
        await gather(client, 1, prompts(4))

        def has_both() -> bool:
            report = EngineReport.read(job.redis.hget(job.keys.engines, engine))
            return 0 == report.sampled_version == report.unusable_version

        await job.until(has_both)
        job.start_worker("other", engine_of_not_finite())  # type: ignore[arg-type]
        rollouts = await gather(client, 2, prompts(NUM_REQUESTS))
        assert NUM_REQUESTS * NUM_ROLLOUTS == len(rollouts)
        job.check()

    run(redis_url, overflowing, scenario)


def test_the_coordinator_ends_a_rollout_whose_failure_cannot_be_recorded(redis_url: str) -> None:
    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        finish, num_attempts = job.job_stores["engine"].rollouts.finish, 0

        async def refuse(request: RolloutRequest, rollout: Rollout, **more: Any) -> bool:
            nonlocal num_attempts
            if request.problem != "p0":
                return await finish(request, rollout, **more)
            num_attempts += 1
            raise TypeError("cannot be encoded")

        job.job_stores["engine"].rollouts.finish = refuse  # type: ignore[method-assign]
        assert_failed(await gather(client, 1, prompts(3)), "TypeError: cannot be encoded")
        assert 2 * NUM_ROLLOUTS == num_attempts
        await job.until_nothing_is_open()

    run(redis_url, StubEngine(result), scenario)


def test_an_engine_that_has_stopped_leaves_its_rollouts_to_others(redis_url: str) -> None:
    engine = StubEngine(raising(EngineError("vLLM's core process has died")))

    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        engine.stopped = True
        async with client.step(1, prompts(1)) as step:
            with pytest.raises(EngineError, match="has died"):
                await job.tasks.pop("engine")
            del job.workers["engine"]
            job.start_worker("other", StubEngine(result))  # type: ignore[arg-type]
            assert {FinishReason.LENGTH} == {rollout.finish_reason async for rollout in step}

    run(redis_url, engine, scenario)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_any_error_of_a_weight_version_refuses_this_version(redis_url: str, model: Path) -> None:
    engine = StubEngine(result)

    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        with pytest.raises(WeightsError, match="RecursionError: maximum recursion depth exceeded"):
            await client.publish_weights(1, model)
        (model / "config.json").write_text("[" * 100_000)
        with pytest.raises(WeightsError, match=r"config\.json cannot be read"):
            await client.publish_weights(2, model)
        (model / "config.json").write_text(json.dumps({}))
        assert 0 == engine.weight_version
        assert 1 == len((await client.publish_weights(3, model)).loaded)
        assert all(rollout.finish_reason.complete for rollout in await gather(client, 1, prompts(3)))

    run(redis_url, engine, scenario, model)


def test_statistics_that_cannot_be_read_for_a_while_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "ENGINE_STATS_INTERVAL_S", 0.0)
    engine, failure = StubEngine(result), EngineError("division by zero")
    replies = iter([{"labeled_counters": {"steps": {"a": 1}}}, failure, failure, {}, failure])
    report = EngineReport("engine")
    seen: list[dict[str, dict[str, int]]] = []

    async def stats() -> dict[str, Any]:
        seen.append(report.labeled_counters)
        reply = next(replies, None)
        if reply is None:
            raise asyncio.CancelledError
        if isinstance(reply, EngineError):
            raise reply
        return reply

    engine.stats = stats  # type: ignore[method-assign]
    monitor = lease.EngineMonitor(engine, report, RunningRollouts(), SpeculationCutoff())  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(monitor.run())
    first = {"steps": {"a": 1}}
    assert [{}, first, first, first, {}, {}] == seen
    assert 2 == caplog.text.count("Cannot read the statistics")


def test_records_of_the_job_that_cannot_be_read_change_nothing(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(job: LiveJob, client: AsyncRolloutClient) -> None:
        worker = job.workers["engine"]
        job.redis.hset(job.keys.weights, mapping={"full": b"?", "group": b"?"})
        job.redis.hset(job.keys.job, "pause", "unknown")
        for order in (Order.update_weights(), Order.init_transfer(), Order.update_pause()):
            job.redis.xadd(job.keys.inbox(worker.engine_id), dict(zip(*[iter(order.encode())] * 2, strict=True)))
        records = ("published weights", "the trainer's group", "its pause")
        await job.until(lambda: all(f"record of {record}" in caplog.text for record in records))
        assert all(rollout.finish_reason.complete for rollout in await gather(client, 1, prompts(3)))
        job.check()

    run(redis_url, StubEngine(result), scenario)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_not_finite_are_not_part_of_a_response(logprob: float) -> None:
    response = ResponseBuilder(None, logprobs=True)
    first, second = (
        {7: SimpleNamespace(logprob=value), 8: SimpleNamespace(logprob=-math.inf)} for value in (-1, logprob)
    )
    response.append(SimpleNamespace(token_ids=[7], logprobs=[first]))
    with pytest.raises(NotFiniteError):
        response.append(SimpleNamespace(token_ids=[7], logprobs=[second]))
    assert [7] == response.token_ids
    assert [-1] == response.logprobs
