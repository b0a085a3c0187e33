"""A whole job in one process, on two real engines: every rollout once, whoever is killed, and all a client may ask."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_api import (
    AsyncRolloutClient,
    FinishReason,
    InvalidRequestError,
    Prompt,
    Rollout,
    RolloutId,
    UpdateMode,
    WeightsError,
    encode,
)
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Broadcast, Refusal, RolloutRequest, TensorToCome, WeightUpdate, decode
from rollout_api.weights.broadcast import JOIN_S
from rollout_api.weights.in_memory import ModelInMemory
from rollout_worker.engine.compat import EngineError
from rollout_worker.engine.host import Engine
from rollout_worker.policy.speculation_cutoff import SpeculationCutoff
from tests.support.in_process_job import CHECKPOINT_TOKENS, LiveJob, live, manifest, start_engine
from tests.support.ports import free_port
from tests.support.reference_model import EOS, VOCABULARY, Law, LoopThread, make_adapter, make_model, merged_law

ENDLESS = list(range(EOS))
"""Tokens to allow so that a rollout goes on to max_tokens."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for version in range(3):
        make_model(root / str(version), seed=version + 3)
    return root


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def engines(models: Path, loop: LoopThread, redis_server: str) -> Iterator[dict[str, Engine]]:
    async def start() -> dict[str, Engine]:
        both = await asyncio.gather(*(start_engine(models / "0", redis_server, manifest()) for _ in range(2)))
        return dict(zip(("engine-0", "engine-1"), both, strict=True))

    started = loop.run(start())
    yield started
    for engine in started.values():
        engine.close()


