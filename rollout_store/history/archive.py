"""Exports a history to one file and imports it again.

An archive consists of JSON lines, compressed with zstd: a header, one line per rollout, and a last line with a
checksum, which distinguishes a complete file from a truncated one.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import redis
import zstandard
from numpy.typing import NDArray

from rollout_api.protocol.history_encoding import decode_draft_sources, encode_draft_sources, rollout_key
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Redis
from rollout_store.history.metadata import HistoryMetadata
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import AppendResult, HistoryStore

ROLLOUTS_PER_IMPORT_BATCH = 64
"""Number of rollouts that an import appends together."""

FORMAT = "das-rollout-history"
VERSION = 1
_COMPRESSION_LEVEL = 9
_MAX_LINE_BYTES = 2**28
"""Maximum size of a line (a rollout of 30 million tokens), so that a damaged file does not request all memory."""
_TOKEN_ID_LIMIT = 2**32 - 1
"""Token ids are less than this."""


class ArchiveError(ValueError):
    """The file is not a complete archive; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Header:
    """The first line of an archive."""

    history: str
    """Full name (``namespace/name``) of the exported history."""
    tokenizer: str
    """Fingerprint of its tokenizer's vocabulary."""
    model: str
    """Model whose rollouts it was created for."""
    generation: int
    """The newest generation when the export started."""
    window: int
    """Number of generations kept per problem."""
    max_bytes: int | None
    """Byte cap in Redis; None if there was none."""
    exported: float
    """Unix time at which the export started, by the server's clock."""
    published: dict[str, int]
    """Generations of the known weight versions, by ``<run>:<version>``."""


@dataclass(frozen=True)
class Contents:
    """Summary of a complete archive."""

    header: Header
    records: int
    """Number of rollouts."""
    newest: int
    """The newest generation of all rollouts."""


@dataclass(frozen=True)
class ExportResult:
    """Result of an export."""

    problems: int
    """Number of problems with rollouts."""
    records: int
    """Number of rollouts."""
    corrupt: int
    """Number of entries that could not be read and are therefore not in the file."""
    size: int
    """Size of the file in bytes."""


@dataclass(frozen=True)
class ImportResult:
    """Result of an import."""

    history: str
    """Full name of the history."""
    new: int
    """Number of rollouts that were added."""
    known: int
    """Number of rollouts that the history already contained."""
    too_old: int
    """Number of rollouts that are not in the history's window."""
    generation: int
    """The history's newest generation after the import."""


def export_history(client: Redis, keys: HistoryKeys, file: Path) -> ExportResult:
    """Write the rollouts in a history's window to *file*, which is replaced when the export is complete.

    Problems are written in the order of their last use, so that an import restores this order. Rollouts that are
    appended during the export may or may not be included.

    Raises:
        UnknownHistoryError: there is no such history.
        OSError: the file cannot be written.
        redis.RedisError: Redis fails; nothing is left of the new file.
    """
    store, info = HistoryStore.open_existing(client, keys)
    header = Header(
        history=keys.full_name,
        tokenizer=info.tokenizer,
        model=info.model,
        generation=info.generation,
        window=info.window,
        max_bytes=info.max_bytes,
        exported=float(client.time()[0]),
        published=store.metadata.published_versions(),
    )
    problems = records = corrupt = 0
    newest = info.generation
    with replacing(file) as raw:
        checksum = sha256()
        compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True)
        with compressor.stream_writer(raw, closefd=False) as compressed:

            def write(line: dict[str, Any]) -> None:
                data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
                checksum.update(data)
                compressed.write(data)

            write({"format": FORMAT, "version": VERSION, **asdict(header)})
            for problem in store.catalog.problems():
                problem_id = problem.problem_id
                sampled = store.catalog.generations([problem_id])[problem_id] or ()
                written, unreadable, last = _export_problem(store, problem_id, info.oldest_kept(sampled), write)
                problems += written > 0
                records, corrupt, newest = records + written, corrupt + unreadable, max(newest, last)
            write({"end": True, "records": records, "newest": newest, "sha256": checksum.hexdigest()})
        size = raw.tell()
    return ExportResult(problems, records, corrupt, size)


