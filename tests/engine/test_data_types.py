"""Engines sample in the data type that the manifest names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_worker.engine.engine import Engine
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import LoopThread


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_an_engine_samples_in_the_requested_data_type(
    dtype: Literal["auto", "bfloat16"], model: Path, loop: LoopThread
) -> None:
    """On CPUs with matrix tiles, vLLM uses other kernels for bfloat16."""
    config = engine_config(model)
    engine = loop.run(Engine.start(replace(config, spec=config.spec.model_copy(update={"dtype": dtype}))))
    try:
        (result,) = EngineHarness(engine, loop).sample([[4, 4, 2, 17]], Sampling(n=1, max_tokens=40, temperature=0))
        assert result.token_ids
    finally:
        engine.close()
