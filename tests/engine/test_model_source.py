"""Locations of models, checkpoints and adapters, and rejected ones; without an engine."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollout_api.manifest.spec import Model
from rollout_store.models.model_source import (
    ModelError,
    max_positions,
    resolve_adapter,
    resolve_checkpoint,
    resolve_model,
)
from tests.support.reference_model import make_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model cache with one model, ``inside``."""
    directory = tmp_path_factory.mktemp("cache")
    make_model(directory / "inside")
    return directory


def test_a_checkpoint_outside_the_allowed_roots_is_rejected(tmp_path: Path, cache: Path) -> None:
    outside = make_model(tmp_path / "outside")
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_checkpoint(str(outside), cache, cache / "inside", [])
    assert outside == resolve_checkpoint(str(outside), cache, cache / "inside", [str(tmp_path)])
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_checkpoint(f"file://{cache}/{'../' * len(cache.parts)}{outside}", cache, cache / "inside", [])


def test_models_of_the_image_are_found_unless_the_cache_has_them(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_image = make_model(tmp_path / "image" / "examples" / "model")
    with pytest.raises(ModelError, match="neither a directory nor in the model cache"):
        resolve_checkpoint("examples/model", cache, cache / "inside", [])
    monkeypatch.setenv("ROLLOUT_SHIPPED_MODELS", str(tmp_path / "image"))
    assert in_image == resolve_checkpoint("examples/model", cache, cache / "inside", [])
    assert cache / "inside" == resolve_checkpoint("inside", cache, cache / "inside", [])
    make_model(cache / "examples" / "model")
    assert cache / "examples" / "model" == resolve_checkpoint("examples/model", cache, cache / "inside", [])


def test_a_checkpoint_of_another_shape_or_format_is_rejected(tmp_path: Path, cache: Path) -> None:
    tied = make_model(tmp_path / "tied", tied=True)
    with pytest.raises(ModelError, match="tie_word_embeddings True, but the model has False"):
        resolve_checkpoint(str(tied), cache, cache / "inside", [str(tmp_path)])
    (tied / "model.safetensors").rename(tied / "pytorch_model.bin")
    with pytest.raises(ModelError, match="other weight formats are not loaded"):
        resolve_checkpoint(str(tied), cache, cache / "inside", [str(tmp_path)])


def test_an_adapter_outside_the_allowed_roots_or_without_safetensors_is_rejected(tmp_path: Path, cache: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_adapter(str(adapter), cache, cache / "inside", [])
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with pytest.raises(ModelError, match=f"has no {name}"):
            resolve_adapter(str(adapter), cache, cache / "inside", [str(tmp_path)])
        (adapter / name).write_text("{}")
    assert adapter == resolve_adapter(str(adapter), cache, cache / "inside", [str(tmp_path)])


@pytest.mark.parametrize(
    ("contents", "reason"),
    [(b"[]", "is not a JSON object"), (b"[" * 100_000, "cannot be read"), (b"\xff", "cannot be read")],
    ids=["list", "nested", "binary"],
)
def test_published_configurations_that_are_malformed_are_rejected(
    tmp_path: Path, cache: Path, contents: bytes, reason: str
) -> None:
    checkpoint = make_model(tmp_path / "checkpoint")
    (checkpoint / "adapter_model.safetensors").touch()
    for name, resolve in (("config.json", resolve_checkpoint), ("adapter_config.json", resolve_adapter)):
        (checkpoint / name).write_bytes(contents)
        with pytest.raises(ModelError, match=f"{name} {reason}"):
            resolve(str(checkpoint), cache, cache / "inside", [str(tmp_path)])


def test_a_full_volume_is_named_as_the_reason_why_a_model_is_not_available(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fill)
    with pytest.raises(ModelError, match="No space left on device"):
        resolve_model(Model(uri="lab/large"), cache)


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 512}, {"text_config": {"max_position_embeddings": 512}}]
)
def test_a_model_that_sees_images_has_the_length_of_its_text(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"max_position_embeddings": 7}, **config}))
    assert 512 == max_positions(tmp_path)