class ForgetfulRedis:
    """A server that comes back with what it was last told to remember."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        self._command = [
            "redis-server",
            "--port",
            str(port),
            "--dir",
            str(directory),
            "--save",
            "",
            "--bind",
            "127.0.0.1",
        ]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while True:
            try:
                if redis.Redis.from_url(self.url).ping():
                    return
            except redis.RedisError:
                time.sleep(0.02)

    def remember(self) -> None:
        redis.Redis.from_url(self.url).save()

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


Story = Callable[[LiveJob, AsyncRolloutClient], Coroutine[Any, Any, None]]


class Stage:
    def __init__(self, loop: LoopThread, engines: dict[str, Engine], models: Path, url: str) -> None:
        self.engines, self.models, self.url = engines, models, url
        self._loop = loop

    def play(self, story: Story, *, job: Any = None, seconds: float = 120) -> None:
        self._loop.run(self._play(story, job or manifest()), timeout=seconds)

    async def _play(self, story: Story, job: Any) -> None:
        try:
            async with (
                live(self.url, job, self.models / "0", VOCABULARY, self.engines) as running,
                AsyncRolloutClient.connect(self.url, uid=running.uid) as client,
            ):
                await story(running, client)
        finally:
            for engine in self.engines.values():  # as they were, for the next story
                if engine.weight_version != 0:
                    await engine.load_weights(self.models / "0", 0)


@pytest.fixture
def stage(loop: LoopThread, engines: dict[str, Engine], models: Path, redis_url: str) -> Stage:
    return Stage(loop, engines, models, redis_url)


def prompts(count: int, length: int = 4, **more: Any) -> list[Prompt]:
    return [
        Prompt([(7 * index + place) % EOS for place in range(length)], f"p{index}", **more) for index in range(count)
    ]


async def gather(client: AsyncRolloutClient, step: int, asked: list[Prompt]) -> list[Rollout]:
    async with client.step(step, asked) as one:
        return [rollout async for rollout in one]


def assert_once(running: LiveJob, rollouts: list[Rollout], expected: int) -> None:
    assert expected == len({rollout.rollout_id for rollout in rollouts}) == len(rollouts)
    assert Counter(rollout.rollout_id for rollout in rollouts if rollout.token_ids) == running.in_history()
    assert 0 == running.redis.xlen(running.keys.requests)
    assert 0 == running.redis.hlen(running.keys.partials)


def test_a_step_is_answered_by_both_engines_and_reaches_the_history(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        rollouts = await gather(client, 1, prompts(12))
        assert_once(running, rollouts, 48)
        assert 2 == len({rollout.engine for rollout in rollouts})
        assert {"stop", "length"} >= {str(rollout.finish_reason) for rollout in rollouts}
        assert all(0 < rollout.started_at <= rollout.finished_at for rollout in rollouts)
        status: dict[str, Any] = {}
        async with asyncio.timeout(20):  # it is published once a second
            while (48, 0, 0, 0) != tuple(status.get(name) for name in ("done", "waiting", "assigned", "requests")):
                await asyncio.sleep(0.1)
                status = client.status
        assert {"engine-0", "engine-1"} == {engine["name"] for engine in status["engines"]}

    stage.play(story)


def test_engines_on_one_machine_may_compute_on_different_cores(engines: dict[str, Engine]) -> None:
    workers = [process for process in psutil.Process().children(recursive=True) if process.name() == "VLLM::Worker"]
    assert len(workers) >= len(engines)  # there are engines of other tests
    for worker in workers:
        # the main thread's, and so those of all threads that it begins
        assert os.sched_getaffinity(0) == set(worker.cpu_affinity())


def test_a_lost_engines_rollouts_go_on_elsewhere_from_what_was_kept(stage: Stage) -> None:
    """And with the law of the model: their log-probabilities are its own over the border."""

    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        job, law = running, Law(stage.models / "0")
        await job.until(lambda: len(job.redis.hgetall(job.keys.engines)) == 2)
        sampled = sum(engine.counters.tokens for engine in stage.engines.values())
        sampling = Sampling(n=4, max_tokens=400, logprobs=True, allowed_token_ids=ENDLESS)
        asked = prompts(8, sampling=sampling)
        task = asyncio.ensure_future(gather(client, 1, asked))
        await job.until(lambda: job.redis.hlen(job.keys.partials) >= 12)
        running_there = len(job.workers["engine-0"]._running)
        assert running_there
        await job.kill("engine-0")
        rollouts = await task
        assert_once(job, rollouts, 32)
        assert all(len(rollout.token_ids) == 400 for rollout in rollouts)
        for rollout in rollouts:
            index = int(RolloutId.parse(rollout.rollout_id).request_id.split(":")[2].split("-")[0])
            assert rollout.logprobs is not None
            prompt = list(asked[index].token_ids)
            assert law.worst_error(prompt, rollout.token_ids, rollout.logprobs, sampling) < 1e-3
        again = sum(engine.counters.tokens for engine in stage.engines.values()) - sampled - 32 * 400
        # each lost at most what is not kept yet and one verification step
        assert 0 <= again <= running_there * (CHECKPOINT_TOKENS + 5)

    stage.play(story)


def test_a_coordinator_may_die_at_any_moment(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        rollouts: list[Rollout] = []
        steps = kills = 0
        while kills < 5:  # how many fall into one step is up to the machine
            steps += 1
            asked = prompts(100, sampling=Sampling(n=4, max_tokens=60))
            task = asyncio.ensure_future(gather(client, steps, asked))
            while not task.done():
                await asyncio.sleep(0.05 + 0.03 * kills)
                await running.kill("coordinator")
                running.start_coordinator()
                kills += 1
            rollouts += await task
        assert_once(running, rollouts, 400 * steps)
        # the last one was started a moment ago; what it answers shows that it has taken over
        assert 16 == len(await gather(client, steps + 1, prompts(4)))
        # a second one takes over; the first gives out nothing any more, and ends
        first = running.tasks.pop("coordinator")
        running.start_coordinator()
        assert 16 == len(await gather(client, steps + 2, prompts(4)))
        with pytest.raises(Exception, match="another coordinator has taken over"):
            await asyncio.wait_for(first, 20)

    stage.play(story)


def test_decoding_and_delivery_go_on_while_there_is_no_coordinator(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        def ended() -> int:
            return int(running.redis.hget(running.keys.totals, "rollouts") or 0)

        def given_out() -> int:
            before = ended()
            return before + sum(map(running.redis.xlen, running.redis.keys(running.keys.inbox("*"))))

        await running.until(lambda: running.redis.hlen(running.keys.engines) == 2)
        sampling = Sampling(n=4, max_tokens=480, allowed_token_ids=ENDLESS)
        async with client.step(1, prompts(8, sampling=sampling)) as step:
            await running.until(lambda: given_out() >= 32)
            await running.kill("coordinator")
            assert ended() < 32
            received = [rollout async for rollout in step]
        assert 32 == len(received)
        assert "coordinator" not in running.tasks

    stage.play(story)


def test_an_engine_that_was_wrongly_taken_for_lost_does_no_harm(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        def known() -> set[bytes]:
            return set(running.redis.hkeys(running.keys.engines))

        await running.until(lambda: len(known()) == 2)
        sampling = Sampling(n=16, max_tokens=400, allowed_token_ids=ENDLESS)
        task = asyncio.ensure_future(gather(client, 1, prompts(8, sampling=sampling)))
        for _ in range(2):
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 2)
            lost = known()
            for engine in lost:
                running.redis.delete(running.keys.lease(engine.decode()))
            await running.until(lambda lost=lost: len(known() - lost) == 2)
        assert not task.done()
        assert_once(running, await task, 128)

    stage.play(story)


def test_redis_may_come_back_without_its_last_moments(stage: Stage, tmp_path: Path) -> None:
    """As after a machine's crash, or a failover: requests, ends and orders of the last moments never happened."""
    server = ForgetfulRedis(tmp_path)
    forgetful = Stage(stage._loop, stage.engines, stage.models, server.url)

    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        sampling = Sampling(n=4, max_tokens=200, allowed_token_ids=ENDLESS)
        first = asyncio.ensure_future(gather(client, 1, prompts(12, sampling=sampling)))
        await running.until(lambda: running.redis.xlen(running.keys.events) >= 6)
        await asyncio.to_thread(server.remember)
        known = running.redis.xlen(running.keys.events)
        second = asyncio.ensure_future(gather(client, 2, prompts(6, sampling=sampling)))
        await running.until(lambda: running.redis.xlen(running.keys.events) >= known + 8)
        await asyncio.to_thread(server.restart)
        assert known + 8 > running.redis.xlen(running.keys.events)
        assert 48 == len(await first)
        assert 24 == len(await second)
        await running.until(lambda: running.redis.xlen(running.keys.requests) == 0, 20)
        await running.until_nothing_is_open()
        assert running.coordinator is not None
        assert 0 == sum(map(len, running.coordinator._assigned.values()))
        assert 0 == running.redis.hlen(running.keys.partials)

    try:
        forgetful.play(story)
    finally:
        server.stop()


