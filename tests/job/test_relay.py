"""The relay moves finished rollouts and their rewards to the history exactly once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from rollout_api.protocol.access_rules import access_rules
from rollout_api.protocol.history_encoding import rollout_key
from rollout_api.protocol.keys import MESSAGE_FIELD
from rollout_api.protocol.messages import (
    Message,
    Purpose,
    Rewards,
    Rollout,
    RolloutId,
    RolloutRequest,
    WeightSpan,
    decode,
    encode,
)
from rollout_api.redis_client.connection import connect
from rollout_head.relay import Relay
from rollout_store.history.records import START, HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_store.job import JobStore
from rollout_store.job.requests import LedgerEntry
from rollout_store.job.streams import CONFLICTS, Outbox, add_dead_letter
from tests.support.job_messages import HISTORY, JOB, request, rollout
from tests.support.redis_servers import Server, create_user
from tests.support.results_in_redis import kept_rollouts
from tests.support.waiting import wait_for

READS = ("xread", "xrange")
"""Commands of a relay's reads."""


class RelayHarness:
    """A job with a relay, whose rollouts the test finishes."""

    def __init__(self, url: str) -> None:
        self.url = create_user(url, access_rules(HISTORY.namespace, "math", JOB.uid, HISTORY.name))
        self.redis = connect(url)
        self.history = HistoryStore(connect(self.url), HISTORY, window=4)
        self.relay = Relay(connect(self.url), JOB, self.history)

    def finish(self, *requests: RolloutRequest) -> None:
        """Finish all samples of requests."""

        async def finish_all() -> None:
            job_store = JobStore.connect(self.url, JOB)
            for asked in requests:
                entry_id: Any = self.redis.xadd(JOB.requests, {MESSAGE_FIELD: encode(asked)})
                await job_store.requests.admit(entry_id.decode(), asked)
                for sample in range(asked.sampling.n):
                    await job_store.rollouts.finish(asked, rollout(asked, sample))
            await job_store.close()

        asyncio.run(finish_all())

    def finish_as(self, asked: RolloutRequest, finished: Rollout) -> None:
        """Finish a request of one sample with a rollout."""

        async def finish_one() -> None:
            job_store = JobStore.connect(self.url, JOB)
            entry_id: Any = self.redis.xadd(JOB.requests, {MESSAGE_FIELD: encode(asked)})
            await job_store.requests.admit(entry_id.decode(), asked)
            assert await job_store.rollouts.finish(asked, finished)
            await job_store.close()

        asyncio.run(finish_one())

    def send(self, stream: str, message: Message) -> None:
        self.redis.xadd(stream, {MESSAGE_FIELD: encode(message)})

    def records(self) -> list[HistoryRecord]:
        return self.history.read({"p": START})["p"].records

    def stored(self) -> list[str]:
        return [record.rollout_id for record in self.records()]


@pytest.fixture
def harness(redis_url: str) -> RelayHarness:
    return RelayHarness(redis_url)


def test_training_rollouts_and_their_rewards_reach_the_history_once(harness: RelayHarness) -> None:
    harness.finish(request(), request("e", n=1, purpose=Purpose.EVAL))
    rewards = Rewards(rewards={"uid/r/1/0": 0.25, "uid/unknown/0/0": 1.0})
    harness.send(JOB.rewards, rewards)
    entries: Any = harness.redis.xrange(JOB.outbox)
    for _ in range(2):
        harness.relay.drain()
        assert ["uid/r/0/0", "uid/r/1/0"] == harness.stored()
        assert [bytes([0, 1, 1, 1, 0])] * 2 == [record.draft_sources for record in harness.records()]
        assert {rollout_key("uid/r/1/0"): 0.25} == harness.history.statistics.rewards("p")
        assert 0 == harness.redis.xlen(JOB.outbox) == harness.redis.xlen(JOB.rewards)
        # As if the relay had been killed between storing the entries and deleting them.
        harness.redis.xadd(JOB.outbox, entries[0][1])
        harness.send(JOB.rewards, rewards)


