"""A history as one file: JSON lines, compressed by zstd, with an end that tells a whole file from a part of one."""

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

from rollout_api.protocol.keys import HistoryKeys, history_of
from rollout_api.protocol.length_entries import rollout_key
from rollout_worker.history.maintenance import known_history
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.server_functions import Call, Redis, run
from rollout_worker.history.store import ADOPT, PUBLISHED, START, Appended, HistoryStore

FORMAT = "das-rollout-history"
VERSION = 1
_LEVEL = 9
_LONGEST_LINE = 2**28
"""Bytes: a rollout of 30 million tokens; a damaged file must not ask for all memory."""
_AT_ONCE = 64
"""Rollouts that are written together."""
_PUBLISHED_AT_ONCE = 1000
_TOKENS = 2**32 - 1
"""Token ids are below this."""


class ArchiveError(ValueError):
    """A file that is no whole archive; the text names the file and says what is wrong with it."""


@dataclass(frozen=True)
class Header:
    """The first line of an archive: what it is an archive of."""

    history: str
    """``namespace/name`` of the history that was exported."""
    tokenizer: str
    model: str
    generation: int
    """The newest generation when the export began."""
    window: int
    """Generations that it was asked to keep."""
    max_bytes: int | None
    exported: float
    """When the export began, in seconds since the epoch, by the server's clock."""
    published: dict[str, int]
    """A run and its weight version, as ``<run>:<version>`` → its generation."""


@dataclass(frozen=True)
class Contents:
    """What a whole archive holds."""

    header: Header
    records: int
    newest: int
    """The newest generation of all rollouts in it."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    problems: int
    records: int
    corrupt: int
    """Entries of the history that could not be read; they are not in the file."""
    size: int
    """Bytes of the file."""


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    history: str
    new: int
    known: int
    """Rollouts that were there already."""
    too_old: int
    """Rollouts that are not in the history's window."""
    generation: int
    """The history's newest generation now."""


def export_history(client: Redis, keys: HistoryKeys, file: Path) -> Exported:
    """Write what is in a history's window to *file*, which is replaced when all is done.

    Its problems come in the order of their last use, so that an import restores it.
    Rollouts that are appended meanwhile may be in it or not.

    Raises:
        UnknownHistoryError: if there is no such history.
        OSError: if the file cannot be written.
        redis.RedisError: if Redis fails; nothing is left of the file then.
    """
    store, about = known_history(client, keys)
    header = Header(
        history=keys.full_name,
        tokenizer=about.tokenizer,
        model=about.model,
        generation=about.generation,
        window=about.window,
        max_bytes=about.max_bytes,
        exported=float(client.time()[0]),
        published=_published(client, keys),
    )
    problems = records = corrupt = 0
    newest = about.generation
    with _replaced(file) as raw:
        sums = sha256()
        with zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).stream_writer(raw, closefd=False) as packed:

            def write(line: dict[str, Any]) -> None:
                data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
                sums.update(data)
                packed.write(data)

            write({"format": FORMAT, "version": VERSION, **asdict(header)})
            for problem in sorted(store.problems(), key=lambda one: one.used):
                sampled = store.generations_of([problem.problem])[problem.problem] or ()
                written, unread, last = _export_problem(store, problem.problem, about.oldest_kept(sampled), write)
                problems += written > 0
                records, corrupt, newest = records + written, corrupt + unread, max(newest, last)
            write({"end": True, "records": records, "newest": newest, "sha256": sums.hexdigest()})
        size = raw.tell()
    return Exported(problems, records, corrupt, size)


