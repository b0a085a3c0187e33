"""The timeline of a job on a real Redis, and the distributions that are counted from it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.protocol.keys import MESSAGE_FIELD
from rollout_api.protocol.messages import CodecError, FinishReason, encode
from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement, Measurement
from rollout_api.redis_client.connection import connect
from rollout_head.coordinator.distributions import Distribution, RolloutDistributions
from rollout_store.job import EngineReport, JobStore, LeaseState, RolloutProgress
from rollout_store.job.streams import ENTRIES_PER_PAGE
from rollout_store.job.timeline import MAX_MEASUREMENTS_BYTES, resolution
from tests.support.job_messages import JOB, request, rollout

Run = Callable[[Callable[[JobStore], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(redis_url: str) -> Run:
    def run_scenario(scenario: Callable[[JobStore], Coroutine[Any, Any, None]]) -> None:
        async def work() -> None:
            job_store = JobStore.connect(redis_url, JOB)
            await scenario(job_store)
            await job_store.close()

        asyncio.run(work())

    return run_scenario


def measurement(done: int, num_engines: int = 1) -> Measurement:
    engine = EngineMeasurement.of("engine-0", 3, 2, {"tokens": 7.0, "drafting_disabled": 1.0})
    return Measurement(0.0, "running", 3, 1, 2, 4, done, 8.5, 0.25, None, 0, [engine] * num_engines)


def test_the_timeline_has_each_ended_rollout_once(run: Run, redis_url: str) -> None:
    asked = request("r", n=2, step=4)
    server = connect(redis_url)

    async def scenario(job_store: JobStore) -> None:
        entry: Any = server.xadd(JOB.requests, {MESSAGE_FIELD: encode(asked)})
        await job_store.requests.admit(entry.decode(), asked)
        before = time.time()
        produced = rollout(asked, 1).model_copy(update={"engine": "engine-0-1a2b", "started_at": before})
        assert await job_store.rollouts.finish(asked, produced)
        assert not await job_store.rollouts.finish(asked, produced)
        [first] = await job_store.timeline.ended()
        await job_store.rollouts.finish(asked, rollout(asked, 0, length=0))
        both = [one async for one in job_store.timeline.all_ended()]
        assert [1, 0] == [one.sample for one in both]
        assert both[1:] == [one.rollout for one in await job_store.timeline.ended(first.entry_id)]
        expected = EndedRollout.of(asked, produced, 1)
        assert ("engine-0", 4, "p", 5, (1, 1)) == (
            expected.engine_name,
            expected.step,
            expected.problem_id,
            expected.tokens,
            (expected.oldest_version, expected.newest_version),
        )
        assert expected.pack() == both[0].pack()
        assert both[0].arrived_at == int(entry.partition(b"-")[0]) / 1000
        assert before - 1 < both[0].finished_at < time.time() + 1
        assert (None, None) == (both[1].oldest_version, both[1].newest_version)

    run(scenario)


def test_a_long_timeline_is_read_page_by_page(run: Run, redis_url: str) -> None:
    asked = request("r", n=ENTRIES_PER_PAGE + 2)
    entry: Any = connect(redis_url).xadd(JOB.requests, {MESSAGE_FIELD: encode(asked)})

    async def scenario(job_store: JobStore) -> None:
        await job_store.requests.admit(entry.decode(), asked)
        await job_store.rollouts.finish_all([(asked, rollout(asked, sample)) for sample in range(asked.sampling.n)])
        samples = [one.sample async for one in job_store.timeline.all_ended()]
        assert list(range(asked.sampling.n)) == sorted(samples)

    run(scenario)


def test_measurements_are_read_in_order(run: Run) -> None:
    async def scenario(job_store: JobStore) -> None:
        timeline = job_store.timeline
        assert await timeline.first_measured_at() is None
        sizes = [await timeline.add_measurement(measurement(done)) for done in range(3)]
        read = [one async for one in timeline.measurements()]
        assert [0, 1, 2] == [one.done for one in read]
        assert [measurement(0).engines] * 3 == [one.engines for one in read]
        assert read[0].time == await timeline.first_measured_at()
        assert [len(measurement(0).pack())] * 3 == sizes

    run(scenario)


@given(st.integers(1, 2**16), st.floats(1.0, 40 * 365 * 86400.0))
def test_all_measurements_of_a_job_stay_within_the_limit(num_bytes: int, age_s: float) -> None:
    parts = resolution(num_bytes)
    # The interval is one second until the job is as old as its resolution, and age / resolution afterwards.
    count = min(age_s, parts) + max(0.0, parts * math.log(age_s / parts))
    limit = MAX_MEASUREMENTS_BYTES if age_s < parts * math.exp(7) else math.inf
    assert count * num_bytes <= limit


def test_measurements_beyond_the_limit_are_trimmed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_store.job.timeline.MAX_MEASUREMENTS_BYTES", 20_000)

    async def scenario(job_store: JobStore) -> None:
        for done in range(600):
            await job_store.timeline.add_measurement(measurement(done))
        kept = [one.done async for one in job_store.timeline.measurements()]
        assert kept == list(range(600 - len(kept), 600))
        assert len(kept) < 400  # Redis trims whole blocks of entries

    run(scenario)


def test_engines_report_running_rollouts_only_while_they_are_observed(run: Run) -> None:
    progress = [RolloutProgress("r", 0, "p", 17, 64, 1.5)]

    async def scenario(job_store: JobStore) -> None:
        report = EngineReport("engine-0")
        engines, timeline = job_store.engines, job_store.timeline
        assert LeaseState.LOST is await engines.heartbeat("e", report)
        assert LeaseState.VALID is await engines.heartbeat("e", report, register=True)
        await timeline.observe()
        assert LeaseState.OBSERVED is await engines.heartbeat("e", report)
        await timeline.report_running("e", progress)
        assert {"e": progress} == await timeline.running()

    run(scenario)


# Distributions


@given(st.lists(st.floats(0, 10), max_size=50))
def test_a_distribution_counts_each_value_up_to_its_bound(values: list[float]) -> None:
    distribution = Distribution((1, 2.5, 5))
    for value in values:
        distribution.observe(value)
    expected = [("1", 1.0), ("2.5", 2.5), ("5", 5.0), ("+Inf", math.inf)]
    assert [(text, sum(value <= bound for value in values)) for text, bound in expected] == distribution.cumulative()
    assert distribution.total == pytest.approx(sum(values))


def ended(**fields: Any) -> EndedRollout:
    common: dict[str, Any] = {"engine": "e-1", "arrived_at": 10.0, "started_at": 12.0, "finished_at": 15.0}
    base = EndedRollout.of(request(), rollout(request(), 0), 0)
    return EndedRollout(**{**vars(base), **common, **fields})


def test_an_ended_rollout_is_counted_in_all_distributions() -> None:
    counted = RolloutDistributions()
    counted.observe_rollout(ended(tokens=100, oldest_version=3, decoding_steps=4, accepted_tokens=6), newest_version=5)
    totals = {name: value.total for name, value in vars(counted).items() if isinstance(value, Distribution)}
    assert totals == {
        "queue_seconds": 2.0,
        "sampling_seconds": 3.0,
        "latency_seconds": 5.0,
        "response_tokens": 100.0,
        "accepted_per_step": 1.5,
        "staleness_versions": 2.0,
        "weight_update_seconds": 0.0,
        "weight_gap_seconds": 0.0,
    }


def test_a_rollout_without_an_engine_has_only_a_latency() -> None:
    counted = RolloutDistributions()
    counted.observe_rollout(ended(engine="", started_at=0.0), newest_version=5)
    assert (1, 0, 0) == (
        sum(counted.latency_seconds.counts),
        sum(counted.queue_seconds.counts),
        sum(counted.response_tokens.counts),
    )


def test_the_length_of_an_interrupted_rollout_is_not_counted() -> None:
    counted = RolloutDistributions()
    counted.observe_rollout(ended(finish_reason=FinishReason.CANCELLED.value), newest_version=5)
    assert (1, 0) == (sum(counted.sampling_seconds.counts), sum(counted.response_tokens.counts))


def test_a_weight_update_is_counted_once_for_each_engine() -> None:
    counted = RolloutDistributions()
    old, new = EngineReport("a", version=1), EngineReport("a", version=2)
    new.counters |= {"weights_update_seconds": 4.0, "weights_gap_seconds": 0.5}
    counted.observe_engines({"a": old})
    for _ in range(2):
        counted.observe_engines({"a": new, "b": new})  # b has loaded its weights before anyone observed it
    assert (4.0, 0.5) == (counted.weight_update_seconds.total, counted.weight_gap_seconds.total)
    assert 1 == sum(counted.weight_update_seconds.counts)


# What a later release, or a defect, has written


def test_an_entry_that_cannot_be_decoded_is_reported_as_such(run: Run, redis_url: str) -> None:
    entry = EndedRollout.of(request(), rollout(request(), 0), 0).pack()

    async def scenario(job_store: JobStore) -> None:
        for fields in ({"d": entry}, {"a": "1-0"}, {"d": entry, "a": "later"}):
            connect(redis_url).delete(JOB.timeline)
            connect(redis_url).xadd(JOB.timeline, fields)
            with pytest.raises(CodecError):
                await job_store.timeline.ended()

    run(scenario)


def test_a_finish_reason_of_a_later_release_counts_as_an_interruption() -> None:
    counted = RolloutDistributions()
    counted.observe_rollout(ended(finish_reason="later"), newest_version=5)
    assert (1, 0) == (sum(counted.sampling_seconds.counts), sum(counted.response_tokens.counts))
