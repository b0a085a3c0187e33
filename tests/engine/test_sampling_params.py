"""vLLM's sampling parameters and the drafting settings of a request; without an engine."""

from __future__ import annotations

from types import SimpleNamespace

from rollout_api.manifest.spec import Sampling
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.sampling_params import end_token_ids, vllm_sampling_params
from rollout_worker.engine.vllm_patches import patch_sampling_without_drafts


def test_end_tokens_are_those_of_the_request_and_of_the_model() -> None:
    """vLLM adds the model's end tokens when it accepts a request."""
    params = vllm_sampling_params(Sampling(stop_token_ids=[7, 8]), "r", None)
    params.update_from_generation_config({"eos_token_id": [2, 3]}, eos_token_id=2)
    assert {2, 3, 7, 8} == set(end_token_ids(params))
    params = vllm_sampling_params(Sampling(), "r", None)
    params.update_from_generation_config({}, eos_token_id=None)
    assert [] == end_token_ids(params)
    params = vllm_sampling_params(Sampling(stop_token_ids=[7, 8], ignore_eos=True), "r", None)
    params.update_from_generation_config({"eos_token_id": [2, 3]}, eos_token_id=2)
    assert {7, 8} == set(end_token_ids(params))


def test_limits_are_reduced_by_the_length_of_the_prefix() -> None:
    sampling = Sampling(max_tokens=9, min_tokens=4)
    params = vllm_sampling_params(sampling, "r", None, prefix_tokens=3)
    assert (6, 1) == (params.max_tokens, params.min_tokens)
    assert 0 == vllm_sampling_params(sampling, "r", None, prefix_tokens=5).min_tokens


def test_seeds_differ_between_streams_and_prefixes_and_are_reproducible() -> None:
    sampling = Sampling(seed=7, max_tokens=9)
    names = [f"request/{sample}" for sample in range(50)]
    seeds = [vllm_sampling_params(sampling, name, None).seed for name in names]
    assert 50 == len(set(seeds))
    assert seeds == [vllm_sampling_params(sampling, name, None).seed for name in names]
    assert 3 == len({vllm_sampling_params(sampling, "r", None, prefix_tokens=tokens).seed for tokens in (0, 3, 5)})
    assert vllm_sampling_params(Sampling(), "r", None).seed is None


def test_top_p_is_only_changed_where_drafting_requires_it() -> None:
    settings = DraftSettings("k", "p", 7)
    assert 1.0 == vllm_sampling_params(Sampling(top_k=5), "r", None).top_p
    assert 0.999999 < vllm_sampling_params(Sampling(top_k=5), "r", settings).top_p <= 1.0
    assert 0.9 == vllm_sampling_params(Sampling(top_k=5, top_p=0.9), "r", settings).top_p
    assert 1.0 == vllm_sampling_params(Sampling(), "r", settings).top_p


def test_draft_settings_are_unchanged_by_extra_args() -> None:
    settings = DraftSettings("k", "p", 7, 3, 2, ("self",), later_turn=True)
    received = DraftSettings.from_extra_args(settings.as_extra_args())
    assert received is not None
    assert settings.as_extra_args() == received.as_extra_args()
    assert DraftSettings.from_extra_args(None) is None
    assert DraftSettings.from_extra_args({"other": 1}) is None


def test_a_step_without_drafts_uses_the_ordinary_sampler() -> None:
    received: list[object] = []
    runner = SimpleNamespace(_sample=lambda logits, metadata: received.append(metadata))
    patch_sampling_without_drafts(runner)
    with_drafts, without = SimpleNamespace(num_draft_tokens=[0, 2]), SimpleNamespace(num_draft_tokens=[0, 0])
    for metadata in (with_drafts, without, None):
        runner._sample(None, metadata)
    assert [with_drafts, None, None] == received
