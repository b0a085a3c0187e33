"""A tiny model that calls a tool, and a chat template for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The template of the tiny model, with tools in the form of Hermes."""
_MAX_STEPS = 400


def train_on(conversation: list[dict[str, Any]], checkpoint: Path, directory: Path) -> None:
    """Write a model to *directory* that, without randomness, gives the assistant's responses of a conversation.

    Args:
        conversation: messages.
        checkpoint: the model that is trained.
        directory: a copy of the model's directory.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rendered = tokenizer.apply_chat_template(conversation, chat_template=CHAT_TEMPLATE, tokenize=False)
    tokens, is_response = [], []
    for message in rendered.split("<|im_start|>")[1:]:
        role, _, text = message.partition("\n")
        for part, is_sampled in (f"<|im_start|>{role}\n", False), (text.removesuffix("\n"), role == "assistant"):
            encoded = tokenizer.encode(part, add_special_tokens=False)
            tokens += encoded
            is_response += [is_sampled] * len(encoded)
        tokens += (newline := tokenizer.encode("\n", add_special_tokens=False))
        is_response += [False] * len(newline)
    inputs = torch.tensor([tokens])
    positions = torch.tensor(is_response[1:]).nonzero()[:, 0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(_MAX_STEPS):
        logits = model(inputs).logits[0, positions]
        expected = inputs[0, positions + 1]
        # The margin makes the responses independent of rounding errors.
        if (logits.softmax(-1)[range(len(expected)), expected] > 0.9).all():
            break
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, expected).backward()
        optimizer.step()
    else:
        raise AssertionError("the model does not learn the conversation")
    model.save_pretrained(directory)
