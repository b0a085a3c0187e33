"""The message plane on a real Redis: every step once, whatever is repeated, refused or killed in between."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
import redis.asyncio

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import DATA, HistoryKeys, MessageKeys
from rollout_api.protocol.length_entries import rollout_key
from rollout_api.protocol.messages import (
    FinishReason,
    Partial,
    Purpose,
    Rewards,
    Rollout,
    RolloutRequest,
    WeightSpan,
    decode,
    encode,
)
from rollout_worker.history.connection import connect, connect_async, retry_async
from rollout_worker.history.store import START, HistoryStore
from rollout_worker.job.job_store import Assignment, EngineReport, JobStore, StaleCoordinatorError
from rollout_worker.job.ledger import read_ledger
from rollout_worker.job.relay import Relay
from tests.support.redis_servers import Server

JOB = MessageKeys("uid")
HISTORY = HistoryKeys("default", "math")
REPORT = EngineReport("engine-0", slots=4)


def request(name: str = "r", n: int = 2, **more: Any) -> RolloutRequest:
    about = {"problem_id": "p", "prompt_token_ids": [1]} | more
    return RolloutRequest(job_uid="uid", request_id=name, sampling=Sampling(n=n), **about)


def rollout(asked: RolloutRequest, sample: int, length: int = 5) -> Rollout:
    return Rollout(
        rollout_id=str(asked.rollout_id(sample)),
        problem_id=asked.problem,
        purpose=asked.purpose,
        token_ids=[sample] * length,
        logprobs=[-0.5] * length,
        spans=[WeightSpan(start=0, weight_version=1)] if length else [],
        finish_reason=FinishReason.STOP,
        steps=2,
        drafted=4,
        accepted=3,
    )


class Bench:
    """The job_store, and Redis as it is behind it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = connect(url)
        self.store = HistoryStore(self.redis, HISTORY, window=4)
        self.relay = Relay(self.redis, JOB, self.store)

    @asynccontextmanager
    async def job_store(self) -> AsyncIterator[JobStore]:
        client = connect_async(self.url)
        yield JobStore(client, JOB)
        await client.aclose()

    def run(self, work: Callable[[JobStore], Coroutine[Any, Any, Any]]) -> Any:
        async def runs() -> Any:
            async with self.job_store() as job_store:
                return await work(job_store)

        return asyncio.run(runs())

    def results(self, client: str = "trainer") -> list[str]:
        entries: Any = self.redis.xrange(JOB.results(client))
        messages = [decode(fields[DATA.encode()]) for _, fields in entries]
        return [message.rollout_id for message in messages if isinstance(message, Rollout)]

    def in_history(self) -> list[str]:
        return [record.rollout_id for record in self.store.read({"p": START})["p"].records]

    def submit(self, asked: RolloutRequest) -> str:
        entry: Any = self.redis.xadd(JOB.requests, {DATA: encode(asked)})
        return str(entry, "utf-8")


@pytest.fixture
def bench(redis_url: str) -> Bench:
    return Bench(redis_url)


def test_a_request_is_taken_up_once_and_answered_once(bench: Bench) -> None:
    asked = request()
    first, again = bench.submit(asked), bench.submit(asked)

    async def story(job_store: JobStore) -> None:
        assert 1 == await job_store.admit(first, asked)
        assert 1 == await job_store.admit(first, asked)  # by the next coordinator
        assert 0 == await job_store.admit(again, asked)
        more = asked.model_copy(update={"sampling": Sampling(n=3)})
        assert -2 == await job_store.admit(bench.submit(more), more)
        assert asked == await job_store.request(first)
        assert await job_store.finish(asked, rollout(asked, 0))
        assert not await job_store.finish(asked, rollout(asked, 0, length=9))
        assert [(frozenset({0}), False)] == await job_store.progress(["r"])
        assert await job_store.finish(asked, rollout(asked, 1))
        assert await job_store.request(first) is None
        late = str(bench.submit(asked))
        assert -1 == await job_store.admit(late, asked)

    bench.run(story)
    assert ["uid/r/0/0", "uid/r/1/0"] == bench.results()
    assert 0 == bench.redis.xlen(JOB.requests)
    totals = {"rollouts": 2, "tokens": 10, "steps": 4, "drafted": 8, "accepted": 6}
    assert totals == {key.decode(): int(value) for key, value in bench.redis.hgetall(JOB.totals).items()}
    assert 0 < bench.redis.ttl(JOB.ledger("r"))
    assert {0: 5, 1: 5} == {sample: entry.length for sample, entry in read_ledger(bench.redis, JOB, ["r"])["r"].items()}


