"""Archives: what was exported is imported, in whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import zstandard

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.length_entries import rollout_key
from rollout_worker.history.archive import (
    ArchiveError,
    Exported,
    Header,
    Imported,
    export_history,
    import_history,
    read_contents,
)
from rollout_worker.history.connection import connect_history
from rollout_worker.history.maintenance import UnknownHistoryError
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.server_functions import Redis
from rollout_worker.history.store import START, HistoryMismatchError, HistoryStore
from tests.support.redis_servers import Cluster, Server

KEYS, COPY = HistoryKeys("default", "math"), HistoryKeys("team", "copy")
ODD = "a {problem} of 50%\n»"
PROBLEMS = ["last used first", ODD, "p"]


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
    )


@pytest.fixture
def client(redis_url: str) -> Any:
    return connect_history(redis_url)


@pytest.fixture
def store(client: Any) -> HistoryStore:
    """A history of three problems, one of them packed in part, with some rewards."""
    store = HistoryStore(client, KEYS, window=4)
    store.open("tokenizer", "model", max_bytes=1 << 30)
    for generation in range(1, 6):
        assert generation == store.publish("run", generation - 1)
        for problem in PROBLEMS:
            some = [(problem, record(f"{problem!r}-{generation}-{number}", generation)) for number in range(3)]
            store.append_all(some, newest=generation)
        if generation == 4:
            store.compact("p")
    store.append("p", record("cut", 5, tokens=0, finish_reason="length"))
    store.reward("p", {"'p'-5-0": 0.5, "'p'-3-1": -1.0})
    store.use([ODD, "p"])
    return store


def content(client: Redis, keys: HistoryKeys) -> dict[str, Any]:
    """All that a draft index or length statistics would see."""
    store = HistoryStore(client, keys, window=4)
    about = store.about()
    assert about is not None or not store.problems()
    slices = {
        problem.problem: store.read({problem.problem: START}, rewarded=[problem.problem])[problem.problem]
        for problem in store.problems()
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
                )
                for r in found.records
                if about and r.generation >= about.oldest_kept(one.generation for one in found.records)
            ),
            found.rewards,
        )
        for problem, found in slices.items()
    }


def lines(file: Path) -> list[bytes]:
    with file.open("rb") as raw:
        return zstandard.ZstdDecompressor().stream_reader(raw).read().splitlines(keepends=True)


def pack(file: Path, text: bytes) -> None:
    file.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(text))


@pytest.fixture
def file(store: HistoryStore, client: Any, tmp_path: Path) -> Path:
    """An archive of *store*."""
    archive = tmp_path / "math.jsonl.zst"
    export_history(client, KEYS, archive)
    return archive


def test_a_history_comes_back_as_it_was(store: HistoryStore, client: Any, file: Path) -> None:
    before, about = content(client, KEYS), store.about()
    assert [13, 12, 12] == [len(before[problem][0]) for problem in ("p", ODD, "last used first")]
    assert {rollout_key("'p'-5-0"): 0.5, rollout_key("'p'-3-1"): -1.0} == before["p"][1]
    lengths, last_use = store.lengths("p"), [one.problem for one in store.problems()]
    store.delete()
    assert Imported("default/math", new=37, known=0, too_old=0, generation=5) == import_history(client, file)
    assert before == content(client, KEYS)
    assert about == store.about()
    assert sorted(lengths, key=str) == sorted(store.lengths("p"), key=str)
    # the problem that would have been evicted first still would be
    assert last_use[0] == "last used first" == store.problems()[0].problem
    # versions that were published have their generations, the next one is new
    assert [1, 5, 6] == [store.publish("run", version) for version in (0, 4, 5)]


def test_what_was_rewarded_since_the_export_keeps_its_reward(store: HistoryStore, client: Any, file: Path) -> None:
    store.reward("p", {"'p'-5-0": 0.75, "'p'-5-1": 0.25})
    import_history(client, file)
    since = {rollout_key("'p'-5-0"): 0.75, rollout_key("'p'-5-1"): 0.25, rollout_key("'p'-3-1"): -1.0}
    assert since == store.rewards("p")


def test_an_archive_says_what_it_is(file: Path, client: Any) -> None:
    contents = read_contents(file)
    assert (37, 5) == (contents.records, contents.newest)
    published = {f"run:{version}": version + 1 for version in range(5)}
    exported = contents.header.exported
    assert Header("default/math", "tokenizer", "model", 5, 4, 1 << 30, exported, published) == contents.header
    assert abs(exported - client.time()[0]) < 60
    assert Exported(3, 37, 0, size=file.stat().st_size) == export_history(client, KEYS, file)
    assert [file] == list(file.parent.iterdir())  # nothing is left beside it
    first = json.loads(lines(file)[1])
    assert ("last used first", [0, 70_001, 140_002, 210_003, 280_004]) == (first["problem"], first["tokens"])


def test_importing_twice_is_importing_once(client: Any, file: Path) -> None:
    before = content(client, KEYS)
    assert Imported("default/math", new=0, known=37, too_old=0, generation=5) == import_history(client, file)
    assert before == content(client, KEYS)


def test_an_import_that_failed_halfway_goes_on(client: Any, file: Path, tmp_path: Path) -> None:
    before = content(client, KEYS)
    with Server(tmp_path / "server") as running:
        other: Any = connect_history(running.url)
        import_history(other, file)
        gone = HistoryStore(other, KEYS, window=4)
        gone.drop([one for one in gone.problems() if one.problem != ODD])
        assert Imported("default/math", new=25, known=12, too_old=0, generation=5) == import_history(other, file)
        assert before == content(other, KEYS)


def test_into_another_history_and_onto_a_cluster(client: Any, file: Path, tmp_path: Path) -> None:
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


def test_a_history_that_goes_on_keeps_its_own_window_and_count(client: Any, file: Path) -> None:
    newer = HistoryStore(client, COPY, window=2)
    newer.open("tokenizer", "model", max_bytes=1 << 20)
    for version in range(6):
        newer.publish("another run", version)
    done = import_history(client, file, COPY)
    # of each problem of the archive the last two generations: 3 rollouts of each, and the cut one
    assert Imported("team/copy", new=19, known=0, too_old=18, generation=6) == done
    assert {(4, 5)} == {tuple(newer.generations_of([problem])[problem] or ()) for problem in PROBLEMS}
    about = newer.about()
    assert about is not None
    assert (2, 1 << 20, 6) == (about.window, about.max_bytes, about.generation)


def test_other_tokenizers_and_models_are_refused(client: Any, file: Path) -> None:
    for keys, tokenizer, model in ((COPY, "another", "model"), (HistoryKeys("d", "m"), "tokenizer", "another")):
        HistoryStore(client, keys, window=4).open(tokenizer, model)
        with pytest.raises(HistoryMismatchError, match=f"history {keys.full_name} holds rollouts of "):
            import_history(client, file, keys)
        assert {} == content(client, keys)
    done = import_history(client, file, HistoryKeys("d", "m"), allow_foreign_model=True)
    assert 37 == done.new


def test_there_must_be_a_history_to_export(client: Any, tmp_path: Path, store: HistoryStore) -> None:
    with pytest.raises(UnknownHistoryError, match=r"there is no history team/copy; there are: default/math"):
        export_history(client, COPY, tmp_path / "file")
    assert [] == list(tmp_path.iterdir())


def test_what_cannot_be_read_is_counted_and_left_out(client: Any, store: HistoryStore, tmp_path: Path) -> None:
    client.xadd(KEYS.log("p"), {"d": b"garbage", "g": 5})
    done = export_history(client, KEYS, tmp_path / "file")
    assert (37, 1) == (done.records, done.corrupt)
    assert 37 == read_contents(tmp_path / "file").records


def test_a_file_that_lacks_its_end_is_refused_wherever_it_was_cut(client: Any, file: Path) -> None:
    whole = file.read_bytes()
    # the last four bytes are zstd's own checksum, without which the archive's still says that all is there
    for size in [*range(0, len(whole) - 4, 7), *range(len(whole) - 12, len(whole) - 4)]:
        file.write_bytes(whole[:size])
        with pytest.raises(ArchiveError, match=r"cut off|damaged|is empty|is no archive"):
            import_history(client, file, COPY)
    assert {} == content(client, COPY)
    # so is one that was written anew from a part of it, with checksums of its own
    file.write_bytes(whole)
    text = lines(file)
    for some in (text[:1], text[:-1], text[:5], [*text[:-1], text[-1][:-9]]):
        pack(file, b"".join(some))
        with pytest.raises(ArchiveError, match="cut off"):
            import_history(client, file, COPY)
    for some in (
        [text[0], *text[2:]],
        [*text[:2], *text[1:]],
        [*text, *text[1:]],
        [text[0], text[2], text[1], *text[3:]],
    ):
        pack(file, b"".join(some))
        with pytest.raises(ArchiveError, match="damaged"):
            import_history(client, file, COPY)
    assert {} == content(client, COPY)


def test_a_file_with_any_byte_changed_is_refused(client: Any, file: Path) -> None:
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
            # some bits of a zstd frame mean nothing for what it unpacks to
            assert text == lines(file)
            harmless += 1
            HistoryStore(client, COPY, window=4).delete()
    assert harmless < len(whole) / 50


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{}\n", "is no archive of a history"),
        (b"rollouts\n", "is cut off or damaged"),
        (b"[]\n", "is cut off or damaged"),
        (
            b'{"format": "das-rollout-history", "version": 9}\n',
            "is an archive of version 9; this program reads version 1",
        ),
        (b'{"format": "das-rollout-history", "version": 1}\n', "has no 'history' in its first line"),
    ],
)
def test_a_file_that_is_something_else_is_refused(client: Any, tmp_path: Path, text: bytes, says: str) -> None:
    pack(tmp_path / "file", text)
    with pytest.raises(ArchiveError, match=says):
        import_history(client, tmp_path / "file", COPY)
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ArchiveError, match="is no archive of a history"):
        import_history(client, tmp_path / "file", COPY)


def test_a_failed_export_leaves_what_was_there(store: HistoryStore, client: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("the last one")
    client.set(KEYS.used(0), "not a sorted set")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        export_history(client, KEYS, file)
    assert [(file, "the last one")] == [(one, one.read_text()) for one in tmp_path.iterdir()]
