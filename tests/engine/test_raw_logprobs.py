"""Engines whose log-probabilities are those of the model before temperature, filters and penalties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_store.history.store import HistoryStore
from rollout_store.job.admission_rules import AdmissionError
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import EOS, LoopThread, ReferenceDistribution
from tests.support.responses import PROMPT, PROMPTS, accepted_share, check_likely_tokens, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

SETTINGS = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 9,
    "repetition_penalty": 1.2,
    "min_tokens": 5,
    "allowed_token_ids": [1, 3, 5, 7, 9, 11, 13, EOS],
}
"""Settings that raw log-probabilities do not reflect."""

MIN_DIFFERENCE = 0.05
"""In each response, a raw and a processed log-probability differ by more than this."""


@pytest.fixture(scope="module", params=["plain", "drafting"])
def raw_engine(
    request: pytest.FixtureRequest,
    model: Path,
    loop: LoopThread,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
) -> Iterator[EngineHarness]:
    config = engine_config(model, drafting_config if request.param == "drafting" else None)
    spec = config.spec.model_copy(update={"logprobs_mode": "raw"})
    engine = loop.run(Engine.start(replace(config, spec=spec)))
    yield EngineHarness(engine, loop, history_store if request.param == "drafting" else None)
    engine.close()


def test_raw_log_probabilities_are_those_of_the_model(
    raw_engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    sampling = Sampling.model_validate({"n": 1, "max_tokens": 30, "top_logprobs": 4, **SETTINGS})
    results = raw_engine.sample(PROMPTS, sampling, "raw")
    if raw_engine.history is not None:
        raw_engine.add_history("raw", tokens_of(results))
        results = raw_engine.sample(PROMPTS, sampling, "raw")
        assert accepted_share(results) > 0.05
    for prompt, result in zip(PROMPTS, results, strict=True):
        check_likely_tokens(reference, prompt, result.tokens, Sampling(top_logprobs=4))
        processed = reference.logprobs(prompt, result.token_ids, sampling)
        assert not np.allclose(
            processed[range(len(processed)), result.token_ids], np.array(result.logprobs), atol=MIN_DIFFERENCE
        )


def test_kept_tokens_are_not_known_from_raw_log_probabilities(raw_engine: EngineHarness) -> None:
    with pytest.raises(AdmissionError, match=r"sampling.keptTokens needs engine.logprobsMode: processed"):
        raw_engine.sample([PROMPT], Sampling(n=1, top_k=5, kept_tokens=True, max_tokens=5))
