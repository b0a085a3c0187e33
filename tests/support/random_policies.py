"""Random policies that behave like trained ones: they are mostly certain, and change slowly from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TASKS: list[dict[str, Any]] = [
    {"name": "sums", "generator": "chain_sum", "problems": 4, "config": {"min_terms": 2, "max_terms": 4}},
    {"name": "bits", "generator": "count_bits", "problems": 4, "config": {}},
]


def make_policies(cache: Path, *, versions: int) -> list[str]:
    """Create the models ``policy/0``, ``policy/1``, … in a model cache, each slightly different from the last one."""
    import reasoning_gym
    import torch

    from scripts.tiny_model.tokenizer import build_tokenizer
    from tests.support.reference_model import small_qwen3

    questions = [
        entry["question"]
        for task in TASKS
        for entry in reasoning_gym.create_dataset(task["generator"], seed=1, size=50, **task["config"])
    ]
    tokenizer = build_tokenizer(questions, vocabulary=320)
    torch.manual_seed(5)
    model = small_qwen3(
        vocab_size=320,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    names = []
    with torch.no_grad():
        model.lm_head.weight *= 30.0
        for version in range(versions):
            directory = cache / "policy" / str(version)
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            names.append(f"policy/{version}")
            for weight in model.parameters():
                weight += 0.01 * weight.std() * torch.randn_like(weight)
    return names
