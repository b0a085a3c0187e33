"""Engines for the tests: real vLLM with a model whose output distribution is known.

An engine takes 15 to 20 seconds to start, so that the tests share as few as possible. A test that changes an engine's
weights restores them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_api.redis_client.connection import connect
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.draft_settings import DraftingConfig, HistoryLocation
from rollout_worker.engine.engine import Engine
from tests.support.engines import KEYS, MAX_DRAFT_TOKENS, EngineHarness, engine_config
from tests.support.reference_model import LoopThread, ReferenceDistribution, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference(model: Path) -> ReferenceDistribution:
    """The output distribution of the model."""
    return ReferenceDistribution(model)


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="session")
def drafting_config(redis_server: str) -> DraftingConfig:
    """A configuration that drafts as much as possible, so that the tests see many drafts."""
    location = HistoryLocation(redis_server, KEYS.namespace, KEYS.name, window=16)
    return DraftingConfig("fixed", MAX_DRAFT_TOKENS, 2**30, location, governed=False)


@pytest.fixture(scope="session")
def history_store(redis_server: str) -> HistoryStore:
    return HistoryStore(connect(redis_server), KEYS, window=16)


def start(loop: LoopThread, config: EngineConfig) -> Engine:
    """Start an engine as engine processes do.

    Scanning vLLM's many objects in each garbage collection would delay tokens by a quarter of a second.
    """
    engine = loop.run(Engine.start(config))
    gc.collect()
    gc.freeze()
    return engine


@pytest.fixture(scope="session")
def drafting_engine(
    model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> Iterator[EngineHarness]:
    engine = start(loop, engine_config(model, drafting_config))
    yield EngineHarness(engine, loop, history_store)
    engine.close()


@pytest.fixture(scope="session")
def plain_engine(model: Path, loop: LoopThread) -> Iterator[EngineHarness]:
    """An engine without speculation."""
    engine = start(loop, engine_config(model))
    yield EngineHarness(engine, loop)
    engine.close()