def test_the_end_of_a_later_turns_prompt_reaches_the_history_but_not_the_client(harness: RelayHarness) -> None:
    prompt = list(range(1000, 1100))
    turns = [
        request(f"t{turn}", n=1, prompt_token_ids=prompt[:length], trajectory_id="t", turn=turn)
        for turn, length in enumerate((90, 100, 3))
    ]
    harness.finish(*turns)
    assert [rollout(asked, 0) for asked in turns] == kept_rollouts(harness.redis, JOB)
    harness.relay.drain()
    assert [[], prompt[-64:], prompt[:3]] == [record.context.tolist() for record in harness.records()]


def test_an_outbox_entry_without_the_end_of_its_prompt_reaches_the_history(harness: RelayHarness) -> None:
    asked = request(n=1, trajectory_id="t", turn=1)
    harness.send(JOB.outbox, rollout(asked, 0))
    harness.relay.drain()
    assert [("uid/r/0/1", [])] == [(record.rollout_id, record.context.tolist()) for record in harness.records()]


@pytest.mark.parametrize("stream", [JOB.outbox, JOB.rewards])
@pytest.mark.parametrize("data", [b"garbage", b"", encode(request())])
def test_an_entry_that_cannot_be_decoded_becomes_a_dead_letter(harness: RelayHarness, stream: str, data: bytes) -> None:
    harness.redis.xadd(stream, {MESSAGE_FIELD: data})
    harness.finish(request(n=1))
    harness.relay.drain()
    assert ["uid/r/0/0"] == harness.stored()
    letters: Any = harness.redis.xrange(JOB.dead_letters)
    ((_, letter),) = letters
    assert (data, stream.encode()) == (letter[b"d"], letter[b"stream"])
    assert letter[b"reason"]


def test_dead_letters_keep_the_beginning_and_the_size_of_a_message(harness: RelayHarness) -> None:
    data = b"\x01" * 2**20
    for _ in range(1010):
        add_dead_letter(harness.redis, JOB.dead_letters, stream=JOB.outbox, data=data, reason="r" * 2**20)
    letters: Any = harness.redis.xrange(JOB.dead_letters, count=1)
    [(_, letter)] = letters
    assert data.startswith(letter[b"d"])
    assert letter[b"d"]
    assert str(len(data)).encode() == letter[b"bytes"]
    assert harness.redis.memory_usage(JOB.dead_letters, samples=0) < 40_000_000


def test_a_reward_with_an_invalid_ledger_entry_becomes_a_dead_letter(harness: RelayHarness) -> None:
    harness.redis.hset(JOB.ledger("r"), "0", msgpack.packb(("p", 5)))
    harness.send(JOB.rewards, Rewards(rewards={"uid/r/0/0": 1.0}))
    harness.relay.drain()
    [(_, letter)] = harness.redis.xrange(JOB.dead_letters)
    assert b"not a ledger entry" in letter[b"reason"]


def test_a_reward_waits_for_a_failover_of_the_history(harness: RelayHarness, tmp_path: Path) -> None:
    harness.finish(request())
    with Server(tmp_path) as server:
        history = HistoryStore(connect(server.url), HISTORY, window=2)
        relay = Relay(harness.redis, JOB, history)
        relay.drain()
        harness.send(JOB.rewards, Rewards(rewards={"uid/r/0/0": 0.25}))
        server.client().replicaof("127.0.0.1", 1)  # the server that was the primary is a replica now
        with pytest.raises(redis.exceptions.ReadOnlyError):
            relay.drain()
        server.client().replicaof("no", "one")
        relay.drain()
        assert {rollout_key("uid/r/0/0"): 0.25} == history.statistics.rewards("p")
    assert 0 == harness.redis.xlen(JOB.dead_letters)


def test_an_idle_relay_waits_in_redis_and_moves_a_rollout_soon(harness: RelayHarness) -> None:
    harness.relay.start()
    try:
        time.sleep(0.5)
        before: Any = harness.redis.info("commandstats")
        time.sleep(2)
        after: Any = harness.redis.info("commandstats")
        reads = [stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for stats in (before, after) for name in READS]
        assert sum(reads[len(READS) :]) - sum(reads[: len(READS)]) <= 20
        harness.finish(request())
        wait_for(lambda: ["uid/r/0/0", "uid/r/1/0"] == harness.stored(), 1)
    finally:
        harness.relay.stop()


def conflicts(harness: RelayHarness) -> int:
    return int(harness.redis.hget(JOB.totals, CONFLICTS) or 0)


