"""The examples of the sizing guide follow from its formulas."""

from __future__ import annotations

import pytest

from scripts import sizing_docs
from scripts.sizing_docs import EXAMPLES, QWEN_7B, QWEN_32B, Plan

PLAN = EXAMPLES["7B on 8 H100s"]


def test_the_examples_are_computed() -> None:
    page = sizing_docs.PAGE.read_text()
    assert sizing_docs.document(page) == page, "run: python -m scripts.sizing_docs"


def test_the_kv_cache_of_a_token_has_keys_and_values_of_every_layer() -> None:
    assert 2 * 28 * 4 * 128 * 2 == sizing_docs.kv_bytes_per_token(QWEN_7B)
    assert sizing_docs.kv_bytes_per_token(QWEN_32B) // 2 == sizing_docs.kv_bytes_per_token(QWEN_32B, bytes_per_number=1)


def test_weights_and_kv_cache_fill_the_usable_memory_of_a_gpu() -> None:
    plan = EXAMPLES["32B on 8 H100s, TP 4"]
    cache = sizing_docs.kv_cache_tokens(plan) * sizing_docs.kv_bytes_per_token(plan.model)
    used = sizing_docs.weight_bytes(plan.model) + cache + 4 * sizing_docs.OTHER_MEMORY_BYTES
    assert 4 * 0.92 * 80e9 == pytest.approx(used)


def test_a_step_takes_the_time_of_its_tokens_on_all_engines() -> None:
    step_tokens = 512 * 16 * 4000
    seconds = 512 * 16 / sizing_docs.rollouts_per_second(PLAN)
    assert step_tokens / (8 * 8000) == pytest.approx(seconds)


def test_the_history_has_every_rollout_of_the_kept_generations() -> None:
    assert 0.6 * 20_000 * 16 * 4 * 4000 == pytest.approx(sizing_docs.history_bytes(PLAN))


@pytest.mark.parametrize("plan", EXAMPLES.values(), ids=EXAMPLES)
def test_the_examples_have_room_for_the_default_number_of_rollouts(plan: Plan) -> None:
    assert 128 <= sizing_docs.running_rollouts(plan)


def test_the_page_repeats_the_measured_cpu_times() -> None:
    page = " ".join(sizing_docs.PAGE.read_text().split())
    for kind in ("coordinator", "relay", "Redis"):
        assert f"{sizing_docs.cpu_ms_per_rollout(kind):.2f} ms" in page
