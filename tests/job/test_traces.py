"""OpenTelemetry traces of a real coordinator and relay. The tests play the engine and the collector."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from rollout_api import Prompt, RequestClient
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.job_info import parse_traceparent
from rollout_api.ports import free_port
from rollout_api.protocol.keys import MESSAGE_FIELD
from rollout_api.protocol.messages import Close, Message, RolloutRequest, decode, encode
from rollout_api.protocol.timeline import EndedRollout
from rollout_api.redis_client.connection import connect
from rollout_head.child_services import JobServices
from rollout_head.coordinator import Coordinator
from rollout_head.coordinator.state import CoordinatorLimits
from rollout_head.relay import Relay
from rollout_head.tracing import (
    TraceExporter,
    is_tracing_requested,
    span_of_request,
    spans_of_rollout,
)
from rollout_store.history.store import HistoryStore
from rollout_store.job import EngineReport, JobStore, StaleCoordinatorError
from rollout_store.job.requests import RequestTrace, pack_trace
from rollout_store.job.setup import JobSetup
from tests.support.in_process_job import manifest
from tests.support.job_messages import HISTORY, JOB, request, rollout
from tests.support.otlp_collector import OtlpCollector, ReceivedSpan, collected_traces
from tests.support.waiting import wait_for, wait_for_async

CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"
SECRET_TOKEN = 54321
MANIFEST = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "traced"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "any/model"}, "workers": {"gpusPerWorker": 0}},
}
START_S = 30.0
"""Seconds until a process has started, on a busy machine."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    with collected_traces(monkeypatch) as running:
        yield running


