"""An engine in the process of its trainer: what vLLM can do, new weights, and a history that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import problem_id_of
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_worker import drafting_args
from tests.support.redis_servers import Server
from tests.support.reference_model import make_adapter, make_model
from tests.support.responses import MAX_LOGPROB_ERROR, PROMPTS, WITHOUT_EOS
from tests.support.tcp_proxy import Proxy
from tests.support.user_engine import UserEngine, vllm_on_cpus
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small model, in the environment of vLLM on CPUs."""
    model = make_model(tmp_path_factory.mktemp("model"))
    with vllm_on_cpus(model):
        yield model


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "prompts that are read in parts": {"prefix": [1, 2, 3] * 120, "max_tokens": 20},
    "log-probabilities": {"logprobs": 3},
    "several responses": {"n": 3, "temperature": 1.0, "top_k": 1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "forbidden words": {"allowed_token_ids": None, "bad_words": ["w3", "w4 w5"], "min_tokens": 10},
    "stop strings": {"stop": ["w3 w7", "w1"]},
    "an adapter": {"lora": True},
    "a regular expression": {"allowed_token_ids": None, "structured_outputs": {"regex": "(w[1-4]){5,40}"}},
}
"""Settings of requests whose greedy responses are the same with and without drafts."""
ENGINE: dict[str, Any] = {
    "in_process": True,
    "max_num_batched_tokens": 256,
    "enable_lora": True,
    "max_lora_rank": 8,
    "worker_extension_cls": "tests.drop_in.test_in_process.TrainerExtension",
    "weight_transfer_config": {"backend": "gloo"},
}


class TrainerExtension:
    """What a trainer adds to vLLM's workers."""

    model_runner: Any

    def trainer_model(self) -> str:
        """Return the name of the model's class."""
        return type(self.model_runner.get_model()).__name__


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the model."""
    return make_adapter(tmp_path_factory.mktemp("adapters") / "adapter", model, seed=1)


def responses(engine: UserEngine, name: str, adapter: Path) -> list[Any]:
    """Return what vLLM returns for one of :data:`REQUESTS`, in a form that can be compared."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    settings = {"temperature": 0, "max_tokens": 60, "allowed_token_ids": WITHOUT_EOS, **REQUESTS[name]}
    prefix, lora = settings.pop("prefix", []), settings.pop("lora", False)
    if "structured_outputs" in settings:
        settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
    outputs = engine.llm.generate(
        [{"prompt_token_ids": [*prefix, *prompt]} for prompt in PROMPTS],
        SamplingParams(**settings),
        use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, str(adapter)) if lora else None,
    )
    return [
        (response.token_ids, response.text, response.finish_reason, response.stop_reason, _logprobs(response.logprobs))
        for output in outputs
        for response in output.outputs
    ]


def _logprobs(logprobs: Any) -> Any:
    return logprobs and [
        {token: pytest.approx(value.logprob, abs=MAX_LOGPROB_ERROR) for token, value in position.items()}
        for position in logprobs
    ]


@pytest.fixture(scope="module")
def plain(model: Path, adapter: Path) -> dict[str, list[Any]]:
    """The responses of plain vLLM to all requests."""
    engine = UserEngine(model, **ENGINE)
    results = {name: responses(engine, name, adapter) for name in REQUESTS}
    engine.close()
    return results


