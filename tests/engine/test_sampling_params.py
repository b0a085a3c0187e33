"""Requests without an engine: vLLM's sampling parameters, drafting settings, and what is rejected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.sample import rejection_sampler

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial, WeightSpan
from rollout_store.job.admission_rules import AdmissionError, can_continue, check_admission
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.sampling_params import end_token_ids, vllm_sampling_params
from rollout_worker.engine.vllm_patches import patch_draft_sampling, patch_sampling_without_drafts

PREFIX = Partial(token_ids=[1, 2, 3], weight_spans=[WeightSpan(start=0, weight_version=0)])
EMPTY_PREFIX = Partial(token_ids=[], weight_spans=[])


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


def test_settings_that_vllm_does_not_support_with_drafts_exclude_them() -> None:
    for settings in ({"min_p": 0.1}, {"logit_bias": {1: 2.0}}, {"logit_bias": {1: 0.0, 2: -0.5}}):
        assert Sampling.model_validate(settings).excludes_drafts
    for settings in ({}, {"min_p": 0}, {"logit_bias": {}}, {"logit_bias": {1: 0.0, 2: -0.0}}, {"top_p": 0.5}):
        assert not Sampling.model_validate(settings).excludes_drafts


def test_a_request_that_is_too_long_is_rejected_with_its_numbers() -> None:
    sampling = Sampling(max_tokens=100)
    check_admission(sampling, 28, max_model_len=128)
    with pytest.raises(AdmissionError, match=r"29 tokens .* 100 .* 128"):
        check_admission(sampling, 29, max_model_len=128)


@pytest.mark.parametrize(
    "settings", [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"structured_outputs": {"regex": "w1"}}]
)
def test_a_prefix_that_would_change_the_output_distribution_is_rejected(settings: dict[str, object]) -> None:
    sampling = Sampling.model_validate(settings)
    assert not can_continue(sampling)
    with pytest.raises(AdmissionError, match="prefix"):
        check_admission(sampling, 10, max_model_len=2048, prefix=PREFIX)
    check_admission(sampling, 10, max_model_len=2048, prefix=EMPTY_PREFIX)


@pytest.mark.parametrize(
    ("sampling", "known", "missing"),
    [
        (Sampling(logprobs=True), {}, "log-probabilities of the prefix"),
        (Sampling(top_logprobs=2), {}, "log-probabilities of the prefix"),
        (Sampling(top_logprobs=2), {"logprobs": [-1.0] * 3}, "top_logprobs of the prefix"),
        (Sampling(top_k=5, kept_tokens=True), {}, "kept_token_ids or omit the prefix"),
    ],
)
def test_a_prefix_without_what_is_requested_of_each_token_is_rejected(
    sampling: Sampling, known: dict[str, Any], missing: str
) -> None:
    assert can_continue(sampling)
    prefix = Partial(token_ids=[1, 2, 3], weight_spans=PREFIX.weight_spans, **known)
    with pytest.raises(AdmissionError, match=missing):
        check_admission(sampling, 10, max_model_len=2048, prefix=prefix)
    check_admission(sampling, 10, max_model_len=2048, prefix=EMPTY_PREFIX)


def test_a_prefix_longer_than_the_response_is_rejected() -> None:
    check_admission(Sampling(max_tokens=3), 10, max_model_len=2048, prefix=PREFIX)
    with pytest.raises(AdmissionError, match=r"3 tokens exceeds sampling\.maxTokens 2"):
        check_admission(Sampling(max_tokens=2), 10, max_model_len=2048, prefix=PREFIX)


def raise_on_cpu_tensors(*_: object, **__: object) -> None:
    """Do what the launch of a Triton kernel does with tensors that are not on the GPU."""
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


def test_the_kernel_of_gpus_is_not_called_with_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", raise_on_cpu_tensors)
    assert not patch_draft_sampling("cuda")
    assert rejection_sampler.expand_batch_to_tokens is raise_on_cpu_tensors
