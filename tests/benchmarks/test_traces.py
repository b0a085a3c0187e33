"""Traces as benchmarks read them: any file of the format, whatever it calls its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.problems import problems_of
from benchmarks.traces import Trajectory, checkpoints, read_trace


def trace(file: Path, rows: list[dict[str, Any]]) -> list[Trajectory]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(file, tokenizer)


def rows_of(names: list[Any]) -> list[dict[str, Any]]:
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
def test_checkpoints_are_in_the_order_of_training(tmp_path: Path, names: list[Any], expected: list[str]) -> None:
    assert checkpoints(trace(tmp_path / "t.jsonl", rows_of(names))) == expected


def test_the_last_checkpoint_is_generated_from_the_one_before(tmp_path: Path) -> None:
    (problem,) = problems_of(trace(tmp_path / "t.jsonl", rows_of([0, 9, 10])), None, None, None)
    assert [one.checkpoint for one in problem.history] == ["9"]
    assert [one.checkpoint for one in problem.running] == ["10"]


def test_the_first_epoch_can_be_named(tmp_path: Path) -> None:
    (problem,) = problems_of(trace(tmp_path / "t.jsonl", rows_of([0, 1, 2])), "0", "1", None)
    assert [one.checkpoint for one in problem.history] == ["0"]


def test_a_line_that_is_no_trajectory_is_named(tmp_path: Path) -> None:
    rows = [*rows_of([1]), {"problem_id": "p", "text": "a"}]
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2 is no trajectory: KeyError: 'prompt'"):
        trace(tmp_path / "t.jsonl", rows)
