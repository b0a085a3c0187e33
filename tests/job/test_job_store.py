"""The job's store on a real Redis: operations are atomic, may be repeated, and are rejected where they must be."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
import redis.asyncio

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.access_rules import access_rules
from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import (
    MAX_KEEP_SECONDS,
    InitWeightTransfer,
    Partial,
    PauseMode,
    RolloutRequest,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.redis_client.connection import connect
from rollout_api.redis_client.pipelined import PipelinedConnection
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_head.dataset.problems import EnvironmentResults, RolloutError
from rollout_head.relay import Relay
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from rollout_store.job import (
    Admission,
    Assignment,
    EngineReport,
    JobStore,
    Order,
    StaleCoordinatorError,
    Stream,
)
from rollout_store.job.job_record import JobDescription
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.requests import LedgerEntry, ResultProgress
from rollout_store.job.rollouts import AppendedTokens
from scripts.sizing_docs import LEDGER_BYTES
from tests.support.job_messages import HISTORY, JOB, request, rollout
from tests.support.redis_servers import Server, create_user
from tests.support.results_in_redis import kept_rollouts
from tests.support.waiting import wait_for_async

REPORT = EngineReport("engine-0", max_running=4)
DESCRIPTION = JobDescription("/model", 300, "{}", 128, 1 << 20, 1 << 20, 100, "history", "")


def weights(version: int) -> WeightUpdate:
    return WeightUpdate(weight_version=version, uri=f"/weights/{version}")


class StoreHarness:
    """Runs operations of a job's store, and reads their effects from Redis."""

    def __init__(self, url: str, admin_url: str = "") -> None:
        self.url = url
        self.redis = connect(admin_url or url)
        self.history = HistoryStore(connect(self.url), HISTORY, window=4)
        self.relay = Relay(connect(self.url), JOB, self.history)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[JobStore]:
        job_store = JobStore.connect(self.url, JOB)
        yield job_store
        await job_store.close()

    def results(self, client: str = "trainer") -> list[str]:
        return [rollout.rollout_id for rollout in kept_rollouts(self.redis, JOB, client)]

    def in_history(self) -> list[str]:
        return [record.rollout_id for record in self.history.read({"p": START})["p"].records]

    def submit(self, asked: RolloutRequest) -> str:
        entry: Any = self.redis.xadd(JOB.requests, {MESSAGE_FIELD: encode(asked)})
        return str(entry, "utf-8")


@pytest.fixture
def harness(redis_url: str) -> StoreHarness:
    rules = access_rules(HISTORY.namespace, "math", JOB.uid, HISTORY.name)
    return StoreHarness(create_user(redis_url, rules), redis_url)


async def test_a_request_is_admitted_once_and_answered_once(harness: StoreHarness) -> None:
    asked = request()
    first, again = harness.submit(asked), harness.submit(asked)

    async with harness.connected() as job_store:
        requests, rollouts = job_store.requests, job_store.rollouts
        assert Admission.NEW is await requests.admit(first, asked)
        assert Admission.KNOWN is await requests.admit(first, asked)  # by the next coordinator
        assert Admission.REPEATED is await requests.admit(again, asked)
        more = asked.model_copy(update={"sampling": Sampling(n=3)})
        assert Admission.CONFLICT is await requests.admit(harness.submit(more), more)
        assert asked == await requests.read(first)
        assert await rollouts.finish(asked, rollout(asked, 0))
        assert not await rollouts.finish(asked, rollout(asked, 0, length=9))
        assert [(frozenset({0}), False)] == await requests.progress(["r"])
        assert await rollouts.finish(asked, rollout(asked, 1))
        assert await requests.read(first) is None
        assert Admission.ANSWERED is await requests.admit(harness.submit(asked), asked)
        totals = {"rollouts": 2, "tokens": 10, "decoding_steps": 4, "draft_tokens": 8, "accepted_tokens": 6}
        assert totals == await rollouts.totals()
    assert ["uid/r/0/0", "uid/r/1/0"] == harness.results()
    assert 0 == harness.redis.xlen(JOB.requests)
    assert 0 < harness.redis.ttl(JOB.ledger("r"))
    ledger = LauncherStore(harness.redis, JOB).read_ledger(["r"])["r"]
    assert {0: 5, 1: 5} == {sample: entry.length for sample, entry in ledger.items()}