def test_weights_that_redis_lost_are_published_again(stage: Stage, tmp_path: Path) -> None:
    server = ForgetfulRedis(tmp_path)
    forgetful = Stage(stage._loop, stage.engines, stage.models, server.url)

    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        await asyncio.to_thread(server.remember)
        await running.kill("coordinator")
        publishing = asyncio.ensure_future(client.publish_weights(1, stage.models / "1", timeout=40))
        await running.until(lambda: running.redis.xlen(running.keys.control) == 1)
        await asyncio.to_thread(server.restart)
        assert 0 == running.redis.xlen(running.keys.control)
        running.start_coordinator()
        assert 2 == len((await publishing).loaded)

    try:
        forgetful.play(story)
    finally:
        server.stop()


def test_a_rollout_that_costs_engine_after_engine_is_given_up_and_the_others_are_not(stage: Stage) -> None:
    engine = manifest().spec.engine.model_dump(by_alias=True, mode="json") | {"checkpointTokens": 1000}

    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        def holder() -> str | None:
            """The engine that makes the rollout of step 1, of which no partial is ever kept."""
            for name, worker in running.workers.items():
                if any(request_id.split(":")[1] == "1" for request_id, _ in worker._running):
                    return name
            return None

        poison = prompts(1, sampling=Sampling(n=1, max_tokens=480, allowed_token_ids=ENDLESS))
        async with client.step(1, poison) as deadly, client.step(2, prompts(8)) as others:
            for _ in range(6):
                async with asyncio.timeout(60):
                    # in the loop itself: in another thread it might end between the look and the kill
                    while (name := holder()) is None:
                        running.check()
                        await asyncio.sleep(0.01)
                engine_id = running.workers[name]._id
                await running.kill(name)
                running.redis.delete(running.keys.lease(engine_id))
                running.start_worker(name, stage.engines[name])
            (given_up,) = [rollout async for rollout in deadly]
            rest = [rollout async for rollout in others]
        assert given_up.finish_reason is FinishReason.FAILED
        assert "6 engines were lost with it" in given_up.detail
        assert 32 == len(rest)
        assert all(rollout.finish_reason.complete for rollout in rest)

    stage.play(story, job=manifest(engine=engine))


def test_cancelled_and_overdue_rollouts_come_back_as_they_are(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=8, max_tokens=480, allowed_token_ids=ENDLESS, logprobs=True)
        asked = prompts(20, sampling=sampling)
        async with client.step(1, asked) as step:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 8)
            await step.cancel()
            started = time.monotonic()
            rollouts = [rollout async for rollout in step]
        assert time.monotonic() - started < 5
        assert_once(running, rollouts, 160)
        assert FinishReason.CANCELLED in {rollout.finish_reason for rollout in rollouts}
        begun = [rollout for rollout in rollouts if rollout.token_ids and not rollout.finish_reason.complete]
        assert begun
        assert all(rollout.logprobs and rollout.spans for rollout in begun)
        # a partial rollout goes on in the next step, as one rollout
        chosen = begun[0]
        index = int(chosen.rollout_id.split(":")[2].split("-")[0])
        (whole,) = await gather(client, 2, [asked[index].continue_from(chosen)])
        assert chosen.token_ids == whole.token_ids[: len(chosen.token_ids)]
        assert 480 == len(whole.token_ids)
        assert whole.logprobs is not None
        law = Law(stage.models / "0")
        assert law.worst_error(list(asked[index].token_ids), whole.token_ids, whole.logprobs, sampling) < 1e-3

        late = [Prompt(one.token_ids, one.problem_id, sampling, deadline_seconds=0.7) for one in asked]
        rollouts = await gather(client, 3, late)
        assert_once_each = {rollout.rollout_id for rollout in rollouts}
        assert 160 == len(assert_once_each)
        assert FinishReason.DEADLINE in {rollout.finish_reason for rollout in rollouts}

    stage.play(story)


