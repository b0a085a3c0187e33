"""Shows a history to people: tables, histograms, statistics, and the texts of rollouts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from statistics import fmean
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.history_encoding import DRAFT_SOURCES, SAMPLED
from rollout_api.protocol.keys import HistoryKeys
from rollout_store.history.contents import Decoder, ProblemContents
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore

_TABLE_WIDTH = 160
"""Columns of a table that is not printed to a terminal."""


def console() -> Console:
    """Return a console for standard output."""
    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=1))


def new_table(*columns: str) -> Table:
    """Return a table without lines; columns whose name begins with ``>`` are right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table


def format_bytes(count: float) -> str:
    """Return a size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that fits into it at least twice."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_age(seconds: float | None) -> str:
    """Return how long ago something was; a dash if that is unknown."""
    return "–" if seconds is None else f"{format_duration(seconds)} ago"


_MAX_BINS = 12
_BAR_WIDTH = 40
"""Characters of the longest bar."""


def bin_edges(longest: int) -> list[int]:
    """Return the edges of at most 12 bins of equal, round width, from 0 to at least *longest*."""
    width, decade = 1, 1
    while width * _MAX_BINS < longest:
        factor = next((factor for factor in (2, 5, 10) if factor * decade * _MAX_BINS >= longest), None)
        if factor is None:
            decade *= 10
            continue
        width = factor * decade
    return list(range(0, max(longest, 1) + width, width))


def length_shares(lengths: LengthStats) -> list[tuple[int, int | None, float]]:
    """Return the share of rollouts in each bin of lengths.

    Returns:
        For each bin its lower edge (exclusive), its upper edge (inclusive) and its share. The upper edge is None for
        rollouts that are estimated to be longer than all that were seen.
    """
    if not lengths.count:
        return []
    edges = bin_edges(lengths.longest)
    longer_than = [lengths.prob_longer_than(edge) for edge in edges]
    longer_than[0] = 1.0  # the first bin includes rollouts without tokens
    bins: list[tuple[int, int | None, float]] = [
        (low, high, above_low - above_high)
        for low, high, above_low, above_high in zip(edges, edges[1:], longer_than, longer_than[1:], strict=False)
    ]
    return [*bins, (edges[-1], None, longer_than[-1])] if longer_than[-1] else bins


def count_histogram(lengths: Sequence[tuple[int, bool]]) -> Table:
    """Return a histogram of rollouts, given by their length and whether they were cut off."""
    edges = bin_edges(max(length for length, _ in lengths))
    bins = [[0, 0] for _ in edges[1:]]
    for length, cut_off in lengths:
        bins[max(0, (length - 1) // edges[1])][cut_off] += 1
    largest = max(sum(counts) for counts in bins)
    table = new_table(">tokens", "", ">rollouts", ">cut off (░)")
    for low, high, (num_complete, num_cut_off) in zip(edges, edges[1:], bins, strict=False):
        bar = Text("█" * _bar_length(num_complete, largest)) + Text(
            "░" * _bar_length(num_cut_off, largest), style="yellow"
        )
        table.add_row(
            f"{low:,}–{high:,}", bar, f"{num_complete + num_cut_off:,}", f"{num_cut_off:,}" if num_cut_off else ""
        )
    return table


def share_histogram(bins: Sequence[tuple[int, int | None, float]]) -> Table:
    """Return a histogram of the result of :func:`length_shares`."""
    largest = max(share for _, _, share in bins)
    table = new_table(">tokens", "", ">share")
    for low, high, share in bins:
        if high is None:
            bar = Text("░" * _bar_length(share, largest), style="yellow")
            table.add_row("longer", bar, f"{share:.1%}", "(cut off before they ended)")
        else:
            table.add_row(f"{low:,}–{high:,}", "█" * _bar_length(share, largest), f"{share:.1%}")
    return table


def _bar_length(value: float, largest: float) -> int:
    """Return the length of a bar, which is visible unless the value is zero."""
    return max(1, round(_BAR_WIDTH * value / largest)) if value else 0


_QUANTILES = (0.1, 0.5, 0.9, 0.99)


def length_quantiles(lengths: LengthStats) -> dict[float, float | None]:
    """Return the quantiles that are shown of lengths; None for one above the longest rollout."""
    return {p: lengths.quantile(p) for p in _QUANTILES} if lengths.count else {}


def statistics_document(keys: HistoryKeys, lengths: LengthStats) -> dict[str, Any]:
    """Return the statistics in the form of ``rollout history stats --json``."""
    return {
        "history": keys.full_name,
        "rollouts": lengths.count,
        "weight": lengths.weight,
        "cut_off": lengths.censored_share,
        "mean": lengths.mean,
        "longest": lengths.longest,
        "quantiles": {str(p): quantile for p, quantile in length_quantiles(lengths).items()},
        "histogram": [{"above": low, "to": high, "share": share} for low, high, share in length_shares(lengths)],
    }


@dataclass(frozen=True)
class ProblemRow:
    """A problem, as ``rollout history problems`` lists it."""

    problem: str
    rollouts: int
    """Number of rollouts whose lengths the history knows."""
    mean_length: float
    """Mean number of response tokens; a rollout that was cut off counts with the tokens that it has."""
    longest: int
    cut_off: int
    """Number of rollouts that were cut off."""
    mean_reward: float | None
    """Mean of the rewards that are known; None if there are none."""
    bytes: int
    """Size of the problem's keys in Redis."""
    last_used: float
    """Unix time of the last append to it or draft from it, by the server's clock."""


