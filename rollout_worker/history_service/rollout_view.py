"""Shows rollouts of one problem as text: which tokens were drafted, and how two rollouts differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_api.protocol.draft_sources import DRAFT_SOURCES, SAMPLED
from rollout_worker.history.problem_contents import ProblemContents
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.token_texts import Decoder

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
    """Return a heading and the text of a rollout.

    Args:
        number: number of the rollout in the table of all.
        record: the rollout.
        contents: the rollouts of its problem.
        decode: returns the texts of tokens.
    """
    return Group(heading(number, record, contents), styled_text(record, decode, frozenset()))


def compare_rollouts(
    numbers: tuple[int, int], records: tuple[HistoryRecord, HistoryRecord], contents: ProblemContents, decode: Decoder
) -> RenderableType:
    """Return two rollouts side by side, in which the tokens that only one of them has are reversed.

    Args:
        numbers: numbers of the rollouts in the table of all.
        records: the rollouts.
        contents: the rollouts of their problem.
        decode: returns the texts of tokens.
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
    """Return the text of a rollout, in which the color of a token is that of its source.

    Args:
        record: the rollout.
        decode: returns the texts of tokens.
        emphasized: indices of tokens to emphasize.
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