def test_what_cannot_be_served_is_refused_with_a_reason_and_the_rest_goes_on(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        keys = running.keys

        def request(name: str, tokens: list[int], **more: Any) -> RolloutRequest:
            return RolloutRequest(
                job_uid=more.pop("uid", running.uid), request_id=name, prompt_token_ids=tokens, **more
            )

        bad = {
            "long": request("long", [1] * 500),
            "megabyte": request("megabyte", [1] * 260_000),
            "foreign token": request("foreign token", [VOCABULARY]),
            "foreign job": request("foreign job", [1], uid="another"),
            "bias": request("bias", [1], sampling=Sampling(min_p=0.5)),
        }
        for one in bad.values():
            running.redis.xadd(keys.requests, {"d": encode(one)})
        for garbage in (b"garbage", encode(WeightUpdate(weight_version=1, uri="/x"))):
            running.redis.xadd(keys.requests, {"d": garbage})
            running.redis.xadd(keys.control, {"d": garbage[:5]})
        assert 4 == len(await gather(client, 1, prompts(1)))
        await running.until(lambda: running.redis.xlen(keys.control) == 0)
        letters: Any = running.redis.xrange(keys.dead)
        reasons = [letter[b"reason"].decode() for _, letter in letters]
        for words in (
            "exceed engine.maxModelLen 512",
            "spec.queue.maxRequestBytes",
            "24 is no token of the model",
            "it is for job another",
            "sampling.minP",
            "no msgpack",
            "a weights where a request belongs",
        ):
            assert any(words in reason for reason in reasons), (words, reasons)
        assert len(bad) + 4 == len(letters)

    stage.play(story)


def test_a_request_is_known_by_its_id(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        assert 4 == len(await gather(client, 1, prompts(1)))
        async with AsyncRolloutClient.connect(stage.url, uid=running.uid, name="other") as other:
            assert 4 == len(await gather(other, 1, prompts(1)))  # the same prompt by another client is another request
        # one id, two meanings: said, and the first goes on
        sampling = Sampling(n=2, max_tokens=300, allowed_token_ids=ENDLESS)
        twice = RolloutRequest(
            job_uid=running.uid, request_id="twice", reply_to="nobody", prompt_token_ids=[1], sampling=sampling
        )
        more = twice.model_copy(update={"sampling": sampling.model_copy(update={"n": 5})})
        for one in (twice, more):
            running.redis.xadd(running.keys.requests, {"d": encode(one)})
        results = running.keys.results(twice.reply_to)
        await running.until(lambda: running.redis.xlen(results) == 3)
        answers: Any = running.redis.xrange(results)
        refusal, *rollouts = [decode(fields[b"d"]) for _, fields in answers]
        assert isinstance(refusal, Refusal)
        assert "asks for another number of samples" in refusal.reason
        assert all(isinstance(one, Rollout) and one.finish_reason.complete for one in rollouts)
        await client.close()
        async with AsyncRolloutClient.connect(stage.url, uid=running.uid) as again:
            # a trainer that went back to an earlier checkpoint: what was answered is asked anew, under another id
            rollouts = await gather(again, 1, prompts(1))
        assert {
            f"{RolloutId.parse(one.rollout_id).request_id[-3:]}/{sample}" for sample, one in enumerate(rollouts)
        } == {f".r1/{sample}" for sample in range(4)}

    stage.play(story)


def test_new_weights_are_served_by_all_engines_and_pinned_steps_by_exactly_theirs(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=2, max_tokens=120, allowed_token_ids=ENDLESS, logprobs=True)
        # an engine waits for what is pinned: the others are to be longer
        longer = sampling.model_copy(update={"n": 4, "max_tokens": 480})
        async with (
            client.step(1, prompts(2, sampling=sampling, weight_version=0)) as pinned,
            client.step(2, prompts(5, sampling=longer)) as free,
        ):
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 16)
            loaded = await client.publish_weights(1, stage.models / "1")
            assert 2 == len(loaded.loaded)
            assert not loaded.failed
            old = [rollout async for rollout in pinned]
            both = [rollout async for rollout in free]
        assert {0} == {span.weight_version for rollout in old for span in rollout.spans}
        assert any(len(rollout.spans) == 2 for rollout in both)
        laws = [Law(stage.models / "0"), Law(stage.models / "1")]
        new = await gather(client, 3, prompts(4, sampling=sampling, weight_version=1))
        for rollout, law in [*((r, laws[0]) for r in old), *((r, laws[1]) for r in new)]:
            index = int(rollout.rollout_id.split(":")[2].split("-")[0])
            prompt = list(prompts(4)[index].token_ids)
            assert rollout.logprobs is not None
            assert law.worst_error(prompt, rollout.token_ids, rollout.logprobs, sampling) < 1e-3
        # what no engine serves any more is said at once
        gone = await gather(client, 4, prompts(1, weight_version=0))
        assert [FinishReason.FAILED] * 4 == [rollout.finish_reason for rollout in gone]
        assert "no engine serves weight version 0 any more" in gone[0].detail

    stage.play(story)


def test_weights_that_cannot_be_loaded_are_said_and_the_old_ones_go_on(stage: Stage, tmp_path: Path) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        broken = make_model(tmp_path / "broken", seed=8)
        (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-100])
        with pytest.raises(WeightsError, match="engine-0"):
            await client.publish_weights(1, broken, mode=UpdateMode.DRAIN)
        with pytest.raises(WeightsError, match="checksum"):
            await client.publish_weights(2, stage.models / "1", sha256="0" * 64)
        with pytest.raises(WeightsError, match="no directory"):
            await client.publish_weights(3, "/nowhere/at/all", sha256=None)
        half = make_model(tmp_path / "half", seed=9)
        (half / "config.json").write_text('{"architectures": [')
        with pytest.raises(WeightsError, match=r"config\.json cannot be read"):
            await client.publish_weights(4, half)
        rollouts = await gather(client, 1, prompts(2))
        assert {0} == {rollout.weight_version for rollout in rollouts}
        pinned = await gather(client, 2, prompts(1, weight_version=4))
        assert "no engine can load weight version 4" in pinned[0].detail
        with pytest.raises(InvalidRequestError, match="0 is the model that the job began with"):
            await client.publish_weights(0, stage.models / "2")
        loaded = await client.publish_weights(5, stage.models / "2")
        # said again, by a trainer that was started again, say, it is served already; other weights are others
        assert 2 == len((await client.publish_weights(5, stage.models / "2")).loaded)
        with pytest.raises(InvalidRequestError, match="5 is served already, from other weights; publish these as 6"):
            await client.publish_weights(5, stage.models / "1")
        assert 2 == len(loaded.loaded)

    stage.play(story)