def problem_rows(store: HistoryStore) -> list[ProblemRow]:
    """Return a row for each problem, in the order of their last use.

    Raises:
        redis.RedisError: the server fails.
    """
    stored = store.catalog.problems()
    entries_by_problem = store.statistics.length_entries_by_problem(problem.problem_id for problem in stored)
    rows = []
    for problem in stored:
        entries = entries_by_problem[problem.problem_id]
        rewards = [entry.reward for entry in entries if entry.reward is not None]
        rows.append(
            ProblemRow(
                problem=problem.problem_id,
                rollouts=len(entries),
                mean_length=fmean(entry.length for entry in entries) if entries else 0.0,
                longest=max((entry.length for entry in entries), default=0),
                cut_off=sum(entry.cut_off for entry in entries),
                mean_reward=fmean(rewards) if rewards else None,
                bytes=problem.bytes,
                last_used=problem.last_used,
            )
        )
    return rows


MAX_SHOWN_TOKENS = 4096
"""Number of tokens after which a rollout's text is cut."""
SOURCE_STYLES = {"history": "green", "self": "cyan", "siblings": "magenta", "cross_problem": "yellow"}
"""Source of drafts → style of its tokens."""
_SOURCE_NAMES = {
    "history": "from the history",
    "self": "from the rollout's own text",
    "siblings": "from siblings",
    "cross_problem": "from other problems",
}
_DIFFERENT = "reverse"
_STYLES = ["", *(SOURCE_STYLES[source] for source in DRAFT_SOURCES)]


def num_drafted(record: HistoryRecord) -> int:
    """Return how many of a rollout's tokens are accepted draft tokens."""
    return len(record.draft_sources) - record.draft_sources.count(SAMPLED)


def legend() -> Text:
    """Return what the colors of tokens mean."""
    parts = [Text(_SOURCE_NAMES[source], style) for source, style in SOURCE_STYLES.items()]
    return Text.assemble("Accepted draft tokens: ", Text(", ").join(parts), ". Other tokens were sampled one by one.")


def show_rollout(number: int, record: HistoryRecord, contents: ProblemContents, decode: Decoder) -> RenderableType:
    """Return a heading and the text of a rollout. *number* is its place in the table of all."""
    return Group(heading(number, record, contents), styled_text(record, decode, frozenset()))


def compare_rollouts(
    numbers: tuple[int, int], records: tuple[HistoryRecord, HistoryRecord], contents: ProblemContents, decode: Decoder
) -> RenderableType:
    """Return two rollouts side by side. Tokens that only one of them has are reversed.

    The *numbers* are their places in the table of all.
    """
    first, second = ([int(token) for token in record.tokens[:MAX_SHOWN_TOKENS]] for record in records)
    different = differing_tokens(first, second)
    table = Table.grid(padding=(0, 3), expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(*(heading(number, record, contents) for number, record in zip(numbers, records, strict=True)))
    texts = [styled_text(record, decode, only) for record, only in zip(records, different, strict=True)]
    for left, right in zip_longest(*(text.split("\n", allow_blank=True) for text in texts), fillvalue=Text()):
        table.add_row(left, right)
    return table


def heading(number: int, record: HistoryRecord, contents: ProblemContents) -> Text:
    """Return a line about a rollout."""
    reward = contents.reward(record)
    facts = [
        f"generation {record.generation}",
        f"weight version {record.weight_version}",
        f"{len(record.tokens):,} tokens",
        f"{num_drafted(record) / len(record.tokens):.0%} from drafts" if record.draft_sources else "",
        f"ended by {record.finish_reason}",
        "" if reward is None else f"reward {reward:.3g}",
    ]
    return Text(f"#{number}: {', '.join(filter(None, facts))}", "bold")


def styled_text(record: HistoryRecord, decode: Decoder, emphasized: frozenset[int]) -> Text:
    """Return the text of a rollout. The color of a token is that of its source.

    The tokens with the indices *emphasized* stand out.
    """
    text = Text()
    for index, (piece, code) in enumerate(_pieces(record, decode)):
        style = _STYLES[code] if code < len(_STYLES) else ""
        text.append(piece, f"{style} {_DIFFERENT}".strip() if index in emphasized else style)
    if (rest := len(record.tokens) - MAX_SHOWN_TOKENS) > 0:
        text.append(f" … and {rest:,} more tokens", "dim")
    return text


def differing_tokens(first: Sequence[int], second: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the indices of the tokens of each sequence that the other one lacks, in the order of the sequences."""
    only_first: set[int] = set()
    only_second: set[int] = set()
    for kind, start, end, other_start, other_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind != "equal":
            only_first.update(range(start, end))
            only_second.update(range(other_start, other_end))
    return frozenset(only_first), frozenset(only_second)


def _pieces(record: HistoryRecord, decode: Decoder) -> Iterator[tuple[str, int]]:
    """Yield the text and the source code of each token that is shown."""
    texts = decode(record.tokens[:MAX_SHOWN_TOKENS].tolist())
    codes = record.draft_sources or bytes(len(record.tokens))
    return zip(texts, codes, strict=False)
