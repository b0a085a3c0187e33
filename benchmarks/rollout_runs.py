"""Runs of the same rollouts in engines of all modes, side by side; see :mod:`benchmarks.rollout`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import RolloutRequest
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.engine.drafting import Drafting, HistoryBinding
from rollout_worker.engine.host import Engine, EngineConfig
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore

KEYS = HistoryKeys("default", "rollout-benchmark")
DRAFT, PEERS_DRAFT, NGRAM_DRAFT = 16, 32, 5
"""Most tokens of a draft: a job's default, vLLM's for suffix decoding, and its usual n-grams'."""
GROUP = 8
"""Samples of a problem that are made together, in a batch that has room for them."""
KV_CACHE_BYTES = (8 if torch.cuda.is_available() else 2) << 30
_JOB = "benchmark"
_FORCED = "benchmarks.forced_sampling.ForcedEngine"
_SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "none-v1-sync": {"async_scheduling": False},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": NGRAM_DRAFT, "prompt_lookup_max": 5}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": PEERS_DRAFT}},
}
MODES = (*_SPECULATION, "das")


@dataclass(frozen=True)
class Run:
    """What one mode needed for one set of rollouts."""

    mode: str
    batch: int
    epoch: int
    round: int
    rollouts: int
    tokens: int
    seconds: float
    """Until the last one ended."""
    steps: int
    """Of the engine."""
    drafted: int
    accepted: int
    drafting_seconds: float
    """Of the engine's process, in the drafter."""
    shim_seconds: float
    base_tokens: float | None = None
    """``c_base / c_tok`` as the governor has fitted it, where there is one."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Names it among the runs of a benchmark."""
        return self.mode, self.batch, self.epoch, self.round


class Sampled(NamedTuple):
    """The rollouts of a problem in one epoch."""

    prompt: list[int]
    rollouts: list[list[int]]
    before: list[list[int]]
    """Its history then."""
    most: int
    """Tokens that a rollout may have: those that end before do so by a token that ends them, as real ones do."""


class Work(NamedTuple):
    """One rollout that is made again."""

    problem: str
    sampled: Sampled
    tokens: list[int]


class Material:
    """What can be made again, and what is known then."""

    def __init__(self, epochs: list[dict[str, Sampled]], ends: Sequence[int] = ()) -> None:
        """Of epochs, each with its problems by name; *ends*: tokens that end a rollout, besides the model's own."""
        self.epochs, self.ends = epochs, list(ends)

    @classmethod
    async def sampled(
        cls, engine: Engine, prompts: dict[str, list[int]], *, epochs: int, samples: int, most: int
    ) -> Material:
        """What an engine samples at temperature 1: of each epoch those before it are the history."""
        made: list[dict[str, Sampled]] = []
        before: dict[str, list[list[int]]] = {name: [] for name in prompts}
        for epoch in range(epochs):
            requests = [
                RolloutRequest(
                    job_uid=_JOB,
                    request_id=f"sampled-{epoch}-{name}",
                    problem_id=name,
                    prompt_token_ids=prompt,
                    sampling=Sampling(n=samples, temperature=1.0, max_tokens=most),
                )
                for name, prompt in prompts.items()
            ]
            found = await asyncio.gather(
                *(engine.generate(one, sample) for one in requests for sample in range(samples))
            )
            said = [one.token_ids for one in found]
            made.append({})
            for number, (name, prompt) in enumerate(prompts.items()):
                mine = said[number * samples : (number + 1) * samples]
                made[-1][name] = Sampled(prompt, mine, list(before[name]), most)
                before[name] += mine
        return cls(made)

    def work(self, epoch: int, batch: int, round_: int) -> list[Work]:
        """As many rollouts as run at a time, and two at least, in groups of one problem; other ones in each round."""
        problems = list(self.epochs[epoch].items())
        group = min(GROUP, batch)
        groups = max(2, batch) // group
        found = []
        for number in range(groups):
            turn, at = divmod(round_ * groups + number, len(problems))
            name, sampled = problems[at]
            rollouts = [sampled.rollouts[(turn * group + place) % len(sampled.rollouts)] for place in range(group)]
            # a history of its own for each run: nothing of a later one is known to an earlier
            found += [Work(f"{batch}-{epoch}-{round_}/{name}", sampled, tokens) for tokens in rollouts]
        return found