def test_an_update_does_not_wait_for_a_pinned_rollout_that_waits_for_it(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        for worker in running.workers.values():  # Redis is slow just when an engine looks for its weights
            weights = worker._job_store.weights

            async def slow(ask: Any = weights) -> Any:
                await asyncio.sleep(0.5)
                return await ask()

            worker._job_store.weights = slow  # type: ignore[method-assign]
        sampling = Sampling(n=4, max_tokens=20, allowed_token_ids=ENDLESS)
        async with client.step(1, prompts(60, sampling=sampling, weight_version=0)) as pinned:
            await running.until(lambda: running.redis.xlen(running.keys.results("trainer")) > 20)
            loaded = await client.publish_weights(1, stage.models / "1", timeout=40)
            assert 2 == len(loaded.loaded)
            old = [rollout async for rollout in pinned]
        assert 240 == len(old)
        assert {0} == {span.weight_version for rollout in old for span in rollout.spans}

    stage.play(story)


def test_pinned_rollouts_keep_to_their_version_when_an_update_lets_running_ones_end(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        sampling = Sampling(n=8, max_tokens=100, allowed_token_ids=ENDLESS)
        async with client.step(1, prompts(20, sampling=sampling, weight_version=0)) as pinned:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 8)
            await client.publish_weights(1, stage.models / "1", mode=UpdateMode.DRAIN)
            old = [rollout async for rollout in pinned]
        assert 160 == len(old)
        assert {0} == {span.weight_version for rollout in old for span in rollout.spans}
        late = [rollout for rollout in old if not rollout.finish_reason.complete]
        assert all("no engine serves weight version 0 any more" in rollout.detail for rollout in late)

    stage.play(story)


def test_an_adapter_goes_on_top_of_its_own_full_weights_or_not_at_all(
    stage: Stage, loop: LoopThread, redis_server: str, tmp_path: Path
) -> None:
    spec = manifest().spec.engine.model_dump(by_alias=True, mode="json") | {"maxLoraRank": 5}
    job = manifest(engine=spec, workers={"gpusPerWorker": 0, "replicas": 1})
    adapters = [make_adapter(tmp_path / f"adapter-{seed}", stage.models / "1", seed) for seed in range(2)]
    before = set(psutil.Process().children(recursive=True))
    engine = loop.run(start_engine(stage.models / "0", redis_server, job))
    cores = [p for p in psutil.Process().children(recursive=True) if p not in before and "EngineCore" in p.name()]
    alone = Stage(loop, {"engine-0": engine}, stage.models, stage.url)
    loads: list[Path] = []
    load_weights = engine.load_weights

    async def counted(directory: Path, *more: Any) -> float:
        loads.append(directory)
        return await load_weights(directory, *more)

    engine.load_weights = counted  # type: ignore[method-assign]

    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=2, max_tokens=40, logprobs=True)
        await client.publish_weights(1, stage.models / "1")
        for version, adapter in enumerate(adapters, 2):
            await client.publish_weights(version, adapter, kind="lora")
            law = merged_law(stage.models / "1", adapter, tmp_path / f"merged-{version}")
            for rollout in await gather(client, version, prompts(3, sampling=sampling, weight_version=version)):
                prompt = list(prompts(3)[int(rollout.rollout_id.split(":")[2].split("-")[0])].token_ids)
                assert rollout.logprobs is not None
                assert law.worst_error(prompt, rollout.token_ids, rollout.logprobs, sampling) < 1e-3
        assert [stage.models / "1"] == loads  # an adapter does not have its base loaded again

        # an engine that cannot have the base does not put the adapter on another one
        await client.publish_weights(9, stage.models / "2")
        await client.publish_weights(10, adapters[0], kind="lora")
        await running.kill("engine-0")
        await engine.load_weights(stage.models / "0", 0)
        (stage.models / "2").rename(stage.models / "gone")
        try:
            running.start_worker("engine-0", engine)
            worker = running.workers["engine-0"]
            await running.until(lambda: 10 in worker._report.failed)
            assert "belongs on the full weights of version 9" in worker._report.failed[10]
            assert {0} == {rollout.weight_version for rollout in await gather(client, 11, prompts(2))}
        finally:
            (stage.models / "gone").rename(stage.models / "2")

        # one that is left with neither old nor new weights takes no work, and ends to begin anew
        await running.kill("engine-0")
        for core in cores:
            core.kill()
        before = running.redis.hkeys(running.keys.engines)
        running.start_worker("engine-0", engine)
        with pytest.raises(EngineError):
            await running.tasks.pop("engine-0")
        assert set(before) >= set(running.redis.hkeys(running.keys.engines))

    try:
        alone.play(story, job=job)
    finally:
        engine.close()


