"""Two engines that all tests of this package share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_worker.engine.engine import Engine
from tests.support.in_process_job import manifest, start_engine
from tests.support.live_job_harness import JobHarness
from tests.support.reference_model import LoopThread, make_model

TOOL_CALL = '<tool_call>{"name": "weather", "arguments": ', "</tool_call>"
JSON_WORDS = ["{", '"rain"', ":", "true", "false", "}", *TOOL_CALL]
"""Words of the models that make an object, and a call of a tool as Hermes writes it."""


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models with different weights; the engines start with ``0``."""
    root = tmp_path_factory.mktemp("models")
    for version in range(3):
        make_model(root / str(version), seed=version + 3, last_words=JSON_WORDS)
    return root


@pytest.fixture(scope="package")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="package")
def engines(models: Path, loop: LoopThread, redis_server: str) -> Iterator[dict[str, Engine]]:
    async def start() -> dict[str, Engine]:
        both = await asyncio.gather(*(start_engine(models / "0", redis_server, manifest()) for _ in range(2)))
        return dict(zip(("engine-0", "engine-1"), both, strict=True))

    started = loop.run(start())
    yield started
    with ThreadPoolExecutor() as pool:  # closing an engine takes seconds
        list(pool.map(Engine.close, started.values()))


@pytest.fixture
def job_harness(loop: LoopThread, engines: dict[str, Engine], models: Path, redis_url: str) -> JobHarness:
    return JobHarness(loop, engines, models, redis_url)
