"""The coordinator on a real Redis. The tests play the engines and the clients."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any, ClassVar

import aiohttp
import msgpack
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from rollout_api import AsyncRolloutClient, Prompt, RequestClient
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.access_rules import access_rules
from rollout_api.protocol.keys import MESSAGE_FIELD, HistoryKeys, MessageKeys
from rollout_api.protocol.messages import (
    Cancel,
    Close,
    FinishReason,
    InitWeightTransfer,
    Message,
    Partial,
    Rollout,
    RolloutRequest,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redis_client.connection import connect
from rollout_head.coordinator import Coordinator
from rollout_head.coordinator.admission import RequestAdmission
from rollout_head.coordinator.canaries import CanaryTest
from rollout_head.coordinator.state import CoordinatorLimits, CoordinatorState
from rollout_head.coordinator.status import StatusBuilder
from rollout_head.coordinator.status_server import StatusServer
from rollout_store.history.store import HistoryStore
from rollout_store.job import EngineReport, JobStore, Order, OrderKind, StaleCoordinatorError
from rollout_store.job.assignments import Assignment
from rollout_store.job.canary import canary_sample
from rollout_store.job.requests import LedgerEntry
from tests.support.in_process_job import manifest
from tests.support.redis_servers import create_user
from tests.support.results_in_redis import kept_rollouts, num_kept, refusals
from tests.support.waiting import wait_for_async

JOB = MessageKeys("uid")
VOCABULARY = 10
TIMEOUT_S = 15.0
FAST = CoordinatorLimits(status_interval_s=0.1, reconcile_interval_s=0.3)


def history_store(server: redis.Redis) -> HistoryStore:
    return HistoryStore(server, HistoryKeys("default", "live"), window=16)


def request(name: str, n: int = 1, **more: Any) -> RolloutRequest:
    sampling = Sampling(**{"n": n, "max_tokens": 20} | more.pop("sampling", {}))
    return RolloutRequest(job_uid="uid", request_id=name, prompt_token_ids=[1], sampling=sampling, **more)


def partial(length: int) -> Partial:
    return Partial(token_ids=[1] * length, weight_spans=[WeightSpan(start=0, weight_version=0)])


class CoordinatorHarness:
    """Plays the clients and engines of a job, and starts its coordinators."""

    def __init__(self, url: str) -> None:
        self.redis = connect(url)
        self.url = create_user(url, access_rules("default", "live", JOB.uid, "live"))
        self.job_store = JobStore.connect(self.url, JOB)

    def send(self, stream: str, *messages: Message) -> None:
        pipeline = self.redis.pipeline(transaction=False)
        for message in messages:
            pipeline.xadd(stream, {MESSAGE_FIELD: encode(message)})
        pipeline.execute()

    def refusals(self) -> dict[str, str]:
        return refusals(self.redis, JOB)

    @property
    def status(self) -> dict[str, Any]:
        """The last status that was published."""
        status: dict[str, Any] = json.loads(self.redis.get(JOB.status) or b"{}")
        return status

    def rollouts(self) -> list[Rollout]:
        return kept_rollouts(self.redis, JOB)

    async def inbox(self, engine: str, count: int) -> list[Order]:
        """Wait until an engine has at least *count* orders, and return them."""

        async def orders() -> list[Order]:
            found = await self.job_store.assignments.inbox(engine)
            return found if len(found) >= count else []

        found: list[Order] = await wait_for_async(orders)
        return found

    async def assignments(self, engine: str, count: int) -> list[Assignment]:
        """Wait until an engine has at least *count* orders to sample, and return what they assign."""

        async def assigned() -> list[Assignment]:
            orders = await self.job_store.assignments.inbox(engine)
            found = [order.assignment for order in orders if order.assignment is not None]
            return found if len(found) >= count else []

        found: list[Assignment] = await wait_for_async(assigned)
        return found

    async def finish(
        self, asked: RolloutRequest, order: Order, length: int, *, engine: str = "a", logprob: float | None = None
    ) -> None:
        """Finish the rollout of an order with *length* tokens."""
        assert order.assignment is not None
        tokens = partial(length)
        if logprob is not None:
            tokens = tokens.model_copy(update={"logprobs": [logprob] * length})
        rollout = Rollout.from_request(asked, order.assignment.sample, tokens, FinishReason.STOP)
        await self.job_store.rollouts.finish(asked, rollout, engine=engine, order=order.order_id)

    @asynccontextmanager
    async def engine(
        self, name: str, max_running: int = 4, counters: dict[str, float] | None = None, **state: Any
    ) -> AsyncIterator[str]:
        """Register an engine that renews its lease and does nothing else."""
        report = EngineReport(name, max_running=max_running, counters=counters or {}, **state)

        async def renew() -> None:
            while True:
                await self.job_store.engines.heartbeat(name, report, register=True)
                await asyncio.sleep(0.5)

        renewing = asyncio.ensure_future(renew())
        try:
            yield name
        finally:
            await cancel_and_wait(renewing)

    @asynccontextmanager
    async def coordinator(
        self, job: RolloutJob | None = None, limits: CoordinatorLimits = FAST
    ) -> AsyncIterator[Coordinator]:
        async with self.unchecked_coordinator(job, limits) as (coordinator, running):
            yield coordinator
            assert not running.done(), running.exception()

    @asynccontextmanager
    async def unchecked_coordinator(
        self, job: RolloutJob | None = None, limits: CoordinatorLimits = FAST
    ) -> AsyncIterator[tuple[Coordinator, asyncio.Task[None]]]:
        """Start a coordinator that may end by itself; yield it and its task."""
        job_store = JobStore.connect(self.url, JOB)
        coordinator = Coordinator(
            job or manifest(), job_store, history_store(connect(self.url)), vocabulary=VOCABULARY, limits=limits
        )
        running = asyncio.ensure_future(coordinator.run())
        try:
            yield coordinator, running
        finally:
            await cancel_and_wait(running)
            await job_store.close()


Scenario = Callable[[CoordinatorHarness], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]


@pytest.fixture
def run(redis_url: str) -> Run:
    async def run_scenario(scenario: Scenario) -> None:
        harness = CoordinatorHarness(redis_url)
        await scenario(harness)
        await harness.job_store.close()

    return lambda scenario: asyncio.run(run_scenario(scenario))


def samples(orders: list[Order]) -> set[int]:
    return {order.assignment.sample for order in orders if order.assignment is not None}


def test_a_returned_rollout_is_assigned_again_even_if_its_event_was_missed(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator(), job.engine("a") as engine:
            job.send(JOB.requests, request("r", n=2))
            first, _ = await job.inbox(engine, 2)
            # The order is gone without an event, as if the event had been trimmed.
            await job.job_store.assignments.acknowledge(engine, first.order_id)
            orders = await job.inbox(engine, 2)
        assert {0, 1} == samples(orders)

    run(scenario)


def test_only_the_engine_with_the_assignment_can_return_it(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator(), job.engine("a") as engine:
            job.send(JOB.requests, request("r"))
            [order] = await job.inbox(engine, 1)
            assert order.assignment is not None
            for reason in ("late", "repeated"):
                await job.job_store.assignments.return_assignment("b", "0-0", order.assignment, reason)
            for reason in ("first", "repeated because the reply was lost"):
                await job.job_store.assignments.return_assignment(engine, order.order_id, order.assignment, reason)
            [again] = await job.inbox(engine, 1)
            # The events are processed in order, so a further request shows that all of them were.
            job.send(JOB.requests, request("later"))
            assert again == (await job.inbox(engine, 2))[0]
            assert 2 == len(await job.job_store.assignments.inbox(engine))

    run(scenario)


def test_a_rollout_that_ended_without_a_coordinator_frees_its_engine(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        asked = request("r", n=2)
        async with job.engine("a", max_running=1) as engine:
            async with job.coordinator():
                job.send(JOB.requests, asked)
                [order] = await job.inbox(engine, 1)
            assert order.assignment is not None
            # The rollout is in the ledger and its order still in the inbox, as if the engine had died in between.
            done = Rollout.from_request(asked, order.assignment.sample, None, FinishReason.LENGTH)
            await job.job_store.rollouts.finish(asked, done, engine=engine, order="0-0")
            async with job.coordinator():
                orders = await job.inbox(engine, 2)
        assert {0, 1} == samples(orders)

    run(scenario)


def test_unknown_tokens_are_refused_before_any_engine_receives_them(run: Run) -> None:
    invalid: dict[str, dict[str, Any]] = {
        "allowed": {"sampling": {"allowed_token_ids": [3, VOCABULARY]}},
        "stop": {"sampling": {"stop_token_ids": [VOCABULARY]}},
        "prefix": {
            "prefix": Partial(token_ids=[VOCABULARY], weight_spans=[WeightSpan(start=0, weight_version=0)]),
        },
    }

    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator(), job.engine("a") as engine:
            job.send(JOB.requests, *(request(name, **fields) for name, fields in invalid.items()), request("valid"))
            [order] = await job.inbox(engine, 1)
            assert order.assignment is not None and "valid" == order.assignment.request_id
            await wait_for_async(lambda: len(job.refusals()) == len(invalid))
        assert set(invalid) == job.refusals().keys()
        assert all(f"{VOCABULARY} is not a token of the model" in reason for reason in job.refusals().values())

    run(scenario)


def test_every_client_gets_the_kept_rollouts_of_a_request(run: Run) -> None:
    prompt = Prompt([1], sampling={"n": 2, "max_tokens": 20})

    async def scenario(job: CoordinatorHarness) -> None:
        async with (
            job.coordinator(),
            job.engine("a") as engine,
            RequestClient.connect(job.url, uid=JOB.uid) as first,
            RequestClient.connect(job.url, uid=JOB.uid) as second,
        ):
            calls = [asyncio.ensure_future(client.rollouts(prompt, request_id="r")) for client in (first, second)]
            orders = await job.inbox(engine, 2)
            assert orders[0].assignment is not None
            asked = await job.job_store.requests.read(orders[0].assignment.entry_id)
            assert asked is not None
            for order in orders:
                await job.finish(asked, order, 3)
            expected, found = await asyncio.gather(*calls)
            # A repetition that arrives after the answer is refused, but the rollouts are still kept.
            job.send(JOB.requests, asked)
            kept = JOB.results(asked.request_id)
            await wait_for_async(lambda: asked.request_id in job.refusals())
            again = await second.rollouts(prompt, request_id="r")
        assert expected == found == again
        assert [0, 1] == [int(rollout.rollout_id.split("/")[2]) for rollout in expected]
        assert 0 < job.redis.ttl(kept) <= (asked.keep_seconds or 0)
        assert not job.redis.exists(JOB.unreleased(asked.reply_to))

    run(scenario)


def test_a_request_whose_rollouts_would_be_kept_can_be_refused_or_cancelled(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator():
            unknown = {"allowed_token_ids": [VOCABULARY]}
            job.send(JOB.requests, request("refused", keep_seconds=60, sampling=unknown))
            await wait_for_async(job.refusals)
            assert "is not a token of the model" in job.refusals()["refused"]
            job.send(JOB.requests, request("cancelled", keep_seconds=60))
            await wait_for_async(lambda: job.redis.exists(JOB.ledger("cancelled")))
            job.send(JOB.control, Cancel(request_ids=["cancelled"]))
            rollout = await wait_for_async(lambda: job.redis.hget(JOB.results("cancelled"), "0"))
            assert FinishReason.CANCELLED == getattr(decode(rollout), "finish_reason", "")
        updates: Any = job.redis.xrange(JOB.result_updates("trainer"))
        assert [b"refused", b"cancelled"] == [fields[b"r"] for _, fields in updates]

    run(scenario)


def test_a_cancellation_may_overtake_its_request(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator():
            await wait_for_async(lambda: job.redis.exists(JOB.status))
            job.send(JOB.requests, *(request(f"r{number}") for number in range(1200)))
            job.send(JOB.control, Cancel(request_ids=["r1199", "never sent"]))
            [cancelled] = await wait_for_async(job.rollouts)
            await wait_for_async(lambda: not job.redis.xlen(JOB.control))
            # A request that is sent after its cancellation is not cancelled.
            job.send(JOB.requests, request("never sent"))
            async with job.engine("a", max_running=2000) as engine:
                orders = await job.inbox(engine, 1200)
        assert ("uid/r1199/0/0", FinishReason.CANCELLED) == (cancelled.rollout_id, cancelled.finish_reason)
        assert "never sent" in {order.assignment.request_id for order in orders if order.assignment is not None}

    run(scenario)


def test_a_new_coordinator_cancels_what_the_last_one_could_not(run: Run) -> None:
    """The last coordinator was killed between recording a cancellation and telling the engine."""

    async def scenario(job: CoordinatorHarness) -> None:
        async with job.engine("a"):
            async with job.coordinator():
                job.send(JOB.requests, request("r"))
                await job.assignments("a", 1)
            await job.job_store.requests.mark_cancelled(["r"])
            async with job.coordinator():
                _, order = await job.inbox("a", 2)
            assert (OrderKind.CANCEL, "r") == (order.kind, order.request_id)

    run(scenario)


def test_engines_receive_work_while_thousands_of_rollouts_are_cancelled(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        names = [f"r{number}" for number in range(100)]
        async with job.coordinator(manifest(queue={"maxRollouts": 100_000})):
            job.send(JOB.requests, *(request(name, n=64) for name in names))
            await wait_for_async(lambda: job.redis.hlen(JOB.ledger(names[-1])))
            job.send(JOB.requests, request("kept"))
            job.send(JOB.control, Cancel(request_ids=names))
            await wait_for_async(lambda: job.redis.hget(JOB.ledger(names[-1]), "cancelled") == b"1")
            async with job.engine("a") as engine:
                [order] = await job.inbox(engine, 1)
                assert num_kept(job.redis, JOB) < 100 * 64
            await wait_for_async(lambda: num_kept(job.redis, JOB) == 100 * 64)
        assert order.assignment is not None and "kept" == order.assignment.request_id
        assert {FinishReason.CANCELLED} == {rollout.finish_reason for rollout in job.rollouts()}

    run(scenario)


def test_samples_that_are_requested_separately_are_scheduled_as_a_group(run: Run) -> None:
    """verl requests each sample of a prompt separately."""

    async def scenario(job: CoordinatorHarness) -> None:
        one = [request(f"one-{sample}", problem_id="one") for sample in range(4)]
        two = [request(f"two-{sample}", problem_id="two") for sample in range(4)]
        async with job.coordinator():
            job.send(JOB.requests, *one, *two)
            await wait_for_async(lambda: job.redis.hlen(JOB.ledger("two-3")))
            async with job.engine("a", max_running=2) as a:
                # The first samples of both problems start before all others.
                orders = await job.inbox(a, 3)
                by_request = {order.assignment.request_id: order for order in orders if order.assignment}
                assert ["one-0", "two-0", "one-1"] == list(by_request)
                # The length of the first sample predicts those of its siblings, which are requests of their own.
                await job.finish(two[0], by_request["two-0"], 20)
                await wait_for_async(lambda: len(job.rollouts()) == 1)
                assigned = [assignment.request_id for assignment in await job.assignments(a, 3)]
                assert ["one-0", "one-1", "two-1"] == assigned

    run(scenario)


def test_a_new_coordinator_opens_no_more_requests_than_the_last_one(run: Run) -> None:
    """It would otherwise read a queue of any length before it does anything else."""

    async def scenario(job: CoordinatorHarness) -> None:
        limited = manifest(queue={"maxRollouts": 20})
        limits = replace(FAST, read_batch=10)
        asked = {f"r{number}": request(f"r{number}") for number in range(200)}
        job.send(JOB.requests, *asked.values())
        async with job.engine("a", max_running=30) as engine:
            async with job.coordinator(limited, limits) as first:
                started = await job.inbox(engine, 20)
                assert 20 == first.num_open_rollouts
            await job.finish(asked[started[0].request_id], started[0], 5)
            async with job.coordinator(limited, limits) as second:
                await wait_for_async(lambda: second.num_open_rollouts)
                most = 0

                async def finish_waiting() -> bool:
                    nonlocal most
                    most = max(most, second.num_open_rollouts)
                    for order in await job.job_store.assignments.inbox(engine):
                        await job.finish(asked[order.request_id], order, 5)
                    return not job.redis.xlen(JOB.requests)

                await wait_for_async(finish_waiting, 30)
                await wait_for_async(lambda: not second.num_open_rollouts)
        assert most <= 20 + limits.read_batch
        assert sorted(str(one.rollout_id(0)) for one in asked.values()) == sorted(
            rollout.rollout_id for rollout in job.rollouts()
        )

    run(scenario)


@pytest.mark.parametrize("reason", ["weights that nobody publishes", "results that nobody reads"])
def test_a_client_whose_rollouts_cannot_start_does_not_keep_others_out(run: Run, reason: str) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        limited = manifest(queue={"maxRollouts": 8, "maxUnreadResults": "1Ki"})
        pinned = {}
        if reason == "weights that nobody publishes":
            pinned = {"min_weight_version": 5}
        else:
            job.redis.hset(JOB.results_written, "dead", 2**20)
        async with job.coordinator(limited) as coordinator:
            job.send(JOB.requests, *(request(f"dead{i}", n=2, reply_to="dead", **pinned) for i in range(4)))
            await wait_for_async(lambda: 8 == coordinator.num_open_rollouts)
            await wait_for_async(
                lambda: (
                    not job.redis.hlen(JOB.results_written)
                    or json.loads(job.redis.get(JOB.status) or b"{}").get("slow_clients")
                )
            )
            async with job.engine("a", max_running=30) as engine:
                job.send(JOB.requests, request("r", n=2, reply_to="alive"))
                orders = await job.inbox(engine, 2)
                assert {"r"} == {order.request_id for order in orders}
                await wait_for_async(lambda: {"dead": 8} == json.loads(job.redis.get(JOB.status))["blocked"])
                # The limit holds for the client itself.
                job.send(JOB.requests, *(request(f"late{i}", n=2, reply_to="dead", **pinned) for i in range(6)))
                job.send(JOB.requests, *(request(f"more{i}", reply_to="dead", **pinned) for i in range(8)))
                await wait_for_async(lambda: {"dead": 28} == json.loads(job.redis.get(JOB.status))["blocked"])
                job.send(JOB.requests, request("never", reply_to="dead", **pinned))
                await asyncio.sleep(0.5)
                assert 30 == coordinator.num_open_rollouts

    run(scenario)


class TestDeadClients:
    """A client that has died while its rollouts fill the queue. Engines decode two rollouts at once."""

    LIMITS = replace(FAST, silent_client_s=1.0)
    PROMPTS: ClassVar = [Prompt([1], sampling=Sampling(n=1, max_tokens=20))] * 8

    @asynccontextmanager
    async def with_dead_client(self, job: CoordinatorHarness, **limits: float) -> AsyncIterator[None]:
        limited = manifest(queue={"maxRollouts": len(self.PROMPTS)})
        async with job.coordinator(limited, replace(self.LIMITS, **limits)), job.engine("a", max_running=2):
            async with self.client(job, "dead") as dead:
                await dead.step(0, self.PROMPTS).start()
                await job.inbox("a", 2)
            await self.finish_running(job, 1)
            yield

    def client(self, job: CoordinatorHarness, name: str) -> AsyncRolloutClient:
        return AsyncRolloutClient.connect(job.url, uid="uid", name=name)

    async def finish_running(self, job: CoordinatorHarness, count: int | None = None) -> list[str]:
        """Finish the rollouts that the engine runs, or *count* of them, and return their clients."""
        clients = []
        for order in (await job.job_store.assignments.inbox("a"))[:count]:
            if order.assignment and (asked := await job.job_store.requests.read(order.assignment.entry_id)):
                await job.finish(asked, order, 5)
                clients.append(asked.reply_to)
        return clients

    async def answer(self, job: CoordinatorHarness, client: str, step: int = 0) -> None:
        """Let a client sample a step, while the engine runs rollouts of this client alone."""

        async def sample() -> list[Rollout]:
            async with self.client(job, client) as connected, connected.step(step, self.PROMPTS) as opened:
                return [rollout async for rollout in opened]

        sampling = asyncio.ensure_future(sample())

        async def is_answered() -> bool:
            assert {client} >= set(await self.finish_running(job))
            return sampling.done()

        await wait_for_async(is_answered)
        rollouts = [rollout.rollout_id for rollout in await sampling]
        assert len(self.PROMPTS) == len(rollouts) == len(set(rollouts))

    def test_others_are_served_until_it_returns(self, run: Run) -> None:
        async def scenario(job: CoordinatorHarness) -> None:
            async with self.with_dead_client(job):
                async with self.client(job, "alive") as alive:
                    waiting = await alive.step(0, self.PROMPTS[:1]).start()
                    await wait_for_async(lambda: ["dead"] == job.status.get("slow_clients"))
                    assert ["dead"] == job.status["silent_clients"]
                    assert {"dead"} == set(await self.finish_running(job))  # they would need long
                    await waiting.end()
                await self.answer(job, "alive", step=1)
                await asyncio.sleep(2 * FAST.status_interval_s)
                assert not await self.finish_running(job)
                assert {"dead"} == job.status["blocked"].keys()
                await self.answer(job, "dead")
                await wait_for_async(lambda: not job.status["silent_clients"])

        run(scenario)

    def test_its_rollouts_go_on_if_there_is_no_other_client(self, run: Run) -> None:
        async def scenario(job: CoordinatorHarness) -> None:
            async with self.with_dead_client(job):
                await wait_for_async(lambda: ["dead"] == job.status.get("silent_clients"))
                for _ in self.PROMPTS:
                    assert not job.status["slow_clients"]
                    await self.finish_running(job)
                    await asyncio.sleep(FAST.status_interval_s)
                await self.answer(job, "dead")

        run(scenario)

    def test_its_rollouts_go_on_once_the_others_have_ended(self, run: Run) -> None:
        async def scenario(job: CoordinatorHarness) -> None:
            async with self.with_dead_client(job, other_clients_s=0.5):
                await wait_for_async(lambda: ["dead"] == job.status.get("silent_clients"))
                async with self.client(job, "alive") as alive, alive.step(0, self.PROMPTS[:1]):
                    await wait_for_async(lambda: ["dead"] == job.status["slow_clients"])
                await wait_for_async(lambda: not job.status["slow_clients"])
                assert ["dead"] == job.status["silent_clients"]

        run(scenario)

    def test_a_trainer_that_is_busy_is_not_dead(self, run: Run) -> None:
        """A trainer that updates its policy takes no results, but its client is told about them."""

        async def scenario(job: CoordinatorHarness) -> None:
            # A client reports twice a second.
            limits = replace(FAST, silent_client_s=3.0)
            async with job.coordinator(limits=limits), job.engine("a", max_running=2):
                job.send(JOB.requests, request("other", reply_to="other", min_weight_version=5))
                async with self.client(job, "busy") as busy, busy.step(0, self.PROMPTS) as step:
                    for _ in self.PROMPTS:
                        await job.inbox("a", 1)
                        await asyncio.sleep(2 * limits.silent_client_s / len(self.PROMPTS))
                        assert ["busy"] == await self.finish_running(job, 1)
                        assert not job.status["silent_clients"]
                    assert len(self.PROMPTS) == len([rollout async for rollout in step])

        run(scenario)


def test_a_coordinator_publishes_its_status_while_it_takes_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        job.send(JOB.requests, *(request(f"r{number}") for number in range(40)))
        admit = RequestAdmission.admit
        num_pages = 0

        async def admit_slowly(self: RequestAdmission, *args: Any) -> None:
            nonlocal num_pages
            await admit(self, *args)
            num_pages += 1
            if num_pages == 3:
                await asyncio.Event().wait()
            await asyncio.sleep(FAST.status_interval_s)

        monkeypatch.setattr(RequestAdmission, "admit", admit_slowly)
        async with job.engine("a"):
            await wait_for_async(lambda: job.redis.exists(JOB.lease("a")))
            async with job.coordinator(limits=replace(FAST, read_batch=10)):
                status = json.loads(await wait_for_async(lambda: job.redis.get(JOB.status)))
        assert 10 <= status["waiting"] <= 20
        assert ["a"] == [engine["id"] for engine in status["engines"]]

    run(scenario)


def test_a_replaced_coordinator_ends_even_if_it_has_no_work(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.unchecked_coordinator() as (_, running):
            await wait_for_async(lambda: job.redis.exists(JOB.status))
            async with job.coordinator():
                with pytest.raises(StaleCoordinatorError):
                    await asyncio.wait_for(running, TIMEOUT_S)

    run(scenario)


def test_cancelling_hundreds_of_requests_takes_few_commands(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        names = [f"r{number}" for number in range(500)]
        async with job.coordinator(), job.engine("a", max_running=250) as a, job.engine("b", max_running=250) as b:
            job.send(JOB.requests, *map(request, names))
            for engine in (a, b):
                await job.inbox(engine, 250)
            job.redis.config_resetstat()
            with job.redis.monitor() as monitor:
                for _ in range(3):  # a client repeats a cancellation until all its rollouts are answered
                    job.send(JOB.control, Cancel(request_ids=names))
                await wait_for_async(lambda: not job.redis.xlen(JOB.control))
                job.redis.echo("end")
                commands = takewhile(
                    lambda line: not line.startswith("ECHO"), (entry["command"] for entry in monitor.listen())
                )
                marked = sum("cancelled" in command for command in commands if command.startswith("HSET"))
            calls: Any = job.redis.info("commandstats")
            orders = [*await job.inbox(a, 500), *await job.inbox(b, 500)]
        assert sorted(names) == sorted(order.request_id for order in orders if order.kind is OrderKind.CANCEL)
        assert calls["cmdstat_fcall"]["calls"] < 100  # including heartbeats
        assert 500 == marked  # repetitions do not mark them again

    run(scenario)


def test_cancellations_of_unknown_requests_are_kept_only_until_all_requests_are_read(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator(manifest(queue={"maxRollouts": 8})):
            job.send(JOB.requests, request("r", n=8))
            await wait_for_async(lambda: job.redis.exists(JOB.ledger("r")))
            # While the queue is full, no request is read.
            for version in (1, 2, 3):
                job.send(JOB.control, Cancel(request_ids=["unread"]), WeightUpdate(weight_version=version, uri="/x"))
                await wait_for_async(lambda version=version: job.redis.xlen(JOB.control) == version)
            job.send(JOB.control, Cancel(request_ids=["r"]))
            await wait_for_async(lambda: not job.redis.xlen(JOB.control))

    run(scenario)


def test_the_next_coordinator_tells_an_engine_about_weights_that_it_missed(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator():
            job.send(JOB.control, WeightUpdate(weight_version=7, uri="/seven"))
            await wait_for_async(lambda: not job.redis.xlen(JOB.control))
        async with job.engine("a") as engine:
            await wait_for_async(lambda: job.redis.exists(JOB.lease(engine)))  # it registers without a coordinator
            async with job.coordinator():
                [order] = await job.inbox(engine, 1)
        assert order.kind is OrderKind.UPDATE_WEIGHTS

    run(scenario)


def test_an_engine_that_has_missed_weights_gets_rollouts_only_if_no_other_engine_has_them(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator(), job.engine("late", missed=1):
            async with job.engine("a", full_version=1, version=1) as a:
                await wait_for_async(lambda: job.redis.hlen(JOB.engines) == 2)
                job.send(JOB.requests, request("first", n=2))
                assert {"first"} == {order.request_id for order in await job.inbox(a, 2)}
                assert [] == await job.job_store.assignments.inbox("late")
            job.send(JOB.requests, request("second", n=1))
            assert "second" in {order.request_id for order in await job.inbox("late", 1)}

    run(scenario)


def test_members_of_a_trainers_group_are_told_to_join_even_if_they_are_discovered_later(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        group = InitWeightTransfer(group="g", engines={"a": 1, "b": 2, "c": 3}, init_info={"world_size": 4})
        async with job.engine("a"), job.engine("others"), job.coordinator():
            job.send(JOB.control, group)
            [order] = await job.inbox("a", 1)
            assert order.kind is OrderKind.INIT_TRANSFER
            assert group == await job.job_store.job.transfer_group()
            async with job.engine("b"):
                [order] = await job.inbox("b", 1)
            assert order.kind is OrderKind.INIT_TRANSFER
            assert [] == await job.job_store.assignments.inbox("others")
            async with job.engine("c", transfer_group="g"):  # it has joined before
                job.send(JOB.control, WeightUpdate(weight_version=1, uri="/one"))
                [order] = await job.inbox("c", 1)
            assert order.kind is OrderKind.UPDATE_WEIGHTS

    run(scenario)


def test_a_rollout_whose_event_was_missed_does_not_count_as_empty(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        short, long = (request(name, n=4, problem_id=name) for name in ("short", "long"))
        async with job.coordinator(), job.engine("a", max_running=1) as engine:  # it is assigned one more rollout ahead
            job.send(JOB.requests, short, long)
            probes = {order.request_id: order for order in await job.inbox(engine, 2)}
            await job.finish(long, probes["long"], 12)
            await job.finish(short, probes["short"], 10)
            assert ["long", "long"] == [order.request_id for order in await job.inbox(engine, 2)]
            # The rollout has ended without an event, as if the event had been trimmed.
            ended = Rollout.from_request(long, 1, partial(12), FinishReason.LENGTH)
            job.redis.hset(JOB.ledger("long"), "1", LedgerEntry.of(ended).pack())
            *_, third = await job.inbox(engine, 3)
        assert "long" == third.request_id

    run(scenario)


def test_an_outdated_weight_update_becomes_a_dead_letter(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator():
            updates = [WeightUpdate(weight_version=version, uri=f"/{version}") for version in (7, 6)]
            job.send(JOB.control, *updates)
            await wait_for_async(lambda: not job.redis.xlen(JOB.control))
            assert [7] == [update.weight_version for update in await job.job_store.job.weights()]
        [(_, letter)] = job.redis.xrange(JOB.dead_letters)
        assert b"weight version 6 is older than 7, which was published before" == letter[b"reason"]

    run(scenario)


def test_malformed_entries_do_not_stop_the_coordinator(run: Run) -> None:
    nested = msgpack.packb({"v": 1, "kind": "request", "prefix": 0})[:-1] + b"\x81\xa6prefix" * 1000 + b"\xc0"
    data: list[dict[Any, Any]] = [{"d": one} for one in (nested, b"", b"\xff" * 9, encode(Close())[:-3])]
    events: list[dict[Any, Any]] = [
        {"r": "r"},
        {"r": b"\xff", "s": "0"},
        {"r": "r", "s": "x"},
        {"r": "r", "s": "0", "l": "y"},
    ]

    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator(), job.engine("a") as engine:
            job.send(JOB.requests, request("r", n=2))
            await job.inbox(engine, 2)
            for stream in (JOB.requests, JOB.control, JOB.events):
                for fields in [*data, *events, {"x": "y"}]:
                    job.redis.xadd(stream, fields)
            job.redis.hset(JOB.engines, "broken", nested)
            await asyncio.sleep(3 * FAST.engine_check_interval_s)
            job.send(JOB.requests, request("s"))
            assert {"r", "s"} == {order.request_id for order in await job.inbox(engine, 3)}

    run(scenario)


def test_rollouts_start_only_on_engines_that_are_not_too_far_behind(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        old = job.engine("old", max_running=8, version=5, failed={7: "no"})
        async with job.coordinator(), old, job.engine("new", max_running=2, version=7):
            job.send(JOB.control, WeightUpdate(weight_version=7, uri="/seven"))
            await wait_for_async(lambda: not job.redis.xlen(JOB.control))
            bounds = {"least": {"min_weight_version": 6}, "fresh": {"max_staleness": 1}, "any": {"max_staleness": 2}}
            job.send(JOB.requests, *(request(name, n=1, **bound) for name, bound in bounds.items()))
            assignments = await job.assignments("new", 2)
            assert {"least": 6, "fresh": 6} == {each.request_id: each.oldest_version for each in assignments}
            [stale] = await job.assignments("old", 1)
            assert ("any", 5) == (stale.request_id, stale.oldest_version)

    run(scenario)


def test_rollouts_fail_if_no_engine_can_load_weights_that_are_new_enough(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator(), job.engine("a", version=5, failed={7: "the file is broken"}):
            job.send(JOB.control, WeightUpdate(weight_version=7, uri="/seven"))
            await wait_for_async(lambda: not job.redis.xlen(JOB.control))
            job.send(JOB.requests, request("fresh", max_staleness=1), request("later", min_weight_version=8))
            [failed] = await wait_for_async(job.rollouts)
            assert (FinishReason.FAILED, "no engine can load weight version 7: the file is broken") == (
                failed.finish_reason,
                failed.detail,
            )
            assert "fresh" in failed.rollout_id
            assert [] == [order for order in await job.inbox("a", 0) if order.assignment is not None]
            # The other one waits for the version that it needs.
            assert 1 == len(job.rollouts())

    run(scenario)


def test_a_prefix_that_is_too_old_is_refused(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        async with job.coordinator():
            job.send(JOB.requests, request("r", min_weight_version=1, prefix=partial(3)))
            await wait_for_async(job.refusals)
            assert "min_weight_version is 1, but the prefix was sampled with version 0" in job.refusals()["r"]

    run(scenario)


def test_canaries_that_differ_from_their_siblings_raise_the_alarm_across_coordinators(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        names = [name for name in map(str, range(4000)) if canary_sample(name, 4) is not None][:60]
        # A canary is not compared if a reconcile finds that its group has finished before the events arrive.
        limits = replace(FAST, reconcile_interval_s=3600.0)
        async with job.engine("a", max_running=1000) as engine:

            async def answer(some: list[str], builder: StatusBuilder, canaries: int) -> CoordinatorStatus:
                """Complete some requests, and return the first status that has counted this many canaries in total."""
                asked = {name: request(name, n=4) for name in some}
                job.send(JOB.requests, *asked.values())
                for order in await job.inbox(engine, 4 * len(some)):
                    assert order.assignment is not None
                    canary = order.assignment.sample == canary_sample(order.request_id, 4)
                    # Canaries are longer and less probable, as if drafting changed the distribution.
                    length, logprob = (9, -2.0) if canary else (5, -1.0)
                    await job.finish(asked[order.request_id], order, length, engine=engine, logprob=logprob)
                status: CoordinatorStatus = await wait_for_async(
                    lambda: builder.last if builder.last and builder.last["canaries"] >= canaries else None
                )
                return status

            async with job.coordinator(limits=limits) as coordinator:
                early = await answer(names[:4], coordinator.status, canaries=4)
                assert not early["distribution_drift"]
                await wait_for_async(lambda: b'"canaries": 4' in (job.redis.get(JOB.canaries) or b""))
            async with job.coordinator(limits=limits) as coordinator:
                late = await answer(names[4:], coordinator.status, canaries=60)
        assert (60, True) == (late["canaries"], late["distribution_drift"])
        assert late["drift_e_value"] > 1000 > early["drift_e_value"] > 1

    run(scenario)


def canary_state(canaries: float, *log_e_values: float) -> bytes:
    """Return the state of a canary test, with the log e-values of a new test after those that are given."""
    complete = [*log_e_values, *CanaryTest().drift.log_e_values[len(log_e_values) :]]
    return json.dumps({"canaries": canaries, "log_e_values": complete}).encode()


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\xff",
        b"{",
        b"null",
        b"[]",
        b'{"canaries": 3}',
        b'{"canaries": [], "log_e_values": [0.0]}',
        b'{"canaries": 3, "log_e_values": [0.0]}',
        canary_state(math.inf),
        canary_state(3, math.nan),
    ],
)
def test_an_unreadable_state_of_the_canary_test_starts_a_new_test(
    run: Run, caplog: pytest.LogCaptureFixture, state: bytes
) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        job.redis.set(JOB.canaries, state)
        async with job.coordinator() as coordinator:
            status = await wait_for_async(lambda: coordinator.status.last)
        assert (0, 1.0, False) == (status["canaries"], status["drift_e_value"], status["distribution_drift"])

    run(scenario)
    [warning] = [message for message in caplog.messages if "canary" in message]
    assert JOB.canaries in warning


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def test_status_and_metrics_are_served_and_agree(run: Run) -> None:
    async def scenario(job: CoordinatorHarness) -> None:
        starting = StatusServer(StatusBuilder(CoordinatorState(FAST), manifest(), "uid"))
        port = await starting.start("127.0.0.1", 0)
        code, body = await get(f"http://127.0.0.1:{port}/status")
        assert 503 == code and "still reading" in json.loads(body)["error"]
        assert 503 == (await get(f"http://127.0.0.1:{port}/readyz"))[0]
        await starting.stop()

        timed = {"timed_seconds": 6.0, "timed_seconds_without_drafts": 8.0}
        labeled = {
            "source_accepted_tokens": {"history": 3, "self": 2},
            "position_accepted_tokens": {"1": 4, "16+": 1},
        }
        reported = {"max_running": 4, "counters": timed, "labeled_counters": labeled}
        async with job.coordinator() as coordinator, job.engine("a", **reported) as engine:
            server = StatusServer(coordinator.status)
            url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
            asked = request("r", n=7)
            # A refusal is not a dead letter.
            job.send(JOB.requests, asked, request("invalid", sampling={"stop_token_ids": [VOCABULARY]}))
            job.redis.xadd(JOB.requests, {"d": b"garbage"})
            [first, *_] = await job.inbox(engine, 4)
            done = Rollout.from_request(
                asked,
                0,
                partial(9),
                FinishReason.LENGTH,
                num_decoding_steps=4,
                num_draft_tokens=8,
                num_accepted_tokens=5,
                started_at=time.time(),
            )
            await job.job_store.rollouts.finish(asked, done, engine=engine, order=first.order_id)

            async def finished() -> dict[str, Any]:
                _, body = await get(f"{url}/status")
                status: dict[str, Any] = json.loads(body)
                return status if status.get("done") == 1 and status["assigned"] == 4 else {}

            async def counted() -> str:
                _, body = await get(f"{url}/metrics")
                return body if 'rollout_latency_seconds_count{job="default/live"} 1.0' in body else ""

            status = await wait_for_async(finished)
            body = await wait_for_async(counted)
            assert (200, "ok\n") == await get(f"{url}/healthz") == await get(f"{url}/readyz")
            await server.stop()
        assert ("default/live", 1, 1) == tuple(status[name] for name in ("job", "requests", "dead_letters"))
        assert (9, 4, 8, 5) == tuple(
            status[name] for name in ("tokens", "decoding_steps", "draft_tokens", "accepted_tokens")
        )
        assert 0.25 == status["saved"]
        assert 6 == status["waiting"] + status["assigned"]
        assert ["a"] == [entry["name"] for entry in status["engines"]]
        assert status["assigned"] == sum(entry["assigned"] for entry in status["engines"])
        assert (None, None, None, {}) == tuple(
            status[name] for name in ("total", "epoch", "redis_error", "engine_errors")
        )
        metrics = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
        assert {"default/live"} == {sample.labels["job"] for sample in metrics}
        values = {sample.name: sample.value for sample in metrics if sample.labels.keys() == {"job"}}
        for metric, name in (
            ("rollout_requests_open", "requests"),
            ("rollout_rollouts_waiting", "waiting"),
            ("rollout_rollouts_assigned", "assigned"),
            ("rollout_saved_ratio", "saved"),
            ("rollout_weight_version", "weight_version"),
            ("rollout_rollouts_total", "done"),
            ("rollout_tokens_total", "tokens"),
            ("rollout_decoding_steps_total", "decoding_steps"),
            ("rollout_draft_tokens_total", "draft_tokens"),
            ("rollout_accepted_tokens_total", "accepted_tokens"),
            ("rollout_engines_lost_total", "engines_lost"),
            ("rollout_dead_letters_total", "dead_letters"),
        ):
            assert status[name] == values[metric], metric
        assert 1 == values["rollout_engines"]
        by_source = {sample.labels["source"]: sample for sample in metrics if "source" in sample.labels}
        assert {"rollout_engine_source_accepted_tokens_total"} == {sample.name for sample in by_source.values()}
        assert {"history": 3, "self": 2} == {source: sample.value for source, sample in by_source.items()}
        by_position = {sample.labels["position"]: sample for sample in metrics if "position" in sample.labels}
        assert {"rollout_engine_position_accepted_tokens_total"} == {sample.name for sample in by_position.values()}
        assert {"1": 4, "16+": 1} == {position: sample.value for position, sample in by_position.items()}
        histograms = {sample.name: sample.value for sample in metrics if sample.labels.get("le") in (None, "16")}
        assert (1, 1, 9) == tuple(histograms[f"rollout_response_tokens_{name}"] for name in ("bucket", "count", "sum"))
        measured = [one async for one in job.job_store.timeline.measurements()]
        assert measured and measured[-1].done <= 1

    run(scenario)
