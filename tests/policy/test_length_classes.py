"""The length classes of running rollouts: when they change, and what is counted of them."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_store.history.known_lengths import KnownLengths
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits
from rollout_worker.policy.governor import StepOutcome
from rollout_worker.policy.length_classes import NO_COUNTERS, LengthClasses
from rollout_worker.policy.named_policies import make_policy
from rollout_worker.policy.step_cost import H100_7B


@pytest.fixture
def lengths() -> KnownLengths:
    """Problems with rollouts of 100, 200 and 400 tokens."""
    known = KnownLengths()
    for problem, length in (("short", 100), ("medium", 200), ("long", 400)):
        known.add(problem, [(1, length, False)] * 4)
    return known


def test_a_rollout_that_outgrows_its_class_gets_another_one(lengths: KnownLengths) -> None:
    classes = LengthClasses(lengths)
    classes.open(0, "short", 0)
    found = []
    for generated in range(0, 260, 20):
        classes.update(np.array([0]), np.array([generated]))
        found.append(str(classes.of(0)))
    # It is classified after 0, 80, 160 and 240 tokens, the first multiples of 20 that are 64 tokens later. When it is
    # longer than all rollouts of its problem, it may become as long as any.
    assert found == ["short"] * 8 + ["long"] * 5


def test_a_rollout_that_continues_is_classified_by_its_length_so_far(lengths: KnownLengths) -> None:
    classes = LengthClasses(lengths)
    lengths.add("mixed", [(1, 100, False)] * 3 + [(1, 200, False)])
    for row, generated in enumerate((0, 120)):
        classes.open(row, "mixed", generated)
    assert [str(classes.of(row)) for row in (0, 1)] == ["short", "medium"]


def test_new_lengths_change_the_class_of_a_running_rollout(lengths: KnownLengths) -> None:
    classes = LengthClasses(lengths)
    classes.open(3, "new", 0)
    classes.update(np.array([3]), np.array([0]))
    assert classes.counters()["class_rollouts"] == {"long": 1, "medium": 0, "short": 0}
    lengths.add("new", [(1, 100, False)] * 4)
    classes.update(np.array([3]), np.array([63]))
    assert str(classes.of(3)) == "long"
    classes.update(np.array([3]), np.array([64]))
    assert classes.counters()["class_rollouts"] == {"long": 0, "medium": 0, "short": 1}
    classes.close(3)
    assert sum(classes.counters()["class_rollouts"].values()) == 0


def test_budgets_and_draft_tokens_are_counted_by_class(lengths: KnownLengths) -> None:
    controller = DraftController(make_policy("das-classes", DraftLimits(16, 1000), lengths), H100_7B, governed=False)
    problems = ("long", "long", "medium", "short")
    rows = np.array([controller.open(each, prompt_tokens=10, generated=0, max_tokens=4000) for each in problems])
    for _ in range(3):
        controller.compute_budgets(rows)
        drafted = np.array([16, 8, 8, 0])
        outcome = StepOutcome(rows, np.array([9, 9, 1, 1]), drafted, drafted / 2, np.full(4, 100), None)
        controller.observe_step(outcome, seconds=None)
    assert controller.length_classes is not None
    assert controller.length_classes.counters() == {
        "class_rollouts": {"long": 2, "medium": 1, "short": 1},
        "class_steps": {"long": 6, "medium": 3, "short": 3},
        "class_budget_tokens": {"long": 96, "medium": 24, "short": 0},
        "class_draft_tokens": {"long": 72, "medium": 24, "short": 0},
        "class_accepted_tokens": {"long": 48, "medium": 0, "short": 0},
    }
    assert controller.length_classes.counters().keys() == NO_COUNTERS.keys()


def test_das_optimal_also_shows_classes_and_marginal_has_none(lengths: KnownLengths) -> None:
    optimal = DraftController(make_policy("das-optimal", DraftLimits(16, 1000), lengths), H100_7B)
    optimal.open("medium", prompt_tokens=10, generated=0, max_tokens=4000)
    assert optimal.length_classes is not None
    assert optimal.length_classes.counters()["class_rollouts"]["medium"] == 1
    assert DraftController(make_policy("marginal", DraftLimits(16, 1000)), H100_7B).length_classes is None