@pytest.mark.parametrize(("n", "max_bytes"), [(1, 250), (4, 480), (16, 1250)])
async def test_an_answered_request_takes_little_memory(redis_url: str, n: int, max_bytes: int) -> None:
    """Ledgers are kept for a week: 500 rollouts per second would be 300 million (docs/sizing.md)."""
    keys = MessageKeys("6f1c2e9a-5d1b-4f0e-9c57-0f3a2b1c4d5e")
    server, job_store = connect(redis_url), JobStore.connect(redis_url, keys)
    asked = RolloutRequest(job_uid=keys.uid, request_id="trainer:1:1", prompt_token_ids=[1], sampling=Sampling(n=n))
    entry: Any = server.xadd(keys.requests, {MESSAGE_FIELD: encode(asked)})
    await job_store.requests.admit(str(entry, "utf-8"), asked)
    counters = {"num_decoding_steps": 3000, "num_draft_tokens": 90_000, "num_accepted_tokens": 70_000}
    engine = {"engine": "math-grpo-worker-3/engine-0#a1b2c3"}
    finished = [rollout(asked, sample).model_copy(update=counters | engine) for sample in range(n)]
    await job_store.rollouts.finish_all([(asked, one) for one in finished])
    await job_store.close()
    assert 0 < server.memory_usage(keys.ledger("trainer:1:1")) <= max_bytes


@pytest.mark.parametrize(("n", "expected_bytes"), LEDGER_BYTES.items())
async def test_the_sizing_guide_has_the_memory_that_redis_needs_for_ledgers(
    tmp_path: Path, n: int, expected_bytes: int
) -> None:
    keys, num_requests = MessageKeys("6f1c2e9a-5d1b-4f0e-9c57-0f3a2b1c4d5e"), 2048 // n
    used = []
    with Server(tmp_path) as server:
        client, job_store = connect(server.url), JobStore.connect(server.url, keys)
        for number in range(2 * num_requests):
            asked = RolloutRequest(
                job_uid=keys.uid, request_id=f"trainer:1:{number}", prompt_token_ids=[1], sampling=Sampling(n=n)
            )
            entry: Any = client.xadd(keys.requests, {MESSAGE_FIELD: encode(asked)})
            await job_store.requests.admit(str(entry, "utf-8"), asked)
            await job_store.rollouts.finish_all([(asked, rollout(asked, sample)) for sample in range(n)])
            if (number + 1) % num_requests == 0:  # the first half also takes what Redis needs in any case
                client.delete(*(key for key in client.scan_iter(count=1000) if b":ledger:" not in key))
                memory: Any = client.info("memory")
                used.append(memory["used_memory"])
        await job_store.close()
    assert 0.8 * expected_bytes <= (used[1] - used[0]) / 2048 <= 1.2 * expected_bytes, used


async def test_the_ledger_remembers_expiring_results_for_a_day(harness: StoreHarness) -> None:
    asked = request(n=1, keep_seconds=60)
    async with harness.connected() as job_store:
        await job_store.requests.admit(harness.submit(asked), asked)
        await job_store.rollouts.finish(asked, rollout(asked, 0))
    assert 60 < harness.redis.ttl(JOB.ledger("r")) <= MAX_KEEP_SECONDS
    [entry] = LauncherStore(harness.redis, JOB).read_ledger(["r"])["r"].values()
    assert LedgerEntry.of(rollout(asked, 0)) == entry
    by_default = LedgerEntry.of(rollout(request(problem_id=""), 0))
    assert by_default == LedgerEntry.unpack(by_default.pack())
    earlier_release = msgpack.packb(("p", 5, "stop", 1, 2, 4, 3, "engine"))
    assert ("p", b"") == (LedgerEntry.unpack(earlier_release).problem_id, LedgerEntry.unpack(earlier_release).digest)
    later_release = msgpack.packb([*msgpack.unpackb(entry.pack()), "new", {"newer": 1}])
    assert entry == LedgerEntry.unpack(later_release)


async def test_a_request_that_redis_has_lost_is_admitted_when_it_is_sent_again(harness: StoreHarness) -> None:
    """A coordinator may read a request, and admit it only after Redis was restarted from an older snapshot."""
    asked = request()

    async with harness.connected() as job_store:
        lost = harness.submit(asked)
        harness.redis.delete(JOB.requests)
        assert Admission.GONE is await job_store.requests.admit(lost, asked)
        assert Admission.NEW is await job_store.requests.admit(harness.submit(asked), asked)


async def test_a_rollout_of_an_unknown_request_is_not_recorded(harness: StoreHarness) -> None:
    asked = request()

    async with harness.connected() as job_store:
        assert not await job_store.rollouts.finish(asked, rollout(asked, 0))
    assert [] == harness.results()


