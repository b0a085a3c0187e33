"""The tokenizer, loaded from a model directory."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_store.models.model_source import load_tokenizer
from scripts.tiny_model.tasks import training_problems
from scripts.tiny_model.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    texts = (text for _, *texts in islice(training_problems(0), 300) for text in texts)
    build_tokenizer(texts, vocabulary=512).save_pretrained(directory)
    return load_tokenizer(directory)


@given(text=st.text())
def test_any_text_is_unchanged_by_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    plain = text.replace("<|", "<")  # not a special token
    assert plain == tokenizer.decode(tokenizer(plain)["input_ids"])


def test_every_digit_is_one_token(tokenizer: Any) -> None:
    numbers = tokenizer("1234567890 12+345=357")["input_ids"]
    digits = [token for token in tokenizer.convert_ids_to_tokens(numbers) if any(c.isdigit() for c in token)]
    assert list("123456789012345357") == digits


def test_the_chat_template_ends_with_the_start_of_the_assistants_turn(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "1 + 2 ="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n" == text


def test_turns_end_with_the_end_of_sequence_token(tokenizer: Any) -> None:
    assert "<|im_end|>" == tokenizer.eos_token
    assert [tokenizer.eos_token_id] == tokenizer("<|im_end|>")["input_ids"]
