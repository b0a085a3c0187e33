"""A trainer writes keyframes and differences, from which every version can be read again bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rollout_api import (
    DeltaWeights,
    InvalidRequestError,
    RolloutClient,
    TensorsInMemory,
    WeightsError,
    WeightUpdate,
)
from rollout_api.weights import delta_weights
from rollout_api.weights.checksum import checksum
from rollout_api.weights.delta_codec import apply, word_type
from rollout_api.weights.delta_file import read_delta
from rollout_api.weights.delta_weights import VersionFiles
from tests.support.fake_job import FakeJob

Tensors = dict[str, torch.Tensor]


def read_version(files: VersionFiles) -> Tensors:
    """Return the tensors of a version."""
    tensors = load_file(files.directory / "model.safetensors")
    for file in files.deltas:
        for delta in read_delta(files.directory / file.name, file.sha256):
            flat = tensors[delta.name].reshape(-1).view(torch.uint8).numpy()
            apply(flat.view(word_type(delta.element_bytes)), delta.num_changed, delta.data)
    return tensors


def assert_same_bits(expected: Tensors, actual: Tensors) -> None:
    """Compare bit by bit, because NaNs are not equal to themselves."""
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.shape) == (actual[name].dtype, actual[name].shape)
        both = (one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, actual[name]))
        assert torch.equal(*both)


def small_tensors() -> Tensors:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(300, 200, dtype=torch.bfloat16),
        "transposed": torch.randn(30, 20).t(),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "count": torch.tensor([1, 2]),
    }


def change(tensors: Tensors, share: float) -> None:
    """Change a share of the bits of the largest tensor, to NaNs and infinities as well."""
    changed = torch.rand(tensors["weight"].shape) < share
    bits = torch.randint(-(2**15), 2**15, tensors["weight"].shape, dtype=torch.int16)
    tensors["weight"].view(torch.int16)[changed] = bits[changed]


@settings(max_examples=15, deadline=None)
@given(shares=st.lists(st.sampled_from([0.0, 0.001, 0.05, 1.0]), max_size=6), interval=st.integers(1, 4))
def test_every_version_can_be_read_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], interval: int
) -> None:
    tensors = small_tensors()
    weights = DeltaWeights(tensors.items, tmp_path_factory.mktemp("deltas"), keyframe_interval=interval)
    written = weights.write(1)
    assert [] == written.deltas
    for version, share in enumerate(shares, 2):
        change(tensors, share)
        written = weights.write(version)
        assert_same_bits(tensors, read_version(written))
        assert checksum(written.directory) == written.sha256
        assert len(written.deltas) < interval


def test_a_difference_is_small_and_large_ones_are_replaced_by_a_keyframe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = small_tensors()
    weights = DeltaWeights(tensors.items, tmp_path)
    keyframe = weights.write(1)
    change(tensors, 0.01)
    small = weights.write(2)
    assert small.size < 0.05 * keyframe.size
    assert keyframe.directory == small.directory
    assert [2] == [file.weight_version for file in small.deltas]
    change(tensors, 1.0)
    assert not caplog.messages
    large = weights.write(3)
    assert not large.deltas
    assert "Weight version 3 is a keyframe, because its difference would take" in caplog.text
    assert_same_bits(tensors, read_version(large))


def test_files_of_the_last_two_keyframes_are_kept(tmp_path: Path) -> None:
    tensors = small_tensors()
    old = DeltaWeights(tensors.items, tmp_path, keyframe_interval=2)
    (tmp_path / "notes.txt").write_text("not of this class")
    abandoned = [old.write(version).directory for version in (1, 2, 3, 4)][-1]
    weights = DeltaWeights(tensors.items, tmp_path, keyframe_interval=2)  # as after a restart of the trainer
    written = [weights.write(version) for version in range(1, 3)]
    assert abandoned.is_dir()  # engines may still read it
    written += [weights.write(version) for version in range(3, 9)]
    assert not abandoned.exists()
    assert {"notes.txt", written[4].directory.name, written[6].directory.name} == {
        path.name for path in tmp_path.iterdir()
    }
    for files in written[4:]:
        assert_same_bits(tensors, read_version(files))


def test_weights_are_converted_to_the_data_type_of_the_engines(tmp_path: Path) -> None:
    master = {"weight": torch.randn(1000, 100)}
    weights = DeltaWeights(master.items, tmp_path, dtype=torch.bfloat16)
    weights.write(1)
    master["weight"] += 1e-6 * torch.randn(1000, 100)
    files = weights.write(2)
    assert 0 < files.size < 0.05 * 2 * 1000 * 100
    assert_same_bits({"weight": master["weight"].bfloat16()}, read_version(files))


def test_other_tensors_begin_with_a_keyframe(tmp_path: Path) -> None:
    weights = DeltaWeights({"a": torch.zeros(1000)}, tmp_path)
    weights.write(1)
    replacements: list[Tensors] = [
        {"a": torch.zeros(1000), "b": torch.zeros(5)},
        {"a": torch.zeros(1000)},
        {"a": torch.zeros(500, 2)},
        {"a": torch.zeros(500, 2, dtype=torch.int32)},
    ]
    for version, tensors in enumerate(replacements, 2):
        weights.replace(tensors)
        files = weights.write(version)
        assert not files.deltas
        assert_same_bits(tensors, read_version(files))


def test_after_a_failure_the_next_version_is_a_keyframe(tmp_path: Path) -> None:
    tensors = small_tensors()
    weights = DeltaWeights(tensors.items, tmp_path)
    weights.write(1)
    change(tensors, 0.01)

    def interrupted() -> Any:
        yield from list(tensors.items())[:2]
        raise RuntimeError("out of memory")

    weights._source._read = interrupted
    with pytest.raises(RuntimeError, match="out of memory"):
        weights.write(2)
    weights._source._read = tensors.items
    files = weights.write(3)
    assert not files.deltas
    assert_same_bits(tensors, read_version(files))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_version_may_be_written_again(tmp_path: Path) -> None:
    tensors = small_tensors()
    weights = DeltaWeights(tensors, tmp_path)
    keyframe = weights.write(1)
    assert keyframe.deltas == weights.write(1).deltas == []
    for version in (2, 2, 3):  # the attempt to publish version 2 has failed once
        tensors["weight"][version, : version + 1] += 1
        files = weights.write(version)
    assert_same_bits(tensors, read_version(files))
    assert 3 == len({file.name for file in files.deltas})
    assert files.deltas == weights.write(3).deltas


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="keyframe_interval is 0"):
        DeltaWeights({"a": torch.zeros(1)}, tmp_path, keyframe_interval=0)
    with pytest.raises(InvalidRequestError, match="a is complex64"):
        DeltaWeights({"a": torch.zeros(1, dtype=torch.complex64)}, tmp_path).write(1)


def test_an_update_describes_the_keyframe_and_all_differences(
    client: RolloutClient, job: FakeJob, tmp_path: Path
) -> None:
    job.report_engine("a", version=0)
    tensors = small_tensors()
    weights = DeltaWeights(TensorsInMemory(tensors.items), tmp_path)
    for version in (1, 2, 3):
        client.publish_weights(version, weights, wait=False)
        change(tensors, 0.01)
    client.publish_weights(4, weights, sha256=None, mode="keep", wait=False)
    first, _, third, fourth = job.control_messages()
    assert isinstance(first, WeightUpdate)
    assert isinstance(third, WeightUpdate)
    assert isinstance(fourth, WeightUpdate)
    assert (str(tmp_path), [], first.sha256) == (str(Path(first.uri).parent), first.deltas, first.identity)
    assert checksum(first.uri) == first.sha256 == third.sha256
    assert [2, 3] == [file.weight_version for file in third.deltas or []]
    assert (third.deltas or [])[-1].sha256 == third.identity
    assert (third.deltas or []) == (fourth.deltas or [])[:2]
    assert "keep" == fourth.mode


class Recorded(TensorsInMemory):
    """Tensors that record what the trainer's other processes are told."""

    def __init__(self) -> None:
        super().__init__({"a": torch.zeros(2)})
        self.aborted: list[str] = []

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)


