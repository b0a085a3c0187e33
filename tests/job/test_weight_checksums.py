"""Engines of a job compute the checksum of published files only once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_api.weights.checksum import checksum
from rollout_store.job import JobStore, job_record


class Computations:
    """Counts how often a checksum is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(job_record, "checksum", self)

    def __call__(self, directory: Path) -> str:
        self.count += 1
        return checksum(directory)


@pytest.fixture
def computations(monkeypatch: pytest.MonkeyPatch) -> Computations:
    return Computations(monkeypatch)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "b.safetensors").write_bytes(b"second")
    return tmp_path


def compute(url: str, directory: Path, expected: str, engines: int = 1) -> list[str]:
    """Return the checksums that several engines get at the same time."""

    async def run() -> list[str]:
        stores = [JobStore.connect(url, MessageKeys("checksums")) for _ in range(engines)]
        try:
            found = [store.weight_checksums(directory, expected) for store in stores]
            return list(await asyncio.gather(*found))
        finally:
            for store in stores:
                await store.close()

    return asyncio.run(run())


def test_one_of_several_engines_computes_the_checksum(
    redis_url: str, weights: Path, computations: Computations
) -> None:
    expected = checksum(weights)
    assert [expected] * 5 == compute(redis_url, weights, expected, engines=5)
    assert [expected] == compute(redis_url, weights, expected)
    assert 1 == computations.count


@pytest.mark.parametrize("kind", ["other bytes", "other time", "other file", "more files"])
def test_it_is_computed_again_for_other_files(
    redis_url: str, weights: Path, computations: Computations, kind: str
) -> None:
    compute(redis_url, weights, checksum(weights))
    path = weights / "a.safetensors"
    if kind == "other bytes":
        path.write_bytes(b"other, longer")
    elif kind == "other time":
        os.utime(path, ns=(1, 1))
    elif kind == "other file":
        stat, new = path.stat(), weights / "new"
        new.write_bytes(path.read_bytes())
        os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        new.replace(path)
    else:
        (weights / "c.safetensors").write_bytes(b"third")
    expected = checksum(weights)
    assert [expected] == compute(redis_url, weights, expected)
    assert 2 == computations.count


def test_a_checksum_that_is_not_the_expected_one_is_computed_here(
    redis_url: str, weights: Path, computations: Computations
) -> None:
    found = checksum(weights)
    assert [found] * 3 == compute(redis_url, weights, "0" * 64, engines=3)
    assert 3 == computations.count


def test_an_engine_that_fails_leaves_the_checksum_to_another_one(
    redis_url: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> str:
        raise OSError("stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr(job_record, "checksum", fail)
        with pytest.raises(OSError, match="stale file handle"):
            compute(redis_url, weights, "0" * 64)
    expected = checksum(weights)
    assert [expected] == compute(redis_url, weights, expected)
