"""vLLM's own engines draft from a shared history with one more argument."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_worker import drafting_args
from tests.support.faulty_extension import CopyingExtension
from tests.support.history_contents import read_rollouts
from tests.support.reference_model import make_model
from tests.support.responses import PROMPTS
from tests.support.user_engine import UserEngine, vllm_on_cpus

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small model, in the environment of vLLM on CPUs."""
    model = make_model(tmp_path_factory.mktemp("model"))
    with vllm_on_cpus(model):
        yield model


def test_engines_that_name_a_history_draft_from_the_rollouts_of_each_other(model: Path, redis_url: str) -> None:
    plain = UserEngine(model)
    expected = plain.sample()
    plain.close()
    first = UserEngine(model, **drafting_args(f"{redis_url}/drop-in"))
    assert first.sample() == expected
    first.sample()  # an engine learns with its next step that requests have ended
    second = UserEngine(model, **drafting_args(f"{redis_url}/drop-in"))
    deadline = time.monotonic() + TIMEOUT_S
    while not second.accepted_of_history() and time.monotonic() < deadline:
        assert second.sample() == expected
    assert second.accepted_of_history() > 100
    assert second.stats()["drafting_failures"] == first.stats()["drafting_failures"] == 0
    first.close()
    second.close()


def test_an_engine_without_a_server_drafts_from_its_own_rollouts(model: Path) -> None:
    engine = UserEngine(model, **drafting_args())
    expected = engine.sample()
    deadline = time.monotonic() + TIMEOUT_S
    while engine.accepted_of_history() < 100 and time.monotonic() < deadline:
        assert engine.sample() == expected
    assert engine.accepted_of_history() >= 100
    engine.close()


def test_weights_that_an_extension_copies_begin_a_generation(model: Path, redis_url: str) -> None:
    url = redis_url.removesuffix("/0")
    extension = f"{CopyingExtension.__module__}.{CopyingExtension.__qualname__}"
    engine = UserEngine(model, in_process=True, worker_extension_cls=extension, **drafting_args(f"{url}/copied"))
    for _ in range(2):
        engine.sample()
        engine.llm.collective_rpc("update_weights_from_path", args=("",))
    engine.close()
    rollouts = read_rollouts(redis.Redis.from_url(url), HistoryKeys("default", "copied"))
    assert {1: len(PROMPTS), 2: len(PROMPTS)} == Counter(rollout.weight_version for rollout in rollouts)
