"""An engine in the process of its trainer, whose history fails."""

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
from tests.support.reference_model import make_model
from tests.support.responses import PROMPTS
from tests.support.tcp_proxy import Proxy
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
    """The greedy responses of plain vLLM."""
    plain = UserEngine(model, in_process=True)
    tokens = plain.sample()
    plain.close()
    return tokens


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
    engine = UserEngine(model, in_process=True, **drafting_args(f"redis://127.0.0.1:{proxy.port}/drop-in"))
    yield engine
    engine.close()


def records(server: Server) -> list[HistoryRecord]:
    """Return the rollouts in the history."""
    store = HistoryStore.for_all_generations(connect_history(server.url), HistoryKeys("default", "drop-in"))
    problems = map(problem_id_of, PROMPTS)
    return [record for problem in problems for log_slice in store.read_all(problem) for record in log_slice.records]


def test_all_rollouts_are_recorded_although_no_step_follows(engine: UserEngine, server: Server) -> None:
    before = len(records(server))
    engine.sample()
    wait_for(lambda: len(records(server)) == before + len(PROMPTS), TIMEOUT_S)


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
    fault = Fault(server, proxy)
    redis_threads.clear()
    fault.begin(name)
    redis_threads.clear()
    try:
        assert engine.sample() == expected
        assert threading.current_thread().name not in redis_threads
    finally:
        fault.end()
    redis_threads.clear()
    before = {record.rollout_id for record in records(server)}
    redis_threads.clear()
    assert engine.sample() == expected
    assert threading.current_thread().name not in redis_threads
    wait_for(lambda: len({record.rollout_id for record in records(server)} - before) >= len(PROMPTS), TIMEOUT_S)
    assert "rollout-recorder" in redis_threads
    assert engine.stats()["drafting_failures"] == 0