async def test_a_partial_is_kept_until_its_rollout_ends(harness: StoreHarness) -> None:
    asked = request(n=1)
    partial = Partial(token_ids=[7, 8], logprobs=[-1.0, -2.0], weight_spans=[WeightSpan(start=0, weight_version=3)])

    async with harness.connected() as job_store:
        rollouts, assignments = job_store.rollouts, job_store.assignments
        assert not await rollouts.checkpoint(asked, 0, partial)
        await job_store.requests.admit(harness.submit(asked), asked)
        assert [1] == await assignments.count_losses(["uid/r/0/0"])
        assert await rollouts.checkpoint(asked, 0, partial)
        assert {} == await assignments.loss_counts()  # progress resets the count
        assert [partial] == await rollouts.partials([(asked, 0)])
        assert (False, False) == await rollouts.start_state("r", 0)
        await rollouts.finish(asked, rollout(asked, 0))
        assert not await rollouts.checkpoint(asked, 0, partial)
        assert (True, False) == await rollouts.start_state("r", 0)
        assert [None] == await rollouts.partials([(asked, 0)])
        assert set() == await rollouts.partial_ids()


async def test_tokens_are_streamed_only_by_the_engine_that_has_the_rollout(harness: StoreHarness) -> None:
    asked = request(n=1, keep_seconds=60, stream=True)
    first = Partial(token_ids=[7, 8], logprobs=[-1.0, -2.0], weight_spans=[WeightSpan(start=0, weight_version=3)])
    second = Partial(token_ids=[9], logprobs=[-3.0], weight_spans=[WeightSpan(start=0, weight_version=4)])
    both = Partial(
        token_ids=[7, 8, 9],
        logprobs=[-1.0, -2.0, -3.0],
        weight_spans=[WeightSpan(start=0, weight_version=3), WeightSpan(start=2, weight_version=4)],
    )

    async with harness.connected() as job_store:
        rollouts, assignments, engines = job_store.rollouts, job_store.assignments, job_store.engines

        async def append(engine: str, order: str, start: int, tokens: Partial) -> int:
            [length] = await rollouts.append_tokens([AppendedTokens(engine, order, asked, 0, start, tokens)])
            return length

        async def order_to(engine: str) -> str:
            await engines.heartbeat(engine, REPORT, register=True)
            assert await assignments.send(coordinator, engine, [Order.sample(Assignment("r", 0, entry_id))])
            [held] = await assignments.inbox(engine)
            return held.order_id

        entry_id = harness.submit(asked)
        await job_store.requests.admit(entry_id, asked)
        coordinator = await assignments.take_over()
        order = await order_to("a")
        await assignments.count_losses([str(asked.rollout_id(0))])
        assert 2 == await append("a", order, 0, first)
        assert {} == await assignments.loss_counts()  # progress resets the count
        assert 2 == await append("a", order, 0, first)  # a repetition has no effect
        assert 2 == await append("a", order, 5, second)  # nor do tokens after a gap
        assert [first] == await rollouts.partials([(asked, 0)])

        await engines.release("a")
        assert await assignments.reclaim(coordinator, "a")
        later = await order_to("b")
        # The first engine continues to sample, but the rollout is no longer its own.
        assert -1 == await append("a", order, 2, second)
        assert not await rollouts.finish(asked, rollout(asked, 0), engine="a", order=order)
        assert 3 == await append("b", later, 2, second)
        assert [both] == await rollouts.partials([(asked, 0)])
        assert await rollouts.finish(asked, rollout(asked, 0), engine="b", order=later)
        assert -1 == await append("b", later, 3, second)
        assert not await rollouts.finish(asked, rollout(asked, 0), engine="b", order=later)
        assert 0 == harness.redis.exists(JOB.tokens("r", 0))
        assert 1 == harness.redis.hlen(JOB.results("r"))


