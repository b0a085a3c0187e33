"""Requests and finished rollouts of a job, for tests that play its clients and engines."""

from __future__ import annotations

from typing import Any

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import encode_draft_sources
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.messages import FinishReason, Rollout, RolloutRequest, WeightSpan

JOB = MessageKeys("uid")
HISTORY = HistoryKeys("default", "math")


def request(name: str = "r", n: int = 2, **more: Any) -> RolloutRequest:
    """Return a request of problem ``p``."""
    fields = {"problem_id": "p", "prompt_token_ids": [1]} | more
    return RolloutRequest(job_uid="uid", request_id=name, sampling=Sampling(n=n), **fields)


def rollout(for_request: RolloutRequest, sample: int, length: int = 5) -> Rollout:
    """Return a finished sample of a request with *length* tokens."""
    return Rollout(
        rollout_id=str(for_request.rollout_id(sample)),
        problem_id=for_request.problem,
        purpose=for_request.purpose,
        token_ids=[sample] * length,
        logprobs=[-0.5] * length,
        weight_spans=[WeightSpan(start=0, weight_version=1)] if length else [],
        finish_reason=FinishReason.STOP,
        num_decoding_steps=2,
        num_draft_tokens=4,
        num_accepted_tokens=3,
        draft_sources=encode_draft_sources(bytes([0, *[1] * 3, *[0] * length])[:length]),
    )
