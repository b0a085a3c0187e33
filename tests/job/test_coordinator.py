"""The coordinator on a real Redis. What engines and clients say is said by the test, at the worst of moments."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from rollout_api.asyncio_tasks import end
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import DATA, HistoryKeys, MessageKeys
from rollout_api.protocol.messages import (
    Cancel,
    FinishReason,
    Message,
    Partial,
    Refusal,
    Rollout,
    RolloutRequest,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
)
from rollout_worker.history.connection import connect, connect_async
from rollout_worker.history.store import HistoryStore
from rollout_worker.job import coordinator as module
from rollout_worker.job.coordinator import Coordinator
from rollout_worker.job.http import StatusServer
from rollout_worker.job.job_store import EngineReport, JobStore, Order, StaleCoordinatorError
from rollout_worker.job.ledger import LedgerEntry
from rollout_worker.job.setup import BLOCK_S
from rollout_worker.job.status import JobStatus, StatusBoard
from rollout_worker.policy.canary import canary_of
from tests.support.in_process_job import manifest

JOB = MessageKeys("uid")
VOCABULARY = 10


def history_of(server: redis.Redis) -> HistoryStore:
    return HistoryStore(server, HistoryKeys("default", "live"), window=16)


PATIENCE_S = 15.0


def request(name: str, n: int = 1, **more: Any) -> RolloutRequest:
    sampling = Sampling(**{"n": n, "max_tokens": 20} | more.pop("sampling", {}))
    return RolloutRequest(job_uid="uid", request_id=name, prompt_token_ids=[1], sampling=sampling, **more)


class Around:
    """A coordinator's surroundings."""

    def __init__(self, url: str, job_store: JobStore) -> None:
        self.url, self.job_store = url, job_store
        self.redis = connect(url)

    def send(self, stream: str, *messages: Message) -> None:
        pipeline = self.redis.pipeline(transaction=False)
        for message in messages:
            pipeline.xadd(stream, {DATA: encode(message)})
        pipeline.execute()

    def replies(self) -> list[Message]:
        entries: Any = self.redis.xrange(JOB.results("trainer"))
        return [decode(fields[DATA.encode()]) for _, fields in entries]

    def rollouts(self) -> list[Rollout]:
        return [reply for reply in self.replies() if isinstance(reply, Rollout)]

    async def until(self, found: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (what := found()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return what

    async def orders(self, engine: str, count: int) -> list[Order]:
        deadline = time.monotonic() + PATIENCE_S
        while len(orders := await self.job_store.orders(engine)) < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return orders

    @asynccontextmanager
    async def engine(self, name: str, slots: int = 4, counters: dict[str, float] | None = None) -> AsyncIterator[str]:
        """An engine that is alive, and does nothing."""

        async def beat() -> None:
            while True:
                await self.job_store.heartbeat(
                    name, EngineReport(name, slots=slots, counters=counters or {}), begin=True
                )
                await asyncio.sleep(0.5)

        beating = asyncio.ensure_future(beat())
        try:
            yield name
        finally:
            await end(beating)

    @asynccontextmanager
    async def coordinator(self, job: RolloutJob | None = None) -> AsyncIterator[Coordinator]:
        job_store = JobStore(connect_async(self.url, block=BLOCK_S), JOB)
        coordinator = Coordinator(job or manifest(), job_store, history_of(self.redis), vocabulary=VOCABULARY)
        running = asyncio.ensure_future(coordinator.run())
        try:
            yield coordinator
            assert not running.done(), running.exception()
        finally:
            await end(running)
            await job_store.client.aclose()


Story = Callable[[Around], Coroutine[Any, Any, None]]


@pytest.fixture
def play(redis_url: str) -> Callable[[Story], None]:
    async def run(story: Story) -> None:
        client = connect_async(redis_url)
        await story(Around(redis_url, JobStore(client, JOB)))
        await client.aclose()

    return lambda story: asyncio.run(run(story))


def test_what_an_engine_gave_back_unheard_is_given_out_again(
    play: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RECONCILE_S", 0.3)

    async def story(around: Around) -> None:
        async with around.coordinator(), around.engine("a") as engine:
            around.send(JOB.requests, request("r", n=2))
            first, _ = await around.orders(engine, 2)
            # its event was trimmed before the coordinator could read it
            await around.job_store.delete(JOB.inbox(engine), first.order_id)
            orders = await around.orders(engine, 2)
        assert {0, 1} == {order.assignment.sample for order in orders if order.assignment is not None}

    play(story)


def test_an_engine_gives_back_only_what_it_has(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        async with around.coordinator(), around.engine("a") as engine:
            around.send(JOB.requests, request("r"))
            [order] = await around.orders(engine, 1)
            assert order.assignment is not None
            for gone in ("b", "b"):  # said late, and twice
                await around.job_store.give_back(gone, "0-0", order.assignment, "draining")
            for _ in range(2):  # its reply was lost, and it was said again
                await around.job_store.give_back(engine, order.order_id, order.assignment, "not served")
            [again] = await around.orders(engine, 1)
            await asyncio.sleep(0.5)
            assert [again] == await around.job_store.orders(engine)

    play(story)


def test_what_ended_while_there_was_no_coordinator_frees_its_engine(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        asked = request("r", n=2)
        async with around.engine("a", slots=1) as engine:
            async with around.coordinator():
                around.send(JOB.requests, asked)
                [order] = await around.orders(engine, 1)
            assert order.assignment is not None
            # the ledger has it, and the order is still there: the engine died between the two, say
            done = Rollout.of(asked, order.assignment.sample, None, FinishReason.LENGTH)
            await around.job_store.finish(asked, done, engine=engine, order="0-0")
            async with around.coordinator():
                orders = await around.orders(engine, 2)
        assert {0, 1} == {order.assignment.sample for order in orders if order.assignment is not None}

    play(story)


@pytest.mark.parametrize(
    "poison",
    [
        {"sampling": {"allowed_token_ids": [3, VOCABULARY]}},
        {"sampling": {"stop_token_ids": [VOCABULARY]}},
        {"prefix": Partial(token_ids=[VOCABULARY], spans=[WeightSpan(start=0, weight_version=0)])},
    ],
    ids=["allowed", "stop", "prefix"],
)
def test_tokens_that_the_model_has_not_are_refused_before_any_engine_sees_them(
    play: Callable[[Story], None], poison: dict[str, Any]
) -> None:
    async def story(around: Around) -> None:
        async with around.coordinator(), around.engine("a") as engine:
            around.send(JOB.requests, request("bad", **poison), request("good"))
            [order] = await around.orders(engine, 1)
            assert order.assignment is not None and "good" == order.assignment.request_id
            [refusal] = await around.until(around.replies)
        assert isinstance(refusal, Refusal) and "bad" == refusal.request_id
        assert f"{VOCABULARY} is no token of the model" in refusal.reason

    play(story)


def test_a_cancellation_may_overtake_its_request(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        async with around.coordinator():
            await around.until(lambda: around.redis.exists(JOB.status))
            many = [request(f"r{number}") for number in range(1200)]
            around.send(JOB.requests, *many)
            around.send(JOB.control, Cancel(request_ids=["r1199", "never sent"]))
            [cancelled] = await around.until(around.rollouts)
            await around.until(lambda: not around.redis.xlen(JOB.control))
            # asked for afterwards, it is meant
            around.send(JOB.requests, request("never sent"))
            async with around.engine("a", slots=2000) as engine:
                orders = await around.orders(engine, 1200)
        assert ("uid/r1199/0/0", FinishReason.CANCELLED) == (cancelled.rollout_id, cancelled.finish_reason)
        assert "never sent" in {order.assignment.request_id for order in orders if order.assignment is not None}

    play(story)


def test_engines_get_work_while_thousands_of_rollouts_are_cancelled(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        job = manifest(queue={"maxRollouts": 100_000})
        names = [f"r{number}" for number in range(300)]
        async with around.coordinator(job):
            around.send(JOB.requests, *(request(name, n=64) for name in names))
            await around.until(lambda: around.redis.hlen(JOB.ledger(names[-1])))
            around.send(JOB.requests, request("kept"))
            around.send(JOB.control, Cancel(request_ids=names))
            await around.until(lambda: around.redis.hget(JOB.ledger(names[-1]), "cancelled") == b"1")
            async with around.engine("a") as engine:
                [order] = await around.orders(engine, 1)
                assert around.redis.xlen(JOB.results("trainer")) < 300 * 64
            await around.until(lambda: around.redis.xlen(JOB.results("trainer")) == 300 * 64)
        assert order.assignment is not None and "kept" == order.assignment.request_id
        assert {FinishReason.CANCELLED} == {rollout.finish_reason for rollout in around.rollouts()}

    play(story)


def test_a_coordinator_that_was_replaced_ends_though_it_has_nothing_to_give_out(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        client = connect_async(around.url, block=BLOCK_S)
        first = Coordinator(manifest(), JobStore(client, JOB), history_of(around.redis), vocabulary=VOCABULARY)
        running = asyncio.ensure_future(first.run())
        await around.until(lambda: around.redis.exists(JOB.status))
        async with around.coordinator():
            with pytest.raises(StaleCoordinatorError):
                await asyncio.wait_for(running, PATIENCE_S)
        await client.aclose()

    play(story)


def test_cancelling_thousands_takes_few_commands(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        names = [f"r{number}" for number in range(500)]
        async with around.coordinator(), around.engine("a", slots=250) as a, around.engine("b", slots=250) as b:
            around.send(JOB.requests, *map(request, names))
            for engine in (a, b):
                await around.orders(engine, 250)
            around.redis.config_resetstat()
            with around.redis.monitor() as monitor:
                for _ in range(3):  # a client repeats it until all is answered
                    around.send(JOB.control, Cancel(request_ids=names))
                await around.until(lambda: not around.redis.xlen(JOB.control))
                around.redis.echo("enough")
                commands = takewhile(lambda line: not line.startswith("ECHO"), (c["command"] for c in monitor.listen()))
                marked = sum("cancelled" in command for command in commands if command.startswith("HSET"))
            calls: Any = around.redis.info("commandstats")
            orders = [*await around.orders(a, 500), *await around.orders(b, 500)]
        assert sorted(names) == sorted(order.request_id for order in orders if order.kind == "cancel")
        assert calls["cmdstat_evalsha"]["calls"] < 100  # with the heartbeats; each takes a message of its own
        assert 500 == marked  # 1,500 if what is cancelled were marked again

    play(story)


def test_cancellations_of_what_never_comes_do_not_pile_up(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        async with around.coordinator(manifest(queue={"maxRollouts": 8})):
            around.send(JOB.requests, request("r", n=8))
            await around.until(lambda: around.redis.exists(JOB.ledger("r")))
            for _ in range(3):  # said again while the queue is full, and no request is read
                around.send(JOB.control, Cancel(request_ids=["unread"]))
                await asyncio.sleep(0.3)
            assert 3 == around.redis.xlen(JOB.control)
            around.send(JOB.control, Cancel(request_ids=["r"]))
            await around.until(lambda: not around.redis.xlen(JOB.control))

    play(story)


def test_an_engine_that_missed_new_weights_is_told_by_the_next_coordinator(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        async with around.coordinator():
            around.send(JOB.control, WeightUpdate(weight_version=7, uri="/seven"))
            await around.until(lambda: not around.redis.xlen(JOB.control))
        async with around.engine("a") as engine:
            await around.until(lambda: around.redis.exists(JOB.lease(engine)))  # nobody saw it come
            async with around.coordinator():
                [order] = await around.orders(engine, 1)
        assert "weights" == order.kind

    play(story)


def test_a_length_that_was_not_heard_is_not_taken_for_nought(
    play: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RECONCILE_S", 0.3)

    def made(asked: RolloutRequest, sample: int, length: int) -> Rollout:
        partial = Partial(token_ids=[1] * length, spans=[WeightSpan(start=0, weight_version=0)])
        return Rollout.of(asked, sample, partial, FinishReason.LENGTH)

    async def story(around: Around) -> None:
        short, long = request("short", n=4), request("long", n=4)
        async with around.coordinator(), around.engine("a", slots=1) as engine:  # it is given one more ahead
            around.send(JOB.requests, short, long)
            probes = reversed(await around.orders(engine, 2))
            for order, asked, length in zip(probes, (long, short), (12, 10), strict=True):
                assert asked.request_id == order.request_id
                await around.job_store.finish(asked, made(asked, 0, length), engine=engine, order=order.order_id)
            assert ["long", "long"] == [order.request_id for order in await around.orders(engine, 2)]
            # ended, and the event was trimmed before the coordinator could read it
            around.redis.hset(JOB.ledger("long"), "1", LedgerEntry.of(made(long, 1, 12)).pack())
            *_, third = await around.orders(engine, 3)
        assert "long" == third.request_id

    play(story)


def test_weights_that_are_older_than_the_newest_go_to_the_dead_letters(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        async with around.coordinator():
            around.send(
                JOB.control,
                WeightUpdate(weight_version=7, uri="/seven"),
                WeightUpdate(weight_version=6, uri="/six"),
            )
            await around.until(lambda: not around.redis.xlen(JOB.control))
            assert [7] == [update.weight_version for update in await around.job_store.weights()]
        [(_, letter)] = around.redis.xrange(JOB.dead)
        assert b"weight version 6 comes after 7" == letter[b"reason"]

    play(story)


def test_an_idle_engine_takes_rollouts_of_one_whose_steps_are_long(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        # a step takes a second for each of its rollouts
        slow = {"cost_base_seconds": 0.1, "cost_token_seconds": 1.0, "cost_context_token_seconds": 1e-6}
        stopped = request("stopped", n=2, sampling={"stop": ["x"], "max_tokens": 400})
        async with around.coordinator() as coordinator, around.engine("a", slots=16, counters=slow) as a:
            around.send(JOB.requests, request("r", n=6, sampling={"max_tokens": 400}), stopped)
            await around.orders(a, 8)
            async with around.engine("b", slots=16, counters=slow):
                async with asyncio.timeout(PATIENCE_S):
                    while not (moves := [one for one in await around.job_store.orders(a) if one.kind == "move"]):
                        await asyncio.sleep(0.1)
                # half of them; but none that cannot go on from what it has
                assert {"r"} == {move.request_id for move in moves}
                assert 3 <= len(moves) <= 5
                first = moves[0].assignment
                assert first is not None
                (order,) = [
                    one
                    for one in await around.job_store.orders(a)
                    if one.kind == "sample"
                    and one.assignment is not None
                    and one.assignment.entry == first.entry
                    and one.assignment.sample == first.sample
                ]
                await around.job_store.give_back(a, order.order_id, first, "moved")
                (taken,) = await around.orders("b", 1)
                assert taken.assignment is not None
                assert ("r", first.sample, True) == (
                    taken.request_id,
                    taken.assignment.sample,
                    taken.assignment.resumed,
                )
                assert coordinator.board.moved == len(moves)

    play(story)


def test_canaries_are_compared_with_their_siblings_across_coordinators(play: Callable[[Story], None]) -> None:
    """Rollouts without drafts that say something else than their siblings are found, and stay found."""

    async def story(around: Around) -> None:
        names = [name for name in map(str, range(4000)) if canary_of(name, 4) is not None][:60]
        async with around.engine("a", slots=1000) as engine:

            async def answer(some: list[str], board: StatusBoard) -> JobStatus:
                asked = {name: request(name, n=4) for name in some}
                already = 0 if board.last is None else board.last["canaries"]
                around.send(JOB.requests, *asked.values())
                for order in await around.orders(engine, 4 * len(some)):
                    assert order.assignment is not None
                    one, sample = asked[order.assignment.request_id], order.assignment.sample
                    # as if drafts had made what is likelier, and shorter
                    odd = sample == canary_of(one.request_id, 4)
                    said = Partial(
                        token_ids=[1] * (9 if odd else 5),
                        logprobs=[-2.0 if odd else -1.0] * (9 if odd else 5),
                        spans=[WeightSpan(start=0, weight_version=0)],
                    )
                    rollout = Rollout.of(one, sample, said, FinishReason.STOP)
                    await around.job_store.finish(one, rollout, engine=engine, order=order.order_id)
                async with asyncio.timeout(PATIENCE_S):
                    while board.last is None or board.last["canaries"] < already + len(some):
                        await asyncio.sleep(0.1)
                return board.last

            async with around.coordinator() as coordinator:
                early = await answer(names[:4], coordinator.board)
                assert not early["distribution_drift"]
            async with around.coordinator() as coordinator:
                late = await answer(names[4:], coordinator.board)
        assert (60, True) == (late["canaries"], late["distribution_drift"])
        assert late["drift_e_value"] > 1000 > early["drift_e_value"] > 1

    play(story)


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def test_status_and_metrics_are_served_and_agree(play: Callable[[Story], None]) -> None:
    async def story(around: Around) -> None:
        waiting = StatusServer(StatusBoard(manifest()))
        early = await waiting.start("127.0.0.1", 0)
        code, body = await get(f"http://127.0.0.1:{early}/status")
        assert 503 == code and "still reading" in json.loads(body)["error"]
        await waiting.stop()

        timed = {"timed_seconds": 6.0, "timed_seconds_without_drafts": 8.0}
        async with around.coordinator() as coordinator, around.engine("a", slots=4, counters=timed) as engine:
            server = StatusServer(coordinator.board)
            url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
            asked = request("r", n=7)
            around.send(JOB.requests, asked, request("too long", sampling={"stop_token_ids": [VOCABULARY]}))
            [first, *_] = await around.orders(engine, 4)
            assert first.assignment is not None
            partial = Partial(token_ids=[1] * 9, spans=[WeightSpan(start=0, weight_version=0)])
            done = Rollout.of(asked, 0, partial, FinishReason.LENGTH, steps=4, drafted=8, accepted=5)
            await around.job_store.finish(asked, done, engine=engine, order=first.order_id)
            status: dict[str, Any] = {}
            async with asyncio.timeout(PATIENCE_S):  # it is made once a second
                while status.get("done") != 1:
                    await asyncio.sleep(0.1)
                    code, body = await get(f"{url}/status")
                    status = json.loads(body)
            waits = await around.job_store.waiting()
            _, body = await get(f"{url}/metrics")
            assert (200, "ok\n") == await get(f"{url}/healthz")
            await server.stop()
        assert ("default/live", 1, 1, 9, 4, 8, 5) == tuple(
            status[name] for name in ("job", "requests", "dead_letters", "tokens", "steps", "drafted", "accepted")
        )
        assert (status["waiting"], 0.25) == (waits[0], status["saved"])
        assert 6 == status["waiting"] + status["assigned"]
        assert ["a"] == [one["name"] for one in status["engines"]]
        assert status["assigned"] == sum(one["assigned"] for one in status["engines"])
        assert (None, None, None, {}) == tuple(
            status[name] for name in ("total", "epoch", "redis_away", "engine_errors")
        )
        samples = [one for family in text_string_to_metric_families(body) for one in family.samples]
        assert {"default/live"} == {one.labels["job"] for one in samples}
        values = {one.name: one.value for one in samples if one.labels.keys() == {"job"}}
        for metric, name in (
            ("rollout_requests_open", "requests"),
            ("rollout_rollouts_waiting", "waiting"),
            ("rollout_rollouts_assigned", "assigned"),
            ("rollout_saved_ratio", "saved"),
            ("rollout_weight_version", "weight_version"),
            ("rollout_rollouts_total", "done"),
            ("rollout_tokens_total", "tokens"),
            ("rollout_steps_total", "steps"),
            ("rollout_drafted_tokens_total", "drafted"),
            ("rollout_accepted_tokens_total", "accepted"),
            ("rollout_engines_lost_total", "engines_lost"),
            ("rollout_dead_letters_total", "dead_letters"),
        ):
            assert status[name] == values[metric], metric
        assert 1 == values["rollout_engines"]
        page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
        names = [one.name.replace("rollout_engine_", "…_") for one in samples]
        assert [] == [name for name in names if f"`{name}`" not in page]

    play(story)
