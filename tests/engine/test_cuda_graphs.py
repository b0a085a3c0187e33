"""The CUDA graphs that vLLM's V2 model runner chooses for steps with and without drafts, on each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_worker.engine.config import cuda_graph_sizes
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from tests.support.engines import engine_config, needs_v2, start_with_extension
from tests.support.faulty_extension import CudaGraphExtension
from tests.support.reference_model import LoopThread

pytestmark = [needs_v2, pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

RESPONSES, DRAFT_TOKENS = 256, 16
SIZES = cuda_graph_sizes(RESPONSES, DRAFT_TOKENS)
BATCH_SIZES = range(1, RESPONSES + 1)
Graphs = list[tuple[str, int]]


@pytest.fixture(scope="module")
def stages(model: Path, loop: LoopThread, drafting_config: DraftingConfig) -> Iterator[Engine]:
    """An engine with two pipeline stages."""
    config = engine_config(model, replace(drafting_config, max_draft_tokens=DRAFT_TOKENS))
    spec = config.spec.model_copy(update={"pipeline_parallel_size": 2, "max_num_seqs": RESPONSES})
    engine = start_with_extension(loop, replace(config, spec=spec), CudaGraphExtension)
    yield engine
    engine.close()


def choose(
    stages: Engine, loop: LoopThread, support: str, steps: list[list[int]], sizes: list[int] = SIZES
) -> list[Graphs]:
    """Return the graphs and the padded numbers of tokens of steps, for each stage."""
    chosen: list[Graphs] = loop.run(stages.collective_rpc("test_choose_graphs", support, sizes, steps))
    assert 2 == len(chosen)
    return chosen


@pytest.mark.parametrize("support", ["ALWAYS", "UNIFORM_BATCH"])
def test_all_pipeline_stages_pad_a_step_to_the_same_number_of_tokens(
    stages: Engine, loop: LoopThread, support: str
) -> None:
    """A stage that has other rows than the one before it ends the engine."""
    drafts = [0, 1, 4, 7, DRAFT_TOKENS]
    uniform = [[1 + length] * responses for responses in BATCH_SIZES for length in drafts]
    uneven = [[1 + number % (1 + DRAFT_TOKENS) for number in range(responses)] for responses in BATCH_SIZES]
    steps = uniform + uneven
    first, last = choose(stages, loop, support, steps)
    padded = zip(steps, first, last, strict=True)
    assert [] == sorted({len(step) for step, one, other in padded if one[1] != other[1]})
    assert last == first


def test_steps_have_full_graphs_where_the_attention_backend_has_none_for_uneven_drafts(
    stages: Engine, loop: LoopThread
) -> None:
    """The captured lengths, in tokens of a response, are 1, 2, 3, 5, 9 and 17."""
    batches = [(responses, 1 + length) for responses in (1, 2, 7, 64, RESPONSES) for length in (0, 1, 2, 4, 8, 16)]
    steps = [[tokens] * responses for responses, tokens in batches if responses * tokens <= SIZES[-1]]
    for graphs in choose(stages, loop, "UNIFORM_BATCH", steps):
        assert {"FULL"} == {kind for kind, _ in graphs}
    # So does a full batch, although none of the sizes in tokens is a multiple of it.
    sizes = [size for size in SIZES if size % RESPONSES]
    for graphs in choose(stages, loop, "UNIFORM_BATCH", [step for step in steps if len(step) == RESPONSES], sizes):
        assert {"FULL"} == {kind for kind, _ in graphs}