def test_what_nobody_asked_for_is_not_recorded(bench: Bench) -> None:
    asked = request()

    async def story(job_store: JobStore) -> None:
        assert not await job_store.finish(asked, rollout(asked, 0))

    bench.run(story)
    assert [] == bench.results()


def test_training_rollouts_and_their_rewards_reach_the_history_once(bench: Bench) -> None:
    asked, evaluated = request(), request("e", n=1, purpose=Purpose.EVAL)

    async def story(job_store: JobStore) -> None:
        for one in (asked, evaluated):
            await job_store.admit(bench.submit(one), one)
            for sample in range(one.sampling.n):
                await job_store.finish(one, rollout(one, sample))

    bench.run(story)
    rewards = Rewards(rewards={"uid/r/1/0": 0.25, "uid/unknown/0/0": 1.0})
    bench.redis.xadd(JOB.rewards, {DATA: encode(rewards)})
    entries: Any = bench.redis.xrange(JOB.outbox)
    bench.relay.drain()
    assert ["uid/r/0/0", "uid/r/1/0"] == bench.in_history()
    assert {rollout_key("uid/r/1/0"): 0.25} == bench.store.rewards("p")
    # as if the relay had been killed after it carried an entry and before it deleted that
    bench.redis.xadd(JOB.outbox, entries[0][1])
    bench.redis.xadd(JOB.rewards, {DATA: encode(rewards)})
    bench.relay.drain()
    assert ["uid/r/0/0", "uid/r/1/0"] == bench.in_history()
    assert {rollout_key("uid/r/1/0"): 0.25} == bench.store.rewards("p")
    assert 0 == bench.redis.xlen(JOB.outbox) == bench.redis.xlen(JOB.rewards)


def test_what_stood_before_a_later_turn_reaches_the_history_and_no_client(bench: Bench) -> None:
    prompt = list(range(1000, 1100))
    turns = [
        request(f"t{turn}", n=1, prompt_token_ids=prompt[:length], trajectory_id="t", turn=turn)
        for turn, length in enumerate((90, 100, 3))
    ]

    async def story(job_store: JobStore) -> None:
        for asked in turns:
            await job_store.admit(bench.submit(asked), asked)
            await job_store.finish(asked, rollout(asked, 0))

    bench.run(story)
    sent: Any = [fields for _, fields in bench.redis.xrange(JOB.results("trainer"))]
    assert [{b"d": encode(rollout(asked, 0))} for asked in turns] == sent
    waiting: Any = [fields for _, fields in bench.redis.xrange(JOB.outbox)]
    assert [{b"d"}, {b"d", b"c"}, {b"d", b"c"}] == [set(fields) for fields in waiting]
    bench.relay.drain()
    records = bench.store.read({"p": START})["p"].records
    assert [[], prompt[-64:], prompt[:3]] == [record.context.tolist() for record in records]


def test_what_a_worker_of_before_has_left_in_the_outbox_is_carried_without_context(bench: Bench) -> None:
    asked = request(n=1, trajectory_id="t", turn=1)
    bench.redis.xadd(JOB.outbox, {DATA: encode(rollout(asked, 0))})
    bench.relay.drain()
    assert [("uid/r/0/1", [])] == [
        (record.rollout_id, record.context.tolist()) for record in bench.store.read({"p": START})["p"].records
    ]


@pytest.mark.parametrize("stream", [JOB.outbox, JOB.rewards])
@pytest.mark.parametrize("data", [b"garbage", b"", encode(request())])
def test_what_the_relay_cannot_read_goes_to_the_dead_letters_and_the_rest_goes_on(
    bench: Bench, stream: str, data: bytes
) -> None:
    bench.redis.xadd(stream, {DATA: data})
    asked = request(n=1)

    async def story(job_store: JobStore) -> None:
        await job_store.admit(bench.submit(asked), asked)
        await job_store.finish(asked, rollout(asked, 0))

    bench.run(story)
    bench.relay.drain()
    assert ["uid/r/0/0"] == bench.in_history()
    letters: Any = bench.redis.xrange(JOB.dead)
    ((_, letter),) = letters
    assert (data, stream.encode()) == (letter[b"d"], letter[b"stream"])
    assert letter[b"reason"]


def test_a_reward_whose_rollout_cannot_be_read_goes_to_the_dead_letters(bench: Bench) -> None:
    bench.redis.hset(JOB.ledger("r"), "0", msgpack.packb(("p", 5)))
    bench.redis.xadd(JOB.rewards, {DATA: encode(Rewards(rewards={"uid/r/0/0": 1.0}))})
    bench.relay.drain()
    [(_, letter)] = bench.redis.xrange(JOB.dead)
    assert b"no entry of a ledger" in letter[b"reason"]


