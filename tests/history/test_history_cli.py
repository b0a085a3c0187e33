"""``rollout-history``: what it prints, what it does, and how it says what went wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from rollout_api.protocol.exit_codes import EXIT_REDIS, EXIT_STATE
from rollout_api.protocol.keys import HistoryKeys
from rollout_worker.history.connection import connect_history
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore, histories
from rollout_worker.history_cli import _edges, _shares, app
from tests.support.redis_servers import Server, free_port, until

KEYS, OTHER = HistoryKeys("default", "math"), HistoryKeys("team", "code")
DAY_S = 86400.0


@pytest.fixture
def client(redis_url: str) -> Any:
    return connect_history(redis_url)


def record(rollout_id: str, tokens: int, generation: int = 2, finish_reason: str = "stop") -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(tokens, dtype=np.uint32), finish_reason)


@pytest.fixture
def store(client: Any) -> HistoryStore:
    """Two histories; of the first, one problem with ten rollouts, two of which were cut off."""
    other = HistoryStore(client, OTHER, window=8)
    other.open("0123456789abcdef", "code-model")
    store = HistoryStore(client, KEYS, window=16)
    store.open("fedcba9876543210", "math-model", max_bytes=64 << 30)
    for version in range(2):
        store.publish("run", version)
    ended = [("p", record(f"r{number}", 100 * number)) for number in range(1, 9)]
    cut = [("p", record(f"r{number}", 1000, finish_reason="length")) for number in (9, 10)]
    store.append_all([*ended, *cut], newest=2)
    store.append("short", record("s", 5), newest=2)
    store.reward("p", {"r1": 0.25})
    return store


def call(url: str, *arguments: str, says: str = "", code: int = 0, answer: str | None = None) -> str:
    """What a command prints, errors as well."""
    result: Result = CliRunner().invoke(app, [*arguments, "--redis", url], input=answer)
    assert code == result.exit_code, result.output
    assert says in result.output
    return result.output


def parsed(url: str, *arguments: str) -> Any:
    return json.loads(call(url, *arguments, "--json"))


def make_old(client: Any, keys: HistoryKeys, by: float) -> None:
    for problem in HistoryStore(client, keys, window=16).problems():
        client.zincrby(keys.used(keys.shard(problem.problem)), -by, problem.problem)


def test_ls(redis_url: str, store: HistoryStore, client: Any) -> None:
    make_old(client, KEYS, 3 * DAY_S)
    store.set_horizon(4)
    heads, math, code = call(redis_url, "ls").splitlines()
    assert ["history", "tokenizer", "model", "problems", "bytes", "cap", "generation", "window"] == heads.split()[:8]
    assert ["default/math", "fedcba987654", "math-model", "2"] == math.split()[:4]
    assert "64.0 GiB" in math
    assert ["2", "16,", "4", "old", "at", "most", "3", "d", "ago"] == math.split()[-9:]
    assert ["team/code", "0123456789ab", "code-model", "0", "0", "B", "–", "0", "8", "–"] == code.split()
    rows = parsed(redis_url, "ls")
    size = sum(problem.bytes for problem in store.problems())
    assert 3 * DAY_S == pytest.approx(rows[0].pop("unused_seconds"), abs=60)
    assert {
        "history": "default/math",
        "tokenizer": "fedcba9876543210",
        "model": "math-model",
        "generation": 2,
        "window": 16,
        "horizon": 4,
        "max_bytes": 64 << 30,
        "problems": 2,
        "bytes": size,
    } == rows[0]


def test_ls_says_which_history_cannot_be_read(redis_url: str, store: HistoryStore, client: Any) -> None:
    client.hset(KEYS.meta, "generation", "many")
    text = call(redis_url, "ls", says="team/code")
    assert re.search(r"default/math +ValueError", text)
    assert "ValueError" in parsed(redis_url, "ls")[0]["error"]


def test_ls_of_an_empty_server(redis_url: str) -> None:
    call(redis_url, "ls", says="There are no histories on this server.")
    assert [] == parsed(redis_url, "ls")


@pytest.mark.parametrize("history", ["math", "default/math"])
def test_show(redis_url: str, store: HistoryStore, history: str) -> None:
    lines = call(redis_url, "show", history, "p").splitlines()
    assert ["rollout", "generation", "tokens", "finish", "reward", "bytes"] == lines[0].split()
    assert ["r1", "2", "100", "stop", "0.25"] == lines[1].split()[:5]
    assert ["r10", "2", "1,000", "length", "–"] == lines[10].split()[:5]
    assert lines[11].startswith("10 rollouts, ")
    assert "beside others long" in lines[11]
    assert ["tokens", "rollouts", "cut", "off", "(░)"] == lines[12].split()
    bars = {line.split()[0]: line.split()[1:] for line in lines[13:] if line.split()[1:]}
    # two of 1,000 were cut off, one each of 100 … 800 ended
    longest = "░" * 40
    assert [longest, "2", "2"] == bars["900–1,000"]
    assert ["█" * 20, "1"] == bars["0–100"]
    assert len(bars) == 10


def test_show_as_json(redis_url: str, store: HistoryStore) -> None:
    found = parsed(redis_url, "show", "math", "p")
    assert ("default/math", "p", 0, "long") == tuple(
        found[name] for name in ("history", "problem", "corrupt", "length_class")
    )
    assert {problem.problem: problem.bytes for problem in store.problems()}["p"] == found["bytes"]
    first, last = found["rollouts"][0], found["rollouts"][-1]
    assert first.pop("bytes") > 0
    assert {
        "rollout": "r1",
        "generation": 2,
        "length": 100,
        "finish_reason": "stop",
        "cut_off": False,
        "reward": 0.25,
    } == first
    assert ("r10", 1000, True, None) == tuple(last[name] for name in ("rollout", "length", "cut_off", "reward"))


def test_show_says_what_there_is(redis_url: str, store: HistoryStore, client: Any) -> None:
    client.xadd(KEYS.log("p"), {"d": b"garbage"})
    call(redis_url, "show", "math", "p", says="1 entries cannot be read.")
    call(redis_url, "show", "math", "q", says="has no problem 'q'; it has 2, those used last: short, p", code=1)
    known = "there is no history default/q; there are: default/math, team/code"
    for command in (["show", "q", "p"], ["stats", "q"], ["delete", "q"]):
        call(redis_url, *command, says=known, code=1)


def test_stats(redis_url: str, store: HistoryStore) -> None:
    store.report_ages({1: (1000.0, 500.0), 3: (200.0, 20.0)})
    text = call(redis_url, "stats", "math", says="The last 11 rollouts of default/math")
    assert "18.2% cut off, mean 510 tokens, longest 1,000." in text
    assert re.search(r"10% within +50% within +90% within +99% within\n +100 +500 +> 1,000 +> 1,000", text)
    # 2 of 11 are in the first bin, and 2 never ended
    assert re.search(r"\n +0–100 +█{40} +18\.2%", text)
    assert re.search(r"\n +longer +░{40} +18\.2%", text)
    assert re.search(r"\n +1 +1,000 +500 +50\.0% +█{20}\s", text)
    assert re.search(r"\n +3 +200 +20 +10\.0% +█{4}\s", text)
    found = parsed(redis_url, "stats", "math")
    assert {"0.1": 100.0, "0.5": 500.0, "0.9": None, "0.99": None} == found["quantiles"]
    assert 1 == pytest.approx(sum(one["share"] for one in found["histogram"]))
    assert [{"age": 1, "drafted": 1000.0, "accepted": 500.0}] == found["acceptance"][:1]
    call(redis_url, "stats", "team/code", says="History team/code has no rollouts.")


def test_bins_are_round_and_cover_all(store: HistoryStore) -> None:
    for longest in [*range(300), 999, 1000, 1001, 4095, 4096, 131_072]:
        edges = _edges(longest)
        assert edges[0] == 0
        assert edges[-1] >= longest
        assert len(edges) <= 14
        assert str(edges[1]).rstrip("0") in {"1", "2", "5"}
    assert [] == _shares(store.length_stats("of no problem"))


def test_export_and_import(redis_url: str, store: HistoryStore, client: Any, tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl.zst"
    call(redis_url, "export", "math", str(file), says=f"{file}: 11 rollouts of 2 problems, ")
    call(redis_url, "import", str(file), says="History default/math: 0 rollouts are new, 11 were there, 0 have left")
    text = call(redis_url, "import", str(file), "--as", "copy", says="History default/copy: 11 rollouts are new")
    assert "its newest generation is 2" in text
    assert len(histories(client)) == 3
    says = "history team/code holds rollouts of another tokenizer"
    call(redis_url, "import", str(file), "--as", "team/code", says=says, code=EXIT_REDIS)
    HistoryStore(client, HistoryKeys("default", "foreign"), window=2).open("fedcba9876543210", "another")
    call(redis_url, "import", str(file), "--as", "foreign", says="of model 'another'", code=EXIT_REDIS)
    call(redis_url, "import", str(file), "--as", "foreign", "--allow-foreign-model", says="11 rollouts are new")
    file.write_bytes(file.read_bytes()[:-20])
    call(redis_url, "import", str(file), says="cut off", code=EXIT_STATE)
    call(redis_url, "import", str(tmp_path / "none"), says="none: No such file or directory", code=EXIT_STATE)
    call(redis_url, "export", "math", str(tmp_path / "no" / "file"), says="No such file", code=EXIT_STATE)


def test_gc(redis_url: str, store: HistoryStore, client: Any) -> None:
    store.open("fedcba9876543210", "math-model", max_bytes=1)
    old = HistoryStore(client, OTHER, window=8)
    old.append("p", record("r", 5), newest=2)
    make_old(client, OTHER, 40 * DAY_S)
    client.set(KEYS.keeper, "another", px=60_000)  # a service that looks after it does not keep gc from it
    plan = call(
        redis_url,
        "gc",
        "--dry-run",
        says="default/math: 0 problems would be trimmed to the window, 0 to the byte cap, 2 would be evicted",
    )
    assert "team/code: would be removed, unused for 40 d: 1 problems" in plan
    assert 2 == len(histories(client)) == len(store.problems())
    done = call(
        redis_url,
        "gc",
        "--retention",
        "50d",
        says="default/math: 0 problems trimmed to the window, 0 to the byte cap, 2 evicted",
    )
    assert "team/code: 0 problems trimmed to the window, 0 to the byte cap, 0 evicted (0 B), 0 packed" in done
    assert "team/code: removed, unused for 40 d" in call(redis_url, "gc")
    assert [KEYS] == histories(client)
    assert [] == store.problems()
    client.hset(KEYS.meta, "generation", "many")
    call(redis_url, "gc", says="default/math: failed: ValueError", code=1)
    call(redis_url, "gc", "--retention", "soon", says="'soon' is no duration", code=2)


def test_delete_asks_first(redis_url: str, store: HistoryStore, client: Any) -> None:
    text = call(redis_url, "delete", "math", answer="n\n", code=1)
    assert re.search(r"History default/math: 2 problems, [0-9.]+ KiB, generation 2, last used \d s ago\.", text)
    call(redis_url, "delete", "math", answer="", code=1)  # nobody there to answer
    assert 2 == len(histories(client))
    call(redis_url, "delete", "math", answer="y\n", says="History default/math is deleted.")
    call(redis_url, "delete", "team/code", "--yes", says="History team/code is deleted.")
    assert [] == client.keys("history:*")


def test_redis_away() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    for command in (["ls"], ["stats", "math"], ["gc"]):
        text = call(url, *command, says="cannot be reached", code=EXIT_REDIS)
        assert "secret" not in text
    call("http://redis", "ls", code=EXIT_REDIS)
    call("http://redis", "serve", code=EXIT_REDIS)
    assert 2 == CliRunner(env={"ROLLOUT_REDIS_URL": None}).invoke(app, ["ls"]).exit_code


def test_urls_from_the_environment(redis_url: str, store: HistoryStore) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    for environment in (
        {"ROLLOUT_REDIS_URL": redis_url},
        {"ROLLOUT_REDIS_URL": away, "ROLLOUT_HISTORY_REDIS_URL": redis_url},
    ):
        assert "default/math" in CliRunner().invoke(app, ["ls"], env=environment).output


def test_it_runs_without_ray_and_vllm() -> None:
    program = (
        "import sys, rollout_worker.history_cli\n"
        "print([name for name in ('ray', 'vllm', 'torch', 'transformers', 'kubernetes') if name in sys.modules])"
    )
    assert "[]\n" == subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout


# serve


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "redis", appendonly=True) as one:
        yield one


@pytest.fixture
def served(running: Server, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A service on *running*, and its port."""
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout_worker.history_cli", "serve", "--port", str(port)],
            env={**os.environ, "ROLLOUT_HISTORY_REDIS_URL": running.url},
            stderr=log,
        )
        try:
            until(lambda: get(port, "/readyz")[0] == 200, "it is ready")
            yield process, port
        finally:
            process.kill()
            process.wait()


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def metrics(port: int) -> dict[tuple[str, str], float]:
    """Value of each metric, by its name and history."""
    return {
        (sample.name, sample.labels.get("history", "")): sample.value
        for family in text_string_to_metric_families(get(port, "/metrics")[1])
        for sample in family.samples
    }