def _export_problem(
    store: HistoryStore, problem: str, oldest: int, write: Callable[[dict[str, Any]], None]
) -> tuple[int, int, int]:
    """Write one problem's rollouts, each once, though it may be compacted meanwhile.

    Returns:
        Rollouts, entries that could not be read, the newest generation.
    """
    cursor, newest, more = START, 0, True
    seen: set[str] = set()
    corrupt: set[str] = set()
    rewards: dict[bytes, float] = {}
    while more:
        found = store.read({problem: cursor}, rewarded={problem} if cursor == START else ())[problem]
        rewards |= found.rewards or {}
        for record in found.records:
            if record.generation >= oldest and record.rollout_id not in seen:
                seen.add(record.rollout_id)
                newest = max(newest, record.generation)
                write(_line(problem, record, rewards.get(rollout_key(record.rollout_id))))
        corrupt.update(one.entry_id for one in found.corrupt)
        cursor, more = found.cursor, found.more
    return len(seen), len(corrupt), newest


def read_contents(file: Path) -> Contents:
    """Read *file* to its end and make sure that it is whole.

    Raises:
        ArchiveError: if it is no archive, of an unknown version, cut off or damaged.
        OSError: if it cannot be read.
    """
    sums, header, lines, last = sha256(), None, 0, b""
    for line in _lines(file):
        if header is None:
            header = _header(file, line)
        sums.update(last)  # the sum is of all lines but the last, in which it stands
        last, lines = line, lines + 1
    if header is None:
        raise ArchiveError(f"{file} is empty, or cut off at its beginning; export it again")
    match _parsed(file, last):
        case {"end": True, "records": int(told), "newest": int(newest), "sha256": str(digest)}:
            pass
        case _:
            raise ArchiveError(f"{file} is cut off: its end is missing after {lines - 1} rollouts; export it again")
    if told != lines - 2 or digest != sums.hexdigest():
        raise ArchiveError(f"{file} is damaged: its checksum is wrong; export it again")
    return Contents(header, told, newest)


def import_history(
    client: Redis, file: Path, keys: HistoryKeys | None = None, *, allow_foreign_model: bool = False
) -> Imported:
    """Bring the rollouts of an archive into a history, with their generations and rewards.

    Nothing is written unless the file is whole. An import that failed half-way goes on when it is repeated: a rollout
    that is there already is left as it is.

    Args:
        client: of the server.
        file: the archive.
        keys: the history, which is made if there is none [default: the one that was exported].
        allow_foreign_model: also into the history of another model with the same tokenizer.

    Raises:
        ArchiveError: if the file is no whole archive.
        HistoryMismatchError: if the history is of another tokenizer, or of another model and that is not allowed.
        OSError: if the file cannot be read.
        redis.RedisError: if Redis fails.
    """
    contents = read_contents(file)
    header = contents.header
    if keys is None:
        keys = history_of(header.history)
    known = HistoryStore(client, keys, window=header.window).about()
    store = HistoryStore(client, keys, window=header.window if known is None else known.window)
    store.open(
        header.tokenizer,
        header.model,
        allow_foreign_model=allow_foreign_model,
        max_bytes=header.max_bytes if known is None else None,
    )
    generation = _adopt(client, keys, contents)
    became = dict.fromkeys(Appended, 0)
    for problem, of_problem in groupby(_records(file), key=lambda one: one[0]):
        for what, rollouts in _import_problem(store, problem, of_problem, generation).items():
            became[what] += rollouts
    return Imported(keys.full_name, became[Appended.NEW], became[Appended.KNOWN], became[Appended.TOO_OLD], generation)


def _import_problem(
    store: HistoryStore, problem: str, rollouts: Iterator[tuple[str, HistoryRecord, float | None]], newest: int
) -> dict[Appended, int]:
    """Append one problem's rollouts, some at a time; what became of how many in the end."""
    became = dict.fromkeys(Appended, 0)
    new: Counter[int] = Counter()
    rewarded = store.rewards(problem)  # since, perhaps; an import that failed half-way may lack some
    while some := list(islice(rollouts, _AT_ONCE)):
        appended = store.append_all([(problem, record) for _, record, _ in some], newest=newest)
        for (_, record, _), what in zip(some, appended, strict=True):
            if isinstance(what, redis.ResponseError):
                raise what
            became[what] += 1
            new[record.generation] += what is Appended.NEW
        rewards = {
            record.rollout_id: reward
            for _, record, reward in some
            if reward is not None and rollout_key(record.rollout_id) not in rewarded
        }
        if rewards:
            store.reward(problem, rewards)
    # those that newer ones of the same archive have pushed out
    kept = set(store.generations_of([problem])[problem] or ())
    gone = sum(rollouts for generation, rollouts in new.items() if generation not in kept)
    became[Appended.NEW] -= gone
    became[Appended.TOO_OLD] += gone
    return became