@pytest.fixture(scope="module")
def expected(plain: dict[str, list[Any]]) -> list[list[int]]:
    """The greedy responses of plain vLLM."""
    return [list(response[0]) for response in plain["greedy"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a disk, which is empty after a restart."""
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[Proxy]:
    """Stands between the engine and its server."""
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def engine(model: Path, proxy: Proxy, expected: list[list[int]]) -> Iterator[UserEngine]:
    """An engine with a history in Redis."""
    engine = UserEngine(model, **ENGINE, **drafting_args(f"redis://127.0.0.1:{proxy.port}/drop-in"))
    yield engine
    engine.close()


def records(server: Server) -> list[HistoryRecord]:
    """Return the rollouts in the history."""
    store = HistoryStore.for_all_generations(connect_history(server.url), HistoryKeys("default", "drop-in"))
    problems = map(problem_id_of, PROMPTS)
    return [record for problem in problems for log_slice in store.read_all(problem) for record in log_slice.records]


@pytest.mark.parametrize("name", REQUESTS)
def test_vllm_can_do_what_it_can_without_drafts(
    engine: UserEngine, plain: dict[str, list[Any]], adapter: Path, name: str
) -> None:
    for _ in range(2):
        assert responses(engine, name, adapter) == plain[name]
    assert engine.stats()["drafting_failures"] == 0
    assert engine.llm.collective_rpc("trainer_model") == ["Qwen3ForCausalLM"]


def test_seeds_and_temperatures_apply(engine: UserEngine) -> None:
    first, second = (engine.sample(temperature=1.0, seed=seed) for seed in (1, 2))
    assert first != second
    assert all(len(output.outputs) == 4 for output in engine.generate(temperature=1.0, n=4))


@pytest.mark.parametrize("setting", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_what_vllm_rejects_with_drafts_gets_its_own_answer(
    engine: UserEngine, expected: list[list[int]], setting: dict[str, Any]
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
        engine.sample(temperature=1.0, **setting)
    assert engine.sample() == expected


def sampled(engine: UserEngine, server: Server, **sampling: Any) -> list[HistoryRecord]:
    """Sample responses, and return what is recorded of them. No step of the engine follows."""
    before = {record.rollout_id for record in records(server)}
    engine.sample(**sampling)

    def new() -> list[HistoryRecord]:
        return [record for record in records(server) if record.rollout_id not in before]

    wait_for(lambda: len(new()) == len(PROMPTS), TIMEOUT_S)
    return new()


@pytest.mark.v2
def test_all_rollouts_are_recorded_although_no_step_follows(engine: UserEngine, server: Server) -> None:
    for reason, sampling in (("length", {"max_tokens": 3}), ("stop", {"stop_token_ids": WITHOUT_EOS})):
        assert {record.finish_reason for record in sampled(engine, server, **sampling)} == {reason}


@pytest.mark.v2
def test_rollouts_are_recorded_while_drafting_is_paused(engine: UserEngine, server: Server) -> None:
    def fail(worker: Any) -> None:
        worker._das_loop.guard(lambda: 1 / 0)

    for _ in range(3):
        engine.llm.collective_rpc(fail)
    assert sampled(engine, server)


@pytest.mark.v2
def test_what_is_not_complete_is_drafted_from_but_is_no_length(engine: UserEngine, server: Server) -> None:
    from vllm import SamplingParams

    (stopped,) = {record.finish_reason for record in sampled(engine, server, stop=[f"w{token}" for token in range(12)])}
    before = {record.rollout_id for record in records(server)}
    vllm = engine.llm.llm_engine
    vllm.add_request("a", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(8):
        vllm.step()
    vllm.abort_request(["a"])
    vllm.step()
    wait_for(lambda: len(records(server)) == len(before) + 1, TIMEOUT_S)
    (aborted,) = [record for record in records(server) if record.rollout_id not in before]
    assert (stopped, aborted.finish_reason) == ("abort", "abort")
    assert len(aborted.tokens) >= 7


def reload_weights(engine: UserEngine, model: Path) -> None:
    """Let vLLM read the weights of a directory."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def load_tensors(engine: UserEngine, _: Path) -> None:
    """Replace the weights part by part, as trainers with colocated engines do."""
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    for _ in range(3):
        worker.model_runner.model.load_weights([])


def transfer(engine: UserEngine, _: Path) -> None:
    """Replace the weights through vLLM's weight transfer."""
    for method in ("start_weight_update", "finish_weight_update"):
        engine.llm.collective_rpc(method)


def sleep(engine: UserEngine, level: int) -> None:
    """Free the memory of the weights, and get it back."""
    engine.llm.sleep(level)
    engine.llm.wake_up()


def version_of(rollouts: list[HistoryRecord]) -> tuple[int, int]:
    """Return the version and the generation of rollouts, which have the same."""
    (version,) = {(record.weight_version, record.generation) for record in rollouts}
    return version


@pytest.mark.parametrize("update", [reload_weights, load_tensors, transfer, lambda engine, _: sleep(engine, 2)])
def test_new_weights_begin_a_generation(
    engine: UserEngine, server: Server, model: Path, update: Callable[[UserEngine, Path], None]
) -> None:
    version, generation = version_of(sampled(engine, server, max_tokens=2))
    sleep(engine, 1)  # keeps the weights
    assert version_of(sampled(engine, server, max_tokens=2)) == (version, generation)
    update(engine, model)
    for _ in range(2):
        assert version_of(sampled(engine, server, max_tokens=2)) == (version + 1, generation + 1)


def test_a_trainer_may_name_its_steps(engine: UserEngine, server: Server, model: Path) -> None:
    _, generation = version_of(sampled(engine, server, max_tokens=2))
    for number, step in enumerate((1000, 1000, 1010), 1):
        load_tensors(engine, model)
        engine.llm.collective_rpc("das_begin_step", args=(step,))
        assert version_of(sampled(engine, server, max_tokens=2)) == (step, generation + 1 + (number > 2))


@pytest.fixture
def redis_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads of this process that have called Redis."""
    threads = set()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return original(*args, **options)

        return call

    for name in ("connect", "send_packed_command", "read_response"):
        monkeypatch.setattr(redis.Connection, name, noting(getattr(redis.Connection, name)))
    return threads


class Fault:
    """Ways in which a server fails."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self._server, self._proxy = server, proxy

    def begin(self, name: str) -> None:
        """Let the server fail."""
        match name:
            case "killed" | "replaced by an empty one":
                self._server.kill()
            case "never answers":
                self._server.pause()
            case "full":
                self._server.client().config_set("maxmemory", 1)
            case "slow":
                self._proxy.delay(0.25)  # in each direction
        if name == "replaced by an empty one":
            self._server.start()

    def end(self) -> None:
        """Let the server recover from all faults."""
        self._server.start()
        self._server.resume()
        self._server.client().config_set("maxmemory", 0)
        self._proxy.delay(0)


@pytest.mark.parametrize("name", ["slow", "full", "never answers", "killed", "replaced by an empty one"])
def test_a_server_that_fails_costs_history_and_no_step(
    engine: UserEngine,
    expected: list[list[int]],
    server: Server,
    proxy: Proxy,
    redis_threads: set[str],
    name: str,
) -> None:
    connect_history(server.url).flushall()
    fault, failures = Fault(server, proxy), engine.stats()["drafting_failures"]

    def sample(max_tokens: int) -> list[list[int]]:
        redis_threads.clear()
        tokens = engine.sample(max_tokens=max_tokens)
        assert threading.current_thread().name not in redis_threads
        return tokens

    fault.begin(name)
    try:
        assert sample(60) == expected
    finally:
        fault.end()
    assert sample(59) == [tokens[:59] for tokens in expected]
    wait_for(lambda: [len(record.tokens) for record in records(server)].count(59) == len(PROMPTS), TIMEOUT_S)
    assert "rollout-recorder" in redis_threads
    assert engine.stats()["drafting_failures"] == failures
