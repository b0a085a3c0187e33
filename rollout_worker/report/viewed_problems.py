"""Chooses the problems whose rollouts a report shows, and reads them from the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import pvariance

from rollout_api.protocol.length_entries import rollout_key
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore
from rollout_worker.history.token_texts import Decoder
from rollout_worker.report.recording import PastLength, ViewedProblem, ViewedRollout

MAX_PROBLEMS = 12
MAX_TOKENS = 400_000
"""Number of tokens of all shown rollouts together, which take a few MB in the page."""
MAX_ROLLOUT_TOKENS = 8_192
"""Number of tokens that are shown of one rollout."""


def choose_problems(lengths: Mapping[str, Sequence[PastLength]], count: int = MAX_PROBLEMS) -> list[str]:
    """Return the problems that are most worth reading.

    Those with the highest variance of rewards and those with the longest rollouts take turns. Problems of a single
    generation come last, because there is nothing to compare.
    """
    known = {problem: entries for problem, entries in lengths.items() if entries}
    by_length = sorted(known, key=lambda problem: (-max(entry.length for entry in known[problem]), problem))
    by_variance = sorted(known, key=lambda problem: (-_variance(known[problem]), problem))
    turns = dict.fromkeys(problem for pair in zip(by_variance, by_length, strict=True) for problem in pair)
    return sorted(turns, key=lambda problem: len({entry.generation for entry in known[problem]}) == 1)[:count]


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


def _variance(entries: Sequence[PastLength]) -> float:
    rewards = [entry.reward for entry in entries if entry.reward is not None]
    return pvariance(rewards) if rewards else 0.0
