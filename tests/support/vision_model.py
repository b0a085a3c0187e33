"""A tiny model that sees images."""

from __future__ import annotations

import io
from pathlib import Path
from zlib import crc32

import torch
from PIL import Image

from scripts.tiny_model.tokenizer import build_tokenizer

IMAGE = "<image>"
"""Stands for an image in a text."""
VOCABULARY = 320
_FAKE, _GLOBAL, _END = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
IMAGE_TEXT = f"{_FAKE}{_GLOBAL}{IMAGE * 4}{_FAKE}"
"""What an image becomes in a prompt: 16 patches, of which four are one token."""
_PATCH, _SIDE = 14, 56
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['role'] + ':' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- else -%}{{- '<image>' -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
)


def make_vision_model(directory: Path, *, seed: int = 5) -> Path:
    """Create a random Idefics3 model, whose greedy responses depend on the image, and return the directory."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    tokenizer = build_tokenizer(["user assistant what is it"], vocabulary=VOCABULARY - 8)
    tokenizer.add_special_tokens({"additional_special_tokens": [_FAKE, IMAGE, _END, _GLOBAL]})
    tokenizer.chat_template = _CHAT_TEMPLATE
    images = Idefics3ImageProcessorPil(size={"longest_edge": _SIDE}, max_image_size={"longest_edge": _SIDE})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_CHAT_TEMPLATE)
    processor.save_pretrained(directory)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config={**small, "image_size": _SIDE, "patch_size": _PATCH},
            text_config=LlamaConfig(**small, vocab_size=VOCABULARY, max_position_embeddings=512, head_dim=64).to_dict(),
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).float()
    with torch.no_grad():
        model.lm_head.weight *= 12.0
        # What the image adds must be as large as what the text does.
        model.model.connector.modality_projection.proj.weight *= 30.0
    model.save_pretrained(directory)
    return directory


def make_image(color: str) -> bytes:
    """Return a PNG image of one color."""
    encoded = io.BytesIO()
    Image.new("RGB", (40, 40), color).save(encoded, "PNG")
    return encoded.getvalue()


def _replaced(data: bytes, index: int, new: bytes) -> bytes:
    return data[:index] + new + data[index + len(new) :]


_HUGE = _replaced(make_image("red"), 16, 2 * (40_000).to_bytes(4, "big"))
HUGE_IMAGE = _replaced(_HUGE, 29, crc32(_HUGE[12:29]).to_bytes(4, "big"))
"""An image that has 40,000 × 40,000 pixels according to its header."""
BROKEN_IMAGE = _replaced(make_image("red"), 33, (4).to_bytes(4, "big"))
"""An image whose data seem to end after four bytes. Both raise neither a ValueError nor an OSError."""
