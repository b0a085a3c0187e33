"""Reads the recording of a job from Redis, with the texts of some of its problems."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import redis

from rollout_api.protocol.history_encoding import LengthEntry, rollout_key
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.messages import Purpose, RolloutId
from rollout_api.protocol.timeline import EndedRollout
from rollout_api.redis_client.connection import connect_async, connect_history, explain_error
from rollout_head.dataset.source import CLIENT_NAME
from rollout_store.history.contents import Decoder, decoder_of
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_store.job import JobStore
from rollout_store.job.engines import EngineReport
from rollout_store.job.part import as_text
from rollout_tools.report.recording import (
    ClassCounts,
    DraftCounts,
    JobRecording,
    PastLength,
    ViewedProblem,
    ViewedRollout,
    choose_problems,
)


class NothingToReportError(LookupError):
    """No recording of the job can be made; the message says why and what to do."""


async def read_recording(
    redis_url: str,
    uid: str,
    *,
    name: str,
    history_url: str = "",
    tokenizer_of: Callable[[str], Any | None],
    prompts: Mapping[str, Sequence[int]] | None = None,
) -> JobRecording:
    """Read everything that a report about a job needs.

    Args:
        redis_url: URL of the job's Redis.
        uid: uid of the job.
        name: ``namespace/name`` of the job.
        history_url: URL of the Redis that keeps the job's history; empty if it is the job's own.
        tokenizer_of: returns the transformers tokenizer of a model, given by its URI; None if it is not at hand, so
            that token ids take the place of texts.
        prompts: token ids of the prompts by problem, as far as they are known.

    Raises:
        NothingToReportError: if the recording cannot be made; the message says why.
        CodecError: if the timeline cannot be decoded.
        RedisUnusableError: if the server of the history fails.
        redis.RedisError: if that of the job fails.
    """
    keys = MessageKeys(uid)
    server = connect_async(redis_url)
    store = JobStore(server, keys)
    try:
        ended = [rollout async for rollout in store.timeline.all_ended()]
        if not ended:
            raise NothingToReportError(
                f"there is no timeline of job {name}: none of its rollouts has ended yet, or it ran with a release "
                "that did not keep timelines"
            )
        description: dict[str, str] = {
            as_text(field): as_text(value) for field, value in (await _hash(server, keys.job)).items()
        }
        if description.get("history_redis") and not history_url:
            raise NothingToReportError(
                f"the history of job {name} is on another Redis server than the job; name it with --history-redis"
            )
        tokenizer = tokenizer_of(description.get("model", ""))
        url = history_url or redis_url
        history = HistoryStore.for_all_generations(
            connect_history(url), HistoryKeys.from_full_name(description.get("history", ""))
        )
        try:
            read = await asyncio.to_thread(_read_history, history, uid, ended, decoder_of(tokenizer), prompts or {})
        except redis.RedisError as error:
            raise explain_error(error, url) from error
        finally:
            history.client.close()
        engines = {engine.report.name: engine.report for engine in (await store.engines.engines()).values()}
        return JobRecording(
            name=name,
            uid=uid,
            recorded_at=await store.clock(),
            release=version("das-rollout"),
            state=description.get("state", "running"),
            model=description.get("model", ""),
            history=description.get("history", ""),
            is_dataset=any(rollout.request_id.startswith(f"{CLIENT_NAME}:") for rollout in ended),
            decoded=tokenizer is not None,
            ended=ended,
            measurements=[measurement async for measurement in store.timeline.measurements()],
            positions=_positions(engines),
            classes=_classes(engines),
            **read._asdict(),
        )
    finally:
        await store.close()


class _FromHistory(NamedTuple):
    """The fields of a recording that are read from the history."""

    rewards: list[float | None]
    lengths: dict[str, list[PastLength]]
    problems: list[ViewedProblem]


def _read_history(
    store: HistoryStore,
    uid: str,
    ended: Sequence[EndedRollout],
    decode: Decoder,
    prompts: Mapping[str, Sequence[int]],
) -> _FromHistory:
    problems = list(dict.fromkeys(rollout.problem_id for rollout in ended if rollout.purpose == Purpose.TRAIN))
    entries = store.statistics.length_entries_by_problem(problems)
    lengths = {
        problem: [PastLength(entry.generation, entry.length, entry.cut_off, entry.reward) for entry in of_problem]
        for problem, of_problem in entries.items()
    }
    chosen = choose_problems(lengths)
    return _FromHistory(
        rewards=_rewards(uid, ended, entries),
        lengths=lengths,
        problems=[
            read_problem(store, problem, decode, prompts.get(problem), MAX_TOKENS // len(chosen)) for problem in chosen
        ],
    )


async def _hash(server: redis.asyncio.Redis, key: str) -> dict[bytes, bytes]:
    found: Any = await server.hgetall(key)
    return dict(found)


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
        counts += [DraftCounts(engine, label, number, accepted.get(label, 0)) for label, number in drafted.items()]
    return sorted(counts, key=lambda one: (one.engine, one.number))


def _classes(engines: Mapping[str, EngineReport]) -> list[ClassCounts]:
    counts = []
    for engine in sorted(engines):
        steps, budgets, drafted, accepted = (
            engines[engine].labeled_counters.get(f"class_{name}", {})
            for name in ("steps", "budget_tokens", "draft_tokens", "accepted_tokens")
        )
        counts += [
            ClassCounts(engine, label, count, budgets.get(label, 0), drafted.get(label, 0), accepted.get(label, 0))
            for label, count in steps.items()
        ]
    return counts


MAX_TOKENS = 400_000
"""Number of tokens of all shown rollouts together, which take a few MB in the page."""
MAX_ROLLOUT_TOKENS = 8_192
"""Number of tokens that are shown of one rollout."""


def read_problem(
    store: HistoryStore, problem_id: str, decode: Decoder, prompt: Sequence[int] | None, max_tokens: int
) -> ViewedProblem:
    """Read the newest rollouts of a problem, of at most *max_tokens* tokens together."""
    records: dict[str, HistoryRecord] = {}
    rewards: dict[bytes, float] = {}
    for part in store.read_all(problem_id):
        records |= {record.rollout_id: record for record in part.records}
        rewards |= part.rewards or {}
    newest_first = sorted(records.values(), key=lambda record: (record.generation, record.rollout_id), reverse=True)
    shown: list[ViewedRollout] = []
    left = max_tokens
    for record in newest_first:
        ids = record.tokens[:MAX_ROLLOUT_TOKENS].tolist()
        if shown and len(ids) > left:
            break
        left -= len(ids)
        shown.append(_viewed(record, decode(ids), rewards.get(rollout_key(record.rollout_id))))
    prompt_text = None if not prompt else "".join(decode(list(prompt)))
    return ViewedProblem(problem_id, prompt_text, shown[::-1], len(newest_first) - len(shown))


def _viewed(record: HistoryRecord, tokens: list[str], reward: float | None) -> ViewedRollout:
    return ViewedRollout(
        rollout_id=record.rollout_id,
        weight_version=record.weight_version,
        generation=record.generation,
        finish_reason=record.finish_reason,
        reward=reward,
        num_tokens=len(record.tokens),
        tokens=tokens,
        sources=list(record.draft_sources[: len(tokens)]),
    )
