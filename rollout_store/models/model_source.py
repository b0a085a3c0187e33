"""Finds the directories of models, checkpoints and adapters, and checks that they may be loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rollout_api.manifest.spec import Model

_SHAPE_KEYS = (
    "architectures",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "tie_word_embeddings",
    "vocab_size",
)
"""Settings of ``config.json`` that must be the same for a checkpoint and the model."""
_OWN_MODELS = "das/"
"""Beginning of the names of models that are created on this machine, and which the hub does not have."""
_HINT_FOR_OWN_MODELS = "; 'rollout tiny-model' writes the model of the examples"
_FILES_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]


class ModelError(ValueError):
    """A model cannot be found or must not be loaded. The message says where it was looked for."""


def _caches(cache: Path) -> list[Path]:
    """Return where models are looked for by name: in the cache, then among those that the image contains."""
    in_image = os.environ.get("ROLLOUT_SHIPPED_MODELS")
    return [cache, Path(in_image)] if in_image else [cache]


def resolve_model(model: Model, cache: Path, *, weights: bool = True) -> Path:
    """Return the local directory of a manifest's model, and download a Hugging Face model that is not there yet.

    Without *weights*, only the configuration and the tokenizer are downloaded.

    Raises:
        ModelError: if it cannot be found, or is not a model directory with safetensors.
    """
    directory = _local_directory(model.uri, cache)
    if directory is None:
        return _checked(_download(model, cache, weights=weights), model.uri, weights=weights)
    return _checked(directory, model.uri)


def find_model(model: Model, cache: Path) -> Path | None:
    """Return the local directory of a manifest's model; None if it is not there and would be downloaded.

    Raises:
        ModelError: if it is neither there nor can be downloaded, or is not a model directory with safetensors.
    """
    directory = _local_directory(model.uri, cache)
    return _checked(directory, model.uri) if directory is not None else _downloaded(model)


def resolve_checkpoint(uri: str, cache: Path, model_directory: Path, allowed_roots: Sequence[str]) -> Path:
    """Return the local directory of weights that replace those of *model_directory* in a running engine.

    Raises:
        ModelError: if it does not exist, lies outside the allowed roots, or has another shape.
    """
    directory = _checked(allowed_directory(uri, cache, model_directory, allowed_roots), uri)
    config, model_config = read_config(directory), read_config(model_directory)
    for key in _SHAPE_KEYS:
        if config.get(key) != model_config.get(key):
            raise ModelError(
                f"checkpoint {uri!r} has {key} {config.get(key)!r}, but the model has {model_config.get(key)!r}: "
                "weights can only be replaced by weights of the same shape"
            )
    return directory


def resolve_adapter(uri: str, cache: Path, model_directory: Path, allowed_roots: Sequence[str]) -> Path:
    """Return the local directory of a LoRA adapter, in PEFT's format, for a running engine.

    Raises:
        ModelError: if it does not exist, lies outside the allowed roots, or is not an adapter with safetensors.
    """
    directory = allowed_directory(uri, cache, model_directory, allowed_roots)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (directory / name).is_file():
            raise ModelError(f"adapter {uri!r}: {directory} has no {name}")
    _read_object(directory / "adapter_config.json")
    return directory


def allowed_directory(uri: str, cache: Path, model_directory: Path, allowed_roots: Sequence[str]) -> Path:
    """Return the local directory of published weights.

    Raises:
        ModelError: if it does not exist, or lies outside the allowed roots.
    """
    directory = _local_directory(uri, cache)
    if directory is None:
        raise ModelError(f"checkpoint {uri!r} is neither a directory nor in the model cache, {cache}")
    real = directory.resolve()
    roots = [cache.resolve(), model_directory.resolve(), *(Path(root).resolve() for root in allowed_roots)]
    # The owner of the cache has chosen its contents, including links to other directories.
    in_cache = any(directory.is_relative_to(parent) for parent in _caches(cache)) and ".." not in directory.parts
    if not in_cache and not any(real.is_relative_to(root) for root in roots):
        raise ModelError(
            f"checkpoint {uri!r} is in {real}, outside the model cache and the model's directory; add its root to "
            "spec.weights.allowedRoots"
        )
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    """Return the contents of a model's ``config.json``.

    Raises:
        ModelError: if it cannot be read, or is not a JSON object.
    """
    return _read_object(directory / "config.json")


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelError: if it cannot be read, or is none.
    """
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found


