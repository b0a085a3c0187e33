"""Drafting in a user's own engine leaves the output distribution unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_worker import drafting_args
from rollout_worker.engine.sampling_params import vllm_sampling_params
from tests.support.engines import MAX_DRAFT_TOKENS
from tests.support.faulty_extension import UngovernedExtension
from tests.support.reference_model import EOS, ReferenceDistribution, make_model
from tests.support.responses import PROMPT, PROMPTS, SAMPLES, accepted_share, sample_exactly
from tests.support.user_engine import UserEngine, vllm_on_cpus

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

REPOSITORY = Path(__file__).parents[2]


class Response(NamedTuple):
    """A response of a user's engine."""

    token_ids: list[int]
    finish_reason: str
    num_accepted_tokens: int


class Sampler:
    """Samples with the settings of a job's requests in an engine of a user's own."""

    def __init__(self, model: Path, **drafting: Any) -> None:
        """Start an engine."""
        self.engine = UserEngine(model, max_num_seqs=64, skip_tokenizer_init=True, **drafting)
        self._drafts = bool(drafting)

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Response]:
        """Sample ``sampling.n`` responses to each prompt; the accepted tokens are divided among them."""
        params = vllm_sampling_params(sampling, "", None)
        params.n, params.seed = sampling.n, sampling.seed
        before = self._accepted()
        inputs: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.engine.llm.generate(inputs, params, use_tqdm=False)
        responses = [response for output in outputs for response in output.outputs]
        accepted = np.diff(np.linspace(0, self._accepted() - before, len(responses) + 1, dtype=int)).tolist()
        return [
            Response(list(one.token_ids), str(one.finish_reason), count)
            for one, count in zip(responses, accepted, strict=True)
        ]

    def _accepted(self) -> int:
        if not self._drafts:
            return 0
        return sum(self.engine.stats()["labeled_counters"]["source_accepted_tokens"].values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small model, in the environment of vLLM on CPUs."""
    model = make_model(tmp_path_factory.mktemp("model"))
    with vllm_on_cpus(model), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")  # the worker process imports the extension
        yield model


@pytest.fixture(scope="module")
def drafting_engine(model: Path) -> Iterator[Sampler]:
    """An engine that drafts as much as possible, so that the tests see many drafts."""
    extension = f"{UngovernedExtension.__module__}.{UngovernedExtension.__qualname__}"
    sampler = Sampler(
        model, worker_extension_cls=extension, **drafting_args(policy="fixed", num_speculative_tokens=MAX_DRAFT_TOKENS)
    )
    yield sampler
    sampler.engine.close()


@pytest.fixture(scope="module")
def plain_engine(model: Path) -> Iterator[Sampler]:
    """An engine without drafter."""
    sampler = Sampler(model)
    yield sampler
    sampler.engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"min_tokens": 40},
        {"allowed_token_ids": [1, 3, 5, 7, 11, EOS]},
        {"stop_token_ids": [7]},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_greedy_tokens_are_the_same_with_and_without_drafts(
    plain_engine: Sampler, drafting_engine: Sampler, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"n": 1, "temperature": 0, "max_tokens": 60, **settings})
    expected = plain_engine.sample(PROMPTS, sampling)
    assert [one[:2] for one in expected] == [one[:2] for one in drafting_engine.sample(PROMPTS, sampling)]
    again = drafting_engine.sample(PROMPTS, sampling)
    assert [one[:2] for one in expected] == [one[:2] for one in again]
    assert accepted_share(again) > 0.2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 20},
        {"temperature": 0.8, "top_p": 0.8, "top_k": 6},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"allowed_token_ids": [0, 1, 2, 5, 8, 13, 21]},
        {"min_tokens": 4},
        {"ignore_eos": True},
        {"seed": 11},
    ],
    ids=str,
)
def test_sampled_tokens_have_the_exact_distribution_of_the_model(
    model: Path, drafting_engine: Sampler, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"temperature": 1.0, "max_tokens": 5, "n": SAMPLES, **settings})
    drafting_engine.sample([PROMPT], sampling.model_copy(update={"n": 64, "seed": None}))
    sample_exactly(ReferenceDistribution(model), sampling, lambda chosen: drafting_engine.sample([PROMPT], chosen))
