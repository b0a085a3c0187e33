"""Reads the recording of a job from Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import redis.asyncio

from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.length_entries import LengthEntry, rollout_key, unpack_entries
from rollout_api.protocol.messages import Purpose, RolloutId
from rollout_api.protocol.timeline import EndedRollout
from rollout_api.redis_client.server_functions import Redis
from rollout_worker.history.queries import query_problems
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.dataset.source import CLIENT_NAME
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.job_store.encoding import as_text
from rollout_worker.job.job_store.engines import EngineReport
from rollout_worker.report.recording import DraftCounts, JobRecording, PastLength
from rollout_worker.report.token_texts import TokenTexts
from rollout_worker.report.viewed_problems import MAX_TOKENS, choose_problems, read_problem


class NoTimelineError(LookupError):
    """The job has no timeline; the message says why."""


async def read_recording(
    server: redis.asyncio.Redis,
    history: Redis,
    *,
    name: str,
    uid: str,
    tokenizer: Any | None = None,
    prompts: Mapping[str, Sequence[int]] | None = None,
) -> JobRecording:
    """Read everything that a report about a job needs.

    Args:
        server: client of the job's Redis.
        history: client of the Redis that keeps the job's history.
        name: ``namespace/name`` of the job.
        uid: uid of the job.
        tokenizer: the transformers tokenizer of its model; None to show token ids in place of texts.
        prompts: token ids of the prompts by problem, as far as they are known.

    Raises:
        NoTimelineError: if no rollout of the job has ended, or its timeline is not kept.
        CodecError: if the timeline cannot be decoded.
        redis.RedisError: if a server fails.
    """
    keys = MessageKeys(uid)
    store = JobStore(server, keys)
    ended = [rollout async for rollout in store.timeline.all_ended()]
    if not ended:
        raise NoTimelineError(
            f"job {name} has no timeline: no rollout has ended yet, or the job ran with a release before the timeline"
        )
    found: Any = await server.hgetall(keys.job)
    description = {as_text(field): as_text(value) for field, value in found.items()}
    engines = {report.name: report for report, _ in (await store.engines.engines()).values()}
    problems = list(dict.fromkeys(rollout.problem_id for rollout in ended if rollout.purpose == Purpose.TRAIN))
    history_store = HistoryStore.for_all_generations(
        history, HistoryKeys.from_full_name(description.get("history", ""))
    )
    entries = await asyncio.to_thread(_length_entries, history_store, problems)
    lengths = {
        problem: [PastLength(entry.generation, entry.length, entry.cut_off, entry.reward) for entry in of_problem]
        for problem, of_problem in entries.items()
    }
    chosen = choose_problems(lengths)
    texts = TokenTexts(tokenizer)
    viewed = [
        await asyncio.to_thread(
            read_problem, history_store, problem, texts, (prompts or {}).get(problem), MAX_TOKENS // len(chosen)
        )
        for problem in chosen
    ]
    published = await asyncio.to_thread(history_store.metadata.published_versions)
    return JobRecording(
        name=name,
        uid=uid,
        recorded_at=await store.clock(),
        release=version("das-rollout"),
        state=description.get("state", "running"),
        model=description.get("model", ""),
        history=description.get("history", ""),
        is_dataset=ended[0].request_id.startswith(f"{CLIENT_NAME}:"),
        decoded=tokenizer is not None,
        ended=ended,
        rewards=_rewards(uid, ended, entries),
        measurements=[measurement async for measurement in store.timeline.measurements()],
        generations={
            int(version.removeprefix(f"{uid}:")): generation
            for version, generation in published.items()
            if version.startswith(f"{uid}:")
        },
        lengths=lengths,
        acceptance_by_age=await asyncio.to_thread(history_store.statistics.acceptance_by_age),
        positions=_positions(engines),
        problems=viewed,
    )


def _length_entries(store: HistoryStore, problems: Sequence[str]) -> dict[str, list[LengthEntry]]:
    stored = query_problems(
        store.client, problems, lambda pipeline, problem: pipeline.hgetall(store.keys.lengths(problem))
    )
    return {problem: unpack_entries(entries or {}) for problem, entries in stored.items()}


def _rewards(
    uid: str, ended: Sequence[EndedRollout], entries: Mapping[str, Sequence[LengthEntry]]
) -> list[float | None]:
    by_key = {(problem, entry.key): entry.reward for problem, known in entries.items() for entry in known}
    ids = [str(RolloutId(uid, rollout.request_id, rollout.sample, rollout.turn)) for rollout in ended]
    return [
        by_key.get((rollout.problem_id, rollout_key(rollout_id)))
        for rollout, rollout_id in zip(ended, ids, strict=True)
    ]


def _positions(engines: Mapping[str, EngineReport]) -> list[DraftCounts]:
    counts = []
    for engine, report in engines.items():
        drafted, accepted = (
            report.labeled_counters.get(f"position_{kind}_tokens", {}) for kind in ("draft", "accepted")
        )
        counts += [DraftCounts(engine, int(label), number, accepted.get(label, 0)) for label, number in drafted.items()]
    return sorted(counts)
