"""The trained head and the arbiter of the benchmark `trained_head`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay import Draft, Outcome, replay
from benchmarks.traces import Segment, Trajectory
from benchmarks.trained_head.arbiter import Arbiter
from benchmarks.trained_head.drafter import MODEL_END, ArbitratedDrafter, without_end
from benchmarks.trained_head.head import STEPS, Chains, Head, Policy, Trainer, draft_all
from rollout_worker.drafting import SuffixIndex
from tests.support.reference_model import small_qwen3

CHAINS = st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 0.99)), max_size=5).map(
    lambda pairs: Draft([token for token, _ in pairs], [probability for _, probability in pairs])
)


@given(chains=st.lists(CHAINS, min_size=1, max_size=3), min_survival=st.floats(0.0, 1.0))
def test_a_draft_follows_one_of_the_chains_and_ends_at_the_threshold(chains: list[Draft], min_survival: float) -> None:
    draft = Arbiter().choose(chains, min_survival).draft
    assert not draft.tokens or any(list(chain.tokens[: len(draft.tokens)]) == draft.tokens for chain in chains)
    assert not draft.tokens or np.prod(draft.probabilities) >= min_survival
    if min_survival == 0:
        assert bool(draft.tokens) == any(chain.tokens for chain in chains)


def test_the_drafter_that_was_right_more_often_is_chosen() -> None:
    arbiter = Arbiter()
    chains = [Draft([1, 1], [0.9, 0.9]), Draft([2, 1], [0.6, 0.9])]
    assert [1, 1] == arbiter.choose(chains, 0.1).draft.tokens
    for number in range(300):
        arbiter.learn(arbiter.choose(chains, 0.1), [2, 1] if number % 10 else [1, 1])
    choice = arbiter.choose(chains, 0.1)
    assert [2, 1] == choice.draft.tokens
    assert 0.9 == pytest.approx(choice.draft.probabilities[0], abs=0.1)


def trajectory(tokens: list[int]) -> Trajectory:
    return Trajectory("p", 0, "", np.array([5, 6, 7], np.uint32), (Segment(True, np.array(tokens, np.uint32)),))


def test_a_head_that_knows_the_response_is_accepted_without_history() -> None:
    response = [8, 9, 10, 11, 12, 13, MODEL_END]
    padded = [*response, *[0] * STEPS]
    chains = Chains(
        np.array([padded[at : at + STEPS] for at in range(len(response) + 1)]),
        np.full((len(response) + 1, STEPS), 0.99),
    )
    outcome = Outcome()
    drafter = ArbitratedDrafter(None, Arbiter(), 0.1, [chains], STEPS)
    replay(drafter, "p", [without_end(trajectory(response))], 16, outcome)
    # The first step samples one token; the second accepts four drafted ones, and the third the end.
    assert (3, 5) == (outcome.steps, outcome.accepted)


def test_the_index_drafts_from_its_history() -> None:
    index = SuffixIndex()
    rollout = without_end(trajectory([8, 9, 10, 11, 12, 13, MODEL_END]))
    outcome = Outcome()
    replay(ArbitratedDrafter(index, Arbiter(), 0.0, [], 0), "p", [rollout], 16, Outcome())
    replay(ArbitratedDrafter(index, Arbiter(), 0.0, [], 0), "p", [rollout], 16, outcome)
    assert outcome.steps <= 2


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    directory: Path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    small_qwen3(vocab_size=40, num_hidden_layers=4).save_pretrained(directory)
    return Policy(directory)


def test_a_draft_depends_only_on_what_was_sampled_before(policy: Policy) -> None:
    torch.manual_seed(0)
    head = Head(policy)
    features, tokens = torch.randn(2, 9, 3 * 64), torch.randint(0, 40, (2, 9))
    drafted, probabilities = head.draft(features, tokens)
    changed_features, changed_tokens = features.clone(), tokens.clone()
    changed_features[:, 5:], changed_tokens[:, 5:] = 0.0, 1
    drafted_again, again = head.draft(changed_features, changed_tokens)
    assert (drafted[:, :5] == drafted_again[:, :5]).all()
    assert torch.allclose(probabilities[:, :5], again[:, :5], atol=1e-5)
    assert not torch.allclose(probabilities[:, 5:], again[:, 5:], atol=1e-5)


def test_drafting_continues_with_the_tokens_that_the_head_has_drafted(policy: Policy) -> None:
    """Given the drafted tokens as recorded ones, training sees the same logits."""
    torch.manual_seed(0)
    head = Head(policy)
    features, tokens = torch.randn(1, 1, 3 * 64), torch.tensor([[3]])
    drafted, probabilities = head.draft(features, tokens)
    recorded = torch.cat([torch.tensor([[0, 3]]), drafted[0]], 1)
    logits = head(features, recorded)
    assert drafted[0, 0].tolist() == logits[:, 0, 0].argmax(-1).tolist()
    assert torch.allclose(probabilities[0, 0], logits[:, 0, 0].softmax(-1).max(-1).values, atol=1e-5)


def test_the_head_learns_to_draft_what_the_model_has_sampled(policy: Policy) -> None:
    torch.manual_seed(0)
    cycle = [10, 11, 12, 13, 14, 15] * 4
    rollouts = [trajectory(cycle[start:]) for start in range(6)]
    head = Head(policy)
    trainer = Trainer(head)
    first = trainer.train(policy, rollouts, 1)
    assert trainer.train(policy, rollouts, 300) < first / 5
    chains = draft_all(head, policy, rollouts)
    for rollout, chain in zip(rollouts, chains, strict=True):
        tokens = rollout.segments[0].tokens
        assert len(tokens) + 1 == len(chain.tokens)
        assert tokens[8 : 8 + STEPS].tolist() == chain.tokens[8].tolist()