async def test_orders_reach_an_engine_once_and_are_reclaimed_when_its_lease_expires(harness: StoreHarness) -> None:
    asked = request()
    entry_id = harness.submit(asked)
    assigned = [Assignment("r", 0, entry_id), Assignment("r", 1, entry_id, resumed=True)]

    async with harness.connected() as job_store:
        assignments, engines = job_store.assignments, job_store.engines
        coordinator = await assignments.take_over()
        await job_store.requests.admit(entry_id, asked)
        commands = [Order.cancel("x"), Order.init_transfer(), Order.update_weights()]
        orders = [*map(Order.sample, assigned), *commands]
        assert not await assignments.send(coordinator, "e", orders)  # the engine has not registered
        assert not await engines.heartbeat("e", REPORT)
        assert await engines.heartbeat("e", REPORT, register=True)
        assert await engines.heartbeat("e", REPORT)
        assert await assignments.send(coordinator, "e", orders)
        held = await assignments.inbox("e")
        assert orders == [replace(order, order_id="") for order in held]
        assert (held, held[-1].order_id) == await assignments.read_inbox("e", "0", timeout_s=1, max_orders=9)
        assert await job_store.rollouts.finish(asked, rollout(asked, 0), engine="e", order=held[0].order_id)
        assert await assignments.reclaim(coordinator, "e") is None  # the lease is valid
        await engines.release("e")
        assert {"e": (REPORT, False)} == await engines.engines()
        assert REPORT == await engines.report("e")
        reclaimed = await assignments.reclaim(coordinator, "e")
        assert reclaimed is not None
        assert [assigned[1]] == [order.assignment for order in reclaimed if order.assignment is not None]
        assert {} == await engines.engines()
        assert await engines.report("e") is None
        assert not await engines.heartbeat("e", REPORT)  # the engine must register again


async def test_an_order_of_an_unknown_kind_is_skipped(harness: StoreHarness) -> None:
    harness.redis.xadd(JOB.inbox("e"), {"k": "of a later release", "i": "x"})
    last: Any = harness.redis.xadd(JOB.inbox("e"), {"k": "cancel", "i": "x"})

    async with harness.connected() as job_store:
        orders, cursor = await job_store.assignments.read_inbox("e", "0", timeout_s=1, max_orders=9)
        assert (["x"], last.decode()) == ([order.request_id for order in orders], cursor)


async def test_cancelling_an_unknown_request_creates_no_ledger(harness: StoreHarness) -> None:
    asked = request()

    async with harness.connected() as job_store:
        requests = job_store.requests
        await requests.admit(harness.submit(asked), asked)
        await requests.mark_cancelled(["unknown", asked.request_id])
        assert [(frozenset(), False), (frozenset(), True)] == await requests.progress(["unknown", asked.request_id])
    assert not harness.redis.exists(JOB.ledger("unknown"))


async def test_fields_of_a_later_release_in_an_engine_report_are_ignored(harness: StoreHarness) -> None:
    report = asdict(REPORT) | {"field_of_a_later_release": 1}
    harness.redis.hset(JOB.engines, "engine-0-a", msgpack.packb(report))
    async with harness.connected() as job_store:
        assert {"engine-0-a": (REPORT, False)} == await job_store.engines.engines()


async def test_a_replaced_coordinator_can_neither_send_orders_nor_reclaim(harness: StoreHarness) -> None:
    async with harness.connected() as job_store:
        assignments = job_store.assignments
        old, new = await assignments.take_over(), await assignments.take_over()
        await job_store.engines.heartbeat("e", REPORT, register=True)
        assert await assignments.send(new, "e", [Order.update_weights()])
        with pytest.raises(StaleCoordinatorError):
            await assignments.send(old, "e", [Order.update_weights()])
        with pytest.raises(StaleCoordinatorError):
            await assignments.reclaim(old, "e")


async def test_late_writes_of_a_replaced_coordinator_have_no_effect(harness: StoreHarness) -> None:
    group = InitWeightTransfer(group="g", engines={"e": 1}, init_info={})
    async with harness.connected() as job_store:
        job = job_store.job
        old, new = await job_store.assignments.take_over(), await job_store.assignments.take_over()
        await job.publish(new, "default/math", DESCRIPTION)
        await job.set_weights(new, weights(2))
        await job.set_pause(new, PauseMode.KEEP)
        before = {key: harness.redis.dump(key) for key in harness.redis.scan_iter()}
        for late in (
            job.publish(old, "default/math", replace(DESCRIPTION, max_rollouts=1)),
            job.set_weights(old, weights(3)),
            job.set_transfer_group(old, group),
            job.set_pause(old, None),
            job.set_status(old, b"{}"),
            job.set_canaries(old, "{}"),
            job.set_closing(old),
            job.set_closed(old),
        ):
            with pytest.raises(StaleCoordinatorError):
                await late
        assert before == {key: harness.redis.dump(key) for key in harness.redis.scan_iter()}