def test_a_partial_is_kept_until_the_rollout_ends_and_not_after(bench: Bench) -> None:
    asked = request(n=1)
    partial = Partial(token_ids=[7, 8], logprobs=[-1.0, -2.0], spans=[WeightSpan(start=0, weight_version=3)])

    async def story(job_store: JobStore) -> None:
        assert not await job_store.checkpoint(asked, 0, partial)
        await job_store.admit(bench.submit(asked), asked)
        assert [1] == await job_store.count_loss(["uid/r/0/0"])
        assert await job_store.checkpoint(asked, 0, partial)
        assert {} == await job_store.attempts()  # progress clears suspicion
        assert partial == (await job_store.partials([(asked, 0)]))[0]
        assert (False, False, partial) == await job_store.before(asked, 0, True)
        await job_store.finish(asked, rollout(asked, 0))
        assert not await job_store.checkpoint(asked, 0, partial)
        assert (True, False, None) == await job_store.before(asked, 0, True)
        assert set() == await job_store.partial_ids()

    bench.run(story)


def test_orders_reach_an_engine_once_and_come_back_when_its_lease_ends(bench: Bench) -> None:
    asked = request()
    entry = bench.submit(asked)
    orders = [Assignment("r", 0, entry), Assignment("r", 1, entry, resumed=True)]

    async def story(job_store: JobStore) -> None:
        number = await job_store.take_over()
        await job_store.admit(entry, asked)
        assert await job_store.assign(number, "e", orders) is None  # it is not there yet
        assert not await job_store.heartbeat("e", REPORT)
        assert await job_store.heartbeat("e", REPORT, begin=True)
        assert await job_store.heartbeat("e", REPORT)
        assert await job_store.assign(number, "e", [*orders, "cancel x", "weights"])
        held = await job_store.orders("e")
        assert orders == [order.assignment for order in held[:2]]
        assert [("cancel", "x"), ("weights", "")] == [(order.kind, order.request_id) for order in held[2:]]
        assert await job_store.finish(asked, rollout(asked, 0), engine="e", order=held[0].order_id)
        assert await job_store.reclaim(number, "e") is None  # it is alive
        await job_store.leave("e")
        assert {"e": (REPORT, False)} == await job_store.engines()
        back = await job_store.reclaim(number, "e")
        assert back is not None
        assert [orders[1]] == [order.assignment for order in back if order.assignment is not None]
        assert {} == await job_store.engines()
        assert not await job_store.heartbeat("e", REPORT)  # what was taken for lost and was not

    bench.run(story)


def test_a_cancellation_makes_no_ledger_for_what_is_unknown(bench: Bench) -> None:
    asked = request()

    async def story(job_store: JobStore) -> None:
        await job_store.admit(bench.submit(asked), asked)
        await job_store.mark_cancelled(["unknown", asked.request_id])
        assert [(frozenset(), False), (frozenset(), True)] == await job_store.progress(["unknown", asked.request_id])

    bench.run(story)
    assert not bench.redis.exists(JOB.ledger("unknown"))


def test_what_a_later_engine_says_of_itself_stops_no_coordinator(bench: Bench) -> None:
    report = asdict(REPORT) | {"said_by_a_later_version": 1}
    bench.redis.hset(JOB.engines, "engine-0-a", msgpack.packb(report))
    assert {"engine-0-a": (REPORT, False)} == bench.run(lambda job_store: job_store.engines())


def test_a_coordinator_that_was_replaced_gives_out_nothing(bench: Bench) -> None:
    async def story(job_store: JobStore) -> None:
        old = await job_store.take_over()
        new = await job_store.take_over()
        await job_store.heartbeat("e", REPORT, begin=True)
        assert await job_store.assign(new, "e", ["weights"])
        with pytest.raises(StaleCoordinatorError):
            await job_store.assign(old, "e", ["weights"])
        with pytest.raises(StaleCoordinatorError):
            await job_store.reclaim(old, "e")

    bench.run(story)


def test_a_full_server_refuses_a_whole_step_and_lets_leases_through(bench: Bench) -> None:
    asked = request()

    async def story(job_store: JobStore) -> None:
        await job_store.admit(bench.submit(asked), asked)
        await job_store.heartbeat("e", REPORT, begin=True)
        bench.redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                await job_store.finish(asked, rollout(asked, 0))
            assert await job_store.heartbeat("e", REPORT)
            waiting = asyncio.ensure_future(retry_async(lambda: job_store.finish(asked, rollout(asked, 0))))
            await asyncio.sleep(0.3)
            assert not waiting.done()
        finally:
            bench.redis.config_set("maxmemory", 0)
        assert await waiting

    bench.run(story)
    assert ["uid/r/0/0"] == bench.results()
    assert 1 == bench.redis.xlen(JOB.outbox)