def _export_problem(
    store: HistoryStore, problem_id: str, oldest: int, write: Callable[[dict[str, Any]], None]
) -> tuple[int, int, int]:
    """Write each rollout of a problem once, even if the problem is compacted in the meantime.

    Returns:
        The number of rollouts, the number of unreadable entries, and the newest generation.
    """
    newest = 0
    written: set[str] = set()
    corrupt: set[str] = set()
    rewards: dict[bytes, float] = {}
    for log_slice in store.read_all(problem_id):
        rewards |= log_slice.rewards or {}
        for record in log_slice.records:
            if record.generation >= oldest and record.rollout_id not in written:
                written.add(record.rollout_id)
                newest = max(newest, record.generation)
                write(_rollout_line(problem_id, record, rewards.get(rollout_key(record.rollout_id))))
        corrupt.update(entry.entry_id for entry in log_slice.corrupt)
    return len(written), len(corrupt), newest


def read_contents(file: Path) -> Contents:
    """Read *file* to its end and check that it is complete.

    Raises:
        ArchiveError: it is not an archive, has an unknown version, is truncated or is damaged.
        OSError: it cannot be read.
    """
    checksum, header, num_lines, last = sha256(), None, 0, b""
    for line in _lines(file):
        if header is None:
            header = _parse_header(file, line)
        checksum.update(last)  # of all lines except the last one, which contains the checksum
        last, num_lines = line, num_lines + 1
    if header is None:
        raise ArchiveError(f"{file} is empty or truncated at its beginning; export it again")
    match _parse_line(file, last):
        case {"end": True, "records": int(records), "newest": int(newest), "sha256": str(digest)}:
            pass
        case _:
            raise ArchiveError(
                f"{file} is truncated after {num_lines - 1} rollouts: its end is missing; export it again"
            )
    if records != num_lines - 2 or digest != checksum.hexdigest():
        raise ArchiveError(f"{file} is damaged: its checksum is wrong; export it again")
    return Contents(header, records, newest)


def import_history(
    client: Redis, file: Path, keys: HistoryKeys | None = None, *, allow_model_mismatch: bool = False
) -> ImportResult:
    """Add the rollouts of an archive to a history, with their generations and rewards.

    Nothing is written unless the file is complete. An import that was interrupted can be repeated: rollouts that are
    there already are left unchanged. Without *keys*, the history is the one that was exported; it is created if it does
    not exist.

    Raises:
        ArchiveError: the file is not a complete archive.
        HistoryMismatchError: the history is of another tokenizer, or of another model and that is not allowed.
        OSError: the file cannot be read.
        redis.RedisError: Redis fails.
    """
    contents = read_contents(file)
    header = contents.header
    if keys is None:
        keys = HistoryKeys.from_full_name(header.history)
    info = HistoryMetadata(client, keys, window=header.window).info()
    store = HistoryStore(client, keys, window=header.window if info is None else info.window)
    store.metadata.open(
        header.tokenizer,
        header.model,
        allow_model_mismatch=allow_model_mismatch,
        max_bytes=header.max_bytes if info is None else None,
    )
    generation = store.metadata.merge_versions(contents.newest, header.published)
    totals = dict.fromkeys(AppendResult, 0)
    for problem_id, rollouts in groupby(_read_rollouts(file), key=lambda rollout: rollout[0]):
        for result, count in _import_problem(store, problem_id, rollouts, generation).items():
            totals[result] += count
    return ImportResult(
        history=keys.full_name,
        new=totals[AppendResult.APPENDED],
        known=totals[AppendResult.DUPLICATE],
        too_old=totals[AppendResult.TOO_OLD],
        generation=generation,
    )


