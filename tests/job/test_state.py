"""Which job a state directory belongs to, and what becomes of the ones before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api import FinishReason, Rollout, RolloutJob, WeightSpan, encode, parse_job
from rollout_api.protocol.keys import DATA, HistoryKeys, MessageKeys
from rollout_worker.history.connection import connect
from rollout_worker.history.store import START, HistoryStore
from rollout_worker.local import StateError, _JobState

MANIFEST: dict[str, Any] = {
    "apiVersion": "das.rollout.dev/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "story"},
    "spec": {
        "model": {"uri": "policy/0"},
        "source": {"dataset": {"tasks": [{"name": "sums", "generator": "chain_sum"}]}},
    },
}


def job(n: int = 8, batch: int = 128) -> RolloutJob:
    manifest = copy.deepcopy(MANIFEST)
    manifest["spec"] |= {"sampling": {"n": n}, "engine": {"maxNumSeqs": batch}}
    return parse_job(manifest)


@pytest.fixture
def said() -> list[str]:
    return []


def test_an_unfinished_job_goes_on_and_a_finished_one_does_not(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "job.json"
    first = _JobState.open(path, job(), said.append)
    again = _JobState.open(path, job(), said.append)
    assert (first.uid, False, True) == (again.uid, first.resumed, again.resumed)
    again.finish()
    assert first.uid != _JobState.open(path, job(), said.append).uid


def test_what_changes_no_rollout_changes_no_job(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "job.json"
    assert _JobState.open(path, job(batch=128), said.append).uid == _JobState.open(path, job(batch=8), said.append).uid
    assert [] == said


def test_jobs_that_were_given_up_lose_nothing_however_many(tmp_path: Path, said: list[str], redis_url: str) -> None:
    client: redis.Redis = connect(redis_url)
    store = HistoryStore(client, HistoryKeys("default", "story"), window=16)
    store.open("tokenizer")
    path = tmp_path / "job.json"
    uids = []
    for n in (1, 2, 3):
        uids.append(_JobState.open(path, job(n), said.append).uid)
        left = Rollout(
            rollout_id=f"{uids[-1]}/r/0/0",
            problem_id="p",
            token_ids=[n],
            spans=[WeightSpan(start=0, weight_version=0)],
            finish_reason=FinishReason.STOP,
        )
        client.xadd(MessageKeys(uids[-1]).outbox, {DATA: encode(left)})
        client.hset(MessageKeys(uids[-1]).ledger("r"), "0", "done")
    last = _JobState.open(path, job(4), said.append)
    last.clear_previous(client, client, job(4))
    history = store.read({"p": START})["p"]
    assert [f"{uid}/r/0/0" for uid in uids] == [record.rollout_id for record in history.records]
    assert [] == client.keys("rollout:*")
    assert ["The manifest has changed"] * 3 == [line.split(":")[0] for line in said]


@pytest.mark.parametrize("content", ["", "{}", "[]", "null"])
def test_a_state_file_that_cannot_be_read_says_so(tmp_path: Path, said: list[str], content: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(StateError, match="remove it"):
        _JobState.open(path, job(), said.append)
