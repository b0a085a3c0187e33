"""Reading a recording from a real Redis with a job and a history, saving it, and loading it again."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.ports import free_port
from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Purpose, RolloutRequest, encode
from rollout_api.redis_client.connection import RedisUnusableError
from rollout_store.history.contents import decoder_of, show_ids
from rollout_store.history.records import HistoryRecord
from rollout_store.job import EngineReport, JobStore
from rollout_store.job.job_record import JobDescription
from rollout_tools.report.reading import NothingToReportError, read_problem, read_recording
from rollout_tools.report.recording import (
    JobRecording,
    PastLength,
    RecordingError,
    choose_problems,
    load_recording,
    save_recording,
)
from scripts.tiny_model.tokenizer import build_tokenizer
from tests.support.history_contents import KEYS, fill, open_history
from tests.support.job_messages import request, rollout
from tests.support.recordings import engine, measurement, small_job

UID = "uid"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["the sum of 2 and 2 is 4"], vocabulary=280)


def describe(history_redis: str = "") -> JobDescription:
    return JobDescription("das/none", 300, "{}", 64, 2**20, 2**20, 10, KEYS.full_name, history_redis)


@pytest.fixture
def job(redis_url: str) -> str:
    """Publish a job with two rollouts that have ended, one of them evaluated, and return the URL of its Redis."""
    server = redis.Redis.from_url(redis_url)
    history = open_history(server)
    generation = history.metadata.publish(UID, 5)
    asked = request("dataset:1:0", n=2, step=1, problem_id="sums/1")
    evaluated = request("compare:1:0", n=1, step=9, problem_id="sums/1", purpose=Purpose.EVAL)
    sources = bytes([0, 1, 1, 0, 2])
    for sample in range(2):
        tokens = np.asarray([sample + 10] * 5, dtype=np.uint32)
        rollout_id = str(asked.rollout_id(sample))
        record = HistoryRecord(rollout_id, UID, 5, generation, tokens, "stop", step=1, draft_sources=sources)
        history.append("sums/1", record)
    history.set_rewards("sums/1", {str(asked.rollout_id(1)): 0.5})

    async def publish() -> None:
        store = JobStore.connect(redis_url, MessageKeys(UID))
        await store.job.publish(1, "default/math", describe())
        for one in (asked, evaluated):
            entry: Any = server.xadd(store.keys.requests, {MESSAGE_FIELD: encode(one)})
            await store.requests.admit(entry.decode(), one)
            await store.rollouts.finish_all([(one, finished(one, sample)) for sample in range(one.sampling.n)])
        await store.timeline.add_measurement(measurement(0, [engine()]))
        report = EngineReport(
            "engine-0",
            labeled_counters={
                "position_draft_tokens": {"16+": 4, "2": 9},
                "position_accepted_tokens": {"2": 6},
                "class_steps": {"long": 10, "medium": 4},
                "class_budget_tokens": {"long": 160, "medium": 32},
                "class_draft_tokens": {"long": 13},
                "class_accepted_tokens": {"long": 6},
            },
        )
        await store.engines.heartbeat("engine-0-1a2b", report, register=True)
        await store.close()

    asyncio.run(publish())
    return redis_url


def finished(asked: RolloutRequest, sample: int) -> Any:
    return rollout(asked, sample).model_copy(update={"draft_tokens_by_source": {"self": 4}, "length_class": "medium"})


def read(url: str, tokenizer: Any = None, **options: Any) -> JobRecording:
    return asyncio.run(read_recording(url, UID, name="default/math", tokenizer_of=lambda _: tokenizer, **options))


def test_everything_about_a_job_is_read(job: str) -> None:
    found = read(job)
    assert ("das/none", KEYS.full_name, "running", True, False) == (
        found.model,
        found.history,
        found.state,
        found.is_dataset,
        found.decoded,
    )
    rewards = {(one.request_id, one.sample): reward for one, reward in zip(found.ended, found.rewards, strict=True)}
    assert {("dataset:1:0", 0): None, ("dataset:1:0", 1): 0.5, ("compare:1:0", 0): None} == rewards
    assert {"self": 4} == found.ended[0].draft_tokens_by_source
    assert {"sums/1": [PastLength(1, 5, False, None), PastLength(1, 5, False, 0.5)]} == found.lengths
    assert [("engine-0", "2", 9, 6), ("engine-0", "16+", 4, 0)] == found.positions
    assert [("engine-0", "long", 10, 160, 13, 6), ("engine-0", "medium", 4, 32, 0, 0)] == found.classes
    assert {"medium"} == {one.length_class for one in found.ended}
    assert 1 == len(found.measurements)
    [problem] = found.problems
    assert (None, 0) == (problem.prompt, problem.num_omitted)
    assert [["10 "] * 5, ["11 "] * 5] == sorted(one.tokens for one in problem.rollouts)
    assert {(0, 1, 1, 0, 2)} == {tuple(one.sources) for one in problem.rollouts}


def test_tokens_and_prompts_are_decoded(job: str, tokenizer: Any) -> None:
    prompt = tokenizer.encode("2+2?")
    [problem] = read(job, tokenizer, prompts={"sums/1": prompt}).problems
    assert "2+2?" == problem.prompt
    assert [tokenizer.decode([10])] * 5 == problem.rollouts[0].tokens


def test_a_job_without_ended_rollouts_has_nothing_to_report(redis_url: str) -> None:
    with pytest.raises(NothingToReportError, match="no timeline of job default/math"):
        read(redis_url)


def test_a_history_on_another_server_must_be_named(job: str) -> None:
    redis.Redis.from_url(job).hset(MessageKeys(UID).job, mapping=asdict(describe("own")))
    with pytest.raises(NothingToReportError, match="--history-redis"):
        read(job)
    assert read(job, history_url=job).lengths
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(RedisUnusableError, match=nobody):
        read(job, history_url=f"redis://{nobody}/0")


# The texts of tokens


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    tokenizer = build_tokenizer(["the sum of 2 and 2 is 4"], vocabulary=280)
    ids = tokenizer.encode(text)
    pieces = decoder_of(tokenizer)(ids)
    assert len(ids) == len(pieces)
    assert text == "".join(pieces)


# The choice of problems


def test_problems_with_different_rewards_and_with_long_rollouts_are_chosen_by_turns() -> None:
    lengths = {
        "dull": [PastLength(1, 10, False, 1.0), PastLength(1, 11, False, 1.0)],
        "mixed": [PastLength(1, 10, False, 1.0), PastLength(1, 10, False, 0.0)],
        "long": [PastLength(1, 500, True, None)],
        "empty": [],
    }
    assert ["mixed", "long", "dull"] == choose_problems(lengths)
    assert ["mixed", "long"] == choose_problems(lengths, 2)
    lengths["repeated"] = [PastLength(1, 10, False, 1.0), PastLength(2, 10, False, 1.0)]
    assert ["repeated", "mixed"] == choose_problems(lengths, 2)


def test_the_newest_rollouts_of_a_problem_are_read_up_to_a_limit(redis_url: str) -> None:
    store = open_history(redis.Redis.from_url(redis_url))
    for generation in (1, 2):
        fill(store, ["p"], rollouts=2, generation=generation)
    problem = read_problem(store, "p", show_ids, None, max_tokens=3 * 400)
    assert [1, 2, 2] == [one.generation for one in problem.rollouts]
    assert 1 == problem.num_omitted


# The file of a recording


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "recording.json.gz"
    save_recording(small_job(), file)
    return file


def changed(file: Path, **fields: Any) -> Path:
    content = json.loads(gzip.decompress(file.read_bytes())) | fields
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    return file


def test_a_recording_is_loaded_as_it_was_saved(file: Path) -> None:
    assert small_job() == load_recording(file)
    assert ["recording.json.gz"] == [one.name for one in file.parent.iterdir()]


def test_fields_of_a_later_release_are_ignored(file: Path) -> None:
    assert small_job() == load_recording(changed(file, later=1))


def test_another_version_is_rejected(file: Path) -> None:
    with pytest.raises(RecordingError, match=r"has version 2 .*reads version 1; use the release that wrote it \(9\.1"):
        load_recording(changed(file, version=2, release="9.1"))


def test_a_damaged_recording_is_rejected(file: Path) -> None:
    with pytest.raises(RecordingError, match="damaged recording"):
        load_recording(changed(file, ended={"columns": ["sample"], "rows": [["x"]]}))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RecordingError, match="incomplete"):
        load_recording(file)


@pytest.mark.parametrize(
    "content", [b"text", gzip.compress(b"text", mtime=0), gzip.compress(b'{"name": "x"}', mtime=0)]
)
def test_something_else_is_rejected(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(RecordingError, match="is not a recording of a job"):
        load_recording(file)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot read .*No such file"):
        load_recording(tmp_path / "missing")