def _adopt(client: Redis, keys: HistoryKeys, contents: Contents) -> int:
    """Make the history count on from the archive's newest generation; returns the newest of both."""
    published = [(PUBLISHED + version, known) for version, known in contents.header.published.items()]
    generation = 0
    for at in range(0, len(published) or 1, _PUBLISHED_AT_ONCE):
        some = [word for pair in published[at : at + _PUBLISHED_AT_ONCE] for word in pair]
        generation = int(run(client, Call(ADOPT, [keys.meta], [contents.newest, *some])))
    return generation


def _published(client: Redis, keys: HistoryKeys) -> dict[str, int]:
    stored: Any = client.hgetall(keys.meta)
    prefix = PUBLISHED.encode()
    return {name[len(prefix) :].decode(): int(value) for name, value in stored.items() if name.startswith(prefix)}


def _line(problem: str, record: HistoryRecord, reward: float | None) -> dict[str, Any]:
    line = {
        "problem": problem,
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
    return line


def _records(file: Path) -> Iterator[tuple[str, HistoryRecord, float | None]]:
    """Problem, rollout and reward, of a whole archive."""
    lines = _lines(file)
    next(lines)
    for number, line in enumerate(lines, start=2):
        found = _parsed(file, line)
        if found.get("end"):
            return
        try:
            record = HistoryRecord(
                rollout_id=str(found["rollout"]),
                run=str(found["run"]),
                weight_version=int(found["weight_version"]),
                generation=int(found["generation"]),
                tokens=_ids(found["tokens"]),
                finish_reason=str(found["finish_reason"]),
                context=_ids(found.get("context", [])),
                step=int(found["step"]),
            )
            reward = found["reward"]
            yield str(found["problem"]), record, None if reward is None else float(reward)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArchiveError(f"{file}, line {number}: no rollout: {type(error).__name__}: {error}") from None


def _ids(numbers: list[int]) -> NDArray[np.uint32]:
    ids = np.asarray(numbers, dtype=np.int64)
    if ids.ndim != 1 or (len(ids) and not (ids.min() >= 0 and ids.max() < _TOKENS)):
        raise ValueError("a token id is out of range")
    return ids.astype(np.uint32)


def _header(file: Path, line: bytes) -> Header:
    found = _parsed(file, line)
    if found.get("format") != FORMAT:
        raise ArchiveError(f"{file} is no archive of a history")
    if found.get("version") != VERSION:
        raise ArchiveError(
            f"{file} is an archive of version {found.get('version')}; this program reads version {VERSION}"
        )
    try:
        fields = {name: found[name] for name in Header.__dataclass_fields__}
    except KeyError as error:
        raise ArchiveError(f"{file} has no {error} in its first line; export it again") from None
    return Header(**fields)


def _parsed(file: Path, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ArchiveError(f"{file} is cut off or damaged: a line is no JSON object; export it again")
    return found


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as raw:
        unpacked = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw), buffer_size=2**20)
        while True:
            try:
                line = unpacked.readline(_LONGEST_LINE)
            except zstandard.ZstdError as error:
                if raw.seek(0) == 0 and raw.read(4) != zstandard.FRAME_HEADER:
                    raise ArchiveError(f"{file} is no archive of a history") from None
                raise ArchiveError(f"{file} is damaged: {error}; export it again") from None
            if not line:
                return
            if not line.endswith(b"\n"):
                raise ArchiveError(f"{file} is cut off in the middle of a line; export it again")
            yield line


@contextmanager
def _replaced(file: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of *file* when it is written and safe on disk, and vanishes when that fails."""
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