def test_thousands_of_rollouts_that_end_at_once_leave_nothing_open(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with client.step(1, prompts(400, sampling=Sampling(n=16, max_tokens=400))) as step:
            await running.until(lambda: running.redis.xlen(running.keys.requests) == 400)
            await step.cancel()
            assert 6400 == len([rollout async for rollout in step])
        await asyncio.wait_for(client.close_job(), 10)
        await running.until_nothing_is_open()

    stage.play(story)


def test_weights_are_broadcast_from_a_trainers_memory_past_any_disk(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        sampling = Sampling(n=2, max_tokens=60, logprobs=True)
        model = AutoModelForCausalLM.from_pretrained(stage.models / "1", dtype="float32")
        weights = ModelInMemory(model, host="127.0.0.1")
        async with client.step(
            1, prompts(4, sampling=Sampling(n=16, max_tokens=400, allowed_token_ids=ENDLESS))
        ) as old:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 4)
            assert 2 == len((await client.publish_weights(1, weights)).loaded)
            running_through = [rollout async for rollout in old]
        assert any([0, 1] == [span.weight_version for span in one.spans] for one in running_through)
        for version in (1, 2):  # another version goes through the group that there is
            if version == 2:
                model.load_state_dict(AutoModelForCausalLM.from_pretrained(stage.models / "2").state_dict())
                assert 2 == len((await client.publish_weights(2, weights)).loaded)
            law = Law(stage.models / str(version))
            for rollout in await gather(client, 1 + version, prompts(6, sampling=sampling, weight_version=version)):
                prompt = list(prompts(6)[int(rollout.rollout_id.split(":")[2].split("-")[0])].token_ids)
                assert rollout.logprobs is not None
                assert law.worst_error(prompt, rollout.token_ids, rollout.logprobs, sampling) < 1e-3

        # other engines than those that were there: a new group
        await running.kill("engine-1")
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 1)
        assert 1 == len((await client.publish_weights(3, weights)).loaded)
        running.start_worker("engine-1", stage.engines["engine-1"])
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        late = next(worker for name, worker in running.workers.items() if name == "engine-1")
        assert "was broadcast before this engine was there" in late._report.failed[3]
        assert 2 == len((await client.publish_weights(4, weights)).loaded)

        # a message that makes no sense harms nobody
        to_come = [TensorToCome(name="x", dtype="float32", shape=[1])]
        offer = Broadcast(
            group="g", ranks=dict.fromkeys((w._id for w in running.workers.values()), 1), world_size=3, tensors=to_come
        )
        for version, uri in ((5, "nccl://nowhere:99999"), (6, "carrier-pigeon://a:1"), (7, "gloo://")):
            update = WeightUpdate(weight_version=version, uri=uri, broadcast=offer)
            running.redis.xadd(running.keys.control, {"d": encode(update)})
            await running.until(lambda v=version: all(v in w._report.failed for w in running.workers.values()))
            assert all("it must be of full ones" in w._report.failed[version] for w in running.workers.values())

        # what does not fit is said before an engine stands still
        other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(stage.models / "1", intermediate_size=8))
        port = free_port()
        with pytest.raises(WeightsError, match="no engine could load") as refused:
            await client.publish_weights(8, ModelInMemory(other, host="127.0.0.1", port=port))
        assert all("has shape" in reason for reason in refused.value.failed.values())
        assert {4} == {rollout.weight_version for rollout in await gather(client, 9, prompts(2))}

        # an engine that dies before it takes part holds the others up until its lease ends, and no longer
        weights = ModelInMemory(model, host="127.0.0.1", port=port)  # which the refused ones gave back
        await running.kill("engine-1")
        began = time.monotonic()
        with pytest.raises(WeightsError, match="no engine could load"):
            await client.publish_weights(9, weights)
        assert time.monotonic() - began < JOIN_S / 3
        assert {4} == {rollout.weight_version for rollout in await gather(client, 10, prompts(2))}
        assert 1 == len((await client.publish_weights(10, weights)).loaded)

        # a trainer that stops waiting leaves nobody waiting for it
        await running.kill("coordinator")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.publish_weights(11, weights), 1)
        assert 0 == running.redis.xlen(running.keys.control)

    stage.play(story)


