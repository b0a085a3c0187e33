"""Engines that take part in the whole protocol of a job, but wait and return random tokens instead of sampling.

``python -m tests.support.stub_engines`` runs some of them as a process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from rollout_api.protocol.messages import FinishReason, Partial, RolloutRequest, WeightSpan
from rollout_store.job.setup import JobSetup
from rollout_store.runtime.garbage_collection import collect_rarely
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.engine import EngineCounters
from rollout_worker.engine.response import GenerationResult
from rollout_worker.engine_worker.published_weights import WeightDirectories
from rollout_worker.engine_worker.worker import EngineWorker

VOCABULARY = 256
"""Token ids are below this number, and known to every model."""


class StubEngine:
    """What an engine worker uses of an engine, with a wait in place of sampling.

    The tokens of a rollout that is sampled again are different ones.

    Args:
        setup: settings of the job.
        generation_time: returns the seconds to wait for a rollout of a request, given the request's id.
        on_sampled: called with the id of each rollout that has been sampled.
    """

    weight_version = 0
    full_weight_version = 0
    stopped = False

    def __init__(
        self,
        setup: JobSetup,
        generation_time: Callable[[str], float],
        on_sampled: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = EngineConfig(model=Path("/model"), spec=setup.job.spec.engine, cpu=True)
        self.counters = EngineCounters()
        self._generation_time, self._on_sampled = generation_time, on_sampled
        self._num_tokens = setup.job.spec.sampling.max_tokens or 1
        self._logprobs = [-0.5] * self._num_tokens

    async def generate(
        self, request: RolloutRequest, sample: int, *, prefix: Partial | None, stop_event: asyncio.Event, **_: Any
    ) -> GenerationResult:
        """Wait, and return random tokens."""
        started = time.monotonic()
        await asyncio.sleep(self._generation_time(request.request_id))
        self._on_sampled(str(request.rollout_id(sample)))
        return GenerationResult(
            token_ids=list(random.randbytes(self._num_tokens)),
            logprobs=self._logprobs,
            ranks=None,
            top_logprobs=None,
            kept_token_ids=None,
            weight_spans=[WeightSpan(start=0, weight_version=0)],
            finish_reason=FinishReason.LENGTH,
            num_decoding_steps=self._num_tokens,
            draft_tokens_by_source={},
            accepted_tokens_by_source={},
            draft_sources=None,
            num_cached_tokens=0,
            started=started,
            finished=time.monotonic(),
        )

    async def stats(self) -> dict[str, Any]:
        """Return what an engine without drafts measures."""
        return {}

    def running_tokens(self) -> dict[str, int]:
        """Return nothing: a stub does not know how far its rollouts are."""
        return {}


def run_engines(
    setup: JobSetup,
    names: Sequence[str],
    generation_time: Callable[[str], float],
    on_sampled: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the workers of some stub engines until the process is killed; see :class:`StubEngine` for the arguments."""
    collect_rarely()  # as the process of a real engine does

    async def run() -> None:
        workers = [
            EngineWorker(
                StubEngine(setup, generation_time, on_sampled),  # type: ignore[arg-type]  # it has what a worker uses
                setup.job_store(),
                setup.history_store(),
                name=name,
                worker="",
                max_running=setup.job.spec.engine.max_num_seqs,
                checkpoint_tokens=setup.job.spec.engine.checkpoint_tokens,
                sampling=setup.job.spec.sampling,
                directories=WeightDirectories(Path("/model"), Path("/model"), []),
            )
            for name in names
        ]
        await asyncio.gather(*(worker.run() for worker in workers))

    uvloop.run(run())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("setup", type=Path, help="file with the settings of the job")
    parser.add_argument("names", nargs="+", help="names of the engines")
    parser.add_argument("--seconds", type=float, required=True, help="mean time to wait for a rollout")
    parser.add_argument("--samples", type=Path, required=True, help="file to which the ids of rollouts are appended")
    options = parser.parse_args()
    with options.samples.open("a", buffering=1) as samples:
        run_engines(
            JobSetup.from_json(options.setup.read_text()),
            options.names,
            lambda _: options.seconds * random.uniform(0.5, 1.5),
            lambda rollout_id: print(rollout_id, file=samples),
        )


if __name__ == "__main__":
    main()
