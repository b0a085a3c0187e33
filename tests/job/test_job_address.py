"""How commands find a job, and which job a state directory belongs to."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from rollout_api import FinishReason, Rollout, RolloutJob, WeightSpan, encode, parse_job
from rollout_api.ports import free_port
from rollout_api.protocol.keys import MESSAGE_FIELD, HistoryKeys, MessageKeys, job_uid_key
from rollout_api.redis_client.connection import RedisUnusableError, connect
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from rollout_tools.cli.job_address import FoundJob, JobAddressError, find_job
from rollout_tools.launch.job_state import JobState, LastRedis, StateError


def publish(redis_url: str, name: str, uid: str) -> None:
    """Publish a job as its coordinator does."""
    client = redis.Redis.from_url(redis_url)
    client.hset(MessageKeys(uid).job, "state", "running")
    client.set(job_uid_key(name), uid)


def run_locally(state: Path, name: str, uid: str, server: LastRedis, *, finished: bool = False) -> Path:
    """Leave in a state directory what `rollout run` leaves there."""
    directory = state / name
    directory.mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps({"uid": uid, "finished": finished}))
    server.save(directory)
    return directory


def manifest_file(directory: Path, redis_url: str | None = None) -> Path:
    manifest: dict[str, Any] = {
        "apiVersion": "das.rollout.dev/v1beta1",
        "kind": "RolloutJob",
        "metadata": {"name": "math"},
        "spec": {"model": {"uri": "policy"}, "source": {"trainer": {}}},
    }
    if redis_url:
        manifest["spec"]["redis"] = {"url": redis_url}
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    return file


def test_a_job_is_found_by_its_name_in_a_given_redis(tmp_path: Path, redis_url: str) -> None:
    publish(redis_url, "default/math", "u1")
    publish(redis_url, "team/math", "u2")
    assert FoundJob("default/math", "u1", redis_url, None) == find_job("math", redis_url=redis_url, state=tmp_path)
    assert FoundJob("team/math", "u2", redis_url, None) == find_job("team/math", redis_url=redis_url, state=tmp_path)


def test_a_uid_names_an_earlier_job(tmp_path: Path, redis_url: str) -> None:
    publish(redis_url, "default/math", "u1")
    publish(redis_url, "default/math", "u2")
    assert "u2" == find_job("math", redis_url=redis_url, state=tmp_path).uid
    assert "u1" == find_job("math", uid="u1", redis_url=redis_url, state=tmp_path).uid
    assert "u1" == find_job(None, uid="u1", redis_url=redis_url, state=tmp_path).name


def test_a_manifest_names_the_redis_of_the_history(tmp_path: Path, redis_url: str) -> None:
    publish(redis_url, "default/math", "u1")
    file = manifest_file(tmp_path)
    assert "" == find_job(None, file=file, redis_url=redis_url).history_url
    manifest = yaml.safe_load(file.read_text())
    manifest["spec"]["history"] = {"redis": {"url": "redis://history:6379/0"}}
    file.write_text(yaml.safe_dump(manifest))
    assert "redis://history:6379/0" == find_job(None, file=file, redis_url=redis_url).history_url


def test_a_manifest_names_the_job_and_its_redis(tmp_path: Path, redis_url: str) -> None:
    publish(redis_url, "default/math", "u1")
    file = manifest_file(tmp_path)
    assert FoundJob("default/math", "u1", redis_url, None) == find_job(None, file=file, redis_url=redis_url)
    with pytest.raises(JobAddressError, match="not both"):
        find_job("math", file=file, redis_url=redis_url)
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(RedisUnusableError, match=nobody):
        find_job(None, file=manifest_file(tmp_path, f"redis://{nobody}/0"), state=tmp_path)


def test_the_only_job_of_a_state_directory_needs_no_name(tmp_path: Path, redis_url: str) -> None:
    publish(redis_url, "default/math", "u1")
    directory = run_locally(tmp_path, "default/math", "u1", LastRedis(redis_url, embedded=False))
    assert FoundJob("default/math", "u1", redis_url, directory) == find_job(None, state=tmp_path)
    assert 0o600 == (directory / "redis-server.json").stat().st_mode & 0o777

    run_locally(tmp_path, "default/code", "u2", LastRedis(redis_url, embedded=False))
    with pytest.raises(JobAddressError, match="default/code, default/math; name one"):
        find_job(None, state=tmp_path)


def test_a_given_redis_takes_precedence_over_a_local_job_of_the_same_name(tmp_path: Path, redis_url: str) -> None:
    publish(redis_url, "default/math", "u1")
    run_locally(tmp_path, "default/math", "u2", LastRedis("redis://127.0.0.1:1/0", embedded=True))
    assert FoundJob("default/math", "u1", redis_url, None) == find_job("math", redis_url=redis_url, state=tmp_path)


def test_the_only_job_of_a_redis_needs_no_name(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(JobAddressError, match="there is no job in this Redis"):
        find_job(None, redis_url=redis_url, state=tmp_path)
    publish(redis_url, "team/math", "u1")
    assert "team/math" == find_job(None, redis_url=redis_url, state=tmp_path).name


def test_an_unknown_name_is_answered_with_those_that_exist(tmp_path: Path, redis_url: str) -> None:
    publish(redis_url, "team/math", "u1")
    with pytest.raises(JobAddressError, match=r"no job default/maths in this Redis .*team/math"):
        find_job("maths", redis_url=redis_url, state=tmp_path)
    run_locally(tmp_path, "default/code", "u2", LastRedis(redis_url, embedded=False))
    with pytest.raises(JobAddressError, match=r"default/maths has not run in .*default/code"):
        find_job("maths", state=tmp_path)


def test_a_job_whose_messages_were_deleted_is_said_to_have_ended(tmp_path: Path, redis_url: str) -> None:
    run_locally(tmp_path, "default/math", "u1", LastRedis(redis_url, embedded=False))
    with pytest.raises(JobAddressError, match="deleted a day after its end"):
        find_job("math", state=tmp_path)


def test_an_embedded_server_that_has_ended_means_that_the_job_does_not_run(tmp_path: Path) -> None:
    nobody = f"redis://:secret@127.0.0.1:{free_port()}/0"
    run_locally(tmp_path, "default/math", "u1", LastRedis(nobody, embedded=True))
    with pytest.raises(JobAddressError, match="does not run at the moment") as ended:
        find_job("math", state=tmp_path)
    assert "secret" not in str(ended.value)
    run_locally(tmp_path, "default/done", "u2", LastRedis(nobody, embedded=True), finished=True)
    with pytest.raises(JobAddressError, match="has ended, and with it the Redis server"):
        find_job("done", state=tmp_path)
    with pytest.raises(RedisUnusableError, match="cannot be reached"):
        find_job("math", redis_url=nobody, state=tmp_path)


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
