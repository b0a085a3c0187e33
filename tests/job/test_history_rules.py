"""Whose a history is: jobs that name it share it, it outlives them, and none of another tokenizer or model gets in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import redis

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import DATA
from rollout_api.protocol.length_entries import rollout_key
from rollout_api.protocol.messages import FinishReason, Rewards, Rollout, RolloutRequest, WeightSpan, encode
from rollout_worker.drafting.drafter import Drafter
from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.history.connection import connect
from rollout_worker.history.store import START, HistoryMismatchError, HistoryStore
from rollout_worker.history.sync import HistorySync
from rollout_worker.job.ending import end_job
from rollout_worker.job.ledger import LedgerEntry
from rollout_worker.job.relay import Relay
from rollout_worker.job.setup import JobSetup
from tests.support.recording_sink import names

WINDOW = 4
TOKENIZER = "a" * 40


class Job:
    """A job that has opened its history, and what its engines leave for its relay."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        namespace: str = "default",
        model: str = "org/model",
        tokenizer: str = TOKENIZER,
        history: Mapping[str, Any] | None = None,
    ) -> None:
        manifest = {
            "apiVersion": "das.rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "source": {"trainer": {}},
                "model": {"uri": model},
                "speculation": {"window": WINDOW},
                "history": {"name": "shared", **(history or {})},
            },
        }
        self.uid = f"uid-of-{name}"
        self.setup = JobSetup(manifest=manifest, uid=self.uid, redis_url=url, vocabulary=99, tokenizer=tokenizer)
        self.server = connect(url)
        self.setup.open_history()
        self.store = self.setup.store()
        self._relay = Relay(self.server, self.setup.keys, self.store)

    def serve(self, version: int) -> int:
        """Its engines have these weights now; their generation."""
        return self.store.publish(self.uid, version)

    def finish(self, name: str, tokens: Sequence[int], *, version: int) -> str:
        """A rollout of problem ``p`` ends and waits for the relay; its id."""
        asked = RolloutRequest(
            job_uid=self.uid, request_id=name, problem_id="p", prompt_token_ids=[1], sampling=Sampling(n=1)
        )
        ended = Rollout(
            rollout_id=str(asked.rollout_id(0)),
            problem_id=asked.problem,
            token_ids=list(tokens),
            spans=[WeightSpan(start=0, weight_version=version)],
            finish_reason=FinishReason.STOP,
        )
        self.server.hset(self.setup.keys.ledger(name), "0", LedgerEntry.of(ended).pack())
        self.server.xadd(self.setup.keys.outbox, {DATA: encode(ended)})
        return ended.rollout_id

    def roll_out(self, name: str, tokens: Sequence[int], *, version: int) -> str:
        """As :meth:`finish`, carried into the history."""
        rollout_id = self.finish(name, tokens, version=version)
        self._relay.drain()
        return rollout_id

    def read(self) -> dict[str, int]:
        """Rollout → generation of all that the history has of the problem."""
        records = self.store.read({"p": START}, count=1000)["p"].records
        assert len({record.rollout_id for record in records}) == len(records)
        return {record.rollout_id: record.generation for record in records}

    @contextmanager
    def drafting(self) -> Iterator[SuffixIndex]:
        """The index that one of its engines drafts from, once it has what there is."""
        index = SuffixIndex()
        sync = HistorySync(self.setup.store(), index)
        sync.start()
        try:
            sync.announce(["p"], self.store.generation())
            assert sync.wait_ready(10)
            yield index
        finally:
            sync.stop()


def draft(index: SuffixIndex, said: Sequence[int]) -> list[int]:
    """What a new rollout of the problem that has said so much is given to verify, from its history alone."""
    drafter = Drafter(index)
    drafter.open(0, "p", np.array([1], dtype=np.uint32), ["history"])
    row = np.zeros(1, np.int64)
    drafter.advance(row, [list(said)], row)
    (found,) = drafter.draft(row, row + 4, np.zeros(1))
    drafter.close(0)
    return found.tokens


@pytest.fixture
def first(redis_url: str) -> Job:
    return Job(redis_url, "first")


def test_a_job_drafts_from_what_another_of_the_same_history_has_made(first: Job, redis_url: str) -> None:
    first.serve(0)
    theirs = first.roll_out("r", range(20, 40), version=0)
    second = Job(redis_url, "second")
    second.serve(0)
    assert {theirs: 1} == second.read()
    with second.drafting() as index:
        assert names(theirs) == index.rollouts("p")
        assert [24, 25, 26, 27] == draft(index, [22, 23])
    # and the first from what the second adds
    ours = second.roll_out("r", range(60, 80), version=0)
    with first.drafting() as index:
        assert set(names(theirs, ours)) == set(index.rollouts("p"))
        assert [64, 65, 66, 67] == draft(index, [62, 63])
    assert 2 == first.store.length_stats("p").count == second.store.length_stats(None).count


def test_a_history_of_the_same_name_in_another_namespace_is_another(first: Job, redis_url: str) -> None:
    first.serve(0)
    first.roll_out("r", range(20, 40), version=0)
    other = Job(redis_url, "other", namespace="team")
    other.serve(0)
    assert {} == other.read()
    with other.drafting() as index:
        assert [] == index.rollouts("p")


