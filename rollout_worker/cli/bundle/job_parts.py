"""What Redis knows about a job."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rollout_api.bundle.archive import BundleArchive
from rollout_api.protocol.keys import MESSAGE_FIELD, HistoryKeys
from rollout_api.redis_client.connection import connect, connect_history
from rollout_worker.cli.job_address import FoundJob
from rollout_worker.cli.job_status import NO_COORDINATOR, read_snapshot
from rollout_worker.engine.model_source import local_tokenizer
from rollout_worker.history.store import HistoryStore
from rollout_worker.history_service.statistics_document import statistics_document
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.job_store.incoming import arrival_time
from rollout_worker.launch.job_recording import RECORDING_FILE
from rollout_worker.report.reading import read_recording
from rollout_worker.report.recording import JobRecording
from rollout_worker.report.recording_file import load_recording, save_recording
from rollout_worker.runtime.model_cache import default_cache

_Result = TypeVar("_Result")
_MAX_REASON = 500
"""Length to which the reasons of dead letters are cut."""

STATUS = ("status.json", "The coordinator's last status, or what is known without a coordinator.")
JOB = ("job.json", "The job's description in Redis (model, sampling, limits, state), and its totals.")
ENGINES = ("engines.json", "The last report of each engine, and the engines that cannot start, with the reasons.")
DEAD_LETTERS = ("dead_letters.json", "The messages that could not be processed, with the reasons.")
HISTORY = ("history.json", "The metadata of the job's history, lengths of its rollouts, and acceptance by age.")
RECORDING = (
    "recording.json.gz",
    "The timeline: when each rollout ran where, and measurements over time. `rollout report recording.json.gz --html "
    "report.html`, after unpacking, makes a page of it.",
)
ENDED = ("timeline/ended.jsonl", "The rollouts that have ended, one a line: when each ran where, and its drafts.")
MEASUREMENTS = ("timeline/measurements.jsonl", "Measurements of the job over time, one a line.")
REDIS_PARTS = (STATUS, JOB, ENGINES, DEAD_LETTERS, HISTORY)


def collect_job(archive: BundleArchive, job: FoundJob, history_url: str, *, with_rollouts: bool) -> None:
    """Add what Redis knows about *job*; prompts, responses and messages only *with_rollouts*."""
    archive.collect(*STATUS, lambda: read_status(job))
    archive.collect(*JOB, lambda: _read_description(job))
    archive.collect(*ENGINES, lambda: _with_store(job, _read_engines))
    archive.collect(*DEAD_LETTERS, lambda: _read_dead_letters(job, with_messages=with_rollouts))
    archive.collect(*HISTORY, lambda: _read_history(job, history_url))
    try:
        recording = _read_recording(job, history_url, with_rollouts=with_rollouts)
        archive.add(*RECORDING, _packed(recording, with_rollouts=with_rollouts))
    except Exception as error:
        archive.note_missing(*RECORDING, str(error))
        archive.collect(*ENDED, lambda: _with_store(job, _read_ended))
        archive.collect(*MEASUREMENTS, lambda: _with_store(job, _read_measurements))


def collect_saved_recording(archive: BundleArchive, directory: Path, *, with_rollouts: bool) -> None:
    """Add the recording that ``rollout run`` has saved when it ended."""
    archive.collect(
        *RECORDING, lambda: _packed(load_recording(directory / RECORDING_FILE), with_rollouts=with_rollouts)
    )


def read_status(job: FoundJob) -> dict[str, Any]:
    """Return the job's status.

    Raises:
        RedisUnusableError: if Redis cannot be used.
    """
    with job.connected() as server:
        snapshot = read_snapshot(server, job)
    status: dict[str, Any] = json.loads(snapshot.as_json())
    if snapshot.state == NO_COORDINATOR:
        status["why"] = "The status of a coordinator expires when it no longer runs, or cannot reach Redis."
    return status


def _read_description(job: FoundJob) -> dict[str, Any]:
    with job.connected() as server:
        described: Any = server.hgetall(job.keys.job)
        totals: Any = server.hgetall(job.keys.totals)
    return {"name": job.name, "uid": job.uid, "description": _decoded(described), "totals": _decoded(totals)}


def _read_dead_letters(job: FoundJob, *, with_messages: bool) -> list[dict[str, Any]]:
    with job.connected() as server:
        entries: Any = server.xrange(job.keys.dead_letters)
    letters = []
    for entry_id, fields in entries:
        message = fields.get(MESSAGE_FIELD.encode(), b"")
        letter = {
            "time": arrival_time(entry_id.decode()),
            "stream": fields.get(b"stream", b"").decode(errors="replace"),
            "reason": fields.get(b"reason", b"").decode(errors="replace")[:_MAX_REASON],
            "bytes": len(message),
        }
        letters.append(letter | ({"message": base64.b64encode(message).decode()} if with_messages else {}))
    return letters


def _read_history(job: FoundJob, history_url: str) -> dict[str, Any]:
    server = connect(job.redis_url)
    try:
        found: Any = server.hmget(job.keys.job, ["history", "history_redis"])
    finally:
        server.close()
    named, elsewhere = found
    if not named:
        raise LookupError("the job's description does not name its history")
    if elsewhere and not history_url:
        raise LookupError("the history is on another Redis server than the job; name it with --history-redis")
    keys = HistoryKeys.from_full_name(named.decode())
    client = connect_history(history_url or job.redis_url)
    try:
        store, info = HistoryStore.open_existing(client, keys)
        lengths, acceptance = store.statistics.length_stats(None), store.statistics.acceptance_by_age()
    finally:
        client.close()
    return asdict(info) | statistics_document(keys, lengths, acceptance)


def _read_recording(job: FoundJob, history_url: str, *, with_rollouts: bool) -> JobRecording:
    reading = read_recording(
        job.redis_url,
        job.uid,
        name=job.name,
        history_url=history_url,
        tokenizer_of=lambda model: local_tokenizer(model, default_cache()) if with_rollouts else None,
    )
    with job.connected():
        return asyncio.run(reading)


def _packed(recording: JobRecording, *, with_rollouts: bool) -> bytes:
    """Return the file of a recording, without prompts and responses unless they are wanted."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / RECORDING_FILE
        save_recording(recording if with_rollouts else replace(recording, problems=[]), file)
        return file.read_bytes()


def _with_store(job: FoundJob, read: Callable[[JobStore], Awaitable[_Result]]) -> _Result:
    async def run() -> _Result:
        store = JobStore.connect(job.redis_url, job.keys)
        try:
            return await read(store.once)
        finally:
            await store.close()

    return asyncio.run(run())


async def _read_engines(store: JobStore) -> dict[str, Any]:
    engines = await store.engines.engines()
    return {
        "engines": {name: {"alive": engine.alive} | asdict(engine.report) for name, engine in engines.items()},
        "cannot_start": await store.engines.failed(),
    }


async def _read_ended(store: JobStore) -> str:
    return "".join([f"{json.dumps(asdict(rollout))}\n" async for rollout in store.timeline.all_ended()])


async def _read_measurements(store: JobStore) -> str:
    return "".join([f"{json.dumps(asdict(one))}\n" async for one in store.timeline.measurements()])


def _decoded(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