def test_unread_results_are_counted(bench: Bench) -> None:
    asked = request(n=20)

    async def story(job_store: JobStore) -> None:
        assert (0, 0) == await job_store.unread("trainer")
        await job_store.admit(bench.submit(asked), asked)
        for sample in range(20):
            await job_store.finish(asked, rollout(asked, sample, length=1000))
        count, size = await job_store.unread("trainer")
        assert 20 == count
        assert 20 * 8000 < size < 20 * 16000
        await job_store.client.xgroup_create(JOB.results("trainer"), "trainer", id="0")
        await job_store.client.xreadgroup("trainer", "trainer", {JOB.results("trainer"): ">"}, count=15)
        assert 5 == (await job_store.unread("trainer"))[0]

    bench.run(story)


def test_a_reward_waits_for_a_failover_of_the_history(bench: Bench, tmp_path: Path) -> None:
    asked = request()

    async def story(job_store: JobStore) -> None:
        await job_store.admit(bench.submit(asked), asked)
        await job_store.finish(asked, rollout(asked, 0))

    bench.run(story)
    with Server(tmp_path) as server:
        store = HistoryStore(connect(server.url), bench.store.keys, window=2)
        relay = Relay(bench.redis, JOB, store)
        relay.drain()
        bench.redis.xadd(JOB.rewards, {DATA: encode(Rewards(rewards={"uid/r/0/0": 0.25}))})
        server.client().replicaof("127.0.0.1", 1)  # what this client knows as the primary is none any more
        with pytest.raises(redis.exceptions.ReadOnlyError):
            relay.drain()
        server.client().replicaof("no", "one")
        relay.drain()
        assert {rollout_key("uid/r/0/0"): 0.25} == store.rewards("p")
    assert 0 == bench.redis.xlen(JOB.dead)


REQUESTS, SAMPLES = 40, 5


def work(url: str, stop_after: int) -> None:
    """Answer requests and carry the rollouts on; killed by itself before a certain packet is sent to Redis."""
    sent = 0

    def count() -> None:
        nonlocal sent
        sent += 1
        if sent == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    sync_send = redis.connection.AbstractConnection.send_packed_command
    async_send = redis.asyncio.connection.AbstractConnection.send_packed_command

    def counted_sync(self: Any, *args: Any, **options: Any) -> Any:
        count()
        return sync_send(self, *args, **options)

    async def counted_async(self: Any, *args: Any, **options: Any) -> Any:
        count()
        return await async_send(self, *args, **options)

    redis.connection.AbstractConnection.send_packed_command = counted_sync  # type: ignore[method-assign]
    redis.asyncio.connection.AbstractConnection.send_packed_command = counted_async  # type: ignore[method-assign]
    bench = Bench(url)

    async def story(job_store: JobStore) -> None:
        number = await job_store.take_over()
        engine = f"e{number}"
        await job_store.heartbeat(engine, REPORT, begin=True)
        for entry, fields in await job_store.entries(JOB.requests):
            asked = decode(fields[b"d"])
            assert isinstance(asked, RolloutRequest)
            if await job_store.admit(entry, asked) != 1:
                continue
            ((done, _),) = await job_store.progress([asked.request_id])
            open_ = [Assignment(asked.request_id, sample, entry) for sample in range(SAMPLES) if sample not in done]
            await job_store.assign(number, engine, open_)
            for order in await job_store.orders(engine):
                if order.assignment is not None:
                    sample = order.assignment.sample
                    partial = Partial(token_ids=[sample], spans=[WeightSpan(start=0, weight_version=1)])
                    await job_store.checkpoint(asked, sample, partial)
                    await job_store.finish(asked, rollout(asked, sample), engine=engine, order=order.order_id)
            bench.relay.drain()
        bench.relay.drain()

    bench.run(story)


def test_killed_before_any_packet_nothing_is_lost_and_nothing_is_there_twice(bench: Bench) -> None:
    requests = [request(str(number), n=SAMPLES) for number in range(REQUESTS)]
    for asked in requests:
        bench.submit(asked)
    fork = multiprocessing.get_context("fork")
    kills = 0
    for stop_after in [*range(4, 60), 0]:
        process = fork.Process(target=work, args=(bench.url, stop_after))
        process.start()
        process.join(30)
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
    expected = Counter(str(asked.rollout_id(sample)) for asked in requests for sample in range(SAMPLES))
    assert expected == Counter(bench.results())
    assert expected == Counter(bench.in_history())
    assert 0 == bench.redis.xlen(JOB.requests) == bench.redis.xlen(JOB.outbox) == bench.redis.hlen(JOB.partials)
    assert kills >= 35