def _import_problem(
    store: HistoryStore, problem_id: str, rollouts: Iterator[tuple[str, HistoryRecord, float | None]], newest: int
) -> dict[AppendResult, int]:
    """Append one problem's rollouts in batches; return the number of rollouts with each result."""
    counts = dict.fromkeys(AppendResult, 0)
    appended: Counter[int] = Counter()
    # Existing rewards are kept: they may be newer. An import that was interrupted may lack some.
    existing_rewards = store.statistics.rewards(problem_id)
    while batch := list(islice(rollouts, ROLLOUTS_PER_IMPORT_BATCH)):
        results = store.append_all([(problem_id, record) for _, record, _ in batch], newest=newest)
        for (_, record, _), result in zip(batch, results, strict=True):
            if isinstance(result, redis.ResponseError):
                raise result
            counts[result] += 1
            appended[record.generation] += result is AppendResult.APPENDED
        rewards = {
            record.rollout_id: reward
            for _, record, reward in batch
            if reward is not None and rollout_key(record.rollout_id) not in existing_rewards
        }
        if rewards:
            store.set_rewards(problem_id, rewards)
    # Newer rollouts of the same archive may have pushed older ones out of the window.
    kept = set(store.catalog.generations([problem_id])[problem_id] or ())
    deleted = sum(count for generation, count in appended.items() if generation not in kept)
    counts[AppendResult.APPENDED] -= deleted
    counts[AppendResult.TOO_OLD] += deleted
    return counts


def _rollout_line(problem_id: str, record: HistoryRecord, reward: float | None) -> dict[str, Any]:
    line = {
        "problem": problem_id,
        "rollout": record.rollout_id,
        "run": record.run,
        "weight_version": record.weight_version,
        "generation": record.generation,
        "step": record.step,
        "finish_reason": record.finish_reason,
        "reward": reward,
        "tokens": record.tokens.tolist(),
    }
    if len(record.context):
        line["context"] = record.context.tolist()
    if record.draft_sources:
        line["draft_sources"] = encode_draft_sources(record.draft_sources).hex()
    return line


def _read_rollouts(file: Path) -> Iterator[tuple[str, HistoryRecord, float | None]]:
    """Yield problem id, rollout and reward of each rollout in a complete archive."""
    lines = _lines(file)
    next(lines)
    for number, line in enumerate(lines, start=2):
        fields = _parse_line(file, line)
        if fields.get("end"):
            return
        try:
            record = HistoryRecord(
                rollout_id=str(fields["rollout"]),
                run=str(fields["run"]),
                weight_version=int(fields["weight_version"]),
                generation=int(fields["generation"]),
                tokens=_token_ids(fields["tokens"]),
                finish_reason=str(fields["finish_reason"]),
                context=_token_ids(fields.get("context", [])),
                step=int(fields["step"]),
                draft_sources=decode_draft_sources(bytes.fromhex(fields.get("draft_sources", ""))),
            )
            reward = fields["reward"]
            yield str(fields["problem"]), record, None if reward is None else float(reward)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArchiveError(f"{file}, line {number}: not a rollout: {type(error).__name__}: {error}") from None


def _token_ids(numbers: list[int]) -> NDArray[np.uint32]:
    ids = np.asarray(numbers, dtype=np.int64)
    if ids.ndim != 1 or (len(ids) and not (ids.min() >= 0 and ids.max() < _TOKEN_ID_LIMIT)):
        raise ValueError("a token id is out of range")
    return ids.astype(np.uint32)


def _parse_header(file: Path, line: bytes) -> Header:
    fields = _parse_line(file, line)
    if fields.get("format") != FORMAT:
        raise ArchiveError(f"{file} is not an archive of a history")
    if fields.get("version") != VERSION:
        raise ArchiveError(
            f"{file} is an archive of version {fields.get('version')}; this program reads version {VERSION}"
        )
    try:
        values = {name: fields[name] for name in Header.__dataclass_fields__}
    except KeyError as error:
        raise ArchiveError(f"{file} lacks {error} in its first line; export it again") from None
    return Header(**values)


def _parse_line(file: Path, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ArchiveError(f"{file} is truncated or damaged: a line is not a JSON object; export it again")
    return fields


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as raw:
        decompressed = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw), buffer_size=2**20)
        while True:
            try:
                line = decompressed.readline(_MAX_LINE_BYTES)
            except zstandard.ZstdError as error:
                if raw.seek(0) == 0 and raw.read(4) != zstandard.FRAME_HEADER:
                    raise ArchiveError(f"{file} is not an archive of a history") from None
                raise ArchiveError(f"{file} is damaged: {error}; export it again") from None
            if not line:
                return
            if not line.endswith(b"\n"):
                raise ArchiveError(f"{file} is truncated in the middle of a line; export it again")
            yield line


@contextmanager
def replacing(file: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces *file* once it is written to disk, or is deleted if that fails."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as raw:
            yield raw
            raw.flush()
            os.fsync(raw.fileno())
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
