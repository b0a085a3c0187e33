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
from tests.support.responses import PROMPTS, WITHOUT_EOS
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


@pytest.mark.parametrize("policy", ["das-classes", "fixed"])
def test_only_a_length_policy_drafts_nothing_for_problems_with_short_rollouts(
    model: Path, expected: list[list[int]], redis_url: str, policy: str
) -> None:
    """Each problem's responses end with a token that is new there: after 8 to 11 tokens, or after more than 20."""
    from vllm import SamplingParams

    new = [[place for place, token in enumerate(tokens) if token not in tokens[:place]] for tokens in expected]
    late = [number for number, places in enumerate(new) if places[-1] > 20]
    early = [number for number, places in enumerate(new) if number not in late and set(places) & set(range(7, 11))]
    early = early[: len(late) // 2]  # so that all of them are in the lowest third
    lengths = {number: 1 + new[number][-1] for number in late} | {
        number: 1 + min(place for place in new[number] if place >= 7) for number in early
    }
    engine = UserEngine(model, in_process=True, **drafting_args(f"{redis_url}/{policy}", policy=policy))
    for step in (1, 2):
        engine.llm.collective_rpc("das_begin_step", args=(step,))
        outputs = engine.llm.generate(
            [{"prompt_token_ids": list(PROMPTS[number])} for number in lengths],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=60,
                    allowed_token_ids=WITHOUT_EOS,
                    stop_token_ids=[expected[number][length - 1]],
                )
                for number, length in lengths.items()
            ],
            use_tqdm=False,
        )
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(lengths.values())
        wait_for(lambda step=step: engine.stats()["history"]["rollouts"] == step * len(lengths), TIMEOUT_S)
    counters = engine.stats()["labeled_counters"]
    engine.close()
    keys = HistoryKeys("default", policy)
    accepted = {True: 0, False: 0}
    """Number of accepted draft tokens once lengths are known, of problems with short rollouts and of the others."""
    for number in lengths:
        for record in read_rollouts(redis.Redis.from_url(redis_url), keys, problem_id_of(PROMPTS[number])):
            if record.weight_version == 2:
                accepted[number in early] += sum(map(bool, record.draft_sources))
    assert accepted[False] > 10
    if policy == "fixed":
        assert accepted[True] > 0
        assert counters["class_steps"] == {}
    else:
        assert accepted[True] == 0
        assert counters["class_steps"]["short"] > 0
        assert counters["class_budget_tokens"]["short"] == counters["class_draft_tokens"]["short"] == 0
        assert counters["class_accepted_tokens"]["medium"] + counters["class_accepted_tokens"]["long"] > 10


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