@pytest.fixture
def silent_address() -> Iterator[str]:
    """The address of a collector that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


# Spans


def ended(**fields: Any) -> EndedRollout:
    common: dict[str, Any] = {"engine": "e-1", "arrived_at": 10.0, "started_at": 12.0, "finished_at": 15.0}
    base = EndedRollout.of(request(step=3), rollout(request(), 0), 0)
    return EndedRollout(**{**vars(base), **common, **fields})


TRACE = RequestTrace(1, 2)


@pytest.mark.parametrize(
    ("fields", "spans"),
    [
        ({}, [("queue", 10.0, 12.0, False), ("sample", 12.0, 15.0, False)]),
        ({"started_at": 9.0}, [("queue", 10.0, 10.0, False), ("sample", 10.0, 15.0, False)]),
        ({"started_at": 16.0}, [("queue", 10.0, 15.0, False), ("sample", 15.0, 15.0, False)]),
        ({"engine": "", "started_at": 0.0}, [("queue", 10.0, 15.0, False)]),
        ({"engine": "", "finish_reason": "failed"}, [("queue", 10.0, 15.0, True)]),
        ({"finish_reason": "failed"}, [("queue", 10.0, 12.0, False), ("sample", 12.0, 15.0, True)]),
    ],
)
def test_a_rollout_waits_and_is_sampled(fields: dict[str, Any], spans: list[tuple[str, float, float, bool]]) -> None:
    found = spans_of_rollout(TRACE, ended(**fields))
    assert spans == [(span.name, span.started_at, span.ended_at, span.has_failed) for span in found]
    assert found[-1].attributes["rollout.finish_reason"] == fields.get("finish_reason", "stop")


def test_a_sampled_rollout_has_counts() -> None:
    _, sample = spans_of_rollout(TRACE, ended(oldest_version=4, newest_version=5))
    assert {
        "rollout.request_id": "r",
        "rollout.problem_id": "p",
        "rollout.purpose": "train",
        "rollout.turn": 0,
        "rollout.step": 3,
        "rollout.sample": 0,
        "rollout.finish_reason": "stop",
        "rollout.engine": "e-1",
        "rollout.draft_mode": "history",
        "rollout.prompt_tokens": 1,
        "rollout.tokens": 5,
        "rollout.decoding_steps": 2,
        "rollout.draft_tokens": 4,
        "rollout.accepted_tokens": 3,
        "rollout.oldest_weight_version": 4,
        "rollout.newest_weight_version": 5,
    } == sample.attributes


def trace_of(asked: RolloutRequest) -> RequestTrace:
    return RequestTrace.unpack(pack_trace(asked), asked.job_uid, asked.request_id)


def test_the_trace_follows_from_the_caller_or_the_trajectory_or_the_request() -> None:
    turns = [request(f"t{turn}", n=1, trajectory_id="t", turn=turn) for turn in range(2)]
    assert trace_of(turns[0]).trace_id == trace_of(turns[1]).trace_id
    assert trace_of(turns[0]).span_id != trace_of(turns[1]).span_id
    assert b"" == pack_trace(request("a"))
    assert 3 == len({trace_of(asked).trace_id for asked in (request("a"), request("b"), turns[0])})
    called = trace_of(request("a", trajectory_id="t", traceparent=TRACEPARENT))
    assert RequestTrace(int(CALLER_TRACE, 16), trace_of(request("a")).span_id, int(CALLER_SPAN, 16), True) == called
    assert not trace_of(request("a", traceparent=TRACEPARENT[:-2] + "00")).caller_sampled
    assert trace_of(request("a")) == trace_of(request("a", traceparent=f"00-{'0' * 32}-{CALLER_SPAN}-01"))


def test_a_trace_that_a_later_release_has_packed_is_replaced_by_one_of_the_request() -> None:
    own = trace_of(request("a"))
    assert own == RequestTrace.unpack(bytes(17), request("a").job_uid, "a")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (TRACEPARENT, TRACEPARENT),
        (f"01{TRACEPARENT[2:]}-later", TRACEPARENT),
        (f"ff{TRACEPARENT[2:]}", None),
        (TRACEPARENT + "0", None),
        ("", None),
        ("garbage", None),
    ],
)
def test_an_invalid_header_is_ignored(header: str, expected: str | None) -> None:
    assert expected == parse_traceparent(header)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "console, otlp"}, True),
    ],
)
def test_standard_environment_variables_turn_traces_on(environment: dict[str, str], expected: bool) -> None:
    assert expected == is_tracing_requested(environment)


# A job


class TracedJob:
    """Sends requests to a job, and plays its engine."""

    def __init__(self, url: str, keys: Any, job_store: JobStore) -> None:
        self.redis, self.keys, self.job_store = connect(url), keys, job_store

    def send(self, stream: str, message: Message) -> None:
        self.redis.xadd(stream, {MESSAGE_FIELD: encode(message)})

    async def answer(self, *requests: RolloutRequest) -> None:
        """Send requests, and finish their rollouts once they are assigned."""
        for asked in requests:
            self.send(self.keys.requests, asked)
        wanted = {(asked.request_id, sample): asked for asked in requests for sample in range(asked.sampling.n)}

        async def finish_assigned() -> bool:
            for order in await self.job_store.assignments.inbox("a-1"):
                if (assignment := order.assignment) is None:
                    continue
                asked = wanted.pop((assignment.request_id, assignment.sample), None)
                if asked is None:
                    continue
                fields = {"engine": "a-1", "started_at": time.time(), "token_ids": [SECRET_TOKEN] * 5}
                produced = rollout(asked, assignment.sample).model_copy(update=fields)
                await self.job_store.rollouts.finish(asked, produced, engine="a-1", order=order.order_id)
            return not wanted

        await wait_for_async(finish_assigned, START_S)


@asynccontextmanager
async def traced_job(url: str, keys: Any) -> AsyncIterator[TracedJob]:
    job_store = JobStore.connect(url, keys)
    report = EngineReport("a", max_running=8)

    async def renew() -> None:
        while True:
            await job_store.engines.heartbeat("a-1", report, register=True)
            await asyncio.sleep(0.5)

    renewing = asyncio.ensure_future(renew())
    try:
        yield TracedJob(url, keys, job_store)
    finally:
        await cancel_and_wait(renewing)
        await job_store.close()


@pytest.fixture
def setup(redis_url: str) -> JobSetup:
    return JobSetup(MANIFEST, "traced", redis_url, 100_000, "fingerprint", http_port=free_port())


@pytest.fixture
def services(setup: JobSetup) -> Iterator[JobServices]:
    running = JobServices(setup)
    yield running
    running.stop()


def asked_of(setup: JobSetup, name: str, n: int = 1, **more: Any) -> RolloutRequest:
    fields = {"job_uid": setup.uid, "prompt_token_ids": [SECRET_TOKEN], "problem_id": "p"} | more
    return request(name, n).model_copy(update=fields)


def test_coordinator_and_relay_trace_each_request(
    collector: OtlpCollector, setup: JobSetup, services: JobServices
) -> None:
    began = time.time()
    group = asked_of(setup, "group", n=2, step=7)
    turns = [asked_of(setup, f"turn{turn}", trajectory_id="t", turn=turn) for turn in range(2)]
    called = asked_of(setup, "called", traceparent=TRACEPARENT)
    services.start()

    async def play() -> None:
        async with traced_job(setup.redis_url, setup.keys) as job:
            await job.answer(group, *turns, called)
            job.send(setup.keys.control, Close())
            await asyncio.to_thread(wait_for, services.ended, START_S)

    asyncio.run(play())
    services.stop()

    requests = {span.request: span for span in collector.named("rollout.request")}
    assert {"group", "turn0", "turn1", "called"} == requests.keys()
    assert requests["turn0"].trace_id == requests["turn1"].trace_id
    assert 3 == len({span.trace_id for span in requests.values()})
    assert [""] * 3 == [requests[name].parent_id for name in ("group", "turn0", "turn1")]
    assert (CALLER_TRACE, CALLER_SPAN) == (requests["called"].trace_id, requests["called"].parent_id)
    children = [span for span in collector.spans if span.name != "rollout.request"]
    assert 5 * 3 == len(children)
    assert len(requests) + len(children) == len({span.span_id for span in collector.spans})
    for span in children:
        whole = requests[span.request]
        assert (whole.trace_id, whole.span_id) == (span.trace_id, span.parent_id)
        service = "relay" if span.name == "history.append" else "coordinator"
        assert ("rollout", "default/traced", f"das-rollout.{service}") == (span.service, span.job, span.scope)
    whole = requests["group"]
    spans = (collector.named(name, "group") for name in ("queue", "sample", "history.append"))
    for queued, sampled, appended in zip(*spans, strict=True):
        assert began - 1 < whole.start == queued.start <= queued.end == sampled.start <= sampled.end <= whole.end
        # Redis 7.0 reads its clock for each of the two entries that a finished rollout adds.
        assert abs(appended.start - sampled.end) < 0.005
        assert appended.start <= appended.end < time.time() + 1
        assert ("a-1", 5, 7) == tuple(sampled.attributes[f"rollout.{name}"] for name in ("engine", "tokens", "step"))
    assert not any(span.is_error for span in collector.spans)
    values = [value for span in collector.spans for value in span.attributes.values()]
    assert {int, str} == {type(value) for value in values}
    assert not [value for value in values if str(SECRET_TOKEN) in str(value)]


def test_a_coordinator_that_is_terminated_sends_its_spans_first(
    collector: OtlpCollector, setup: JobSetup, services: JobServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    services.start()

    async def play() -> None:
        async with traced_job(setup.redis_url, setup.keys) as job:
            await job.answer(asked_of(setup, "r"))
            await wait_for_async(lambda: not job.redis.xlen(setup.keys.outbox))
            # After each status, the coordinator reads what has ended.
            seen: dict[bytes, None] = {}
            await wait_for_async(lambda: seen.update({job.redis.get(setup.keys.status): None}) or len(seen) > 3)

    asyncio.run(play())
    assert [] == collector.spans
    services.stop()
    names = ["history.append", "queue", "rollout.request", "sample"]
    assert names == sorted(span.name for span in collector.spans)


def in_process_coordinator(
    url: str, traces: TraceExporter | None, engine_check_interval_s: float = 0.2
) -> tuple[Coordinator, JobStore]:
    job_store = JobStore.connect(url, JOB)
    history = HistoryStore(connect(url), HISTORY, window=4)
    limits = CoordinatorLimits(status_interval_s=0.1, engine_check_interval_s=engine_check_interval_s)
    return Coordinator(manifest(), job_store, history, vocabulary=100_000, limits=limits, traces=traces), job_store


def test_a_coordinator_that_was_replaced_leaves_the_spans_to_the_other_one(
    collector: OtlpCollector, redis_url: str
) -> None:
    async def play() -> None:
        traces = TraceExporter("coordinator", "default/live", JOB.uid)
        # It would notice the other one only after a minute.
        coordinator, job_store = in_process_coordinator(redis_url, traces, engine_check_interval_s=60)
        async with traced_job(redis_url, JOB) as job:
            running = asyncio.ensure_future(coordinator.run())
            asked = request("r", 1)
            job.send(JOB.requests, asked)
            await wait_for_async(lambda: job.job_store.assignments.inbox("a-1"))
            await asyncio.sleep(0.5)  # until it has begun to read what ends
            job.redis.incr(JOB.fencing_token)
            await job.job_store.rollouts.finish(asked, rollout(asked, 0), engine="a-1")
            with pytest.raises(StaleCoordinatorError):
                await asyncio.wait_for(running, 10)
        await asyncio.to_thread(traces.close)
        await job_store.close()

    asyncio.run(play())
    assert [] == collector.spans


def test_a_coordinator_that_takes_over_adds_to_the_traces_and_repeats_nothing(
    collector: OtlpCollector, redis_url: str
) -> None:
    async def play() -> None:
        exporters = [TraceExporter("coordinator", "default/live", JOB.uid) for _ in range(2)]
        first, first_store = in_process_coordinator(redis_url, exporters[0])
        second, second_store = in_process_coordinator(redis_url, exporters[1])
        async with traced_job(redis_url, JOB) as job:
            running = asyncio.ensure_future(first.run())
            # One of two rollouts ends while the first coordinator runs. It goes on when the second one takes over.
            await job.answer(request("done", 2))
            half = request("half", 2)
            job.send(JOB.requests, half)

            async def half_is_assigned() -> bool:
                return 2 == len(await job.job_store.assignments.inbox("a-1"))

            await wait_for_async(half_is_assigned)
            await job.job_store.rollouts.finish(half, rollout(half, 0), engine="a-1")
            await wait_for_async(lambda: 3 == len(collector.named("queue")))
            successor = asyncio.ensure_future(second.run())
            with pytest.raises(StaleCoordinatorError):
                await running
            await job.answer(request("last", 1))
            await job.job_store.rollouts.finish(half, rollout(half, 1), engine="a-1")
            job.send(JOB.control, Close())
            await asyncio.to_thread(Relay(job.redis, JOB, HistoryStore(job.redis, HISTORY, window=4)).drain)
            await asyncio.wait_for(successor, START_S)
        for exporter in exporters:
            await asyncio.to_thread(exporter.close)
        await first_store.close()
        await second_store.close()

    asyncio.run(play())
    assert ["done", "half", "last"] == sorted(span.request for span in collector.named("rollout.request"))
    assert [5, 3] == [len(collector.named(name)) for name in ("queue", "sample")]
    assert 3 + 5 + 3 == len({span.span_id for span in collector.spans}) == len(collector.spans)
    [half] = collector.named("rollout.request", "half")
    assert [half.span_id] * 2 == [span.parent_id for span in collector.named("queue", "half")]


def test_a_rollout_that_the_relay_appends_again_is_traced_once(collector: OtlpCollector, redis_url: str) -> None:
    server = connect(redis_url)
    asked = request("r", 1)

    async def finish() -> None:
        job_store = JobStore.connect(redis_url, JOB)
        entry: Any = server.xadd(JOB.requests, {MESSAGE_FIELD: encode(asked)})
        await job_store.requests.admit(entry.decode(), asked)
        await job_store.rollouts.finish(asked, rollout(asked, 0))
        await job_store.close()

    asyncio.run(finish())
    [(_, fields)] = server.xrange(JOB.outbox)
    traces = TraceExporter("relay", "default/live", JOB.uid)
    relay = Relay(server, JOB, HistoryStore(server, HISTORY, window=4), traces)
    for _ in range(2):
        relay.drain()
        server.xadd(JOB.outbox, fields)  # as if the relay had been killed before it could delete the entry
    relay.drain()
    traces.close()
    assert ["history.append"] == [span.name for span in collector.spans]


# Sampling


def exported(collector: OtlpCollector, requests: list[RolloutRequest]) -> list[ReceivedSpan]:
    """Let one process export the spans of rollouts, and another one those of their requests."""
    for kind in ("children", "requests"):
        traces = TraceExporter(kind, "default/live", JOB.uid)
        for asked in requests:
            trace, done = trace_of(asked), ended(request_id=asked.request_id)
            whole = span_of_request(trace, done, has_failed=False)
            traces.export(spans_of_rollout(trace, done) if kind == "children" else [whole])
        traces.close()
    return collector.spans


def test_all_processes_sample_the_same_traces(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    spans = exported(collector, [request(f"r{index}") for index in range(100)])
    by_trace: dict[str, set[str]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, set()).add(span.name)
    assert 25 < len(by_trace) < 75
    assert all({"rollout.request", "queue", "sample"} == names for names in by_trace.values())


def test_the_caller_decides_whether_its_trace_is_recorded(collector: OtlpCollector) -> None:
    flags = {"sampled": "01", "unsampled": "00"}
    requests = [request(name, traceparent=TRACEPARENT[:-2] + flag) for name, flag in flags.items()]
    assert ["sampled"] * 3 == [span.request for span in exported(collector, requests)]


def test_the_environment_names_the_service(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "math-rollouts")
    assert {"math-rollouts"} == {span.service for span in exported(collector, [request()])}


def test_spans_can_be_sent_over_grpc(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.grpc_url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert ["queue", "rollout.request", "sample"] == sorted(span.name for span in exported(collector, [request()]))


# Failures


def test_a_collector_that_does_not_answer_delays_nothing(
    silent_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", silent_address)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
    traces = TraceExporter("coordinator", "default/live", JOB.uid)
    spans = spans_of_rollout(TRACE, ended())
    began = time.monotonic()
    for _ in range(1000):
        traces.export(spans)
    traces.close()
    assert time.monotonic() - began < 50  # a single batch waits for a hundred seconds
    assert "Queue full, dropping Span." in caplog.text


def test_a_job_ends_although_its_collector_is_down(
    setup: JobSetup, services: JobServices, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    services.start()

    async def play() -> None:
        async with traced_job(setup.redis_url, setup.keys) as job:
            for index in range(3):
                await job.answer(asked_of(setup, f"r{index}"))
                await asyncio.sleep(1.5)
            job.send(setup.keys.control, Close())
            await asyncio.to_thread(wait_for, services.ended, START_S)

    asyncio.run(play())
    services.stop()
    assert "Failed to export" in capfd.readouterr().err


@pytest.mark.parametrize("protocol", ["http/json", "grcp"])
def test_an_unknown_protocol_is_reported(
    protocol: str, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    assert TraceExporter.from_environment("coordinator", "default/live", JOB.uid) is None
    assert [logging.ERROR] == [record.levelno for record in caplog.records]
    assert f"OTEL_EXPORTER_OTLP_PROTOCOL is '{protocol}'; use http/protobuf or grpc" in caplog.text


def test_nothing_is_imported_without_traces() -> None:
    program = (
        "import sys, rollout_head.services\n"  # the Redis client imports parts of OpenTelemetry
        "from rollout_head.tracing import TraceExporter\n"
        "assert TraceExporter.from_environment('coordinator', 'default/traced', 'uid') is None\n"
        "print([name for name in sys.modules if name in ('opentelemetry.sdk.trace', 'opentelemetry.exporter')])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", program]
    assert "[]\n" == subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


# Callers


def test_a_request_belongs_to_the_active_span_of_its_client(redis_url: str) -> None:
    async def prepare() -> None:
        coordinator, job_store = in_process_coordinator(redis_url, None)
        running = asyncio.ensure_future(coordinator.run())
        async with RequestClient.connect(redis_url, uid=JOB.uid) as client:
            outside = client.prepare(Prompt([1]), request_id="r")
            with TracerProvider().get_tracer("trainer").start_as_current_span("step") as span:
                inside = client.prepare(Prompt([1]), request_id="r")
                context = span.get_span_context()
            assert outside.request_id == inside.request_id
            given = client.prepare(Prompt([1]), request_id="r", traceparent=TRACEPARENT)
        for prepared, expected in (
            (outside, None),
            (inside, f"00-{context.trace_id:032x}-{context.span_id:016x}-"),
            (given, TRACEPARENT),
        ):
            sent = decoded(prepared.data).traceparent
            assert (expected is None and sent is None) or (sent is not None and sent.startswith(str(expected)))
        await cancel_and_wait(running)
        await job_store.close()

    asyncio.run(prepare())


def decoded(data: bytes) -> RolloutRequest:
    message = decode(data)
    assert isinstance(message, RolloutRequest)
    return message
