"""vLLM's own engines draft from a shared history with one more argument."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import problem_id_of
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.store import HistoryStore
from rollout_worker import drafting_args
from rollout_worker.drop_in.worker import tokenizer_of
from tests.support.engines import needs_v2
from tests.support.faulty_extension import CopyingExtension
from tests.support.history_contents import read_rollouts
from tests.support.reference_model import make_model
from tests.support.responses import PROMPTS
from tests.support.user_engine import UserEngine, vllm_on_cpus
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small model, in the environment of vLLM on CPUs."""
    model = make_model(tmp_path_factory.mktemp("model"))
    with vllm_on_cpus(model):
        yield model


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """The responses of plain vLLM."""
    engine = UserEngine(model)
    tokens = engine.sample()
    engine.close()
    return tokens


def test_engines_that_name_a_history_draft_from_the_rollouts_of_each_other(
    model: Path, expected: list[list[int]], redis_url: str
) -> None:
    first, second = (UserEngine(model, **drafting_args(f"{redis_url}/drop-in")) for _ in range(2))
    assert first.sample() == expected
    deadline = time.monotonic() + TIMEOUT_S
    while not second.accepted_of_history() and time.monotonic() < deadline:
        assert second.sample() == expected
    assert second.accepted_of_history() > 100
    assert second.stats()["drafting_failures"] == first.stats()["drafting_failures"] == 0
    first.close()
    second.close()


def test_an_engine_that_uses_no_tokenizer_shares_the_history_of_the_others(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    with_tokenizer, without = (
        tokenizer_of(EngineArgs(str(model), max_model_len=512, skip_tokenizer_init=skip).create_engine_config())
        for skip in (False, True)
    )
    assert with_tokenizer == without
    assert "tokens" not in without


@pytest.mark.parametrize(
    "ranks",
    [
        "tensor_parallel_size",
        pytest.param("pipeline_parallel_size", marks=needs_v2),  # vLLM's V1 fails with any drafter (seen in 0.32)
    ],
)
def test_one_of_several_ranks_drafts_and_records(
    model: Path, expected: list[list[int]], redis_url: str, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # with several ranks, vLLM compiles even with enforce_eager
    arguments: dict[str, Any] = {ranks: 2, **drafting_args(f"{redis_url}/{ranks}")}
    engine = UserEngine(model, **arguments)
    store = HistoryStore.for_all_generations(connect_history(redis_url), HistoryKeys("default", ranks))
    for _ in range(2):
        assert engine.sample() == expected
    engine.llm.collective_rpc("das_begin_step", args=(7,))
    assert engine.sample() == expected

    def recorded() -> list[list[int]]:
        slices = [list(store.read_all(problem_id_of(prompt))) for prompt in PROMPTS]
        return [[record.weight_version for part in parts for record in part.records] for parts in slices]

    wait_for(lambda: sum(map(len, recorded())) >= 3 * len(PROMPTS), TIMEOUT_S)
    assert all(sorted(versions) == [1, 1, 7] for versions in recorded())
    assert engine.stats()["drafting_failures"] == 0
    assert engine.accepted_of_history() > 0
    engine.close()


def test_an_engine_without_a_server_drafts_from_its_own_rollouts(model: Path, expected: list[list[int]]) -> None:
    engine = UserEngine(model, **drafting_args())
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