class Bench:
    """Engines of all modes."""

    def __init__(self, engines: dict[str, Engine], material: Material, store: HistoryStore) -> None:
        self._engines, self._material, self._store = engines, material, store
        self._kept: set[str] = set()

    async def run(self, mode: str, batch: int, epoch: int, round_: int) -> Run:
        """Make the rollouts of one set in one mode."""
        engine = self._engines[mode]
        works = self._material.work(epoch, batch, round_)
        name = f"{batch}-{epoch}-{round_}"
        requests = [request_of(f"{name}-{number}", work, self._material.ends) for number, work in enumerate(works)]
        recorded = {str(one.rollout_id(0)): work.tokens for one, work in zip(requests, works, strict=True)}
        await engine._rpc("bench_record", recorded)
        used = {work.problem: work.sampled for work in works}
        self._keep(used)
        await engine._rpc("bench_remember", [(one.prompt, one.before) for one in used.values()])
        if not await engine.announce(list(used), 1, wait=60):
            raise RuntimeError(f"the history is not read within a minute: {await engine.stats()}")
        before, (times,) = asdict(engine.counters), await engine._rpc("bench_times")
        started = time.perf_counter()
        made = await _at_a_time(engine, requests, batch)
        seconds = time.perf_counter() - started
        after, (later,) = asdict(engine.counters), await engine._rpc("bench_times")
        for one, work in zip(made, works, strict=True):
            if one != work.tokens:
                raise RuntimeError(f"{mode} did not say what was recorded of {work.problem}")
        stats = await engine.stats()
        return Run(
            mode,
            batch,
            epoch,
            round_,
            len(works),
            sum(len(work.tokens) for work in works),
            seconds,
            round(later["steps"] - times["steps"]),
            after["drafted"] - before["drafted"],
            after["accepted"] - before["accepted"],
            later["drafting_seconds"] - times["drafting_seconds"],
            later["shim_seconds"] - times["shim_seconds"],
            stats["cost_base_seconds"] / stats["cost_token_seconds"] if stats else None,
        )

    def _keep(self, used: dict[str, Sampled]) -> None:
        """Write the rollouts that ours drafts from into Redis, once."""
        for problem in used.keys() - self._kept:
            self._kept.add(problem)
            for number, tokens in enumerate(used[problem].before):
                record = HistoryRecord(f"{problem}-{number}", _JOB, 1, 1, np.array(tokens, np.uint32), "stop")
                self._store.append(problem, record, newest=1)


async def _at_a_time(engine: Engine, requests: Sequence[RolloutRequest], batch: int) -> list[list[int]]:
    room, waiting = asyncio.Semaphore(batch), {one.request_id: one.sampling.max_tokens for one in requests}

    async def make(request: RolloutRequest) -> list[int]:
        async with room:
            del waiting[request.request_id]
            return (await engine.generate(request, 0)).token_ids

    async def tell() -> None:
        while True:  # as an engine's worker does; of their lengths no more is said than on average
            usual = sum(waiting.values()) / max(1, len(waiting))
            await engine.tell_waiting(len(waiting), len(waiting) * usual)
            await asyncio.sleep(1.0)

    telling = asyncio.ensure_future(tell())
    try:
        return await asyncio.gather(*(make(request) for request in requests))
    finally:
        telling.cancel()


def request_of(name: str, work: Work, ends: list[int]) -> RolloutRequest:
    """Asks an engine for a rollout, without a word of how long it will be."""
    return RolloutRequest(
        job_uid=_JOB,
        request_id=name,
        problem_id=work.problem,
        prompt_token_ids=work.sampled.prompt,
        sampling=Sampling(n=1, temperature=1.0, max_tokens=work.sampled.most, stop_token_ids=ends),
    )


def engine_config(mode: str, model: Path, url: str, *, most: int, batch: int, eager: bool) -> EngineConfig:
    """Of an engine for rollouts of at most *most* tokens with their prompts."""
    spec = EngineSpec(
        max_model_len=most + PEERS_DRAFT,
        max_num_seqs=batch,
        kv_cache_memory=str(KV_CACHE_BYTES),
        enforce_eager=eager,
    )
    drafting, overrides = None, {"worker_extension_cls": _FORCED, **_SPECULATION.get(mode, {})}
    if mode in ("das", "das-ungoverned"):
        binding = HistoryBinding(url, KEYS.namespace, KEYS.name, window=16)
        alone = mode == "das-ungoverned"
        drafting = Drafting("fixed" if alone else "marginal", DRAFT, 2**31, binding, governed=not alone)
        overrides["worker_extension_cls"] = "benchmarks.forced_sampling.ForcedDraftingEngine"
    return EngineConfig(
        model=model, spec=spec, cpu=not torch.cuda.is_available(), drafting=drafting, overrides=overrides
    )


@asynccontextmanager
async def engines_of(
    modes: Sequence[str], model: Path, url: str, *, most: int, batch: int, eager: bool = False
) -> AsyncIterator[dict[str, Engine]]:
    """An engine of each mode, one started after the other."""
    async with AsyncExitStack() as stack:
        engines = {}
        for mode in modes:
            config = engine_config(mode, model, url, most=most, batch=batch, eager=eager)
            engine = engines[mode] = await Engine.start(config)
            stack.callback(engine.close)
            await engine._rpc("bench_prepare")
            print(f"{mode}: started", file=sys.stderr, flush=True)
        yield engines


@contextmanager
def redis_server() -> Iterator[str]:
    """A Redis of its own; its address."""
    with tempfile.TemporaryDirectory() as directory:
        lock = os.open(Path(directory) / "lock", os.O_CREAT | os.O_RDWR)
        server = EmbeddedRedis(Path(directory) / "redis", keep_open=lock)
        try:
            yield server.start()
        finally:
            server.stop()
            os.close(lock)
