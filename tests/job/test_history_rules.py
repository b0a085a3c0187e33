"""Who uses a history: jobs share it by name, it outlives them, and other tokenizers and models are rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import rollout_key
from rollout_api.protocol.keys import MESSAGE_FIELD
from rollout_api.protocol.messages import FinishReason, Rewards, Rollout, RolloutRequest, WeightSpan, encode
from rollout_api.redis_client.connection import connect
from rollout_head.ending import end_job
from rollout_head.relay import Relay
from rollout_store.history.metadata import HistoryMismatchError
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from rollout_store.history.sync import HistorySync
from rollout_store.job.requests import LedgerEntry
from rollout_store.job.setup import JobSetup
from rollout_worker.drafting.index import SuffixIndex
from tests.support.recording_sink import names

WINDOW = 4
TOKENIZER = "a" * 40


class Job:
    """A job that has opened its history, with engines that finish rollouts and a relay that moves them."""

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
            "apiVersion": "das.rollout.dev/v1beta1",
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
        self.setup = JobSetup(manifest=manifest, uid=self.uid, redis_url=url, vocabulary_size=99, tokenizer=tokenizer)
        self.server = connect(url)
        self.setup.open_history()
        self.store = self.setup.history_store()
        self._relay = Relay(self.server, self.setup.keys, self.store)

    def serve(self, version: int) -> int:
        """Publish a weight version; return its generation."""
        return self.store.metadata.publish(self.uid, version)

    def finish(self, name: str, tokens: Sequence[int], *, version: int) -> str:
        """Put a finished rollout of problem ``p`` into the outbox; return its id."""
        request = RolloutRequest(
            job_uid=self.uid, request_id=name, problem_id="p", prompt_token_ids=[1], sampling=Sampling(n=1)
        )
        ended = Rollout(
            rollout_id=str(request.rollout_id(0)),
            problem_id=request.problem,
            token_ids=list(tokens),
            weight_spans=[WeightSpan(start=0, weight_version=version)],
            finish_reason=FinishReason.STOP,
        )
        self.server.hset(self.setup.keys.ledger(name), "0", LedgerEntry.of(ended).pack())
        self.server.xadd(self.setup.keys.outbox, {MESSAGE_FIELD: encode(ended)})
        return ended.rollout_id

    def finish_and_store(self, name: str, tokens: Sequence[int], *, version: int) -> str:
        """Finish a rollout and move it to the history; return its id."""
        rollout_id = self.finish(name, tokens, version=version)
        self._relay.drain()
        return rollout_id

    def read(self) -> dict[str, int]:
        """Rollout → generation, for all rollouts of the problem in the history."""
        records = self.store.read({"p": START}, count=1000)["p"].records
        assert len({record.rollout_id for record in records}) == len(records)
        return {record.rollout_id: record.generation for record in records}

    @contextmanager
    def drafting(self) -> Iterator[SuffixIndex]:
        """Yield the suffix index of one of the job's engines, once it has loaded the history."""
        index = SuffixIndex()
        sync = HistorySync(self.setup.history_store(), index)
        sync.start()
        try:
            sync.announce(["p"])
            assert sync.wait_ready(10)
            yield index
        finally:
            sync.stop()


def draft(index: SuffixIndex, tokens: Sequence[int]) -> list[int]:
    """Draft from the history alone for a rollout of the problem with these tokens."""
    handle = index.open("p", [1], sources=["history"])
    index.extend(handle, list(tokens))
    found = index.draft(handle, 4)
    index.close(handle)
    return found.tokens


@pytest.fixture
def first(redis_url: str) -> Job:
    return Job(redis_url, "first")


def test_a_job_drafts_from_rollouts_of_another_job_with_the_same_history(first: Job, redis_url: str) -> None:
    first.serve(0)
    theirs = first.finish_and_store("r", range(20, 40), version=0)
    second = Job(redis_url, "second")
    second.serve(0)
    assert {theirs: 1} == second.read()
    with second.drafting() as index:
        assert names(theirs) == index.rollouts("p")
        assert [24, 25, 26, 27] == draft(index, [22, 23])
    # the first job also drafts from rollouts of the second
    ours = second.finish_and_store("r", range(60, 80), version=0)
    with first.drafting() as index:
        assert set(names(theirs, ours)) == set(index.rollouts("p"))
        assert [64, 65, 66, 67] == draft(index, [62, 63])
    assert 2 == first.store.statistics.length_stats("p").count == second.store.statistics.length_stats(None).count


def test_a_history_with_the_same_name_in_another_namespace_is_separate(first: Job, redis_url: str) -> None:
    first.serve(0)
    first.finish_and_store("r", range(20, 40), version=0)
    other = Job(redis_url, "other", namespace="team")
    other.serve(0)
    assert {} == other.read()
    with other.drafting() as index:
        assert [] == index.rollouts("p")


