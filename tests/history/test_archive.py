"""Archives: an exported history is imported completely or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import zstandard

from rollout_api.protocol.history_encoding import rollout_key
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect_history
from rollout_api.redis_client.server_functions import Redis
from rollout_store.history.archive import (
    ArchiveError,
    ExportResult,
    Header,
    ImportResult,
    export_history,
    import_history,
    read_contents,
)
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.metadata import HistoryMismatchError
from rollout_store.history.records import START, HistoryRecord
from rollout_store.history.store import HistoryStore, UnknownHistoryError
from tests.support.redis_servers import Cluster, Server

KEYS, COPY = HistoryKeys("default", "math"), HistoryKeys("team", "copy")
SPECIAL = "a {problem} of 50%\n»"
PROBLEMS = ["least recently used", SPECIAL, "p"]


def record(rollout_id: str, generation: int, tokens: int = 5, finish_reason: str = "stop") -> HistoryRecord:
    ids = np.arange(tokens, dtype=np.uint32) * 70_001
    return HistoryRecord(
        rollout_id,
        "run",
        generation - 1,
        generation,
        ids,
        finish_reason,
        np.arange(3, dtype=np.uint32),
        step=generation,
        draft_sources=bytes(number % 5 for number in range(tokens)) if generation % 2 else b"",
    )


@pytest.fixture
def client(redis_url: str) -> Any:
    return connect_history(redis_url)


@pytest.fixture
def store(client: Any) -> HistoryStore:
    """A history of three problems with some rewards. One problem is partly compacted."""
    store = HistoryStore(client, KEYS, window=4)
    store.metadata.open("tokenizer", "model", max_bytes=1 << 30)
    for generation in range(1, 6):
        assert generation == store.metadata.publish("run", generation - 1)
        for problem in PROBLEMS:
            some = [(problem, record(f"{problem!r}-{generation}-{number}", generation)) for number in range(3)]
            store.append_all(some, newest=generation)
        if generation == 4:
            MaintenanceOperations(store).compact("p")
    store.append("p", record("cut", 5, tokens=0, finish_reason="length"))
    store.set_rewards("p", {"'p'-5-0": 0.5, "'p'-3-1": -1.0})
    store.catalog.mark_used([SPECIAL, "p"])
    return store


def content(client: Redis, keys: HistoryKeys) -> dict[str, Any]:
    """Return everything that suffix indexes and length statistics read."""
    store = HistoryStore(client, keys, window=4)
    info = store.metadata.info()
    assert info is not None or not store.catalog.problems()
    slices = {
        problem.problem_id: store.read({problem.problem_id: START}, with_rewards=[problem.problem_id])[
            problem.problem_id
        ]
        for problem in store.catalog.problems()
    }
    return {
        problem: (
            sorted(
                (
                    r.rollout_id,
                    r.run,
                    r.weight_version,
                    r.generation,
                    r.step,
                    r.tokens.tolist(),
                    r.finish_reason,
                    len(r.context),
                    r.draft_sources,
                )
                for r in found.records
                if info and r.generation >= info.oldest_kept(known.generation for known in found.records)
            ),
            found.rewards,
        )
        for problem, found in slices.items()
    }


def lines(file: Path) -> list[bytes]:
    """Return the decompressed lines of an archive."""
    with file.open("rb") as raw:
        return zstandard.ZstdDecompressor().stream_reader(raw).read().splitlines(keepends=True)


def compress(file: Path, text: bytes) -> None:
    """Write text in the compression of archives."""
    file.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(text))


@pytest.fixture
def file(store: HistoryStore, client: Any, tmp_path: Path) -> Path:
    """An archive of *store*."""
    archive = tmp_path / "math.jsonl.zst"
    export_history(client, KEYS, archive)
    return archive


def test_deleted_history_is_restored_by_an_import(store: HistoryStore, client: Any, file: Path) -> None:
    before, info = content(client, KEYS), store.metadata.info()
    assert [13, 12, 12] == [len(before[problem][0]) for problem in ("p", SPECIAL, "least recently used")]
    assert {rollout_key("'p'-5-0"): 0.5, rollout_key("'p'-3-1"): -1.0} == before["p"][1]
    lengths, by_use = store.statistics.length_entries("p"), [problem.problem_id for problem in store.catalog.problems()]
    MaintenanceOperations(store).delete_history()
    assert ImportResult("default/math", new=37, known=0, too_old=0, generation=5) == import_history(client, file)
    assert before == content(client, KEYS)
    assert info == store.metadata.info()
    assert sorted(lengths, key=str) == sorted(store.statistics.length_entries("p"), key=str)
    # The same problem would be evicted first.
    assert by_use[0] == "least recently used" == store.catalog.problems()[0].problem_id
    # Published versions have their generations, and the next version gets a new one.
    assert [1, 5, 6] == [store.metadata.publish("run", version) for version in (0, 4, 5)]


def test_import_keeps_rewards_that_were_set_after_the_export(store: HistoryStore, client: Any, file: Path) -> None:
    store.set_rewards("p", {"'p'-5-0": 0.75, "'p'-5-1": 0.25})
    import_history(client, file)
    expected = {rollout_key("'p'-5-0"): 0.75, rollout_key("'p'-5-1"): 0.25, rollout_key("'p'-3-1"): -1.0}
    assert expected == store.statistics.rewards("p")


def test_archive_has_a_header_and_leaves_no_temporary_file(file: Path, client: Any) -> None:
    contents = read_contents(file)
    assert (37, 5) == (contents.records, contents.newest)
    published = {f"run:{version}": version + 1 for version in range(5)}
    exported = contents.header.exported
    assert Header("default/math", "tokenizer", "model", 5, 4, 1 << 30, exported, published) == contents.header
    assert abs(exported - client.time()[0]) < 60
    result = export_history(client, KEYS, file)  # the size of the compressed file depends on the time in its header
    assert ExportResult(3, 37, 0, size=file.stat().st_size) == result
    assert [file] == list(file.parent.iterdir())
    first = json.loads(lines(file)[1])
    assert ("least recently used", [0, 70_001, 140_002, 210_003, 280_004]) == (first["problem"], first["tokens"])


def test_interrupted_import_can_be_repeated(client: Any, file: Path, tmp_path: Path) -> None:
    before = content(client, KEYS)
    with Server(tmp_path / "server") as running:
        other: Any = connect_history(running.url)
        import_history(other, file)
        catalog = HistoryStore(other, KEYS, window=4).catalog
        catalog.delete([problem for problem in catalog.problems() if problem.problem_id != SPECIAL])
        assert ImportResult("default/math", new=25, known=12, too_old=0, generation=5) == import_history(other, file)
        assert before == content(other, KEYS)


def test_archive_can_be_imported_into_another_history_and_on_a_cluster(client: Any, file: Path, tmp_path: Path) -> None:
    before = content(client, KEYS)
    import_history(client, file, COPY)
    assert before == content(client, COPY) == content(client, KEYS)
    with Cluster(tmp_path / "cluster") as cluster:
        clustered = connect_history(cluster.url)
        import_history(clustered, file, COPY)
        assert before == content(clustered, COPY)
        back = tmp_path / "back.jsonl.zst"
        export_history(clustered, COPY, back)
    assert sorted(lines(file)[1:-1]) == sorted(lines(back)[1:-1])


def test_existing_history_keeps_its_window_cap_and_generation(client: Any, file: Path) -> None:
    newer = HistoryStore(client, COPY, window=2)
    newer.metadata.open("tokenizer", "model", max_bytes=1 << 20)
    for version in range(6):
        newer.metadata.publish("another run", version)
    result = import_history(client, file, COPY)
    # The last two generations of each problem are added, with three rollouts each, and the one that was cut off.
    assert ImportResult("team/copy", new=19, known=0, too_old=18, generation=6) == result
    assert {(4, 5)} == {tuple(newer.catalog.generations([problem])[problem] or ()) for problem in PROBLEMS}
    info = newer.metadata.info()
    assert info is not None
    assert (2, 1 << 20, 6) == (info.window, info.max_bytes, info.generation)


def test_history_of_another_tokenizer_or_model_is_rejected(client: Any, file: Path) -> None:
    for keys, tokenizer, model in ((COPY, "another", "model"), (HistoryKeys("d", "m"), "tokenizer", "another")):
        HistoryStore(client, keys, window=4).metadata.open(tokenizer, model)
        with pytest.raises(HistoryMismatchError, match=f"history {keys.full_name} holds rollouts of "):
            import_history(client, file, keys)
        assert {} == content(client, keys)
    assert 37 == import_history(client, file, HistoryKeys("d", "m"), allow_model_mismatch=True).new


def test_export_of_an_unknown_history_is_an_error(client: Any, tmp_path: Path, store: HistoryStore) -> None:
    with pytest.raises(UnknownHistoryError, match=r"there is no history team/copy; this server has: default/math"):
        export_history(client, COPY, tmp_path / "file")
    assert [] == list(tmp_path.iterdir())


def test_unreadable_entries_are_counted_and_omitted(client: Any, store: HistoryStore, tmp_path: Path) -> None:
    client.xadd(KEYS.log("p"), {"d": b"garbage", "g": 5})
    result = export_history(client, KEYS, tmp_path / "file")
    assert (37, 1) == (result.records, result.corrupt)
    assert 37 == read_contents(tmp_path / "file").records


def test_truncated_file_is_rejected(client: Any, file: Path) -> None:
    whole = file.read_bytes()
    # The last four bytes are zstd's checksum. Without them, the checksum of the archive is still correct.
    for size in [*range(0, len(whole) - 4, 7), *range(len(whole) - 12, len(whole) - 4)]:
        file.write_bytes(whole[:size])
        with pytest.raises(ArchiveError, match=r"truncated|damaged|is empty|is not an archive"):
            import_history(client, file, COPY)
    assert {} == content(client, COPY)
    # The same applies to a file that was recompressed from some of the lines, with a correct checksum of zstd.
    file.write_bytes(whole)
    text = lines(file)
    for some in (text[:1], text[:-1], text[:5], [*text[:-1], text[-1][:-9]]):
        compress(file, b"".join(some))
        with pytest.raises(ArchiveError, match="truncated"):
            import_history(client, file, COPY)
    for some in (
        [text[0], *text[2:]],
        [*text[:2], *text[1:]],
        [*text, *text[1:]],
        [text[0], text[2], text[1], *text[3:]],
    ):
        compress(file, b"".join(some))
        with pytest.raises(ArchiveError, match="damaged"):
            import_history(client, file, COPY)
    assert {} == content(client, COPY)


def test_file_with_a_changed_byte_is_rejected(client: Any, file: Path) -> None:
    whole, text = file.read_bytes(), lines(file)
    harmless = 0
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 0x10
        file.write_bytes(changed)
        try:
            import_history(client, file, COPY)
        except ArchiveError:
            assert {} == content(client, COPY)
        else:
            # Some bits of a zstd frame do not affect the decompressed data.
            assert text == lines(file)
            harmless += 1
            MaintenanceOperations(HistoryStore(client, COPY, window=4)).delete_history()
    assert harmless < len(whole) / 50


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        (b"{}\n", "is not an archive of a history"),
        (b"rollouts\n", "is truncated or damaged"),
        (b"[]\n", "is truncated or damaged"),
        (
            b'{"format": "das-rollout-history", "version": 9}\n',
            "is an archive of version 9; this program reads version 1",
        ),
        (b'{"format": "das-rollout-history", "version": 1}\n', "lacks 'history' in its first line"),
    ],
)
def test_file_of_another_format_is_rejected(client: Any, tmp_path: Path, text: bytes, expected_error: str) -> None:
    compress(tmp_path / "file", text)
    with pytest.raises(ArchiveError, match=expected_error):
        import_history(client, tmp_path / "file", COPY)
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ArchiveError, match="is not an archive of a history"):
        import_history(client, tmp_path / "file", COPY)


def test_failed_export_leaves_the_existing_file(store: HistoryStore, client: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("an earlier archive")
    client.set(KEYS.last_used(0), "not a sorted set")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        export_history(client, KEYS, file)
    assert [(file, "an earlier archive")] == [(path, path.read_text()) for path in tmp_path.iterdir()]
