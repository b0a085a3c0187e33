"""What the index learns: probabilities converge to acceptance rates, ages count, and another index continues."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex

TEMPLATE = [int(token) for token in np.random.default_rng(7).permutation(1000)[:60]]


def predictions(index: SuffixIndex, problem: str, rng: np.random.Generator, rate: float, steps: int) -> list[float]:
    """Run requests whose first token is 1 with the given rate, and return the predicted probabilities of that token."""
    found = []
    for _ in range(steps):
        handle = index.open(problem, sources=("history",))
        draft = index.draft(handle, 1)
        assert [1] == draft.tokens
        found += draft.probabilities
        index.extend(handle, [1 if rng.random() < rate else 2])
        index.close(handle)
    return found


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.9])
def test_probability_converges_to_the_acceptance_rate(rate: float) -> None:
    index = SuffixIndex()
    index.add("p", [(str(i), 0, [1, 9]) for i in range(3)])
    found = predictions(index, "p", np.random.default_rng(1), rate, 6000)
    # About 2,000 observations count, so that one standard deviation is at most 0.011.
    assert rate == pytest.approx(found[-1], abs=0.04)


def test_probability_follows_a_changed_acceptance_rate() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 9])])
    rng = np.random.default_rng(2)
    predictions(index, "p", rng, 0.9, 3000)
    found = predictions(index, "p", rng, 0.1, 8000)
    assert pytest.approx(0.1, abs=0.04) == found[-1]


def test_expected_and_actual_acceptance_agree_over_whole_drafts() -> None:
    """Drafts have several tokens and come from the history and the request's own text."""
    index = SuffixIndex(depth=16)
    rng = np.random.default_rng(3)
    # Each token of a response is that of the template with probability 0.8, or else one that never occurs again.
    template = [int(token) for token in rng.permutation(1000)[:60]]
    index.add("p", [(str(i), 0, template) for i in range(4)])
    fresh = iter(range(10_000, 10_000_000))
    expected = accepted = 0.0
    for round_ in range(300):
        handle = index.open("p", prompt=[5000, *template[:10]])
        position = 0
        while position < len(template):
            draft = index.draft(handle, 6)
            survival = np.cumprod(draft.probabilities)
            sampled: list[int] = []
            for token in [*draft.tokens, -1][: len(template) - position]:
                sampled.append(template[position + len(sampled)] if rng.random() < 0.8 else next(fresh))
                if sampled[-1] != token:
                    break
            hits = sum(a == b for a, b in zip(draft.tokens, sampled, strict=False))
            if round_ >= 100:
                # Positions beyond the end of the template cannot be verified.
                expected += float(survival[: len(template) - position].sum())
                accepted += hits
            index.extend(handle, sampled)
            position += len(sampled)
        index.close(handle)
    assert accepted > 1000
    assert pytest.approx(accepted, rel=0.06) == expected


def minority_wins(few: tuple[int, float | None], many: tuple[int, float | None], problems: int) -> list[bool]:
    """Return for each problem whether the token of the minority is drafted, given that it is always the right one.

    Three rollouts of the generation and reward *few* begin with one token, and five of *many* with another. Each
    problem has its own tokens, and rollouts without tokens in all generations.
    """
    index = SuffixIndex()
    won = []
    for problem in range(problems):
        index.add(str(problem), [(f"empty {generation}", generation, []) for generation in range(11)])
        few_token, many_token = 2 * problem + 1, 2 * problem + 2
        index.add(str(problem), [(f"few {i}", few[0], [few_token]) for i in range(3)])
        index.add(str(problem), [(f"many {i}", many[0], [many_token]) for i in range(5)])
        for name, (_, reward) in (("few", few), ("many", many)):
            if reward is not None:  # afterwards, because trainers report rewards later
                index.set_rewards(str(problem), {f"{name} {i}": reward for i in range(5)})
        handle = index.open(str(problem), sources=("history",))
        won.append([few_token] == index.draft(handle, 1).tokens)
        index.extend(handle, [few_token])
        index.close(handle)
    return won


@pytest.mark.parametrize("age", [2, 4, 8])
@pytest.mark.parametrize("right", ["young", "old"])
def test_votes_of_the_more_accurate_age_gain_weight(age: int, right: str) -> None:
    young, old = (10, None), (10 - age, None)
    found = minority_wins(*((young, old) if right == "young" else (old, young)), problems=150)
    assert (False, True) == (found[0], found[-1])


def drafted_ages(index: SuffixIndex, problem: str, beginnings: list[int]) -> list[int | None]:
    """Return for each beginning of a response the age of the rollout that the draft after it comes from."""
    ages = []
    for beginning in beginnings:
        handle = index.open(problem, sources=("history", "cross_problem"))
        index.extend(handle, [beginning])
        ages += index.draft(handle, 1).ages
        index.close(handle)
    return ages