def dead_letters(harness: RelayHarness) -> list[tuple[Message, str]]:
    found: Any = harness.redis.xrange(JOB.dead_letters)
    return [(decode(fields[b"d"]), fields[b"reason"].decode()) for _, fields in found]


def reward(of: Rollout, value: float) -> Rewards:
    return Rewards(rewards={of.rollout_id: value}, digests={of.rollout_id: of.digest})


def test_a_reward_for_other_tokens_than_those_in_the_history_is_kept_apart(harness: RelayHarness) -> None:
    """Redis has lost a rollout that the trainer had received, and it was sampled again."""
    asked = request()
    harness.finish(asked)
    received = rollout(asked, 0, length=7)
    both = {"uid/r/0/0": 0.25, "uid/r/1/0": 0.5}
    digests = {"uid/r/0/0": received.digest, "uid/r/1/0": rollout(asked, 1).digest}
    harness.send(JOB.rewards, Rewards(rewards=both, digests=digests))
    harness.relay.drain()
    assert {rollout_key("uid/r/1/0"): 0.5} == harness.history.statistics.rewards("p")
    [(letter, reason)] = dead_letters(harness)
    assert reward(received, 0.25) == letter
    assert "uid/r/0/0" in reason
    assert 1 == conflicts(harness)


def test_a_reward_for_tokens_that_are_not_in_the_history_is_kept_apart(harness: RelayHarness) -> None:
    """Redis has lost a rollout that the trainer had received, and it has not been sampled again yet."""
    received = rollout(request(), 0)
    harness.send(JOB.rewards, reward(received, 0.25))
    harness.relay.drain()
    [(letter, reason)] = dead_letters(harness)
    assert reward(received, 0.25) == letter
    assert received.rollout_id in reason
    assert 1 == conflicts(harness)


def test_rewards_wait_until_the_repeated_rollouts_of_all_problems_are_compared(harness: RelayHarness) -> None:
    asked = [request(str(number), n=1, problem_id=f"p{number}") for number in range(150)]
    harness.finish(*asked)
    harness.relay.drain()
    again = [rollout(one, 0, length=3) for one in asked]
    for one in again:
        harness.send(JOB.outbox, one)
        harness.send(JOB.rewards, reward(one, 0.5))
    left = []
    while harness.redis.xlen(JOB.outbox):
        harness.relay._move_batch()
        left.append((harness.redis.xlen(JOB.outbox), harness.redis.xlen(JOB.rewards)))
    assert [(86, 150), (22, 150), (0, 0)] == left
    assert 300 == conflicts(harness)
    assert {} == harness.history.statistics.rewards("p149")


def test_a_ledger_that_has_expired_is_not_created_again(harness: RelayHarness) -> None:
    harness.finish(request(n=1))
    outbox, first = Outbox(harness.redis, JOB), RolloutId("uid", "r", 0)
    [entry] = outbox.ledger_entries([first])
    assert isinstance(entry, LedgerEntry)
    outbox.replace_ledger_entry(first, replace(entry, digest=b"other"))
    [replaced] = outbox.ledger_entries([first])
    assert replace(entry, digest=b"other") == replaced
    harness.redis.delete(JOB.ledger("r"))
    outbox.replace_ledger_entry(first, entry)
    assert not harness.redis.exists(JOB.ledger("r"))


def test_all_refused_rewards_can_be_read_from_the_dead_letters(harness: RelayHarness) -> None:
    ids = ["r", f"train:7:{'f' * 200}"]  # with the long ids, a hundred rewards are larger than what is kept of a letter
    harness.finish(*(request(request_id, n=300) for request_id in ids))
    sent = {f"uid/{request_id}/{sample}/0": sample / 4 for request_id in ids for sample in range(300)}
    harness.send(JOB.rewards, Rewards(rewards=sent, digests=dict.fromkeys(sent, "0" * 16)))
    harness.relay.drain()
    letters = [letter for letter, _ in dead_letters(harness) if isinstance(letter, Rewards)]
    assert sent == {rollout_id: value for letter in letters for rollout_id, value in letter.rewards.items()}
    assert max(len(letter.rewards) for letter in letters) <= 100
    assert 600 == conflicts(harness)


