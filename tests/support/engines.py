"""Real engines for the tests, with a synchronous interface."""

from __future__ import annotations

import asyncio
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import DRAFT_SOURCES, decode_draft_sources
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import Partial, RolloutRequest
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.reference_model import LoopThread

_REPOSITORY = Path(__file__).parents[2]
KEYS = HistoryKeys("default", "engine-tests")
MAX_DRAFT_TOKENS = 6
HISTORY_TIMEOUT_S = 30
PARTIAL_ATTEMPTS = 20
USES_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether engines use vLLM's V2 model runner."""
needs_v2 = pytest.mark.skipif(not USES_V2, reason="run with make test-v2")
"""Marks tests of what only vLLM's V2 model runner can do."""


def engine_config(model: Path, drafting: DraftingConfig | None = None) -> EngineConfig:
    """Return the configuration of a small CPU engine."""
    spec = EngineSpec.model_validate({**SMALL_CPU_ENGINE, "maxNumSeqs": 64})
    return EngineConfig(model=model, spec=spec, cpu=True, drafting=drafting)


def start_with_extension(loop: LoopThread, config: EngineConfig, extension: type) -> Engine:
    """Start an engine whose worker has a test's extension."""
    name = f"{extension.__module__}.{extension.__qualname__}"
    with pytest.MonkeyPatch.context() as patch:  # the worker process imports the extension
        patch.setenv("PYTHONPATH", str(_REPOSITORY), prepend=":")
        return loop.run(Engine.start(replace(config, overrides=config.overrides | {"worker_extension_cls": name})))


@dataclass
class EngineHarness:
    """An engine and its event loop."""

    engine: Engine
    loop: LoopThread
    history: HistoryStore | None = None
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        problem: str = "p",
        draft_budget: int | None = None,
    ) -> list[GenerationResult]:
        """Sample ``sampling.n`` responses to each prompt, in order."""
        return self.generate([self.request(prompt, sampling, problem, draft_budget=draft_budget) for prompt in prompts])

    def vllm_counts(self) -> tuple[int | None, int]:
        """Return how many tokens vLLM counts as drafted and as accepted so far.

        V2 counts the places that it has planned for drafts, and the drafter counts one more draft of each response
        that ends, because V2 executes one more step of it. The first number is then None.
        """
        counters = self.engine.counters
        return None if USES_V2 else counters.draft_tokens, counters.accepted_tokens

    def check_counts(self, results: Sequence[GenerationResult], before: tuple[int | None, int]) -> None:
        """Compare the counts of responses with vLLM's since *before*."""
        for result in results:
            codes = decode_draft_sources(result.draft_sources or b"").ljust(len(result.token_ids), b"\0")
            assert len(result.token_ids) == len(codes)
            assert result.num_accepted_tokens == sum(map(bool, codes))
            by_source = {source: codes.count(code) for code, source in enumerate(DRAFT_SOURCES, start=1)}
            assert {name: count for name, count in by_source.items() if count} == result.accepted_tokens_by_source
        drafted, accepted = self.vllm_counts()
        assert sum(result.num_accepted_tokens for result in results) == accepted - before[1]
        if drafted is not None and before[0] is not None:
            assert sum(result.num_draft_tokens for result in results) == drafted - before[0]

    def continue_from(
        self, prompt: Sequence[int], sampling: Sampling, prefixes: Sequence[Partial], problem: str = "p"
    ) -> list[GenerationResult]:
        """Sample one response from each prefix, in order, each with a seed of its own if there is one."""
        settings = [
            sampling if sampling.seed is None else sampling.model_copy(update={"seed": 100_000 * sampling.seed + index})
            for index in range(len(prefixes))
        ]
        return self.generate(
            [self.request(prompt, one, problem, prefix=prefix) for one, prefix in zip(settings, prefixes, strict=True)]
        )

    def generate(self, requests: Sequence[RolloutRequest]) -> list[GenerationResult]:
        """Generate all samples of all requests concurrently, in order."""

        async def gather() -> list[GenerationResult]:
            calls = [
                self.engine.generate(request, sample) for request in requests for sample in range(request.sampling.n)
            ]
            return list(await asyncio.gather(*calls))

        return self.loop.run(gather())

    def generate_partially(
        self,
        request: RolloutRequest,
        interval: int,
        *,
        max_gap: float = math.inf,
        on_partial: Callable[[Partial], object] = lambda _: None,
    ) -> tuple[GenerationResult, list[Partial]]:
        """Generate one response; return it and its partials, at least one. *on_partial* receives them, too.

        While this process is busy, tokens come together, so that a response may have no partials, or more than
        *max_gap* tokens between two of them. It is then generated again.
        """
        for _ in range(PARTIAL_ATTEMPTS):
            partials: list[Partial] = []

            def receive(partial: Partial, partials: list[Partial] = partials) -> None:
                partials.append(partial)
                on_partial(partial)

            result = self.loop.run(self.engine.generate(request, 0, on_partial=receive, partial_interval=interval))
            ends = [0, *(len(partial.token_ids) for partial in partials), len(result.token_ids)]
            if partials and max(map(operator.sub, ends[1:], ends)) <= max_gap:
                return result, partials
        pytest.fail(f"no response of {PARTIAL_ATTEMPTS} had partials with gaps of at most {max_gap} tokens")

    def request(
        self, prompt: Sequence[int], sampling: Sampling, problem: str = "p", **fields: object
    ) -> RolloutRequest:
        """Create a request with a unique id."""
        return RolloutRequest.model_validate(
            {
                "job_uid": "test",
                "request_id": str(next(self._numbers)),
                "problem_id": problem,
                "prompt_token_ids": list(prompt),
                "sampling": sampling,
                **fields,
            }
        )

    def add_history(self, problem: str, responses: Sequence[Sequence[int]]) -> None:
        """Add responses to the history and wait until the engine can draft from them."""
        assert self.history is not None
        for response in responses:
            tokens = np.array(response, dtype=np.uint32)
            name = f"{problem}-{next(self._numbers)}"
            self.history.append(problem, HistoryRecord(name, "test", 1, 1, tokens, "stop"), newest=1)
        assert self.loop.run(self.engine.announce([problem], 1, timeout_s=HISTORY_TIMEOUT_S))
