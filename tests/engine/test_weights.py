"""New weights in a running engine: what is sampled then comes from them, all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Bed, config
from testbed import Law, LoopThread, make_model

from rollout_api.job import Sampling
from rollout_worker.engine.host import Engine
from rollout_worker.engine.model_source import ModelError, resolve_checkpoint

PROMPT = [5, 1, 9, 2]


def worst_logprob_error(bed: Bed, law: Law) -> float:
    """Largest difference between an engine's log-probabilities and the law's."""
    sampling = Sampling(n=8, max_tokens=12, logprobs=True)
    worst = 0.0
    for response in bed.sample([PROMPT], sampling):
        assert response.logprobs is not None
        worst = max(worst, law.worst_error(PROMPT, response.token_ids, response.logprobs, sampling))
    return worst


def test_tied_embeddings_are_reloaded_whole(tmp_path: Path, loop: LoopThread) -> None:
    first, second = (make_model(tmp_path / str(seed), seed=seed, tied=True) for seed in (1, 2))
    engine = loop.run(Engine.start(config(first)))
    try:
        bed = Bed(engine, loop)
        assert worst_logprob_error(bed, Law(first)) < 1e-3
        assert worst_logprob_error(bed, Law(second)) > 0.1
        loop.run(engine.load_weights(second, 2))
        assert worst_logprob_error(bed, Law(second)) < 1e-3
        assert bed.sample([PROMPT], Sampling(n=1, max_tokens=5))[0].weight_version == 2
    finally:
        engine.close()


def test_weights_are_reloaded_while_drafting(tmp_path: Path, drafted: Bed, model: Path) -> None:
    other = make_model(tmp_path / "other", seed=9)
    drafted.loop.run(drafted.engine.load_weights(other, 2))
    try:
        drafted.sample([PROMPT], Sampling(n=16, max_tokens=40), problem="reload")
        assert worst_logprob_error(drafted, Law(other)) < 1e-3
    finally:
        drafted.loop.run(drafted.engine.load_weights(model, 0))
    assert worst_logprob_error(drafted, Law(model)) < 1e-3


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    make_model(directory / "inside")
    return directory


def test_a_checkpoint_outside_the_allowed_roots_is_refused(tmp_path: Path, cache: Path) -> None:
    outside = make_model(tmp_path / "outside")
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_checkpoint(str(outside), cache, cache / "inside", [])
    assert outside == resolve_checkpoint(str(outside), cache, cache / "inside", [str(tmp_path)])
    with pytest.raises(ModelError, match=r"spec\.weights\.allowedRoots"):
        resolve_checkpoint(f"file://{cache}/{'../' * len(cache.parts)}{outside}", cache, cache / "inside", [])


def test_a_checkpoint_of_another_shape_or_format_is_refused(tmp_path: Path, cache: Path) -> None:
    tied = make_model(tmp_path / "tied", tied=True)
    with pytest.raises(ModelError, match="tie_word_embeddings True where the model has False"):
        resolve_checkpoint(str(tied), cache, cache / "inside", [str(tmp_path)])
    (tied / "model.safetensors").rename(tied / "pytorch_model.bin")
    with pytest.raises(ModelError, match="other weight formats are not loaded"):
        resolve_checkpoint(str(tied), cache, cache / "inside", [str(tmp_path)])
