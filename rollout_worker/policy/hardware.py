"""The cost model of a GPU's steps before any was measured, from data sheets of the card and the size of the model."""

from __future__ import annotations

import re
from typing import NamedTuple

from rollout_worker.policy.step_cost import StepCost

_BANDWIDTH_SHARE = 0.8
"""Share of the memory's bandwidth with which kernels read weights."""
_FLOPS_SHARE = 0.5
"""Share of the peak performance that matrix products reach with a few hundred tokens."""
_LAUNCH_S = 1e-3
"""Time of a step that does not depend on the model: scheduling, preparing inputs, launching graphs, sampling."""


class Card(NamedTuple):
    """A GPU, as its data sheet describes it."""

    bytes_per_s: float
    """Bandwidth of the memory."""
    flops: float
    """Dense operations per second in bfloat16 with tensor cores, without sparsity."""


_CARDS = {
    "a100": Card(1.555e12, 312e12),
    "a100 80gb": Card(1.935e12, 312e12),
    "a800 80gb": Card(1.935e12, 312e12),
    "a10": Card(0.6e12, 125e12),
    "a40": Card(0.696e12, 149.7e12),
    "l4": Card(0.3e12, 121e12),
    "l40": Card(0.864e12, 181e12),
    "l40s": Card(0.864e12, 362e12),
    "h20": Card(4.0e12, 148e12),
    "h20 3e": Card(4.8e12, 148e12),
    "h100": Card(3.35e12, 989e12),
    "h100 pcie": Card(2.0e12, 756e12),
    "h100 nvl": Card(3.9e12, 835e12),
    "h800": Card(3.35e12, 989e12),
    "h200": Card(4.8e12, 989e12),
    "h200 nvl": Card(4.8e12, 835e12),
    "gh200": Card(4.0e12, 989e12),
    "b200": Card(8.0e12, 2250e12),
    "gb200": Card(8.0e12, 2500e12),
    "b300": Card(8.0e12, 2250e12),
    "mi300x": Card(5.3e12, 1307e12),
    "mi325x": Card(6.0e12, 1307e12),
}
"""Cards by the words of their names that distinguish them.

The figures are those of NVIDIA's and AMD's data sheets; those of the H20, which has no public one, are reported by its
vendors. Where a sheet gives performance with sparsity, it is halved."""
_UNKNOWN_CARD = Card(2.0e12, 150e12)
"""A card on which draft tokens cost much compared with a step, so that few are drafted until steps were measured."""


class ModelPart(NamedTuple):
    """The part of a model that one GPU computes, under tensor and pipeline parallelism."""

    weight_bytes: int
    """Size of all its weights."""
    weights: int
    """Number of its weights."""
    kv_bytes_per_token: float
    """Size of the keys and values of one token."""
    expert_bytes: int = 0
    """Size of those weights that belong to the experts of a mixture."""
    expert_weights: int = 0
    """Number of these weights."""
    expert_share: float = 0.0
    """Share of the experts that one token uses."""


def find_card(name: str) -> Card | None:
    """Return the card with the name that ``torch.cuda.get_device_name`` returns; None if it is unknown."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    matches = [key for key in _CARDS if words.issuperset(key.split())]
    return _CARDS[max(matches, key=len)] if matches else None


def predicted_step_cost(card_name: str, part: ModelPart) -> StepCost:
    """Predict the cost model of a GPU.

    It follows the roofline of the card. A step reads all weights once, each token takes two operations per weight, and
    attention reads the keys and values of the context. Experts are read only if a token uses them.

    For a 7B model on an H100, these are 6.7 ms, 31 µs and 17 ns, where DAS has measured 8 ms and 26 µs (arXiv
    2511.13841); on an H20, they are 5.8 ms, 205 µs and 14 ns.
    """
    card = find_card(card_name) or _UNKNOWN_CARD
    weights_per_s = _BANDWIDTH_SHARE * card.bytes_per_s
    used_weights = part.weights - (1.0 - part.expert_share) * part.expert_weights
    return StepCost(
        base_s=_LAUNCH_S + (part.weight_bytes - part.expert_bytes) / weights_per_s,
        per_token_s=2 * used_weights / (_FLOPS_SHARE * card.flops),
        # Every coefficient is positive, also if no layer has keys and values for the whole context.
        per_context_token_s=max(part.kv_bytes_per_token, 1.0) / card.bytes_per_s,
        experts_s=part.expert_bytes / weights_per_s,
        expert_share=part.expert_share,
    )
