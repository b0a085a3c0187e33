"""The contents of a history for people: the rollouts of problems, texts of their tokens, and tables of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout_api.protocol.history_encoding import DRAFT_SOURCES, SAMPLED, rollout_key
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Redis
from rollout_store.history.archive import replacing
from rollout_store.history.metadata import HistoryInfo
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore

if TYPE_CHECKING:
    import pyarrow as pa


class ProblemContents(NamedTuple):
    """The rollouts of one problem."""

    records: list[HistoryRecord]
    """Those in the history's window, oldest first."""
    rewards: dict[bytes, float]
    """Rewards by ``rollout_key``."""
    num_corrupt: int
    """Number of entries that cannot be read."""

    def reward(self, record: HistoryRecord) -> float | None:
        """Return the reward of a rollout; None if it has none."""
        return self.rewards.get(rollout_key(record.rollout_id))


def read_problem(store: HistoryStore, problem_id: str, info: HistoryInfo) -> ProblemContents:
    """Read a problem's rollouts.

    Raises:
        redis.RedisError: if Redis fails.
    """
    records: dict[str, HistoryRecord] = {}
    corrupt: set[str] = set()
    rewards: dict[bytes, float] = {}
    for log_slice in store.read_all(problem_id):
        records |= {record.rollout_id: record for record in log_slice.records}
        corrupt.update(entry.entry_id for entry in log_slice.corrupt)
        rewards |= log_slice.rewards or {}
    oldest = info.oldest_kept(record.generation for record in records.values())
    return ProblemContents(
        [record for record in records.values() if record.generation >= oldest], rewards, len(corrupt)
    )


Decoder = Callable[[Iterable[int]], list[str]]
"""Returns the text of each token; together, they are the text of all."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message says where it was looked for, and what to do."""


def load_decoder(source: str) -> Decoder:
    """Return a decoder of a tokenizer.

    Args:
        source: a directory with ``tokenizer.json``, such a file, or the name of a model on the Hugging Face hub.

    Raises:
        TokenizerError: if it cannot be loaded.
    """
    from tokenizers import Tokenizer

    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(source)
    except Exception as error:  # tokenizers has no errors of its own
        reason = str(error).partition("\n")[0]
        raise TokenizerError(
            f"the tokenizer {source} cannot be loaded ({reason}); name a directory that contains tokenizer.json, or a "
            "model of the Hugging Face hub"
        ) from None
    return partial(_texts, tokenizer)


