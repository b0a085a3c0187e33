"""Models with recurrent layers, as vLLM configures them, without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import engine_args, engine_environment, vllm_settings
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.recurrent_states import check_layers, state_bytes
from tests.support.engines import engine_config
from tests.support.recurrent_model import qwen3_next

STATE = 32 * 128 * 128 * 4
"""Bytes of the state of one of Qwen3-Next's 36 linear attention layers, without the tokens of its convolution."""


@pytest.fixture
def configure(drafting_config: DraftingConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that returns vLLM's configuration of an engine with drafts of 16 tokens."""

    def configure(model: Path, memory: str, **extra_args: Any) -> Any:
        config = engine_config(model, replace(drafting_config, max_draft_tokens=16))
        fields = {"dtype": "bfloat16", "kv_cache_memory": memory, "extra_args": extra_args}
        spec = config.spec.model_copy(update=fields)
        config = replace(config, spec=spec)
        for name, value in engine_environment(config, os.environ).items():
            monkeypatch.setenv(name, value)
        return engine_args(vllm_settings(config)).create_engine_config()

    return configure


@pytest.mark.parametrize(("memory", "places"), [("4Ti", 16), ("80Gi", 2), ("1Gi", 1)])
def test_the_states_of_a_full_batch_take_at_most_a_quarter_of_the_memory(
    configure: Callable[..., Any], tmp_path: Path, memory: str, places: int
) -> None:
    """vLLM keeps a state for each place for a draft, and two more with prefix caching."""
    config = configure(qwen3_next(tmp_path), memory)
    assert places == config.speculative_config.num_speculative_tokens
    assert 36 * (2 + places) * (STATE + (3 + places) * 8192 * 2) == state_bytes(config)


def test_a_response_of_qwen3_next_would_take_more_than_a_gigabyte_with_16_drafts(
    configure: Callable[..., Any], tmp_path: Path
) -> None:
    config = configure(qwen3_next(tmp_path), "4Ti", enable_prefix_caching=False)
    assert pytest.approx(1.47e9, rel=0.01) == state_bytes(config)


def test_models_without_recurrent_layers_keep_their_drafts(configure: Callable[..., Any], model: Path) -> None:
    config = configure(model, "1Gi")
    assert 0 == state_bytes(config)
    assert 16 == config.speculative_config.num_speculative_tokens


class Layer(MambaBase):  # type: ignore[misc]
    """A recurrent layer of some kind."""

    def __init__(self, kind: MambaAttentionBackendEnum) -> None:
        self._kind = kind

    def get_state_shape(self) -> list[tuple[int, ...]]:
        return [(1,)]

    def get_state_dtype(self) -> tuple[Any, ...]:
        import torch

        return (torch.float32,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return self._kind


class BailingLayer(Layer):
    """Linear attention that undoes drafts."""

    def get_attn_backend(self) -> Any:
        return BailingLinearAttentionBackend


KIND = MambaAttentionBackendEnum


@pytest.mark.parametrize(
    ("layer", "refused"),
    [
        (Layer(KIND.LINEAR), True),
        (Layer(KIND.MAMBA1), True),
        (BailingLayer(KIND.LINEAR), False),
        (Layer(KIND.GDN_ATTN), False),
        (Layer(KIND.MAMBA2), False),
        (Layer(KIND.SHORT_CONV), False),
    ],
)
def test_layers_that_cannot_undo_drafts_are_refused(layer: Layer, refused: bool) -> None:
    cache = SimpleNamespace(
        mamba_block_size=1, mamba_page_size_padded=None, mamba_cache_mode="none", use_replayssm=False
    )
    layers = {"attention": object(), "recurrent": layer}
    config: Any = SimpleNamespace(
        cache_config=cache,
        num_speculative_tokens=2,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    if not refused:
        check_layers(config)
        return
    with pytest.raises(EngineError, match=r"cannot undo rejected drafts.*speculation\.policy"):
        check_layers(config)
