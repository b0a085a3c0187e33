"""How much each experiment does, and what the experiments share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.redis_server import redis_server
from benchmarks.rollout_runs import KEYS, dummy_7b_model, random_model
from rollout_api.redis_client.connection import connect
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.engine import Engine
from tests.support.engines import EngineHarness
from tests.support.reference_model import LoopThread

Row = dict[str, Any]
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Settings:
    """What the experiments do, except for how long a whole experiment may take."""

    is_dry: bool
    """Whether the experiments run on CPUs, to test them."""
    trace: Path
    """Recorded rollouts that consist of token ids; see :mod:`benchmarks.traces`."""
    model: Callable[[], Path]
    """Returns the directory of the model whose speed is measured."""
    exposed_batches: tuple[int, ...]
    exposed_steps: int
    """Measured steps for each batch size and kind of drafts."""
    steady_batches: tuple[int, ...]
    steady_pairs: int
    """Number of turns of each mode."""
    turn_s: float
    """Duration of a turn."""
    warm_up_s: float
    """Time from the start of the first rollouts to the first turn."""
    batched_tokens: int | None
    """``max_num_batched_tokens`` of all modes; None for that of this project's engines."""
    samples: int
    """Number of responses in the test of the output distribution."""
    hot_path_batches: tuple[int, ...]
    hot_path_steps: int


def full(trace: Path) -> Settings:
    """Return the settings for a GPU."""
    return Settings(
        is_dry=False,
        trace=trace,
        model=dummy_7b_model,
        exposed_batches=(1, 16, 64, 128, 256),
        exposed_steps=60,
        steady_batches=(16, 128),
        steady_pairs=5,
        turn_s=2.0,
        warm_up_s=4.0,
        batched_tokens=None,
        samples=4000,
        hot_path_batches=(8, 64, 256),
        hot_path_steps=300,
    )


def dry(trace: Path) -> Settings:
    """Return the settings for a test on CPUs."""
    return Settings(
        is_dry=True,
        trace=trace,
        model=lambda: random_model(hidden=128, layers=2),
        exposed_batches=(2,),
        exposed_steps=3,
        steady_batches=(2,),
        steady_pairs=2,
        turn_s=0.5,
        warm_up_s=0.5,
        batched_tokens=1024,
        samples=100,
        hot_path_batches=(4,),
        hot_path_steps=20,
    )


@contextmanager
def history_server() -> Iterator[tuple[str, HistoryStore, LoopThread]]:
    """Run a Redis server and an event loop; yield the server's URL, its history, and the loop."""
    loop = LoopThread()
    with redis_server() as url:
        yield url, HistoryStore(connect(url), KEYS, window=16), loop
    loop.stop()


@contextmanager
def running(loop: LoopThread, store: HistoryStore, config: EngineConfig, **overrides: Any) -> Iterator[EngineHarness]:
    """Run an engine with further vLLM settings."""
    config = replace(config, overrides=config.overrides | overrides)
    engine = loop.run(Engine.start(config), _START_TIMEOUT_S)
    try:
        yield EngineHarness(engine, loop, store)
    finally:
        engine.close()
