"""The draft policies that a manifest can name."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from rollout_api.manifest.spec import PolicyName, Speculation
from rollout_store.history.known_lengths import KnownLengths
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits
from rollout_worker.policy.named_policies import make_policy, uses_lengths
from rollout_worker.policy.step_cost import H100_7B

NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_can_be_made_and_drafts(name: PolicyName) -> None:
    lengths = KnownLengths()
    lengths.add("p", [(1, 1000, False)] * 8)
    policy = make_policy(name, DraftLimits(16, 1000), lengths if uses_lengths(name) else None)
    rows = np.array([policy.open("p", prompt_tokens=10, generated=0, max_tokens=4000) for _ in range(2)])
    budgets = [policy.compute_budgets(rows, H100_7B).tokens for _ in range(20)]
    assert np.concatenate(budgets).max() > 0


def test_das_drafts_more_for_problems_with_long_rollouts_once_lengths_are_known() -> None:
    lengths = KnownLengths()
    policy = make_policy("das-classes", DraftLimits(16, 1000), lengths)
    problems = ("short", "medium", "long", "unknown")

    def budgets() -> list[int]:
        rows = np.array([policy.open(each, prompt_tokens=10, generated=0, max_tokens=4000) for each in problems])
        return list(policy.compute_budgets(rows, H100_7B).tokens.tolist())

    assert budgets() == [16, 16, 16, 16]
    for problem, length in (("short", 100), ("medium", 200), ("long", 400)):
        lengths.add(problem, [(1, length, False)] * 4)
    assert budgets() == [0, 8, 16, 16]


def test_a_policy_that_predicts_lengths_is_not_made_without_any() -> None:
    assert {name for name in NAMES if uses_lengths(name)} == {"marginal-with-lengths", "das-classes", "das-optimal"}
    with pytest.raises(ValueError, match="das-optimal needs the lengths"):
        make_policy("das-optimal", DraftLimits(16, 1000))


def test_only_unlimited_exceeds_the_maximum_of_the_manifest() -> None:
    assert {name: Speculation(policy=name, max_draft_tokens=8).max_draft_length for name in NAMES} == {
        **dict.fromkeys(NAMES, 8),
        "unlimited": 64,
    }


@pytest.mark.parametrize("graph_sizes", [(), (8, 16, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_no_draft_goes_on_below_the_threshold(name: PolicyName, graph_sizes: tuple[int, ...]) -> None:
    """The threshold adds to that of ``marginal``, also where drafts fill a CUDA graph and are longer therefore."""

    def min_survivals(threshold: float) -> np.ndarray:
        lengths = KnownLengths() if uses_lengths(name) else None
        policy = make_policy(name, DraftLimits(16, 1000, threshold), lengths)
        controller = DraftController(policy, H100_7B, graph_sizes=graph_sizes)
        rows = np.array(
            [controller.open("p", prompt_tokens=tokens, generated=0, max_tokens=40_000) for tokens in (10, 30_000)]
        )
        return controller.compute_budgets(rows).min_survivals

    without = min_survivals(0.0)
    for threshold in (0.01, 0.5, 1.0):
        assert np.maximum(without, threshold).tolist() == min_survivals(threshold).tolist()
    assert (without > 0).all() == name.startswith("marginal")
