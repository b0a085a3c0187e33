"""Differences between two versions of a tensor are exact, whatever the bits are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open

from rollout_api.weights import delta_codec
from rollout_api.weights.delta_codec import DeltaError, Words, apply, encode, fingerprint, word_type
from rollout_api.weights.delta_file import TensorDelta, read_delta, write_delta
from rollout_api.weights.safetensors_file import read_layout, write_safetensors

WORD_TYPES = [word_type(size) for size in (1, 2, 4, 8)]
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001]
"""Bits of bfloat16: zeros, infinities, NaNs and the smallest subnormal number."""


@st.composite
def versions(draw: st.DrawFn) -> tuple[Words, Words]:
    """Two versions of a tensor, of which any part has changed."""
    dtype = draw(st.sampled_from(WORD_TYPES))
    size = draw(st.integers(0, 300))
    elements = st.sampled_from(SPECIAL) if dtype.itemsize == 2 else None
    old: Words = draw(arrays.arrays(dtype, size, elements=elements))
    new: Words = draw(arrays.arrays(dtype, size))
    kept = draw(arrays.arrays(np.bool_, size))
    return old, np.where(kept, old, new).astype(dtype)


@given(versions())
def test_an_applied_difference_gives_exactly_the_new_version(pair: tuple[Words, Words]) -> None:
    old, new = pair
    count, data = encode(old, new)
    assert (old != new).sum() == count
    result = old.copy()
    apply(result, count, data)
    assert new.tobytes() == result.tobytes()
    assert fingerprint(new) == fingerprint(result)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.sampled_from(WORD_TYPES), st.sampled_from([0.0, 1e-3, 0.3, 1.0]), st.integers(0, 99))
def test_tensors_of_several_blocks(extra: int, dtype: np.dtype[np.uint16], share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    size = 2 * delta_codec._BLOCK_ELEMENTS + extra
    old: Words = random.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype)
    new = old + (random.random(size) < share).astype(dtype)
    count, data = encode(old, new)
    result = old.copy()
    apply(result, count, data)
    assert np.array_equal(new, result)


def test_small_steps_of_few_weights_take_less_than_one_byte_for_each_byte_that_changes() -> None:
    random = np.random.default_rng(0)
    old = (random.standard_normal(1_000_000).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    changed = random.random(len(old)) < 0.01
    new = old + np.where(changed, random.choice([1, 0xFFFF], len(old)), 0).astype("<u2")
    _, data = encode(old, new)
    assert len(data) < 2 * changed.sum()


@pytest.mark.parametrize("index", [0, 4096 * 4, 99_998, 99_999])
def test_the_fingerprint_depends_on_every_element(index: int) -> None:
    elements = np.zeros(100_000, "<u2")
    before = fingerprint(elements)
    elements[index] = 1
    assert before != fingerprint(elements)


def test_differences_that_do_not_fit_are_rejected() -> None:
    old, new = np.zeros(10, "<u2"), np.arange(10, dtype="<u2")
    count, data = encode(old, new)
    for target, number, content, message in (
        (np.zeros(9, "<u2"), count, data, "changes element 9 of a tensor with 9"),
        (np.zeros(10, "<u4"), count, data, "has not the size of 9 changed elements"),
        (np.zeros(10, "<u2"), count - 1, data, "has not the size of 8 changed elements"),
        (np.zeros(10, "<u2"), count, data[:-8], "has not the size of 9 changed elements"),
        (np.zeros(10, "<u2"), count, b"?" + data, "cannot be decompressed"),
    ):
        with pytest.raises(DeltaError, match=message):
            apply(target, number, content)
        assert not target.any()
    with pytest.raises(DeltaError, match="16 bytes"):
        word_type(16)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.binary(max_size=40)), max_size=4))
def test_files_contain_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("delta") / "x.delta"
    tensors = [TensorDelta(name, 2, 7, 3, "ab", data) for name, data in parts]
    size, digest = write_delta(path, tensors)
    assert path.stat().st_size == size
    assert tensors == read_delta(path, digest)


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.delta"
    _, digest = write_delta(path, [TensorDelta("a", 2, 7, 3, "ab", b"data")])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DeltaError, match="was published with"):
        read_delta(path, digest)
    with pytest.raises(DeltaError, match="cannot be read"):
        read_delta(tmp_path / "missing", digest)


def test_keyframes_are_safetensors_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    first, second = np.arange(6, dtype=np.float32), np.array([7], np.uint8)
    write_safetensors(path, [("a", "F32", (2, 3), first), ("b", "U8", (), second), ("c", "F16", (0, 4), second[:0])])
    with safe_open(path, framework="numpy") as file:
        assert np.array_equal(first.reshape(2, 3), file.get_tensor("a"))
        assert 7 == file.get_tensor("b")
        assert (0, 4) == file.get_tensor("c").shape
    content = path.read_bytes()
    layout = {tensor.name: tensor for tensor in read_layout(path)}
    assert first.tobytes() == content[layout["a"].offset :][: layout["a"].size]
    assert ("F16", (0, 4), 0) == (layout["c"].dtype, layout["c"].shape, layout["c"].size)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="less than its tensors need"):
        read_layout(path)
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_layout(path)
