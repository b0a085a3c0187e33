"""From a request's settings to vLLM's, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial, WeightSpan
from rollout_worker.engine.compat import sample_plainly_without_drafts
from rollout_worker.engine.sampling import (
    AdmissionError,
    DraftScope,
    admit,
    can_continue,
    draft_limits,
    end_tokens,
    vllm_sampling,
)


@pytest.mark.parametrize(
    ("settings", "names"),
    [({"min_p": 0.1}, "sampling.minP"), ({"logit_bias": {1: 2.0}}, "sampling.logitBias")],
)
def test_what_vllm_refuses_under_speculation_is_refused_by_name(settings: dict[str, object], names: str) -> None:
    sampling = Sampling.model_validate(settings)
    with pytest.raises(AdmissionError, match=names):
        admit(sampling, 10, max_model_len=2048, speculating=True)
    admit(sampling, 10, max_model_len=2048, speculating=False)


def test_a_request_that_does_not_fit_is_refused_with_its_numbers() -> None:
    sampling = Sampling(max_tokens=100)
    admit(sampling, 28, max_model_len=128, speculating=True)
    with pytest.raises(AdmissionError, match=r"29 tokens .* 100 .* 128"):
        admit(sampling, 29, max_model_len=128, speculating=True)


PREFIX = Partial(token_ids=[1, 2, 3], spans=[WeightSpan(start=0, weight_version=0)])


@pytest.mark.parametrize(
    "settings", [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"stop": ["end"]}, {"logprobs": True}]
)
def test_a_prefix_with_which_the_law_would_be_another_is_refused(settings: dict[str, object]) -> None:
    sampling = Sampling.model_validate(settings)
    # log-probabilities are the prefix's to have, not a matter of the law
    assert ("logprobs" in settings) == can_continue(sampling)
    with pytest.raises(AdmissionError, match="prefix"):
        admit(sampling, 10, max_model_len=2048, speculating=True, prefix=PREFIX)
    admit(sampling, 10, max_model_len=2048, speculating=True, prefix=Partial(token_ids=[], spans=[]))


def test_a_prefix_longer_than_the_response_may_be_is_refused() -> None:
    admit(Sampling(max_tokens=3), 10, max_model_len=2048, speculating=True, prefix=PREFIX)
    with pytest.raises(AdmissionError, match=r"3 tokens exceeds sampling\.maxTokens 2"):
        admit(Sampling(max_tokens=2), 10, max_model_len=2048, speculating=True, prefix=PREFIX)


def test_the_drafter_is_told_what_ends_a_response() -> None:
    """The job's own stop tokens, and the model's, which vLLM adds when a request comes in."""
    params = vllm_sampling(Sampling(stop_token_ids=[7, 8]), "r", None)
    params.update_from_generation_config({"eos_token_id": [2, 3]}, eos_token_id=2)
    assert {2, 3, 7, 8} == set(end_tokens(params))
    params = vllm_sampling(Sampling(), "r", None)
    params.update_from_generation_config({}, eos_token_id=None)
    assert [] == end_tokens(params)


def test_vllm_is_asked_for_what_the_prefix_leaves() -> None:
    sampling = Sampling(max_tokens=9, min_tokens=4, seed=1)
    params = vllm_sampling(sampling, "r", None, prefix=3)
    assert (6, 1) == (params.max_tokens, params.min_tokens)
    assert 0 == vllm_sampling(sampling, "r", None, prefix=5).min_tokens
    assert 3 == len({vllm_sampling(sampling, "r", None, prefix=prefix).seed for prefix in (0, 3, 5)})


lengths = st.integers(0, 200)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 100), lengths, st.integers(0, 64))
def test_no_draft_passes_a_limit(undrafted: int, min_tokens: int, max_tokens: int, produced: int, most: int) -> None:
    (limit,) = draft_limits(
        np.array([produced]),
        undrafted=np.array([undrafted]),
        min_tokens=np.array([min_tokens]),
        max_tokens=np.array([max_tokens]),
        most=np.array([most]),
    ).tolist()
    assert 0 <= limit <= (most if produced >= undrafted else 0)
    last = produced + limit + 1  # the model adds one token of its own
    if limit:
        assert last <= max_tokens or produced < min_tokens
        if produced < min_tokens:
            assert last <= min_tokens


def test_the_scope_survives_the_way_through_extra_args() -> None:
    scope = DraftScope("k", "p", 7, 3, 2, ("self",), 1)
    back = DraftScope.from_extra_args(scope.as_extra_args())
    assert back is not None
    assert scope.as_extra_args() == back.as_extra_args()
    assert DraftScope.from_extra_args(None) is None
    assert DraftScope.from_extra_args({"other": 1}) is None


def test_seeds_differ_between_rollouts_and_repeat_for_the_same() -> None:
    sampling = Sampling(seed=7)
    seeds = [vllm_sampling(sampling, f"job/r/{sample}/0", None).seed for sample in range(50)]
    assert len(set(seeds)) == 50
    assert seeds[3] == vllm_sampling(sampling, "job/r/3/0", None).seed
    assert vllm_sampling(Sampling(), "job/r/0/0", None).seed is None


def test_top_p_is_only_touched_where_drafts_need_it() -> None:
    scope = DraftScope("k", "p", 7)
    assert vllm_sampling(Sampling(top_k=5), "r", None).top_p == 1.0
    assert 0.999999 < vllm_sampling(Sampling(top_k=5), "r", scope).top_p <= 1.0
    assert vllm_sampling(Sampling(top_k=5, top_p=0.9), "r", scope).top_p == 0.9
    assert vllm_sampling(Sampling(), "r", scope).top_p == 1.0


def test_a_step_without_drafts_is_sampled_as_without_speculation() -> None:
    asked: list[object] = []
    runner = SimpleNamespace(_sample=lambda logits, metadata: asked.append(metadata))
    sample_plainly_without_drafts(runner)
    some, none = SimpleNamespace(num_draft_tokens=[0, 2]), SimpleNamespace(num_draft_tokens=[0, 0])
    for metadata in (some, none, None):
        runner._sample(None, metadata)
    assert [some, None, None] == asked
