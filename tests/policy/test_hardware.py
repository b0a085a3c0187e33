"""The predicted cost model of a GPU: close to what was measured, and cautious where the card is unknown."""

from __future__ import annotations

import pytest

from rollout_worker.policy.hardware import ModelPart, find_card, predicted_step_cost
from rollout_worker.policy.step_cost import H100_7B, StepCost

QWEN_7B = ModelPart(weight_bytes=15_200_000_000, weights=7_600_000_000, kv_bytes_per_token=28 * 2 * 4 * 128 * 2)
"""Qwen2.5-7B in bfloat16."""
H20_7B = StepCost(base_s=6.6e-3, per_token_s=174e-6, per_context_token_s=14e-9)
"""A 7B model on an H20, as benchmarks simulate it."""


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H100 80GB HBM3", H100_7B), ("NVIDIA H20", H20_7B)])
def test_the_prediction_agrees_with_known_costs_within_a_factor_of_one_and_a_half(name: str, known: StepCost) -> None:
    predicted = predicted_step_cost(name, QWEN_7B)
    for expected, actual in zip(known[:3], predicted[:3], strict=True):
        assert 1 / 1.5 < actual / expected < 1.5


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "flops"),
    [
        ("NVIDIA A100-SXM4-40GB", 1.555e12, 312e12),
        ("NVIDIA A100-SXM4-80GB", 1.935e12, 312e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12, 312e12),
        ("NVIDIA H100 PCIe", 2.0e12, 756e12),
        ("NVIDIA H100 NVL", 3.9e12, 835e12),
        ("NVIDIA H200", 4.8e12, 989e12),
        ("NVIDIA H20-3e", 4.8e12, 148e12),
        ("NVIDIA B200", 8.0e12, 2250e12),
        ("NVIDIA L40S", 0.864e12, 362e12),
        ("AMD Instinct MI300X", 5.3e12, 1307e12),
    ],
)
def test_cards_are_recognized_by_the_names_that_drivers_report(name: str, bytes_per_s: float, flops: float) -> None:
    assert (bytes_per_s, flops) == find_card(name)


def test_draft_tokens_cost_more_on_an_unknown_card_than_on_most_others() -> None:
    assert find_card("NVIDIA X9000") is None
    ratios = {
        name: predicted_step_cost(name, QWEN_7B).per_token_s / predicted_step_cost(name, QWEN_7B).base_s
        for name in ("NVIDIA X9000", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA H20")
    }
    assert ratios["NVIDIA H20"] > ratios.pop("NVIDIA X9000") > max(list(ratios.values())[:-1])


def test_tensor_parallelism_divides_everything_but_the_launch() -> None:
    half = QWEN_7B._replace(**{name: getattr(QWEN_7B, name) // 2 for name in QWEN_7B._fields[:3]})
    whole_cost, half_cost = (predicted_step_cost("NVIDIA H100 80GB HBM3", part) for part in (QWEN_7B, half))
    assert whole_cost[1:3] == pytest.approx([2 * value for value in half_cost[1:3]])
    assert whole_cost.base_s / 2 < half_cost.base_s < whole_cost.base_s


def test_experts_are_read_only_if_they_are_used() -> None:
    part = ModelPart(61_000_000_000, 30_500_000_000, 98_304, 58_000_000_000, 29_000_000_000, 8 / 128)
    cost = predicted_step_cost("NVIDIA H200", part)
    all_weights_s = part.weight_bytes / (0.8 * 4.8e12)
    assert cost.step_time(1, 0) < 0.3 * all_weights_s
    assert all_weights_s < cost.step_time(1000, 0) < 2 * all_weights_s
    assert 2 * (1.5e9 + 29e9 / 16) / (0.5 * 989e12) == pytest.approx(cost.per_token_s)
