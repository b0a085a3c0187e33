"""Requests that an engine rejects; without an engine."""

from __future__ import annotations

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial, WeightSpan
from rollout_worker.engine.admission import can_continue, check_admission
from rollout_worker.engine.errors import AdmissionError

PREFIX = Partial(token_ids=[1, 2, 3], weight_spans=[WeightSpan(start=0, weight_version=0)])
EMPTY_PREFIX = Partial(token_ids=[], weight_spans=[])


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"min_p": 0.1}, "sampling.minP"), ({"logit_bias": {1: 2.0}}, "sampling.logitBias")],
)
def test_settings_that_vllm_does_not_support_with_speculation_are_rejected_by_name(
    settings: dict[str, object], name: str
) -> None:
    sampling = Sampling.model_validate(settings)
    with pytest.raises(AdmissionError, match=name):
        check_admission(sampling, 10, max_model_len=2048, speculative=True)
    check_admission(sampling, 10, max_model_len=2048, speculative=False)


def test_a_request_that_is_too_long_is_rejected_with_its_numbers() -> None:
    sampling = Sampling(max_tokens=100)
    check_admission(sampling, 28, max_model_len=128, speculative=True)
    with pytest.raises(AdmissionError, match=r"29 tokens .* 100 .* 128"):
        check_admission(sampling, 29, max_model_len=128, speculative=True)


@pytest.mark.parametrize("settings", [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}])
def test_a_prefix_that_would_change_the_output_distribution_is_rejected(settings: dict[str, object]) -> None:
    sampling = Sampling.model_validate(settings)
    assert not can_continue(sampling)
    with pytest.raises(AdmissionError, match="prefix"):
        check_admission(sampling, 10, max_model_len=2048, speculative=True, prefix=PREFIX)
    check_admission(sampling, 10, max_model_len=2048, speculative=True, prefix=EMPTY_PREFIX)


def test_a_prefix_without_log_probabilities_is_rejected_if_they_are_requested() -> None:
    sampling = Sampling(logprobs=True)
    assert can_continue(sampling)
    with pytest.raises(AdmissionError, match=r"log-probabilities of the prefix"):
        check_admission(sampling, 10, max_model_len=2048, speculative=True, prefix=PREFIX)
    check_admission(sampling, 10, max_model_len=2048, speculative=True, prefix=EMPTY_PREFIX)


def test_a_prefix_without_likely_tokens_is_rejected_if_they_are_requested() -> None:
    prefix = Partial(token_ids=[1, 2, 3], logprobs=[-1.0] * 3, weight_spans=PREFIX.weight_spans)
    with pytest.raises(AdmissionError, match=r"top_logprobs of the prefix"):
        check_admission(Sampling(top_logprobs=2), 10, max_model_len=2048, speculative=True, prefix=prefix)
    with pytest.raises(AdmissionError, match=r"log-probabilities of the prefix"):
        check_admission(Sampling(top_logprobs=2), 10, max_model_len=2048, speculative=True, prefix=PREFIX)


def test_a_prefix_longer_than_the_response_is_rejected() -> None:
    check_admission(Sampling(max_tokens=3), 10, max_model_len=2048, speculative=True, prefix=PREFIX)
    with pytest.raises(AdmissionError, match=r"3 tokens exceeds sampling\.maxTokens 2"):
        check_admission(Sampling(max_tokens=2), 10, max_model_len=2048, speculative=True, prefix=PREFIX)