@pytest.mark.parametrize("versions", [1, 2, 1000])
def test_ages_count_the_generations_in_which_the_problem_was_sampled(versions: int) -> None:
    """They do not depend on the number of weight versions per epoch, nor on whether siblings have ended."""
    index = SuffixIndex(pool_tokens=1000)
    epochs = range(5)
    index.add("p", [(f"{epoch}", epoch * versions, [epoch, 9]) for epoch in epochs[:-1]])
    assert [3, 2, 1, 0] == drafted_ages(index, "p", [0, 1, 2, 3])
    index.add("q", [("other", 4 * versions, [4, 9])])
    for _ in range(2):
        assert [4, 3, 2, 1, 0] == drafted_ages(index, "p", [*epochs])
        index.add("p", [("sibling", 4 * versions, [5, 9])])
    assert [0] == drafted_ages(index, "p", [5])
    # Another problem has its own ages, also of rollouts of the first one.
    index.add("r", [("other", 2 * versions, [2, 9])])
    assert [2, 2, 1, 1, 0, 0] == drafted_ages(index, "r", [0, 1, 2, 3, 4, 5])
    index.drop_rollout("p", "3")
    assert [3, 2, 1, 0] == drafted_ages(index, "p", [0, 1, 2, 5])
    index.drop_before("p", 2 * versions)
    assert [1, 0] == drafted_ages(index, "p", [2, 5])
    index.drop_problem("p")
    assert [1, 0] == drafted_ages(index, "p", [2, 4]), "rollouts of other problems"


def test_drafts_do_not_depend_on_the_number_of_weight_versions_per_epoch() -> None:
    found = []
    for versions in (1, 1000):
        rng = np.random.default_rng(5)
        index = SuffixIndex(depth=16, pool_tokens=10_000)
        drafts = []
        text = rng.integers(0, 8, 200)
        for epoch in range(12):
            for problem in ("p", "q"):
                handle = index.open(problem)
                for start in range(0, len(text), 4):
                    drafts.append(index.draft(handle, 4))
                    index.extend(handle, text[start : start + 4].tolist())
                index.close(handle)
                index.add(problem, [(f"{epoch}", versions * epoch, text.astype(np.uint32))])
                index.wait_idle()
                text = np.where(rng.random(len(text)) < 0.1, rng.integers(0, 8, len(text)), text)
        found.append([(draft.tokens, draft.probabilities, draft.ages) for draft in drafts])
    assert found[0] == found[1]


def test_votes_of_rewarded_rollouts_gain_weight_when_they_are_more_accurate() -> None:
    found = minority_wins((10, 1.0), (10, 0.0), problems=150)
    assert (False, True) == (found[0], found[-1])


def test_votes_have_equal_weight_when_their_rollouts_do_not_differ() -> None:
    assert not any(minority_wins((10, None), (10, None), problems=150))
    assert not any(minority_wins((10, 1.0), (10, 1.0), problems=150))


def test_a_token_that_is_repeatedly_right_is_preferred() -> None:
    """Fewer rollouts propose it each time, but the weight of the token after its predecessor grows."""
    index = SuffixIndex()
    found = []
    for problem in range(150):
        rollouts = [(f"few {i}", 0, [7, 1]) for i in range(3)] + [(f"many {i}", 0, [7, 2]) for i in range(5)]
        index.add(str(problem), rollouts)
        handle = index.open(str(problem), sources=("history",))
        index.extend(handle, [7])
        found += index.draft(handle, 1).tokens
        index.extend(handle, [1])
        index.close(handle)
    assert (2, 1) == (found[0], found[-1])


def test_a_probability_below_the_threshold_recovers() -> None:
    """The model also learns from the first token that is not drafted for its low survival."""
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 9])])
    predictions(index, "p", np.random.default_rng(4), 0.0, 50)
    handles = [index.open("p", sources=("history",)) for _ in range(400)]
    drafts = []
    for handle in handles:
        drafts.append(len(index.draft(handle, 1, min_survival=0.5)))
        index.extend(handle, [1])
    assert (0, 1) == (drafts[0], drafts[-1])


def test_probabilities_remain_finite_after_a_surprise_following_a_long_match() -> None:
    """All levels, one for each source and match length, are almost certain, and all of them are wrong."""
    index = SuffixIndex()
    fresh = itertools.count(10)

    def unseen(count: int) -> list[int]:
        return list(itertools.islice(fresh, count))

    def finish(handle: int, context: list[int], right: int) -> None:
        index.extend(handle, unseen(1) + context)
        index.draft(handle, 1)
        index.extend(handle, [right])
        index.close(handle)

    for length, votes in itertools.product([2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48] * 20, [1, 2, 3, 5, 9, 17]):
        context, [right] = unseen(length), unseen(1)
        problem = str(right)
        prompt = [token for _ in range(votes) for token in (*unseen(1), *context, right)]
        finish(index.open(problem, prompt, sources=("self",)), context, right)
        index.add(problem, [(str(i), 0, [*unseen(1), *context, right]) for i in range(votes)])
        finish(index.open(problem, sources=("history",)), context, right)
        index.drop_problem(problem)
        siblings = [index.open(problem, sources=("siblings",)) for _ in range(votes)]
        for sibling in siblings:
            index.extend(sibling, [*unseen(1), *context, right])
        finish(index.open(problem, sources=("siblings",)), context, right)
        for sibling in siblings:
            index.close(sibling)
    for problem in ("first", "second", "third"):
        repeated = unseen(1) * 27
        index.add(problem, [("a", 0, unseen(1) + repeated + unseen(1))])
        sibling, handle = index.open(problem), index.open(problem)
        index.extend(sibling, unseen(1) + repeated)
        index.extend(handle, unseen(1) + repeated)
        (probability,) = index.draft(handle, 1).probabilities
        assert 0 < probability < 1
        index.extend(handle, unseen(1))