def test_a_job_that_begins_at_version_0_makes_the_newest_generation_and_makes_nothing_old(
    first: Job, redis_url: str
) -> None:
    made = {}
    for version in range(WINDOW + 2):
        generation = first.serve(version)
        made[first.roll_out(f"v{version}", range(20, 40), version=version)] = generation
    assert WINDOW + 2 == first.store.generation()
    kept = {name: generation for name, generation in made.items() if generation > 2}
    assert kept == first.read()

    second = Job(redis_url, "second")
    assert kept == second.read()  # by opening it nothing was made old
    assert WINDOW + 3 == second.serve(0) == second.serve(0)
    ours = second.roll_out("r", range(60, 80), version=0)
    newest = WINDOW + 3
    in_window = {name: generation for name, generation in kept.items() if generation > newest - WINDOW}
    assert WINDOW - 1 == len(in_window)
    assert in_window | {ours: newest} == second.read()
    with second.drafting() as index:
        assert set(names(*in_window, ours)) == set(index.rollouts("p"))

    # the first goes on: what it made before the second came and carries now is of its own generation, its next is newer
    late = first.roll_out("late", range(20, 40), version=WINDOW + 1)
    assert newest + 1 == first.serve(WINDOW + 2)
    assert WINDOW + 2 == first.read()[late]
    # whoever sees it first, a version of a run has one generation
    assert newest == second.serve(0)


def test_a_deleted_job_leaves_its_history_as_it_was_with_all_that_it_had_finished(first: Job, redis_url: str) -> None:
    first.serve(0)
    carried = first.roll_out("carried", range(20, 40), version=0)
    keys = first.setup.keys
    first.server.hset(keys.job, "state", "running")
    first.server.xadd(keys.rewards, {DATA: encode(Rewards(rewards={carried: 0.5}))})
    waiting = first.finish("waiting", range(60, 80), version=0)
    end_job(first.server, keys, first.store, "default/first", state="deleted", reason="deleted")
    assert [keys.job.encode()] == list(first.server.scan_iter(keys.every()))  # for clients that ask

    second = Job(redis_url, "second")
    assert {carried: 1, waiting: 1} == second.read()
    assert {rollout_key(carried): 0.5} == second.store.rewards("p")
    about = second.store.about()
    assert about is not None
    assert (TOKENIZER, "org/model") == (about.tokenizer, about.model)
    with second.drafting() as index:
        assert [64, 65, 66, 67] == draft(index, [62, 63])
    # nothing of it runs out with the job
    assert {-1} == {first.server.ttl(key) for key in first.server.scan_iter("history:*")}

    before = dump(first.server)
    end_job(first.server, keys, first.store, "default/first", state="deleted", reason="again")
    assert before == dump(first.server)


def dump(server: redis.Redis) -> dict[bytes, bytes | None]:
    """All of all histories."""
    kept: Any = {key: server.dump(key) for key in server.scan_iter("history:*")}
    return dict(kept)


def test_a_history_of_another_tokenizer_is_refused_and_stays_as_it_is(first: Job, redis_url: str) -> None:
    first.serve(0)
    first.roll_out("r", range(20, 40), version=0)
    before = dump(first.server)
    with pytest.raises(HistoryMismatchError) as refused:
        Job(redis_url, "second", tokenizer="b" * 40, history={"maxBytes": "2Gi", "allowForeignModel": True})
    assert (
        "history default/shared holds rollouts of another tokenizer (aaaaaaaaaaaa…, this model's is bbbbbbbbbbbb…); "
        "name another in spec.history.name"
    ) == str(refused.value)
    assert before == dump(first.server)
    Job(redis_url, "second", tokenizer="b" * 40, history={"name": "another"})


def test_a_history_of_another_model_is_refused_and_stays_as_it_is(first: Job, redis_url: str) -> None:
    first.serve(0)
    theirs = first.roll_out("r", range(20, 40), version=0)
    before = dump(first.server)
    with pytest.raises(HistoryMismatchError) as refused:
        Job(redis_url, "second", model="org/larger", history={"maxBytes": "2Gi"})
    assert (
        "history default/shared holds rollouts of model 'org/model', not of 'org/larger'; name another in "
        "spec.history.name, or set spec.history.allowForeignModel to draft from those as well"
    ) == str(refused.value)
    assert before == dump(first.server)
    # what was refused may be allowed
    second = Job(redis_url, "second", model="org/larger", history={"allowForeignModel": True})
    second.serve(0)
    ours = second.roll_out("r", range(60, 80), version=0)
    assert {theirs: 1, ours: 2} == second.read()
    with second.drafting() as index:
        assert [24, 25, 26, 27] == draft(index, [22, 23])
    # it is still the first's, which needs no leave
    about = HistoryStore(first.server, first.setup.history_keys, window=WINDOW).about()
    assert about is not None
    assert "org/model" == about.model
    Job(redis_url, "third")
    with pytest.raises(HistoryMismatchError, match="org/model"):
        Job(redis_url, "fourth", model="org/larger")