def test_a_job_that_starts_at_version_0_gets_the_newest_generation_and_expires_nothing(
    first: Job, redis_url: str
) -> None:
    generations = {}
    for version in range(WINDOW + 2):
        generation = first.serve(version)
        generations[first.finish_and_store(f"v{version}", range(20, 40), version=version)] = generation
    assert WINDOW + 2 == first.store.metadata.generation()
    kept = {name: generation for name, generation in generations.items() if generation > 2}
    assert kept == first.read()

    second = Job(redis_url, "second")
    assert kept == second.read()  # opening the history expires nothing
    assert WINDOW + 3 == second.serve(0) == second.serve(0)
    ours = second.finish_and_store("r", range(60, 80), version=0)
    newest = WINDOW + 3
    in_window = {name: generation for name, generation in kept.items() if generation > newest - WINDOW}
    assert WINDOW - 1 == len(in_window)
    assert in_window | {ours: newest} == second.read()
    with second.drafting() as index:
        assert set(names(*in_window, ours)) == set(index.rollouts("p"))

    # a late rollout of the first job keeps its generation, and the first job's next version is newer than the second's
    late = first.finish_and_store("late", range(20, 40), version=WINDOW + 1)
    assert newest + 1 == first.serve(WINDOW + 2)
    assert WINDOW + 2 == first.read()[late]
    # a version of a run always has the same generation
    assert newest == second.serve(0)


def test_a_deleted_job_leaves_its_history_with_all_finished_rollouts(first: Job, redis_url: str) -> None:
    first.serve(0)
    stored = first.finish_and_store("stored", range(20, 40), version=0)
    keys = first.setup.keys
    first.server.hset(keys.job, "state", "running")
    first.server.xadd(keys.rewards, {MESSAGE_FIELD: encode(Rewards(rewards={stored: 0.5}))})
    waiting = first.finish("waiting", range(60, 80), version=0)
    end_job(first.server, keys, first.store, "default/first", state="deleted", reason="deleted")
    assert [keys.job.encode()] == list(
        first.server.scan_iter(keys.pattern())
    )  # which tells clients that the job has ended

    second = Job(redis_url, "second")
    assert {stored: 1, waiting: 1} == second.read()
    assert {rollout_key(stored): 0.5} == second.store.statistics.rewards("p")
    info = second.store.metadata.info()
    assert info is not None
    assert (TOKENIZER, "org/model") == (info.tokenizer, info.model)
    with second.drafting() as index:
        assert [64, 65, 66, 67] == draft(index, [62, 63])
    # no key of the history expires with the job
    assert {-1} == {first.server.ttl(key) for key in first.server.scan_iter("history:*")}

    before = dump(first.server)
    end_job(first.server, keys, first.store, "default/first", state="deleted", reason="again")
    assert before == dump(first.server)


def dump(server: redis.Redis) -> dict[bytes, bytes | None]:
    """Return the contents of all histories."""
    kept: Any = {key: server.dump(key) for key in server.scan_iter("history:*")}
    return dict(kept)


def test_a_history_of_another_tokenizer_is_rejected_and_unchanged(first: Job, redis_url: str) -> None:
    first.serve(0)
    first.finish_and_store("r", range(20, 40), version=0)
    before = dump(first.server)
    with pytest.raises(HistoryMismatchError) as mismatch:
        Job(redis_url, "second", tokenizer="b" * 40, history={"maxBytes": "2Gi", "allowModelMismatch": True})
    assert (
        "history default/shared holds rollouts of another tokenizer (aaaaaaaaaaaa…, this model's is bbbbbbbbbbbb…); "
        "choose another name in spec.history.name"
    ) == str(mismatch.value)
    assert before == dump(first.server)
    Job(redis_url, "second", tokenizer="b" * 40, history={"name": "another"})


def test_a_history_of_another_model_is_rejected_and_unchanged(first: Job, redis_url: str) -> None:
    first.serve(0)
    theirs = first.finish_and_store("r", range(20, 40), version=0)
    before = dump(first.server)
    with pytest.raises(HistoryMismatchError) as mismatch:
        Job(redis_url, "second", model="org/larger", history={"maxBytes": "2Gi"})
    assert (
        "history default/shared holds rollouts of model 'org/model', not of 'org/larger'; choose another name in "
        "spec.history.name, or set spec.history.allowModelMismatch to use these rollouts, too"
    ) == str(mismatch.value)
    assert before == dump(first.server)
    # the mismatch may be allowed explicitly
    second = Job(redis_url, "second", model="org/larger", history={"allowModelMismatch": True})
    second.serve(0)
    ours = second.finish_and_store("r", range(60, 80), version=0)
    assert {theirs: 1, ours: 2} == second.read()
    with second.drafting() as index:
        assert [24, 25, 26, 27] == draft(index, [22, 23])
    # the history still belongs to the first model, whose jobs need no permission
    info = HistoryStore(first.server, first.setup.history_keys, window=WINDOW).metadata.info()
    assert info is not None
    assert "org/model" == info.model
    Job(redis_url, "third")
    with pytest.raises(HistoryMismatchError, match="org/model"):
        Job(redis_url, "fourth", model="org/larger")