async def test_weights_never_go_back_to_an_older_version(harness: StoreHarness) -> None:
    async with harness.connected() as job_store:
        coordinator = await job_store.assignments.take_over()
        for version in (1, 2, 1):
            await job_store.job.set_weights(coordinator, weights(version))
        assert [weights(2)] == await job_store.job.weights()


async def test_a_full_server_rejects_whole_operations_and_accepts_heartbeats(
    harness: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request()

    async with harness.connected() as job_store:
        await job_store.requests.admit(harness.submit(asked), asked)
        await job_store.engines.heartbeat("e", REPORT, register=True)
        harness.redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                await job_store.once.rollouts.finish(asked, rollout(asked, 0))
            assert await job_store.engines.heartbeat("e", REPORT)
            waiting = asyncio.ensure_future(job_store.rollouts.finish(asked, rollout(asked, 0)))
            await wait_for_async(lambda: "retrying until it is available" in caplog.text)
            assert not waiting.done()
        finally:
            harness.redis.config_set("maxmemory", 0)
        assert await waiting
    assert ["uid/r/0/0"] == harness.results()
    assert 1 == harness.redis.xlen(JOB.outbox)


async def test_unread_results_are_measured(harness: StoreHarness) -> None:
    asked = request(n=20)

    async with harness.connected() as job_store:
        nothing = ResultProgress(0, 0, None)
        assert {} == await job_store.results.progress([])
        assert {"trainer": nothing, "other": nothing} == await job_store.results.progress(["trainer", "other"])
        await job_store.requests.admit(harness.submit(asked), asked)
        for sample in range(20):
            await job_store.rollouts.finish(asked, rollout(asked, sample, length=1000))
        sizes = [len(harness.redis.hget(JOB.results("r"), str(sample)) or b"") for sample in range(20)]
        unread = {"trainer": ResultProgress(sum(sizes), 0, None), "other": nothing}
        assert unread == await job_store.results.progress(["trainer", "other"])
        harness.redis.hset(JOB.results_read, "trainer", sum(sizes[:15]))
        harness.redis.hset(JOB.results_noticed, "trainer", sum(sizes[:18]))
        progress = await job_store.results.progress(["trainer"])
        assert {"trainer": ResultProgress(sum(sizes), sum(sizes[:15]), sum(sizes[:18]))} == progress
        assert sum(sizes[15:]) == progress["trainer"].unread
        updates: Any = [fields for _, fields in harness.redis.xrange(JOB.result_updates("trainer"))]
        assert [b"%d" % sum(sizes[: number + 1]) for number in range(20)] == [fields[b"w"] for fields in updates]
        assert [b"%d" % sample for sample in range(20)] == [fields[b"s"] for fields in updates]


async def test_results_expire_or_are_kept_until_they_are_released(harness: StoreHarness) -> None:
    expiring, kept = request("expiring", n=1, keep_seconds=60), request("kept", n=1)

    async with harness.connected() as job_store:
        for asked in (expiring, kept):
            await job_store.requests.admit(harness.submit(asked), asked)
            await job_store.rollouts.finish(asked, rollout(asked, 0))
    assert 0 < harness.redis.ttl(JOB.results("expiring")) <= 60
    assert -1 == harness.redis.ttl(JOB.results("kept"))
    assert ["uid/kept/0/0"] == harness.results()


async def test_results_that_were_released_are_dropped(harness: StoreHarness) -> None:
    asked, early = request(n=3), request("early", n=1)
    both = [key for name in ("r", "early") for key in (JOB.ledger(name), JOB.results(name))]

    async with harness.connected() as job_store:
        first = harness.submit(asked)
        await job_store.requests.admit(first, asked)
        await job_store.rollouts.finish(asked, rollout(asked, 0))
        release = Call(Function("release"), [JOB.job, JOB.unreleased("trainer"), *both], [60, "r", "early"])
        for deleted in (1, 0, 0):  # it does nothing for a job that is gone, and a repetition has no effect
            run(harness.redis, release)
            assert deleted == len(harness.results())
            harness.redis.hset(JOB.job, "state", "running")
        assert [] == harness.results()
        # The request is open until all its rollouts have ended, and a later coordinator cancels them.
        assert Admission.KNOWN is await job_store.requests.admit(first, asked)
        assert [(frozenset({0}), True)] == await job_store.requests.progress(["r"])
        assert Admission.REPEATED is await job_store.requests.admit(harness.submit(asked), asked)
        for sample in (1, 2):
            assert await job_store.rollouts.finish(asked, rollout(asked, sample))
        # One that the job had not admitted is never sampled.
        assert Admission.REPEATED is await job_store.requests.admit(harness.submit(early), early)
    assert [] == harness.results() == harness.redis.keys(JOB.results("*"))
    assert 0 == harness.redis.xlen(JOB.requests)
    assert 1 == harness.redis.xlen(JOB.result_updates("trainer"))
    assert 0 < harness.redis.ttl(JOB.ledger("r")) and 0 < harness.redis.ttl(JOB.ledger("early"))


REQUESTS, SAMPLES = 40, 5


def answer_requests(url: str, stop_before: int) -> None:
    """Answer all requests and move the rollouts to the history; kill this process before its n-th packet to Redis."""
    sent = 0

    def count() -> None:
        nonlocal sent
        sent += 1
        if sent == stop_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sync_send = redis.connection.AbstractConnection.send_packed_command
    async_send = redis.asyncio.connection.AbstractConnection.send_packed_command
    flush = PipelinedConnection._flush

    def counted_sync(self: Any, *args: Any, **options: Any) -> Any:
        count()
        return sync_send(self, *args, **options)

    async def counted_async(self: Any, *args: Any, **options: Any) -> Any:
        count()
        return await async_send(self, *args, **options)

    def counted_flush(self: PipelinedConnection) -> None:
        count()
        flush(self)

    PipelinedConnection._flush = counted_flush  # type: ignore[method-assign]
    redis.connection.AbstractConnection.send_packed_command = counted_sync
    redis.asyncio.connection.AbstractConnection.send_packed_command = counted_async
    harness = StoreHarness(url)

    async def answer() -> None:
        async with harness.connected() as job_store:
            assignments, rollouts = job_store.assignments, job_store.rollouts
            coordinator = await assignments.take_over()
            engine = f"e{coordinator}"
            await job_store.engines.heartbeat(engine, REPORT, register=True)
            for entry in await job_store.incoming.page(Stream.REQUESTS, "0", max_entries=100):
                asked = decode(entry.data)
                assert isinstance(asked, RolloutRequest)
                if await job_store.requests.admit(entry.entry_id, asked) not in (Admission.NEW, Admission.KNOWN):
                    continue
                ((done, _),) = await job_store.requests.progress([asked.request_id])
                unfinished = [sample for sample in range(SAMPLES) if sample not in done]
                orders = [Order.sample(Assignment(asked.request_id, sample, entry.entry_id)) for sample in unfinished]
                await assignments.send(coordinator, engine, orders)
                for order in await assignments.inbox(engine):
                    if order.assignment is not None:
                        sample = order.assignment.sample
                        partial = Partial(token_ids=[sample], weight_spans=[WeightSpan(start=0, weight_version=1)])
                        await rollouts.checkpoint(asked, sample, partial)
                        await rollouts.finish(asked, rollout(asked, sample), engine=engine, order=order.order_id)
                harness.relay.drain()
            harness.relay.drain()

    asyncio.run(answer())


def test_a_process_killed_before_any_packet_loses_and_duplicates_no_rollout(harness: StoreHarness) -> None:
    requests = [request(str(number), n=SAMPLES) for number in range(REQUESTS)]
    for asked in requests:
        harness.submit(asked)
    fork = multiprocessing.get_context("fork")
    kills = 0
    for stop_before in [*range(4, 60), 0]:
        process = fork.Process(target=answer_requests, args=(harness.url, stop_before))
        process.start()
        process.join(30)
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
    expected = Counter(str(asked.rollout_id(sample)) for asked in requests for sample in range(SAMPLES))
    assert expected == Counter(harness.results())
    assert expected == Counter(harness.in_history())
    redis_server = harness.redis
    assert 0 == redis_server.xlen(JOB.requests) == redis_server.xlen(JOB.outbox) == redis_server.hlen(JOB.partials)
    assert kills >= 35


async def test_an_environment_with_thousands_of_types_of_errors_does_not_enlarge_the_status(
    harness: StoreHarness,
) -> None:
    results = EnvironmentResults(LauncherStore(harness.redis, JOB))
    errors = {f"r-{number}": RolloutError(f"type-{number}", "p", "m" * 2000) for number in range(25_000)}
    await results.record({"r": RolloutError("timeout", "p", "m"), **errors})
    async with harness.connected() as job_store:
        summary = await job_store.job.environment_errors()
    assert {"timeout": 1, "exception": 25_000} == {kind: error["count"] for kind, error in summary.items()}
    assert len(summary["exception"]["message"]) <= 1000