def test_turns_go_where_their_prefix_is_cached(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        await running.until(lambda: len(running.redis.hgetall(running.keys.engines)) == 2)
        async with client.step(1) as step:
            starts = [[(number + place) % EOS for place in range(280)] for number in range(6)]
            chats = [step.trajectory(start, problem_id=f"t{number}") for number, start in enumerate(starts)]
            seen: dict[int, set[str]] = {number: set() for number in range(6)}
            cached = []
            for turn in range(4):
                said = await step.turn(chats, sampling={"max_tokens": 40, "allowed_token_ids": ENDLESS})
                for number, rollout in enumerate(said):
                    seen[number].add(rollout.engine)
                    if turn:
                        cached.append(rollout.cached_tokens)
                for chat in chats:
                    chat.observe([3, 1, 4, 1, 5, 9, 2, 6])
        assert {1} == {len(engines) for engines in seen.values()}
        assert 2 == len(set().union(*seen.values()))
        assert min(cached) >= 128  # the blocks of a CPU engine have so many
        # what the environment said is context, and never the model's own
        running.relay.drain()
        records = running.store.read({"t0": "-"})["t0"].records
        assert [40] * 4 == [len(record.tokens) for record in records]
        before, contexts = starts[0], [[]]
        for record in records[:-1]:
            before = [*before, *record.tokens.tolist(), 3, 1, 4, 1, 5, 9, 2, 6]
            contexts.append(before[-64:])
        assert contexts == [record.context.tolist() for record in records]

    stage.play(story)


def test_a_client_that_does_not_read_holds_up_itself_and_nobody_else(stage: Stage) -> None:
    job = manifest(queue={"maxUnreadResults": "64Ki"})

    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=16, max_tokens=100, allowed_token_ids=ENDLESS)
        keys, slow = running.keys, "slow"
        for index, prompt in enumerate(prompts(40, sampling=sampling)):
            request = RolloutRequest(
                job_uid=running.uid,
                request_id=f"slow-{index}",
                reply_to=slow,
                prompt_token_ids=list(prompt.token_ids),
                sampling=sampling,
            )
            running.redis.xadd(keys.requests, {"d": encode(request)})
        await running.until(lambda: running.redis.xlen(keys.results(slow)) > 60)
        assert 8 == len(await gather(client, 1, prompts(2)))
        await asyncio.sleep(3)
        stopped_at = running.redis.xlen(keys.results(slow))
        await asyncio.sleep(2)
        assert stopped_at == running.redis.xlen(keys.results(slow)) < 640
        assert running.redis.memory_usage(keys.results(slow)) < 400_000
        assert [slow] == client.status["slow_clients"]
        async with AsyncRolloutClient.connect(stage.url, uid=running.uid, name=slow) as late:
            rows = 0
            async with asyncio.timeout(60):
                while rows < 640:
                    for _ in range(10):
                        entries: Any = running.redis.xreadgroup("trainer", slow, {keys.results(slow): ">"}, count=64)
                        rows += sum(len(found) for _, found in entries)
                    await asyncio.sleep(0.05)
            assert late.name == slow

    stage.play(story, job=job)


