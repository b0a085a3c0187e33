"""Tests of reading traces and selecting their checkpoints."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.traces import Trajectory, checkpoints, problems_of, read_trace


def read_rows(file: Path, rows: list[dict[str, Any]]) -> list[Trajectory]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(file, tokenizer)


def rows_with_checkpoints(names: list[Any]) -> list[dict[str, Any]]:
    return [
        {"problem_id": "p", "sample_index": 0, "epoch_or_checkpoint": name, "prompt": "a", "text": "a b"}
        for name in names
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["step_400", "step_1000", "step_400"], ["step_400", "step_1000"]),
        (["step_1000", "step_400"], ["step_400", "step_1000"]),
        ([0, 9, 10], ["0", "9", "10"]),
        (["sft", "rl_10", "final"], ["sft", "rl_10", "final"]),
        ([None, None], [""]),
    ],
)
def test_checkpoints_are_sorted_by_number_or_kept_in_file_order(
    tmp_path: Path, names: list[Any], expected: list[str]
) -> None:
    assert expected == checkpoints(read_rows(tmp_path / "t.jsonl", rows_with_checkpoints(names)))


def test_last_two_checkpoints_are_history_and_evaluated_by_default(tmp_path: Path) -> None:
    (problem,) = problems_of(read_rows(tmp_path / "t.jsonl", rows_with_checkpoints([0, 9, 10])), None, None, None)
    assert ["9"] == [rollout.checkpoint for rollout in problem.history]
    assert ["10"] == [rollout.checkpoint for rollout in problem.evaluated]


def test_named_checkpoint_is_used_as_history(tmp_path: Path) -> None:
    (problem,) = problems_of(read_rows(tmp_path / "t.jsonl", rows_with_checkpoints([0, 1, 2])), "0", "1", None)
    assert ["0"] == [rollout.checkpoint for rollout in problem.history]


def test_error_names_the_line_when_a_line_is_not_a_trajectory(tmp_path: Path) -> None:
    rows = [*rows_with_checkpoints([1]), {"problem_id": "p", "text": "a"}]
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2, is not a trajectory: KeyError: 'prompt'"):
        read_rows(tmp_path / "t.jsonl", rows)


def test_token_ids_are_read_without_a_tokenizer(tmp_path: Path) -> None:
    prompt, response = (base64.b64encode(np.array(tokens, "<u2").tobytes()).decode() for tokens in ([1, 2], [5, 700]))
    row = {"problem_id": "p", "sample_index": 0, "epoch_or_checkpoint": "version_3"}
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({**row, "prompt_tokens": prompt, "tokens": response}).encode()))
    [trajectory] = read_trace(file, None)
    assert ("p", 0, "version_3") == (trajectory.problem, trajectory.sample, trajectory.checkpoint)
    assert [1, 2] == trajectory.prompt.tolist()
    assert [[5, 700]] == [segment.tokens.tolist() for segment in trajectory.segments]