def decoder_of(tokenizer: Any | None) -> Decoder:
    """Return a decoder of a transformers tokenizer; that of ids for None, and for one that is not a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return show_ids if backend is None else partial(_texts, backend)


def show_ids(tokens: Iterable[int]) -> list[str]:
    """Return the ids of tokens as text, separated by spaces: a decoder for those without a tokenizer."""
    return [f"{token} " for token in tokens]


def _texts(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    def whole(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    stream = DecodeStream(skip_special_tokens=False)
    texts: list[str] = []
    incomplete: list[int] = []
    for token in tokens:
        incomplete.append(int(token))
        try:
            # A token that ends within a character has no text; the one that completes the character has it all.
            text = stream.step(tokenizer, int(token))
        except Exception:  # bytes that are no character; tokenizers has no errors of its own
            stream, text = DecodeStream(skip_special_tokens=False), whole(incomplete)
        if text is not None:
            incomplete = []
        texts.append(text or "")
    if incomplete:
        texts[-1] += whole(incomplete)
    return texts


_ROWS_PER_GROUP = 1024
"""Number of rollouts that are written at once, so that a large history does not have to fit into memory."""
_DATA_FILE = Path("data") / "train-00000-of-00001.parquet"
"""Path of the rollouts in a dataset, where ``datasets.load_dataset`` looks for the split ``train``."""


class TableError(RuntimeError):
    """A table cannot be written; the message says what to do."""


@dataclass(frozen=True)
class TableResult:
    """Result of an export."""

    file: Path
    problems: int
    """Number of problems with rollouts."""
    rollouts: int
    corrupt: int
    """Number of entries that could not be read and are therefore not in the file."""


def export_parquet(client: Redis, keys: HistoryKeys, file: Path, decode: Decoder | None = None) -> TableResult:
    """Write the rollouts in a history's window to a Parquet file, which is replaced when the export is complete.

    Without *decode*, which returns the texts of tokens, the column ``text`` is empty.

    Raises:
        UnknownHistoryError: there is no such history.
        TableError: pyarrow is not installed.
        OSError: the file cannot be written.
        redis.RedisError: Redis fails; nothing is left of the new file.
    """
    pyarrow, parquet = _import_pyarrow()
    store, info = HistoryStore.open_existing(client, keys)
    schema = _schema(pyarrow)
    problems = rollouts = corrupt = 0
    with replacing(file) as raw, parquet.ParquetWriter(raw, schema, compression="zstd") as writer:
        pending: list[dict[str, Any]] = []

        def write() -> None:
            writer.write_table(pyarrow.Table.from_pylist(pending, schema))
            pending.clear()

        for problem in store.catalog.problems():
            contents = read_problem(store, problem.problem_id, info)
            pending += _rows(problem.problem_id, contents, decode)
            problems += bool(contents.records)
            rollouts += len(contents.records)
            corrupt += contents.num_corrupt
            if len(pending) >= _ROWS_PER_GROUP:
                write()
        write()
    return TableResult(file, problems, rollouts, corrupt)


def export_dataset(client: Redis, keys: HistoryKeys, directory: Path, decode: Decoder | None = None) -> TableResult:
    """Write the rollouts in a history's window to a directory that ``datasets.load_dataset`` reads.

    It can be uploaded to the Hugging Face hub as it is. For arguments and errors, see :func:`export_parquet`.

    Raises:
        TableError: also if the directory has a README.md that does not come from an earlier export.
    """
    _, info = HistoryStore.open_existing(client, keys)
    card = directory / "README.md"
    if card.exists() and not (directory / _DATA_FILE).exists():
        raise TableError(
            f"{directory} is no exported dataset, and its README.md would be replaced; name a new directory"
        )
    (directory / _DATA_FILE).parent.mkdir(parents=True, exist_ok=True)
    result = export_parquet(client, keys, directory / _DATA_FILE, decode)
    card.write_text(_card(keys.full_name, info, result))
    return result


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise TableError("Parquet files need pyarrow, which is not installed: pip install pyarrow") from None
    return pyarrow, parquet


def _schema(pyarrow: Any) -> pa.Schema:
    columns = {
        "rollout_id": pyarrow.string(),
        "problem_id": pyarrow.string(),
        "run": pyarrow.string(),
        "weight_version": pyarrow.int64(),
        "generation": pyarrow.int64(),
        "step": pyarrow.int64(),
        "finish_reason": pyarrow.string(),
        "reward": pyarrow.float64(),
        "length": pyarrow.int64(),
        "accepted_draft_tokens": pyarrow.int64(),
        "token_ids": pyarrow.list_(pyarrow.uint32()),
        "draft_sources": pyarrow.list_(pyarrow.uint8()),
        "text": pyarrow.string(),
    }
    return pyarrow.schema(list(columns.items()))


def _rows(problem_id: str, contents: ProblemContents, decode: Decoder | None) -> Iterator[dict[str, Any]]:
    for record in contents.records:
        yield {
            "rollout_id": record.rollout_id,
            "problem_id": problem_id,
            "run": record.run,
            "weight_version": record.weight_version,
            "generation": record.generation,
            "step": None if record.step < 0 else record.step,
            "finish_reason": record.finish_reason,
            "reward": contents.reward(record),
            "length": len(record.tokens),
            "accepted_draft_tokens": len(record.draft_sources) - record.draft_sources.count(SAMPLED),
            "token_ids": record.tokens,
            "draft_sources": list(record.draft_sources) or None,
            "text": None if decode is None else "".join(decode(record.tokens.tolist())),
        }


def _card(history: str, info: HistoryInfo, result: TableResult) -> str:
    codes = ", ".join(f"{number} {source}" for number, source in enumerate(DRAFT_SOURCES, start=1))
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: {_DATA_FILE.as_posix()}
---
# Rollouts of {history}

{result.rollouts:,} rollouts of {result.problems:,} problems by {info.model or "a model of unknown name"}, exported from
a history of das-rollout. `generation` orders the weight versions of all runs. `draft_sources` says of each token
whether it was an accepted draft token, and of which source: 0 no, {codes}.
"""
