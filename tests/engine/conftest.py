"""Engines for the tests: real vLLM on a model whose law is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_worker.engine.drafting import Drafting, HistoryBinding
from rollout_worker.engine.host import Engine
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore
from tests.support.engines import KEYS, MAX_DRAFT_TOKENS, Bed, config
from tests.support.reference_model import Law, LoopThread, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def law(model: Path) -> Law:
    return Law(model)


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="session")
def drafting(redis_server: str) -> Drafting:
    # as if a token cost next to nothing, so that much is drafted
    binding = HistoryBinding(redis_server, KEYS.namespace, KEYS.name, window=16)
    return Drafting("fixed", MAX_DRAFT_TOKENS, 2**30, binding, governed=False)


@pytest.fixture(scope="session")
def drafted(model: Path, loop: LoopThread, drafting: Drafting, redis_server: str) -> Iterator[Bed]:
    """An engine that drafts."""
    engine = loop.run(Engine.start(config(model, drafting)))
    yield Bed(engine, loop, HistoryStore(connect(redis_server), KEYS, window=16))
    engine.close()


@pytest.fixture(scope="session")
def plain(model: Path, loop: LoopThread) -> Iterator[Bed]:
    """The same model with no speculation configured."""
    engine = loop.run(Engine.start(config(model)))
    yield Bed(engine, loop)
    engine.close()