def max_positions(directory: Path) -> int | None:
    """Return the maximum sequence length of a model; None if its configuration does not contain it."""
    config = read_config(directory)
    text = config.get("text_config")  # of a model that also sees images
    positions = (config | text if isinstance(text, dict) else config).get("max_position_embeddings")
    return int(positions) if positions is not None else None


def load_tokenizer(directory: Path) -> Any:
    """Return the transformers tokenizer of a model.

    Raises:
        ModelError: if it has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer in {directory} cannot be loaded: {error}") from None


def local_tokenizer(uri: str, cache: Path) -> Any | None:
    """Return the transformers tokenizer of a model that is on this machine already; None if there is none."""
    from huggingface_hub import snapshot_download

    try:
        directory = _local_directory(uri, cache)
        if directory is None:
            directory = Path(snapshot_download(uri, local_files_only=True))
        return load_tokenizer(directory)
    except (ModelError, OSError, ValueError):  # the hub's errors are OSErrors and ValueErrors
        return None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's vocabulary, equal for tokenizers whose token ids have the same meaning."""
    digest = blake2b(digest_size=16)
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token_id}:{token}\0".encode())
    return digest.hexdigest()


def _local_directory(uri: str, cache: Path) -> Path | None:
    if uri.startswith("file:"):
        path = Path(unquote(urlsplit(uri).path))
        return path if path.is_dir() else _missing(uri, path)
    if uri.startswith("/"):
        return Path(uri) if Path(uri).is_dir() else _missing(uri, Path(uri))
    if ".." in Path(uri).parts:
        raise ModelError(f"model {uri!r} is outside the model cache, {cache}; use an absolute path")
    return next((directory / uri for directory in _caches(cache) if (directory / uri).is_dir()), None)


def _missing(uri: str, path: Path) -> Path:
    raise ModelError(f"model {uri!r}: the directory {path} does not exist")


def _download(model: Model, cache: Path, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = None if weights else _FILES_WITHOUT_WEIGHTS
    try:
        return Path(snapshot_download(model.uri, revision=model.revision, allow_patterns=wanted))
    except Exception as error:  # the hub raises its own errors, httpx's and OSError; all mean that it is unavailable
        hint = _HINT_FOR_OWN_MODELS if model.uri.startswith(_OWN_MODELS) else ""
        reason = type(error).__name__
        if isinstance(error, OSError) and error.strerror:  # for example, the volume is full
            reason += f": {error.strerror}"
        raise ModelError(
            f"model {model.uri!r} is neither a directory in the model cache, {cache}, nor available from the "
            f"Hugging Face hub ({reason}){hint}"
        ) from None


def _downloaded(model: Model) -> Path | None:
    """Return the directory of a model that was downloaded before; None if it is missing or incomplete.

    Raises:
        ModelError: if the hub has no such model.
    """
    if model.uri.startswith(_OWN_MODELS):
        raise ModelError(f"model {model.uri!r} is not in the model cache{_HINT_FOR_OWN_MODELS}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(model.uri, revision=model.revision, local_files_only=True))
        return _checked(directory, model.uri)
    except HFValidationError as error:
        raise ModelError(
            f"model {model.uri!r} is neither in the model cache nor the id of a Hugging Face model: {error}"
        ) from None
    except (LocalEntryNotFoundError, ModelError):
        return None


def _checked(directory: Path, uri: str, *, weights: bool = True) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelError(f"model {uri!r}: {directory} has no config.json, so it is not a model directory")
    if weights and not any(directory.glob("*.safetensors")):
        raise ModelError(f"model {uri!r}: {directory} has no *.safetensors; other weight formats are not loaded")
    return directory


def default_cache() -> Path:
    """Return the directory of the model cache: ``ROLLOUT_MODEL_CACHE``, or one in the user's cache."""
    if named := os.environ.get("ROLLOUT_MODEL_CACHE"):
        return Path(named)
    return Path("~/.cache/das-rollout/models").expanduser()
