"""Which job a state directory belongs to, and what happens to earlier jobs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api import FinishReason, Rollout, RolloutJob, WeightSpan, encode, parse_job
from rollout_api.protocol.keys import MESSAGE_FIELD, HistoryKeys, MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from rollout_tools.launch.job_state import JobState, StateError

MANIFEST: dict[str, Any] = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "story"},
    "spec": {
        "model": {"uri": "policy/0"},
        "source": {"dataset": {"tasks": [{"name": "sums", "generator": "chain_sum"}]}},
    },
}


def job(n: int = 8, batch: int = 128) -> RolloutJob:
    manifest = copy.deepcopy(MANIFEST)
    manifest["spec"] |= {"sampling": {"rolloutsPerPrompt": n}, "engine": {"maxNumSeqs": batch}}
    return parse_job(manifest)


@pytest.fixture
def messages() -> list[str]:
    return []


def test_an_unfinished_job_is_continued_and_a_finished_one_is_not(tmp_path: Path, messages: list[str]) -> None:
    path = tmp_path / "job.json"
    first = JobState.open(path, job(), messages.append)
    again = JobState.open(path, job(), messages.append)
    assert (first.uid, False, True) == (again.uid, first.resumed, again.resumed)
    again.mark_finished()
    assert first.uid != JobState.open(path, job(), messages.append).uid


def test_a_change_that_does_not_affect_rollouts_continues_the_job(tmp_path: Path, messages: list[str]) -> None:
    path = tmp_path / "job.json"
    assert (
        JobState.open(path, job(batch=128), messages.append).uid
        == JobState.open(path, job(batch=8), messages.append).uid
    )
    assert [] == messages


def test_abandoned_jobs_lose_no_finished_rollout(tmp_path: Path, messages: list[str], redis_url: str) -> None:
    client: redis.Redis = connect(redis_url)
    store = HistoryStore(client, HistoryKeys("default", "story"), window=16)
    store.metadata.open("tokenizer")
    path = tmp_path / "job.json"
    uids = []
    for n in (1, 2, 3):
        uids.append(JobState.open(path, job(n), messages.append).uid)
        left = Rollout(
            rollout_id=f"{uids[-1]}/r/0/0",
            problem_id="p",
            token_ids=[n],
            weight_spans=[WeightSpan(start=0, weight_version=0)],
            finish_reason=FinishReason.STOP,
        )
        client.xadd(MessageKeys(uids[-1]).outbox, {MESSAGE_FIELD: encode(left)})
        client.hset(MessageKeys(uids[-1]).ledger("r"), "0", "done")
    last = JobState.open(path, job(4), messages.append)
    last.clean_up_previous_jobs(client, client, job(4))
    history = store.read({"p": START})["p"]
    assert [f"{uid}/r/0/0" for uid in uids] == [record.rollout_id for record in history.records]
    assert [] == client.keys("rollout:*")
    assert ["The manifest has changed"] * 3 == [line.split(":")[0] for line in messages]


@pytest.mark.parametrize("content", ["", "{}", "[]", "null"])
def test_an_unreadable_state_file_is_reported(tmp_path: Path, messages: list[str], content: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(StateError, match="remove it"):
        JobState.open(path, job(), messages.append)