def test_a_budget_of_zero_changes_nothing() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [7, 1, 2, 3])])
    handle = index.open("p", sources=("history",))
    index.extend(handle, [7])
    assert [1, 2, 3] == index.draft(handle, 3).tokens
    assert [] == index.draft(handle, 0).tokens
    index.extend(handle, [1, 2])
    assert (3, 2, 2) == tuple(index.counters()["history"])


def index_of(problem: str) -> SuffixIndex:
    index = SuffixIndex(depth=16)
    index.add(problem, [("a", 0, TEMPLATE)])
    return index


def overestimation(index: SuffixIndex, problem: str, count: int, rate: float, seed: int) -> float:
    """Run *count* rollouts whose tokens are those of the template with probability *rate*.

    Returns the predicted number of accepted draft tokens, divided by its true expectation.
    """
    rng = np.random.default_rng(seed)
    predicted = expected = 0.0
    fresh = iter(range(10_000, 10_000_000))
    for _ in range(count):
        handle = index.open(problem, sources=("history",))
        position = 0
        while position < len(TEMPLATE):
            draft = index.draft(handle, min(4, len(TEMPLATE) - position))
            sampled: list[int] = []
            for token in [*draft.tokens, None][: len(TEMPLATE) - position]:
                sampled.append(TEMPLATE[position + len(sampled)] if rng.random() < rate else next(fresh))
                if sampled[-1] != token:
                    break
            predicted += draft.expected
            assert draft.tokens == TEMPLATE[position : position + len(draft)]
            expected += sum(rate**length for length in range(1, len(draft) + 1))
            index.extend(handle, sampled)
            position += len(sampled)
        index.close(handle)
    return predicted / expected


@pytest.mark.parametrize("rate", [0.3, 0.97])
def test_loaded_parameters_are_accurate_from_the_first_rollout(rate: float) -> None:
    trained, untrained, loaded = index_of("p"), index_of("q"), index_of("q")
    overestimation(trained, "p", 1000, rate, 1)
    loaded.load_state_dict(trained.state_dict())
    with_state = overestimation(loaded, "q", 3, rate, 2)
    without_state = overestimation(untrained, "q", 3, rate, 2)
    assert abs(with_state - 1) < 0.25
    assert abs(with_state - 1) < abs(without_state - 1) / 2


def test_loaded_parameters_adapt_quickly_to_a_changed_distribution() -> None:
    trained, loaded = index_of("p"), index_of("p")
    overestimation(trained, "p", 1000, 0.97, 1)
    loaded.load_state_dict(trained.state_dict())
    overestimation(loaded, "p", 20, 0.3, 2)
    overestimation(trained, "p", 20, 0.3, 2)
    assert overestimation(loaded, "p", 20, 0.3, 3) < 1.5
    assert overestimation(trained, "p", 20, 0.3, 3) > 2.5


def test_loaded_parameters_can_be_saved_again() -> None:
    trained, loaded = index_of("p"), index_of("p")
    overestimation(trained, "p", 50, 0.9, 1)
    loaded.load_state_dict(trained.state_dict())
    again = index_of("p")
    again.load_state_dict(loaded.state_dict())
    assert loaded.state_dict() == again.state_dict()


def test_an_invalid_state_is_rejected_and_changes_nothing() -> None:
    index = index_of("p")
    overestimation(index, "p", 5, 0.9, 1)
    before = index.state_dict()
    not_a_number = bytearray(before)
    struct.pack_into("<f", not_a_number, 4 + 800, float("nan"))
    negative = bytearray(before)
    struct.pack_into("<f", negative, 4 + 804, -1.0)
    huge = bytearray(before)
    struct.pack_into("<f", huge, len(before) - 8, 1e30)
    other_layout = b"\xff" + before[1:]
    for wrong in (
        b"",
        b"123",
        before[:4],
        before[:-8],
        before[:-1],
        before + b"12345678",
        other_layout,
        not_a_number,
        negative,
        huge,
    ):
        with pytest.raises(ValueError, match="was not returned by state_dict"):
            index.load_state_dict(bytes(wrong))
    assert before == index.state_dict()
    with pytest.raises(TypeError):
        index.load_state_dict("text")
