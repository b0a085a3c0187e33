"""Models with random weights for measuring speed, created without a download."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

VOCABULARY = 32_768
END = VOCABULARY
"""A token id outside the vocabulary of traces; forced rollouts end with it."""
_CACHE = Path.home() / ".cache" / "das-rollout" / "benchmarks"


def random_model(hidden: int = 1024, layers: int = 15, positions: int = 2048) -> Path:
    """Return the directory of a Qwen3 model with random weights and no end-of-sequence token.

    The model is created on the first call and cached.

    Args:
        hidden: hidden size; with the default values the model has 267M parameters.
        layers: number of layers.
        positions: maximum context length in tokens.
    """
    directory = _CACHE / f"qwen3-{hidden}-{layers}-{positions}-{END + 1}"
    if (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY + 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    return directory


def dummy_7b_model(positions: int = 16_384) -> Path:
    """Return the directory of a model with Qwen2.5-7B's shape but no weights, for vLLM's ``load_format: dummy``."""
    from transformers import Qwen2Config

    directory = _CACHE / f"qwen2-7b-{positions}"
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        rope_theta=1e6,
        eos_token_id=None,
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


MODELS: dict[str, Callable[..., Path]] = {"267m": random_model, "7b": dummy_7b_model}
"""The models by name; each function takes the number of ``positions``."""


def add_model_argument(parser: ArgumentParser) -> None:
    """Add the option ``--model``, whose value is a key of :data:`MODELS`."""
    parser.add_argument("--model", choices=MODELS, default="267m", help="model with random weights [%(default)s]")
