"""Real engines, and a way to ask them for many responses at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import Partial, RolloutRequest
from rollout_worker.engine.drafting import Drafting
from rollout_worker.engine.host import Engine, EngineConfig, Generated
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore
from tests.support.reference_model import POSITIONS, LoopThread

KEYS = HistoryKeys("default", "engine-tests")
MAX_DRAFT_TOKENS = 6


def config(model: Path, drafting: Drafting | None = None) -> EngineConfig:
    # float32, so that a token is decided by the model and not by rounding
    spec = EngineSpec(
        max_model_len=POSITIONS, dtype="float32", max_num_seqs=64, kv_cache_memory="256Mi", enforce_eager=True
    )
    return EngineConfig(model=model, spec=spec, cpu=True, drafting=drafting)


@dataclass
class Bed:
    """An engine and a way to ask it for many responses at once."""

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
    ) -> list[Generated]:
        """``sampling.n`` responses to each prompt, in order."""
        requests = [self.request(prompt, sampling, problem, draft_budget=draft_budget) for prompt in prompts]
        return self.loop.run(self._gather(requests))

    def request(
        self, prompt: Sequence[int], sampling: Sampling, problem: str = "p", **fields: object
    ) -> RolloutRequest:
        """A request of its own name."""
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

    def go_on(
        self, prompt: Sequence[int], sampling: Sampling, prefixes: Sequence[Partial], problem: str = "p"
    ) -> list[Generated]:
        """One response from each prefix, in order."""
        requests = [self.request(prompt, sampling, problem, prefix=prefix) for prefix in prefixes]
        return self.loop.run(self._gather(requests))

    async def _gather(self, requests: list[RolloutRequest]) -> list[Generated]:
        calls = [self.engine.generate(request, sample) for request in requests for sample in range(request.sampling.n)]
        return list(await asyncio.gather(*calls))

    def remember(self, problem: str, responses: Sequence[Sequence[int]]) -> None:
        """Put responses into the history and wait until the engine can draft from them."""
        assert self.history is not None
        for response in responses:
            tokens = np.array(response, dtype=np.uint32)
            name = f"{problem}-{next(self._numbers)}"
            self.history.append(problem, HistoryRecord(name, "test", 1, 1, tokens, "stop"), newest=1)
        assert self.loop.run(self.engine.announce([problem], 1, wait=30))
