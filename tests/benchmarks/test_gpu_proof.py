"""The experiments for a GPU run on CPUs, and what is packed for the machine with the GPU."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu_proof.__main__ import append, read, run_in_process
from benchmarks.gpu_proof.pack import commands, prune

REPOSITORY = Path(__file__).parents[2]
EXPERIMENTS = ("start", "exposed", "steady", "exactness", "weights", "drafter")
LENGTHS = ("no drafts", "4 even", "uneven", "16")
KINDS = [
    "plain V2",
    "das at rest",
    *(f"das, {length}, {when} the launch" for when in ("after", "before") for length in LENGTHS),
]
MODES = ("none", "das", "ngram", "suffix", "none-v1-sync")
FIGURES = {
    "time until an engine with drafts has started",
    *(f"exposed time, {quantile}, batch 2, {kind}" for kind in KINDS for quantile in ("p50", "p99")),
    "steps that have not got their drafts in time",
    *(f"throughput, {mode}, batch 2, {loops} loops" for mode in MODES for loops in ("with", "without")),
    *(f"speed of {mode}, batch 2, {loops} loops" for mode in MODES[1:] for loops in ("with", "without")),
    *(
        f"{name} error of log-probabilities, {drafts} drafts"
        for name in ("mean", "largest")
        for drafts in ("with", "without")
    ),
    *(f"p-value, model's distribution, {drafts} drafts" for drafts in ("with", "without")),
    "p-value, responses with and without drafts",
    *(f"equal greedy responses, weights {way}" for way in ("from disk", "from memory", "FP8, from disk")),
    "critical path, p50, batch 4, das-rollout, threads 1",
    "critical path, p99, batch 4, das-rollout, threads 1",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--dry-run", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_experiments_write_their_rows_and_figures(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path))
    rows = read(tmp_path / "rows.jsonl")
    ended = {row["experiment"]: row["ended"] for row in rows if "ended" in row}
    assert dict.fromkeys(EXPERIMENTS, "exit code 0") == ended, result.stdout + result.stderr
    assert 0 == result.returncode
    rows = [row for row in rows if "ended" not in row]
    assert set(EXPERIMENTS) == {row["experiment"] for row in rows}
    assert {True} == {row["dry"] for row in rows}
    figures = {figure["name"]: figure for figure in json.loads((tmp_path / "figures.json").read_text())["figures"]}
    assert set() == FIGURES - figures.keys()
    missed = [name for name in FIGURES if figures[name]["target"] is not None and "time" not in name]
    assert all(figures[name]["value"] >= figures[name]["target"] for name in missed)
    for row in rows:
        assert not row.get("drafting_failures")
        assert not row.get("different_responses")
        if row["experiment"] == "exposed":
            assert (row["steps"] if "after" in row["kind"] else 0) == row["deferred_steps"]
            assert (row["accepted_tokens"] > 0) == any(length in row["kind"] for length in LENGTHS[1:])


@pytest.mark.slow
def test_an_experiment_that_fails_or_takes_too_long_loses_no_rows(tmp_path: Path) -> None:
    append(tmp_path / "rows.jsonl", {"experiment": "start", "dry": True})
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"experiment": "st')  # the machine was lost while this was written
    assert [{"experiment": "start", "dry": True}] == read(tmp_path / "rows.jsonl")
    result = run("--out", str(tmp_path), "--trace", "missing.jsonl", "drafter")
    assert 1 == result.returncode
    assert "No such file" in (tmp_path / "drafter.log").read_text()
    assert not run_in_process("drafter", 0.001, ["--dry-run", "--out", str(tmp_path)], tmp_path, {})
    ended = [row["ended"] for row in read(tmp_path / "rows.jsonl")[1:]]
    assert ["exit code 1", "stopped after 0.001 minutes"] == ended


def fat_binary(entries: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Return code for several architectures: for each, its kind (1 is PTX, 2 machine code), its number and the code."""
    parts = b"".join(
        struct.pack("<HHIQ12xI", kind, 0, 32, len(code), architecture) + code for kind, architecture, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(parts)) + parts


def test_only_device_code_that_the_gpu_can_run_is_kept() -> None:
    native = fat_binary([(2, 80, b"cubin 80"), (2, 90, b"cubin 90"), (1, 90, b"text  90")])
    compiled = fat_binary([(2, 80, b"cubin-80"), (1, 80, b"text--80"), (1, 100, b"text-100")])
    code, names = native + bytes(8) + compiled, b"\0.nv_fatbin\0.shstrtab\0"
    sections = [(0, 0, 0), (1, 64, len(code)), (12, 64 + len(code), len(names))]
    headers = b"".join(struct.pack("<IIQQQQ24x", name, 1, 0, 0, start, size) for name, start, size in sections)
    elf = struct.pack("<40xQ10xHHH", 64 + len(code) + len(names), 64, 3, 2)
    library = elf.ljust(64, b"\0") + code + names + headers
    expected = library
    for removed in (b"cubin 80", b"text  90", b"cubin-80", b"text-100"):
        expected = expected.replace(removed, bytes(8))
    assert expected == prune(library)


def test_three_commands_of_the_permitted_length_check_and_run_everything(tmp_path: Path) -> None:
    archives = [tmp_path / "packages.tar.xz", tmp_path / "project.tar.xz"]
    for archive in archives:
        archive.write_bytes(b"archive")
    lines = commands(archives)
    assert 3 == len(lines)
    assert max(map(len, lines)) < 2000
    assert 2 == lines[0].count("sha256sum -c")
    # The shell replaces $PWD after it has changed the directory.
    assert all("cd build/gpu-proof/unpacked && PYTHONPATH=$PWD/project:$PWD/site " in line for line in lines)
    assert list(EXPERIMENTS) == [name for line in lines for name in line.split(".jsonl.gz ")[1].split()]
