from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_worker.engine.host import Engine
from tests.support.engines import Bed, config
from tests.support.reference_model import LoopThread


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_an_engine_samples_in_the_number_format_that_is_asked_for(
    dtype: Literal["auto", "bfloat16"], model: Path, loop: LoopThread
) -> None:
    """On CPUs with matrix tiles vLLM's kernels for bfloat16 use these."""
    wanted = config(model)
    engine = loop.run(Engine.start(replace(wanted, spec=wanted.spec.model_copy(update={"dtype": dtype}))))
    try:
        (made,) = Bed(engine, loop).sample([[4, 4, 2, 17]], Sampling(n=1, max_tokens=40, temperature=0))
        assert made.token_ids
    finally:
        engine.close()
