"""Workarounds for vLLM's defects are only applied where they are needed."""

from __future__ import annotations

import pytest
from vllm.v1.sample import rejection_sampler

from rollout_worker.engine.vllm_patches import patch_draft_sampling


def raise_on_cpu_tensors(*_: object, **__: object) -> None:
    """Do what the launch of a Triton kernel does with tensors that are not on the GPU."""
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


def test_the_kernel_of_gpus_is_not_called_with_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", raise_on_cpu_tensors)
    assert not patch_draft_sampling("cuda")
    assert rejection_sampler.expand_batch_to_tokens is raise_on_cpu_tensors
