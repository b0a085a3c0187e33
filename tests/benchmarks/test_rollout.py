"""Real engines that are made to say recorded rollouts."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rollout import figures_of, lower_bound
from benchmarks.rollout_runs import DRAFT, KEYS, Bench, Material, Run, Sampled, engines_of, redis_server, request_of
from rollout_worker.drafting.drafter import Drafter
from rollout_worker.drafting.index import POOL_TOKENS, SuffixIndex
from rollout_worker.engine.sampling import SOURCES
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore
from tests.support.reference_model import VOCABULARY, make_model

PROMPT = [4, 4, 2, 17]
END = VOCABULARY - 1
MOST = 200


def rollouts(count: int, chance: random.Random) -> list[list[int]]:
    """Of the same stretches in another order, with mistakes, so that drafts pass now and then."""
    stretches = [[chance.randrange(VOCABULARY - 1) for _ in range(12)] for _ in range(6)]
    found = []
    for _ in range(count):
        tokens = [token for _ in range(14) for token in chance.choice(stretches)]
        said = [chance.randrange(VOCABULARY - 1) if chance.random() < 0.06 else token for token in tokens]
        found.append([*said, END])
    return found


def replayed(history: list[list[int]], made: list[list[int]]) -> list[list[int]]:
    """Draft tokens accepted in each step of rollouts one after the other, without an engine."""
    index = SuffixIndex(pool_tokens=POOL_TOKENS)
    index.add("p", [(str(number), 1, np.array(tokens, np.uint32)) for number, tokens in enumerate(history)])
    drafter, row, found = Drafter(index), np.zeros(1, np.int64), []
    sources = next(iter(SOURCES.values()))
    for tokens in made:
        drafter.open(0, "p", np.array(PROMPT, np.uint32), sources, ends=[END])
        said, drafted, steps = 0, 0, []
        draft: list[int] = []
        while said < len(tokens):
            rest = tokens[said:]
            accepted = next((at for at, token in enumerate(draft) if rest[at] != token), len(draft))
            drafter.advance(row, [rest[: accepted + 1]], row + drafted)
            steps.append(accepted)
            said += accepted + 1
            budget = min(DRAFT, MOST - said - 1)
            draft = drafter.draft(row, row + budget, np.zeros(1))[0].tokens
            drafted = len(draft)
        drafter.close(0)
        found.append(steps)
    return found


def test_an_engine_accepts_exactly_what_the_replay_of_the_same_rollouts_accepts(tmp_path: Path) -> None:
    """Policy fixed, one request at a time: replayed acceptance is that of a real engine."""
    model = make_model(tmp_path / "model")
    chance = random.Random(5)
    both = rollouts(12, chance)
    material = Material([{"p": Sampled(PROMPT, both[8:], both[:8], MOST)}], [END])

    async def run(url: str) -> list[list[int]]:
        async with engines_of(["das-ungoverned"], model, url, most=300, batch=1, eager=True) as engines:
            (engine,) = engines.values()
            bench = Bench(engines, material, HistoryStore(connect(url), KEYS, window=16))
            await engine._rpc("bench_note")
            noted = []
            for round_ in range(2):
                made = await bench.run("das-ungoverned", 1, 0, round_)
                (found,) = await engine._rpc("bench_noted")
                names = [
                    request_of(f"1-0-{round_}-{number}", work, material.ends)
                    for number, work in enumerate(material.work(0, 1, round_))
                ]
                steps = [found[str(one.rollout_id(0))] for one in names]
                assert made.accepted == sum(map(sum, steps))
                noted += steps
            return noted

    with redis_server() as url:
        in_engine = asyncio.run(run(url))
    expected = replayed(both[:8], [work.tokens for round_ in range(2) for work in material.work(0, 1, round_)])
    assert expected == in_engine
    assert sum(map(sum, expected)) > sum(map(len, expected)) / 2


def runs(mode: str, seconds: list[float]) -> list[Run]:
    return [Run(mode, 4, 0, number, 8, 1000, one, 100, 50, 25, 0.1, 0.01) for number, one in enumerate(seconds)]


def test_figures_are_of_pairs_that_all_modes_have() -> None:
    made = runs("none", [2.0, 4.0, 6.0, 9.0]) + runs("das", [1.0, 2.0, 2.0])
    figures = {figure.name: figure for figure in figures_of(made, ["none", "das"], [4, 8], claim_267m=False)}
    speed = figures["speed of das, batch 4, median of 3 pairs"]
    assert (2.0, 0.98) == (speed.value, speed.target)
    assert 2.0 == figures["speed of das, batch 4"].value
    assert not [name for name in figures if "batch 8" in name]
    claimed = figures_of(made, ["none", "das"], [4], claim_267m=True)
    assert [1.25] == [one.target for one in claimed if one.name == speed.name]


def test_the_lower_bound_is_below_the_median_and_above_the_least() -> None:
    ratios = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert 1.0 <= lower_bound(ratios) < 1.3
    assert 1.2 == pytest.approx(lower_bound([1.2] * 7))