@pytest.mark.parametrize("version", [1, 2])
def test_a_rollout_with_other_tokens_than_those_in_the_history_is_kept_apart(
    harness: RelayHarness, version: int
) -> None:
    """The history, which is on another server, still has a rollout that the job has lost and sampled again."""
    asked = request(n=1)
    first = rollout(asked, 0, length=7)
    spans = [WeightSpan(start=0, weight_version=version)]
    again = rollout(asked, 0, length=3).model_copy(update={"weight_spans": spans})
    harness.finish_as(asked, first)
    harness.relay.drain()
    harness.redis.delete(JOB.ledger("r"))
    harness.finish_as(asked, again)
    harness.send(JOB.rewards, reward(again, 0.5))
    harness.relay.drain()
    assert [first.token_ids] == [record.tokens.tolist() for record in harness.records()]
    assert {} == harness.history.statistics.rewards("p")
    assert [again.rollout_id, again.rollout_id] == [
        letter.rollout_id if isinstance(letter, Rollout) else next(iter(letter.rewards))
        for letter, _ in dead_letters(harness)
        if isinstance(letter, Rollout | Rewards)
    ]
    assert 2 == conflicts(harness)
    harness.send(JOB.rewards, reward(first, 0.75))
    harness.relay.drain()
    assert {rollout_key(first.rollout_id): 0.75} == harness.history.statistics.rewards("p")


def test_round_trips_do_not_grow_with_the_number_of_rewards(
    harness: RelayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network latency of 20 ms would otherwise limit the relay to some tens of rewards per second."""
    asked = [request(str(number), problem_id=f"p{number}") for number in range(250)]
    harness.finish(*asked)
    for one in asked:
        harness.send(JOB.rewards, Rewards(rewards={f"uid/{one.request_id}/{sample}/0": 1.0 for sample in range(2)}))
    num_sent = 0
    send = redis.Connection.send_packed_command

    def count(*args: Any, **kwargs: Any) -> None:
        nonlocal num_sent
        num_sent += 1  # a pipeline is sent at once, and its replies are awaited together
        send(*args, **kwargs)

    monkeypatch.setattr(redis.Connection, "send_packed_command", count)
    harness.relay.drain()
    monkeypatch.undo()
    assert {rollout_key("uid/249/1/0"), rollout_key("uid/249/0/0")} == harness.history.statistics.rewards("p249").keys()
    assert num_sent < 40, f"500 rollouts and 500 rewards took {num_sent} round trips"


def counts_of_reads(harness: RelayHarness, stream: str, batches: int) -> list[int]:
    """Return how many entries of *stream* the relay asks for in each of the next batches."""
    with harness.redis.monitor() as monitor:
        for _ in range(batches):
            harness.relay._move_batch()
        harness.redis.echo("end")
        counts = []
        while (command := monitor.next_command()["command"]) != "ECHO end":
            words = command.split()
            if words[:2] == ["XRANGE", stream]:
                counts.append(int(words[-1]))
    return counts


def test_many_small_rewards_do_not_enlarge_the_batches_of_rollouts(harness: RelayHarness) -> None:
    pipeline = harness.redis.pipeline()
    for number in range(4000):
        pipeline.xadd(JOB.rewards, {MESSAGE_FIELD: encode(Rewards(rewards={f"uid/{number}/0/0": 1.0}))})
    pipeline.execute()
    assert [64, 128, 256, 512, 1024, 2048] == counts_of_reads(harness, JOB.rewards, 6)
    asked = request(n=300)
    for sample in range(300):
        pipeline.xadd(JOB.outbox, {MESSAGE_FIELD: encode(rollout(asked, sample, length=10_000))})
    pipeline.execute()
    assert [64, 99, 99, 99, 76] == counts_of_reads(harness, JOB.outbox, 5)
    assert 300 == harness.relay.num_appended


def test_a_batch_has_few_large_rollouts(harness: RelayHarness) -> None:
    """All rollouts of a batch are in memory, and each may have megabytes."""
    asked = request(n=70)
    for sample in range(70):
        harness.redis.xadd(JOB.outbox, {MESSAGE_FIELD: encode(rollout(asked, sample, length=250_000))})
    assert [64, 3, 3, 3] == counts_of_reads(harness, JOB.outbox, 4)
    assert 70 == harness.relay.num_appended
