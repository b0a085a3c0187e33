"""Tests of the benchmark of real engines, which sample recorded rollouts."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from vllm.config.speculative import NgramGPUTypes

from benchmarks.redis_server import redis_server
from benchmarks.rollout import Results, figures_of
from benchmarks.rollout_runs import (
    GROUP_SIZE,
    KEYS,
    MAX_DRAFT,
    UNGOVERNED,
    Measurement,
    ModeRunner,
    RecordedEpochs,
    RecordedGroup,
    engine_config,
    model_runner,
    start_engines,
)
from rollout_api.redis_client.connection import connect
from rollout_store.history.store import HistoryStore
from rollout_worker.drafting.index import POOL_TOKENS, SuffixIndex
from rollout_worker.engine.config import vllm_settings
from rollout_worker.engine.draft_settings import SOURCES
from rollout_worker.engine.engine import Engine
from tests.support.reference_model import VOCABULARY, make_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROBLEM = "p"
PROMPT = [4, 4, 2, 17]
END = VOCABULARY - 1
MAX_TOKENS = 200
ROUNDS = 2


def random_rollouts(count: int, rng: random.Random) -> list[list[int]]:
    """Return rollouts of shared phrases in random order with some random tokens, so that drafts are partly accepted."""
    phrases = [[rng.randrange(VOCABULARY - 1) for _ in range(12)] for _ in range(6)]
    rollouts = []
    for _ in range(count):
        tokens = [token for _ in range(14) for token in rng.choice(phrases)]
        noisy = [rng.randrange(VOCABULARY - 1) if rng.random() < 0.06 else token for token in tokens]
        rollouts.append([*noisy, END])
    return rollouts


def accepted_in_replay(history: list[list[int]], rollouts: list[list[int]]) -> list[list[int]]:
    """Return the accepted draft tokens of each step of rollouts, replayed one after the other without an engine."""
    index = SuffixIndex(pool_tokens=POOL_TOKENS)
    index.add(PROBLEM, [(str(number), 1, np.array(tokens, np.uint32)) for number, tokens in enumerate(history)])
    accepted_by_rollout = []
    sources = next(iter(SOURCES.values()))
    for tokens in rollouts:
        handle = index.open(PROBLEM, np.array(PROMPT, np.uint32), sources=sources, stop_tokens=[END])
        generated, accepted_by_step = 0, []
        draft: list[int] = []
        while generated < len(tokens):
            rest = tokens[generated:]
            accepted = next((place for place, token in enumerate(draft) if rest[place] != token), len(draft))
            index.extend(handle, rest[: accepted + 1])
            accepted_by_step.append(accepted)
            generated += accepted + 1
            draft = index.draft(handle, max(0, min(MAX_DRAFT, MAX_TOKENS - generated - 1))).tokens
        index.close(handle)
        accepted_by_rollout.append(accepted_by_step)
    return accepted_by_rollout


def test_engine_accepts_exactly_what_a_replay_without_an_engine_accepts(tmp_path: Path) -> None:
    """With the policy ``fixed`` and one request at a time, the acceptance of every step is the same."""
    model = make_model(tmp_path / "model")
    rollouts = random_rollouts(12, random.Random(5))
    history, evaluated = rollouts[:8], rollouts[8:]
    recorded = RecordedEpochs([{PROBLEM: RecordedGroup(PROMPT, evaluated, history, MAX_TOKENS)}], [END])

    async def run(url: str) -> list[list[int]]:
        async with start_engines([UNGOVERNED], model, url, max_tokens=300, batch=1, eager=True) as engines:
            runner = ModeRunner(engines, recorded, HistoryStore(connect(url), KEYS, window=16))
            await runner.record_acceptance(UNGOVERNED)
            accepted = []
            for round_ in range(ROUNDS):
                measurement = await runner.run(UNGOVERNED, 1, 0, round_)
                by_rollout = await runner.acceptance(UNGOVERNED)
                of_round = [by_rollout[str(request.rollout_id(0))] for request in recorded.requests(0, 1, round_)]
                assert sum(map(sum, of_round)) == measurement.accepted
                accepted += of_round
            return accepted

    with redis_server() as url:
        in_engine = asyncio.run(run(url))
    selected = [rollout.tokens for round_ in range(ROUNDS) for rollout in recorded.select(0, 1, round_)]
    expected = accepted_in_replay(history, selected)
    assert expected == in_engine
    assert sum(map(sum, expected)) > sum(map(len, expected)) / 2


def test_the_engines_of_a_mode_share_the_groups_and_draft_by_length(tmp_path: Path) -> None:
    """Each engine has one problem whose rollouts were short so far, and one whose rollouts were long."""
    model, rng = make_model(tmp_path / "model"), random.Random(5)
    groups = {}
    for name in ("short 0", "short 1", "long 0", "long 1"):
        rollouts = random_rollouts(2 * GROUP_SIZE, rng)
        if name.startswith("short"):
            rollouts = [[*tokens[:9], END] for tokens in rollouts]
        groups[name] = RecordedGroup(PROMPT, rollouts[:GROUP_SIZE], rollouts[GROUP_SIZE:], MAX_TOKENS)
    recorded, batch = RecordedEpochs([groups], [END]), len(groups) * GROUP_SIZE

    async def run(url: str) -> tuple[Measurement, list[Engine], list[dict[str, dict[str, int]]]]:
        async with start_engines(
            ["das-classes"], model, url, max_tokens=300, batch=batch, eager=True, engines=2
        ) as started:
            engines = started["das-classes"]
            measurement = await ModeRunner(started, recorded, HistoryStore(connect(url), KEYS, window=16)).run(
                "das-classes", batch, 0, 0
            )
            return measurement, engines, [(await engine.stats())["labeled_counters"] for engine in engines]

    with redis_server() as url:
        measurement, engines, counters = asyncio.run(run(url))
    expected = [
        sum(len(tokens) for name in (f"short {number}", f"long {number}") for tokens in groups[name].rollouts)
        for number in range(2)
    ]
    assert expected == [engine.counters.tokens for engine in engines]
    assert (batch, sum(expected)) == (measurement.rollouts, measurement.tokens)
    assert measurement.accepted == sum(engine.counters.accepted_tokens for engine in engines)
    for of_engine in counters:
        assert of_engine["class_draft_tokens"]["short"] == 0 < of_engine["class_steps"]["short"]
        assert of_engine["class_draft_tokens"]["long"] > 0


def measurements(mode: str, seconds: list[float], epoch: int = 0) -> list[Measurement]:
    return [
        Measurement(mode, 4, epoch, number, 8, 1000, makespan, 100, 50, 25, 0.1, 0.01)
        for number, makespan in enumerate(seconds)
    ]


def test_figures_use_only_the_pairs_that_all_modes_have() -> None:
    runs = measurements("none", [2.0, 4.0, 6.0, 9.0]) + measurements("das", [1.0, 2.0, 2.0])
    figures = {figure.name: figure for figure in figures_of(runs, ["none", "das"], [4, 8], claim_267m=False)}
    speed = figures["speed of das, batch 4, median of 3 pairs"]
    assert (2.0, 0.98) == (speed.value, speed.target)
    assert 2.0 == figures["speed of das against the fastest other mode, batch 4"].value
    assert not [name for name in figures if "batch 8" in name]
    with_claim = figures_of(runs, ["none", "das"], [4], claim_267m=True)
    assert [1.25] == [figure.target for figure in with_claim if figure.name == speed.name]


def test_policies_with_lengths_are_compared_with_das_by_epoch_and_are_no_peers_of_it() -> None:
    modes, runs = ["none", "das", "das-classes"], []
    for epoch, speed in enumerate((2.0, 4.0)):
        runs += measurements("none", [3.0] * 5, epoch) + measurements("das", [2.0] * 5, epoch)
        runs += measurements("das-classes", [2.0 / speed] * 5, epoch)
    figures = {figure.name: figure for figure in figures_of(runs, modes, [4], claim_267m=False)}
    for epoch, speed in enumerate((2.0, 4.0), 1):
        name = f"speed of das-classes against das, batch 4, epoch {epoch}"
        assert [(speed, "das")] * 2 == [
            (figures[one].value, figures[one].peer) for one in (name, f"{name}, lower bound")
        ]
    assert "none (fastest)" == figures["speed of das against the fastest other mode, batch 4"].peer


def test_there_is_a_lower_bound_from_five_pairs_on() -> None:
    bounds = []
    for pairs in (4, 5):
        runs = measurements("none", [2.0] * pairs) + measurements("das", [1.0] * pairs)
        figures = figures_of(runs, ["none", "das"], [4], claim_267m=False)
        bounds.append([figure.value for figure in figures if figure.name.endswith("lower bound")])
    assert [[], [2.0, 2.0]] == bounds


def test_benchmark_resumes_from_its_file_only_with_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    results = Results(file, {"modes": ["none"]}, resume=True)
    for measurement in measurements("none", [1.0, 2.0]):
        results.add(measurement)
    results.save([])
    assert results.measurements == Results(file, {"modes": ["none"]}, resume=True).measurements
    with pytest.raises(ValueError, match="has other settings"):
        Results(file, {"modes": ["das"]}, resume=True)


@pytest.mark.parametrize("gpus", [False, True])
def test_ngrams_run_at_their_best(monkeypatch: pytest.MonkeyPatch, gpus: bool) -> None:
    """On GPUs, vLLM has them in V2, and with asynchronous scheduling under one of their two names only."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    settings = vllm_settings(engine_config("ngram", Path("model"), "", max_tokens=64, batch=4, eager=True))
    assert gpus == (settings["speculative_config"]["method"] in get_args(NgramGPUTypes))
    with model_runner("ngram"):
        assert (None if gpus else "0") == os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
