"""vLLM's own engines draft from a shared history with one more argument."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_worker import drafting_args
from rollout_worker.engine.config import EngineConfig, engine_environment
from tests.support.engines import engine_config
from tests.support.reference_model import make_model
from tests.support.responses import PROMPTS, WITHOUT_EOS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """The configuration of a small engine."""
    return engine_config(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def _environment(config: EngineConfig) -> Iterator[None]:
    """The environment of vLLM on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(config, {}).items():
            patch.setenv(name, value)
        yield


class UserEngine:
    """An engine that a user starts without a job."""

    def __init__(self, config: EngineConfig, **drafting: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(config.model),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=16,
            kv_cache_memory_bytes=1 << 27,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **drafting,
        )

    def sample(self) -> list[list[int]]:
        """Sample a greedy response to each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(n=1, temperature=0, max_tokens=60, detokenize=False, allowed_token_ids=WITHOUT_EOS)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stats(self) -> dict[str, Any]:
        """Return the drafter's statistics."""
        (stats,) = self.llm.collective_rpc("das_stats")
        return dict(stats)

    def accepted_of_history(self) -> int:
        """Return how many draft tokens from earlier rollouts were accepted."""
        return int(self.stats()["labeled_counters"]["source_accepted_tokens"]["history"])

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


@pytest.mark.usefixtures("_environment")
def test_engines_that_name_a_history_draft_from_the_rollouts_of_each_other(
    config: EngineConfig, redis_url: str
) -> None:
    plain = UserEngine(config)
    expected = plain.sample()
    plain.close()
    first = UserEngine(config, **drafting_args(f"{redis_url}/drop-in"))
    assert first.sample() == expected
    first.sample()  # an engine learns with its next step that requests have ended
    second = UserEngine(config, **drafting_args(f"{redis_url}/drop-in"))
    deadline = time.monotonic() + TIMEOUT_S
    while not second.accepted_of_history() and time.monotonic() < deadline:
        assert second.sample() == expected
    assert second.accepted_of_history() > 100
    assert second.stats()["drafting_failures"] == first.stats()["drafting_failures"] == 0
    first.close()
    second.close()


@pytest.mark.usefixtures("_environment")
def test_an_engine_without_a_server_drafts_from_its_own_rollouts(config: EngineConfig) -> None:
    engine = UserEngine(config, **drafting_args())
    expected = engine.sample()
    deadline = time.monotonic() + TIMEOUT_S
    while engine.accepted_of_history() < 100 and time.monotonic() < deadline:
        assert engine.sample() == expected
    assert engine.accepted_of_history() >= 100
    engine.close()