def test_groups_of_sixty_four_are_whole(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        groups = await client.generate([list(one.token_ids) for one in prompts(4)], step=1, n=64, max_tokens=30)
        assert [64] * 4 == [len(group) for group in groups]
        assert_once(running, [rollout for group in groups for rollout in group], 256)

    stage.play(story)


def test_ten_thousand_short_requests_are_all_answered(stage: Stage) -> None:
    job = manifest(engine=manifest().spec.engine.model_dump(by_alias=True, mode="json") | {"maxNumSeqs": 64})

    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        asked = [
            Prompt([index % EOS, index // EOS % EOS, index // EOS**2], sampling={"n": 1, "max_tokens": 8})
            for index in range(10_000)
        ]
        rollouts = await gather(client, 1, asked)
        assert 10_000 == len({rollout.rollout_id for rollout in rollouts})
        assert 0 == running.redis.xlen(running.keys.results("trainer"))

    stage.play(story, job=job, seconds=300)


def test_a_worker_that_is_told_to_leave_hands_over_what_it_has(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=4, max_tokens=450, allowed_token_ids=ENDLESS)
        task = asyncio.ensure_future(gather(client, 1, prompts(20, sampling=sampling)))
        await running.until(lambda: running.redis.hlen(running.keys.partials) >= 10)
        worker, done = running.workers.pop("engine-0"), running.tasks.pop("engine-0")
        started = time.monotonic()
        await worker.drain(0.2)
        await done
        assert time.monotonic() - started < 3
        rollouts = await task
        assert_once(running, rollouts, 80)
        assert {} == running.redis.hgetall(running.keys.attempts)  # nobody is blamed for it
        # and one that joins takes its part
        running.start_worker("engine-2", stage.engines["engine-0"])
        both = {"engine-1", "engine-2"}
        await running.until(lambda: both == {engine["name"] for engine in client.status.get("engines", [])})
        assert 2 == len({rollout.engine for rollout in await gather(client, 2, prompts(8))})

    stage.play(story)


def test_rollouts_that_are_to_go_on_elsewhere_do_so_from_what_they_have(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=16, max_tokens=400, allowed_token_ids=ENDLESS, logprobs=True)
        task = asyncio.ensure_future(gather(client, 1, prompts(2, sampling=sampling)))
        await running.until(lambda: running.redis.hlen(running.keys.partials) >= 20)
        coordinator, source = running.coordinator, running.workers["engine-0"]._id
        assert coordinator is not None
        orders = await coordinator._job_store.orders(source)
        moved = [order.assignment for order in orders if order.assignment is not None][:6]
        assert 6 == len(moved)
        await coordinator._job_store.assign(coordinator._number, source, moved, "move")
        rollouts = await task
        assert_once(running, rollouts, 32)
        ids = [RolloutId.parse(rollout.rollout_id) for rollout in rollouts]
        by_id = {(one.request_id, one.sample): rollout for one, rollout in zip(ids, rollouts, strict=True)}
        there = [by_id[one.request_id, one.sample] for one in moved]
        # they went on where they were: those steps made less than the whole
        assert all(one.steps < len(one.token_ids) - 10 for one in there)
        assert [400] * 32 == [len(rollout.token_ids) for rollout in rollouts]
        assert {} == running.redis.hgetall(running.keys.attempts)  # nobody is blamed for it

    stage.play(story)


def test_an_engine_on_which_drafting_does_not_pay_ends_between_two_steps_for_one_without(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = Sampling(n=4, max_tokens=200, allowed_token_ids=ENDLESS)
        worker, task = running.workers["engine-0"], running.tasks.pop("engine-0")
        worker._futility = SpeculationCutoff(least_seconds=0.01, stopped=0.0)  # as if it never paid
        rollouts = await gather(client, 1, prompts(8, sampling=sampling))
        assert_once(running, rollouts, 32)
        await asyncio.wait_for(task, 20)
        assert worker.gives_up
        assert not running.workers["engine-1"].gives_up
        # its place is taken by one that does all work, though it cannot draft
        del running.workers["engine-0"]
        running.start_worker("engine-0", stage.engines["engine-0"], given_up=True)
        seen: dict[str, bool] = {}
        async with asyncio.timeout(20):
            while seen != {"engine-0": True, "engine-1": False}:
                await asyncio.sleep(0.1)
                seen = {engine["name"]: engine["given_up"] for engine in client.status.get("engines", [])}
        made = await gather(client, 2, prompts(8, sampling=sampling))
        assert {"engine-0", "engine-1"} == {rollout.engine.rpartition("-")[0] for rollout in made}

    stage.play(story)


def test_the_job_ends_when_it_is_closed_and_all_is_answered(stage: Stage) -> None:
    async def story(running: LiveJob, client: AsyncRolloutClient) -> None:
        async with client.step(1, prompts(8)) as step:
            received = 0
            async for _ in step:
                received += 1
                if received == 4:
                    await client.close_job()
        assert 32 == received
        await asyncio.sleep(1)
        assert not running.tasks["coordinator"].done()  # the relay would end with the job, and has work left
        running.relay.drain()
        await asyncio.wait_for(running.tasks["coordinator"], 10)
        assert b"closed" == running.redis.hget(running.keys.job, "state")

    stage.play(story)
