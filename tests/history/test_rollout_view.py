"""Reading rollouts, and exporting them as tables: `rollout-history show` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from rollout_api.protocol.exit_codes import EXIT_STATE
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.contents import _texts, load_decoder
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_store.history_service.cli import app
from rollout_store.history_service.views import (
    MAX_SHOWN_TOKENS,
    compare_rollouts,
    differing_tokens,
    styled_text,
)
from tests.support.history_contents import KEYS

TEXTS = ["the answer is 12 ✓", "the answer is 13, because…", "no 東京"]


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer: several tokens may be one character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the answer is 12 because"] * 3, trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def tokens(tokenizer_directory: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture
def store(redis_url: str, tokens: list[list[int]]) -> HistoryStore:
    """A history with three rollouts of one problem. The first begins with three drafted tokens."""
    store = HistoryStore(connect_history(redis_url), KEYS, window=16)
    store.metadata.open("fedcba", "math-model")
    store.metadata.publish("run", 0)
    for number, ids in enumerate(tokens):
        codes = bytes([1, 1, 2] + [0] * (len(ids) - 3)) if number == 0 else b""
        record = HistoryRecord(
            f"u/r/{number}/0", "run", 0, 0, np.array(ids, np.uint32), "stop", step=7, draft_sources=codes
        )
        store.append("p", record, newest=0)
    store.set_rewards("p", {"u/r/0/0": 1.0, "u/r/1/0": 0.0})
    return store


def run(url: str, *arguments: str, code: int = 0) -> str:
    result: Result = CliRunner().invoke(app, [*arguments, "--redis", url])
    assert code == result.exit_code, result.output
    return result.output


def test_the_text_of_each_token_is_that_of_its_characters(tokenizer_directory: Path, tokens: list[list[int]]) -> None:
    decode = load_decoder(str(tokenizer_directory))
    for ids, text in zip(tokens, TEXTS, strict=True):
        pieces = decode(ids)
        assert len(ids) == len(pieces)
        assert text == "".join(pieces)


def test_show_prints_texts_and_two_rollouts_side_by_side(
    redis_url: str, store: HistoryStore, tokenizer_directory: Path
) -> None:
    output = run(
        redis_url, "show", "math", "p", "--texts", "2", "--compare", "1", "2", "--tokenizer", str(tokenizer_directory)
    )
    assert TEXTS[0] in output and TEXTS[2] in output
    assert "#3: generation 0, weight version 0" in output
    # A legend of colors is of no use in a pipe.
    assert "Accepted draft tokens:" not in output
    assert "reward 1" in output
    line = next(line for line in output.splitlines() if TEXTS[0] in line)
    assert TEXTS[1] in line


def test_without_a_tokenizer_token_ids_are_shown(redis_url: str, store: HistoryStore, tokens: list[list[int]]) -> None:
    output = run(redis_url, "show", "math", "p", "--texts", "1")
    assert " ".join(map(str, tokens[2])) in " ".join(output.split())


def test_a_rollout_or_tokenizer_that_does_not_exist_is_an_error(
    redis_url: str, store: HistoryStore, tmp_path: Path
) -> None:
    message = run(redis_url, "show", "math", "p", "--compare", "1", "4", code=1)
    assert message.startswith("error: --compare: there is no rollout 4; the table numbers them from 1 to 3")
    message = run(
        redis_url, "show", "math", "p", "--texts", "1", "--tokenizer", str(tmp_path / "none"), code=EXIT_STATE
    )
    assert "cannot be loaded" in message and "tokenizer.json" in message


def record(ids: list[int], codes: bytes = b"") -> HistoryRecord:
    return HistoryRecord("u/r/0/0", "run", 0, 0, np.array(ids, np.uint32), "stop", draft_sources=codes)


def spans(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_drafted_tokens_have_the_color_of_their_source() -> None:
    text = styled_text(
        record([5, 6, 7, 8], bytes([0, 1, 2, 7])), lambda ids: [f"{one} " for one in ids], frozenset({2})
    )
    assert "5 6 7 8 " == text.plain
    assert [("6 ", "green"), ("7 ", "cyan reverse")] == spans(text)


def test_a_long_rollout_is_cut() -> None:
    text = styled_text(record([1] * (MAX_SHOWN_TOKENS + 5)), lambda ids: ["x" for _ in ids], frozenset())
    assert text.plain.endswith("x … and 5 more tokens")
    assert MAX_SHOWN_TOKENS == text.plain.count("x")


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_what_two_rollouts_have_in_common_is_equal(first: list[int], second: list[int]) -> None:
    only_first, only_second = differing_tokens(first, second)
    common = [token for index, token in enumerate(first) if index not in only_first]
    assert common == [token for index, token in enumerate(second) if index not in only_second]
    if first == second:
        assert (frozenset(), frozenset()) == (only_first, only_second)


def test_rollouts_of_several_lines_are_compared_line_by_line(store: HistoryStore) -> None:
    contents: Any = type("Contents", (), {"reward": lambda *_: None})()
    shown = compare_rollouts((1, 2), (record([1, 2]), record([1])), contents, lambda ids: [f"{one}\n" for one in ids])
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    assert [["1", "1"], ["2"]] == [line.split() for line in capture.get().splitlines()[1:3]]


def test_parquet_has_all_columns(
    redis_url: str, store: HistoryStore, tokens: list[list[int]], tokenizer_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "math.parquet"
    output = run(redis_url, "export", "math", str(file), "--tokenizer", str(tokenizer_directory))
    assert "3 rollouts of 1 problems." in output
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert TEXTS == [row["text"] for row in rows]
    assert tokens == [row["token_ids"] for row in rows]
    assert [1.0, 0.0, None] == [row["reward"] for row in rows]
    assert [3, 0, 0] == [row["accepted_draft_tokens"] for row in rows]
    assert [[1, 1, 2], None] == [rows[0]["draft_sources"][:3], rows[1]["draft_sources"]]
    assert {("p", "run", 0, 7, "stop")} == {
        (row["problem_id"], row["run"], row["weight_version"], row["step"], row["finish_reason"]) for row in rows
    }


def test_a_dataset_is_loaded_by_hugging_face_datasets(redis_url: str, store: HistoryStore, tmp_path: Path) -> None:
    directory = tmp_path / "rollouts"
    output = run(redis_url, "export", "math", str(directory), "--format", "dataset")
    assert "--tokenizer" in output
    assert f"load_dataset('{directory}')" in " ".join(output.split())
    loaded = datasets.load_dataset(str(directory), cache_dir=str(tmp_path / "cache"))
    assert ["u/r/0/0", "u/r/1/0", "u/r/2/0"] == sorted(loaded["train"]["rollout_id"])
    assert "3 rollouts of 1 problems by math-model" in (directory / "README.md").read_text()
    run(redis_url, "export", "math", str(directory), "--format", "dataset")  # replaces the earlier one


def test_a_dataset_replaces_no_files_of_others(redis_url: str, store: HistoryStore, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("My project")
    output = run(redis_url, "export", "math", str(tmp_path), "--format", "dataset", code=5)
    assert "name a new directory" in output
    assert "My project" == (tmp_path / "README.md").read_text()
    assert not (tmp_path / "data").exists()


def test_an_archive_needs_no_tokenizer(redis_url: str, store: HistoryStore, tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl.zst"
    assert "omit --tokenizer" in run(redis_url, "export", "math", str(file), "--tokenizer", "policy", code=5)
    assert not file.exists()


def test_an_existing_file_stays_if_the_export_fails(redis_url: str, store: HistoryStore, tmp_path: Path) -> None:
    file = tmp_path / "math.parquet"
    file.write_bytes(b"old")
    run(redis_url, "export", "unknown", str(file), code=1)
    assert b"old" == file.read_bytes()
    assert [file] == list(tmp_path.iterdir())


@given(st.data())
def test_any_tokens_have_texts_that_are_the_text_of_all(data: st.DataObject) -> None:
    """Tokens may stand for single bytes, which need not be valid, and end within a character."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ids = data.draw(st.lists(st.integers(0, 257), max_size=12))
    pieces = _texts(tokenizer, ids)
    assert len(ids) == len(pieces)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert text == "".join(pieces)


def test_a_response_that_ends_within_a_character_keeps_its_last_token(
    tokenizer_directory: Path, tokens: list[list[int]]
) -> None:
    pieces = load_decoder(str(tokenizer_directory))(tokens[0][:-1])
    assert pieces[-1] or pieces[-2]
    assert "".join(pieces).endswith("\ufffd")