def test_nothing_is_written_if_the_job_cannot_apply_differences(
    client: RolloutClient, redis_url: str, job: FakeJob, tmp_path: Path
) -> None:
    source = Recorded()
    weights = DeltaWeights(source, tmp_path)
    job.report_engine("a", version=4, deltas=False)
    with pytest.raises(InvalidRequestError, match="engine a cannot apply differences"):
        client.publish_weights(5, weights)
    job.report_engine("a", version=4)
    for options, message in (
        ({"kind": "lora"}, "always full weights"),
        ({"sha256": "0" * 64}, "checksums are computed here"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            client.publish_weights(5, weights, **options)
    with pytest.raises(InvalidRequestError, match="older than 4"):
        client.publish_weights(3, weights)
    assert 4 == len(source.aborted)
    assert [] == list(tmp_path.iterdir())
    assert [] == job.control_messages()


def test_a_directory_that_cannot_be_written_is_reported(client: RolloutClient, job: FakeJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"weight version 1 cannot be written: .*file"):
        client.publish_weights(1, DeltaWeights({"a": torch.zeros(2)}, tmp_path / "file"))


def test_the_chain_is_bounded_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_weights, "MAX_CHAIN_SHARE", 0.1)
    tensors = small_tensors()
    weights = DeltaWeights(tensors.items, tmp_path, keyframe_interval=1000)
    lengths = []
    for version in range(1, 30):
        files = weights.write(version)
        lengths.append(len(files.deltas))
        assert sum((files.directory / one.name).stat().st_size for one in files.deltas) < 0.13 * 120_000
        change(tensors, 0.01)
    assert 3 < lengths.index(0, 1) < 10
