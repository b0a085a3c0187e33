"""Acceptance of the likeliest token and of a sampled one, at positions where both can be calculated by hand."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.record_training import trace_lines
from benchmarks.sampled_drafts import Positions, choice, figures_of, positions_of
from benchmarks.traces import Segment, Trajectory, read_trace
from rollout_worker.drafting import SuffixIndex

VOCABULARY = 20


def positions(count: int, *, predicted: float, likeliest: float, sampled: float) -> Positions:
    return Positions(*(np.full(count, value) for value in (predicted, 0.5, likeliest, sampled)))


def test_acceptance_follows_from_p_and_q() -> None:
    index = SuffixIndex()
    history = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 6, 4, 5]]
    index.add("p", [(str(number), 0, tokens) for number, tokens in enumerate(history)])
    rollout = Trajectory("p", 0, "1", np.array([9], np.uint32), (Segment(True, np.array([1, 2, 3], np.uint32)),))
    p = np.full((3, VOCABULARY), 1e-9)
    p[2, [3, 6]] = 0.3, 0.7
    *_, (predicted, share, likeliest, sampled) = positions_of(index, rollout, p)
    assert 0 < predicted < 1
    assert 0.5 < share < 1  # two of three rollouts continue with 3
    assert pytest.approx(0.3) == likeliest
    assert pytest.approx(min(0.3, share) + min(0.7, 1 - share)) == sampled


def test_the_choice_is_learned_from_earlier_versions() -> None:
    known = Positions(
        *map(
            np.concatenate,
            zip(
                positions(50, predicted=0.3, likeliest=0.3, sampled=0.6),
                positions(50, predicted=0.9, likeliest=0.95, sampled=0.9),
                strict=True,
            ),
        )
    )
    assert choice(known, positions(2, predicted=0.3, likeliest=0, sampled=0)).all()
    assert not choice(known, positions(2, predicted=0.9, likeliest=0, sampled=0)).any()
    assert not choice(known, positions(2, predicted=0.6, likeliest=0, sampled=0)).any()  # nothing is known


def test_figures_compare_the_choice_with_the_likeliest_token() -> None:
    version = positions(10, predicted=0.6, likeliest=0.5, sampled=0.75)
    figures, rows = figures_of({"version_2": version, "version_3": version})
    chosen = [figure for figure in figures if figure.target is not None]
    assert [1.5] * 4 == pytest.approx([figure.value for figure in chosen])
    assert {"version_3"} == {row["version"] for row in rows}
    assert 1.0 == rows[0]["sampled_share"]


def test_a_recorded_trace_is_read_again(tmp_path: Path) -> None:
    rollout: Any = SimpleNamespace(token_ids=[5, 6, 700], logprobs=[-0.5, -0.25, 0.0])
    lines = list(trace_lines(3, [[1, 2]], [[rollout]], [[1.0]]))
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    [trajectory] = read_trace(file, None)
    assert ("p00", 0, "version_3") == (trajectory.problem, trajectory.sample, trajectory.checkpoint)
    assert [1, 2] == trajectory.prompt.tolist()
    assert [[5, 6, 700]] == [segment.tokens.tolist() for segment in trajectory.segments]


def test_a_trace_with_texts_needs_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"problem_id": "p", "sample_index": 0, "prompt": "a", "text": "b"}\n')
    with pytest.raises(ValueError, match="give its tokenizer"):
        read_trace(file, None)


def test_damaged_tokens_are_reported_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    odd = base64.b64encode(b"abc").decode()
    file.write_text(f'{{"problem_id": "p", "sample_index": 0, "prompt_tokens": "{odd}", "tokens": "{odd}"}}\n')
    with pytest.raises(ValueError, match="line 1, is not a trajectory"):
        read_trace(file, None)