def test_serve_shows_what_it_does_and_ends_when_told(
    running: Server, served: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    process, port = served
    client: Any = connect_history(running.url)
    store = HistoryStore(client, KEYS, window=16)
    store.open("tokenizer", "model", max_bytes=1)
    store.publish("run", 0)
    store.append("a prompt", record("r", 5, generation=1), newest=1)
    until(lambda: metrics(port).get(("rollout_history_evicted_total", "default/math")) == 1, "it evicts")
    found = metrics(port)
    for name, value in {
        "lease_held": 1,
        "bytes": 0,
        "max_bytes": 1,
        "problems": 0,
        "window": 16,
        "generation": 1,
        "compacted_total": 0,
        "failed_passes_total": 0,
    }.items():
        assert value == found[f"rollout_history_{name}", "default/math"], name
    assert found["rollout_history_evicted_bytes_total", "default/math"] > 100
    assert found["rollout_history_pass_seconds_total", "default/math"] > 0
    assert (1, 0) == (found["rollout_history_redis_up", ""], found["rollout_history_expired_total", ""])
    assert "a prompt" not in get(port, "/metrics")[1]
    assert (200, "ok\n") == get(port, "/healthz")
    assert client.exists(KEYS.keeper)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert 0 == process.wait(timeout=20)
    assert time.monotonic() - began < 5
    assert not client.exists(KEYS.keeper)
    assert "1 of its 1 problems were evicted" in (tmp_path / "log").read_text()


def test_serve_is_alive_but_not_ready_while_redis_is_away_and_ends_though_it_hangs(
    running: Server, served: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, port = served
    running.kill()
    until(lambda: get(port, "/readyz")[0] == 503, "it is not ready")
    assert "ConnectionError" in get(port, "/readyz")[1]
    assert 200 == get(port, "/healthz")[0]
    assert 0 == metrics(port)["rollout_history_redis_up", ""]
    running.start()
    until(lambda: get(port, "/readyz")[0] == 200, "it is ready again")
    running.pause()
    time.sleep(6)  # it is in the middle of a command then
    process.send_signal(signal.SIGTERM)
    assert 0 == process.wait(timeout=15)


def test_serve_says_that_its_port_is_taken(redis_url: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 – as serve does
        call(redis_url, "serve", "--port", str(taken.getsockname()[1]), says="address already in use", code=EXIT_STATE)
