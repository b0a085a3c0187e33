"""The command ``rollout-history``: output, effects and error messages."""

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

from rollout_api.ports import free_port
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.status import EXIT_REDIS, EXIT_STATE
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.metadata import list_histories
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_store.history_service.cli import app
from rollout_store.history_service.views import bin_edges, length_shares
from tests.support.history_contents import KEYS, OTHER
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

DAY_S = 86400.0


@pytest.fixture
def client(redis_url: str) -> Any:
    return connect_history(redis_url)


def record(rollout_id: str, tokens: int, generation: int = 2, finish_reason: str = "stop") -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(tokens, dtype=np.uint32), finish_reason)


@pytest.fixture
def store(client: Any) -> HistoryStore:
    """Two histories. In the first, one problem has ten rollouts; two of them were cut off."""
    other = HistoryStore(client, OTHER, window=8)
    other.metadata.open("0123456789abcdef", "code-model")
    store = HistoryStore(client, KEYS, window=16)
    store.metadata.open("fedcba9876543210", "math-model", max_bytes=64 << 30)
    for version in range(2):
        store.metadata.publish("run", version)
    ended = [("p", record(f"r{number}", 100 * number)) for number in range(1, 9)]
    cut = [("p", record(f"r{number}", 1000, finish_reason="length")) for number in (9, 10)]
    store.append_all([*ended, *cut], newest=2)
    store.append("short", record("s", 5), newest=2)
    store.set_rewards("p", {"r1": 0.25})
    return store


def run(url: str, *arguments: str, expected: str = "", code: int = 0, answer: str | None = None) -> str:
    """Run a command and return its output, including errors."""
    result: Result = CliRunner().invoke(app, [*arguments, "--redis", url], input=answer)
    assert code == result.exit_code, result.output
    assert expected in result.output
    return result.output


def run_json(url: str, *arguments: str) -> Any:
    return json.loads(run(url, *arguments, "--json"))


def age_last_use(client: Any, keys: HistoryKeys, seconds: float) -> None:
    """Move the last use of all problems into the past, but not their last change, so that no compaction is due."""
    for problem in HistoryStore(client, keys, window=16).catalog.problems():
        client.zincrby(keys.last_used(keys.shard_of(problem.problem_id)), -seconds, problem.problem_id)


def test_ls_lists_histories(redis_url: str, store: HistoryStore, client: Any) -> None:
    age_last_use(client, KEYS, 3 * DAY_S)
    header, math, code = run(redis_url, "ls").splitlines()
    assert [
        "history",
        "tokenizer",
        "model",
        "problems",
        "bytes",
        "cap",
        "generation",
        "window",
        "engines",
    ] == header.split()[:9]
    assert ["default/math", "fedcba987654", "math-model", "2"] == math.split()[:4]
    assert "64.0 GiB" in math
    assert ["2", "16", "0", "3", "d", "ago"] == math.split()[-6:]
    assert ["team/code", "0123456789ab", "code-model", "0", "0", "B", "–", "0", "8", "0", "–"] == code.split()
    rows = run_json(redis_url, "ls")
    size = sum(problem.bytes for problem in store.catalog.problems())
    assert 3 * DAY_S == pytest.approx(rows[0].pop("unused_seconds"), abs=60)
    assert {
        "history": "default/math",
        "tokenizer": "fedcba9876543210",
        "model": "math-model",
        "generation": 2,
        "window": 16,
        "engines": 0,
        "max_bytes": 64 << 30,
        "problems": 2,
        "bytes": size,
    } == rows[0]


def test_ls_reports_a_history_that_cannot_be_read(redis_url: str, store: HistoryStore, client: Any) -> None:
    client.hset(KEYS.meta, "generation", "many")
    text = run(redis_url, "ls", expected="team/code")
    assert re.search(r"default/math +ValueError", text)
    assert "ValueError" in run_json(redis_url, "ls")[0]["error"]


def test_ls_on_an_empty_server(redis_url: str) -> None:
    run(redis_url, "ls", expected="There are no histories on this server.")
    assert [] == run_json(redis_url, "ls")


@pytest.mark.parametrize("history", ["math", "default/math"])
def test_show_lists_rollouts_and_a_histogram(redis_url: str, store: HistoryStore, history: str) -> None:
    lines = run(redis_url, "show", history, "p").splitlines()
    assert ["#", "rollout", "generation", "tokens", "from", "drafts", "finish", "reward", "bytes"] == lines[0].split()
    assert ["1", "r1", "2", "100", "0%", "stop", "0.25"] == lines[1].split()[:7]
    assert ["10", "r10", "2", "1,000", "0%", "length", "–"] == lines[10].split()[:7]
    assert lines[11].startswith("10 rollouts, ")
    assert "long compared with other problems" in lines[11]
    assert ["tokens", "rollouts", "cut", "off", "(░)"] == lines[12].split()
    bars = {line.split()[0]: line.split()[1:] for line in lines[13:] if line.split()[1:]}
    # Two rollouts of 1,000 tokens were cut off; one of each length from 100 to 800 ended.
    longest = "░" * 40
    assert [longest, "2", "2"] == bars["900–1,000"]
    assert ["█" * 20, "1"] == bars["0–100"]
    assert len(bars) == 10


def test_problems_are_listed_with_lengths_and_rewards(redis_url: str, store: HistoryStore) -> None:
    output = run(redis_url, "problems", "math")
    header, longest, shortest = output.splitlines()
    assert "mean reward" in header
    # Eight rollouts of 100 to 800 tokens, and two of 1,000; the last use follows.
    assert ["p", "10", "560", "1,000", "0.25"] == longest.split()[:5]
    assert ["short", "1", "5", "5", "–"] == shortest.split()[:5]
    first, second = run_json(redis_url, "problems", "math")
    assert ("p", 2) == (first["problem"], first["cut_off"])
    stored = {problem.problem_id: problem for problem in store.catalog.problems()}
    assert [stored["p"].bytes, stored["short"].bytes] == [first["bytes"], second["bytes"]]


def test_problems_have_an_order_and_a_limit(redis_url: str, store: HistoryStore) -> None:
    (last_used,) = run_json(redis_url, "problems", "math", "--sort", "used", "--limit", "1")
    assert "short" == last_used["problem"]
    assert "1 of 2 problems" in run(redis_url, "problems", "math", "--limit", "1")
    run(redis_url, "problems", "unknown", code=1)


def test_show_prints_json(redis_url: str, store: HistoryStore) -> None:
    found = run_json(redis_url, "show", "math", "p")
    assert ("default/math", "p", 0, "long") == tuple(
        found[name] for name in ("history", "problem", "corrupt", "length_class")
    )
    assert {problem.problem_id: problem.bytes for problem in store.catalog.problems()}["p"] == found["bytes"]
    first, last = found["rollouts"][0], found["rollouts"][-1]
    assert first.pop("bytes") > 0
    assert {
        "rollout": "r1",
        "generation": 2,
        "length": 100,
        "finish_reason": "stop",
        "cut_off": False,
        "reward": 0.25,
        "accepted_draft_tokens": 0,
    } == first
    assert ("r10", 1000, True, None) == tuple(last[name] for name in ("rollout", "length", "cut_off", "reward"))


def test_unknown_problem_or_history_is_an_error_that_lists_the_known_ones(
    redis_url: str, store: HistoryStore, client: Any
) -> None:
    client.xadd(KEYS.log("p"), {"d": b"garbage"})
    run(redis_url, "show", "math", "p", expected="1 entries cannot be read.")
    run(
        redis_url,
        "show",
        "math",
        "q",
        expected="has no problem 'q'; it has 2 problems, most recently used: short, p",
        code=1,
    )
    known = "there is no history default/q; this server has: default/math, team/code"
    for command in (["show", "q", "p"], ["stats", "q"], ["delete", "q"]):
        run(redis_url, *command, expected=known, code=1)


def test_stats_shows_lengths(redis_url: str, store: HistoryStore) -> None:
    text = run(redis_url, "stats", "math", expected="The latest 11 rollouts of default/math")
    assert "18.2% cut off, mean 510 tokens, longest 1,000." in text
    assert re.search(r"10% within +50% within +90% within +99% within\n +100 +500 +> 1,000 +> 1,000", text)
    # Two of eleven rollouts are in the first bin, and two were cut off.
    assert re.search(r"\n +0–100 +█{40} +18\.2%", text)
    assert re.search(r"\n +longer +░{40} +18\.2%", text)
    found = run_json(redis_url, "stats", "math")
    assert {"0.1": 100.0, "0.5": 500.0, "0.9": None, "0.99": None} == found["quantiles"]
    assert 1 == pytest.approx(sum(column["share"] for column in found["histogram"]))
    run(redis_url, "stats", "team/code", expected="History team/code has no rollouts.")


def test_bins_are_round_and_cover_all_lengths(store: HistoryStore) -> None:
    for longest in [*range(300), 999, 1000, 1001, 4095, 4096, 131_072]:
        edges = bin_edges(longest)
        assert edges[0] == 0
        assert edges[-1] >= longest
        assert len(edges) <= 14
        assert str(edges[1]).rstrip("0") in {"1", "2", "5"}
    assert [] == length_shares(store.statistics.length_stats("unknown problem"))


def test_archive_can_be_exported_and_imported(redis_url: str, store: HistoryStore, client: Any, tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl.zst"
    run(redis_url, "export", "math", str(file), expected=f"{file}: 11 rollouts of 2 problems, ")
    run(
        redis_url,
        "import",
        str(file),
        expected="History default/math: 0 rollouts added, 11 were there already, 0 have left",
    )
    text = run(redis_url, "import", str(file), "--as", "copy", expected="History default/copy: 11 rollouts added")
    assert "the newest generation is 2" in text
    assert len(list_histories(client)) == 3
    mismatch = "history team/code holds rollouts of another tokenizer"
    run(redis_url, "import", str(file), "--as", "team/code", expected=mismatch, code=EXIT_REDIS)
    HistoryStore(client, HistoryKeys("default", "other-model"), window=2).metadata.open("fedcba9876543210", "another")
    run(redis_url, "import", str(file), "--as", "other-model", expected="of model 'another'", code=EXIT_REDIS)
    run(redis_url, "import", str(file), "--as", "other-model", "--allow-model-mismatch", expected="11 rollouts added")
    file.write_bytes(file.read_bytes()[:-20])
    run(redis_url, "import", str(file), expected="truncated", code=EXIT_STATE)
    run(redis_url, "import", str(tmp_path / "none"), expected="none: No such file or directory", code=EXIT_STATE)
    run(redis_url, "export", "math", str(tmp_path / "no" / "file"), expected="No such file", code=EXIT_STATE)


def test_gc_maintains_all_histories(redis_url: str, store: HistoryStore, client: Any) -> None:
    store.metadata.open("fedcba9876543210", "math-model", max_bytes=1)
    old = HistoryStore(client, OTHER, window=8)
    old.append("p", record("r", 5), newest=2)
    age_last_use(client, OTHER, 40 * DAY_S)
    client.set(KEYS.maintainer_lease, "another", px=60_000)  # gc ignores the lease
    plan = run(
        redis_url,
        "gc",
        "--dry-run",
        expected="default/math: 0 problems would be trimmed to the window, 0 trimmed to the byte cap, 2 evicted",
    )
    assert "team/code: would be deleted, unused for 40 d: 1 problems" in plan
    assert 2 == len(list_histories(client)) == len(store.catalog.problems())
    done = run(
        redis_url,
        "gc",
        "--retention",
        "50d",
        expected="default/math: 0 problems trimmed to the window, 0 trimmed to the byte cap, 2 evicted",
    )
    assert (
        "team/code: 0 problems trimmed to the window, 0 trimmed to the byte cap, 0 evicted (0 B), 0 compacted" in done
    )
    assert "team/code: deleted, unused for 40 d" in run(redis_url, "gc")
    assert [KEYS] == list_histories(client)
    assert [] == store.catalog.problems()
    client.hset(KEYS.meta, "generation", "many")
    run(redis_url, "gc", expected="default/math: failed: ValueError", code=1)
    run(redis_url, "gc", "--retention", "soon", expected="'soon' is not a duration", code=2)


def test_delete_asks_for_confirmation(redis_url: str, store: HistoryStore, client: Any) -> None:
    text = run(redis_url, "delete", "math", answer="n\n", code=1)
    assert re.search(r"History default/math: 2 problems, [0-9.]+ KiB, generation 2, last used \d s ago\.", text)
    run(redis_url, "delete", "math", answer="", code=1)  # the input has ended
    assert 2 == len(list_histories(client))
    run(redis_url, "delete", "math", answer="y\n", expected="Deleted history default/math.")
    run(redis_url, "delete", "team/code", "--yes", expected="Deleted history team/code.")
    assert [] == client.keys("history:*")


def test_unreachable_redis_is_reported_without_its_password() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    for command in (["ls"], ["stats", "math"], ["gc"]):
        text = run(url, *command, expected="cannot be reached", code=EXIT_REDIS)
        assert "secret" not in text
    run("http://redis", "ls", code=EXIT_REDIS)
    run("http://redis", "serve", code=EXIT_REDIS)
    assert 2 == CliRunner(env={"ROLLOUT_REDIS_URL": None}).invoke(app, ["ls"]).exit_code


def test_url_is_read_from_the_environment(redis_url: str, store: HistoryStore) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    for environment in (
        {"ROLLOUT_REDIS_URL": redis_url},
        {"ROLLOUT_REDIS_URL": away, "ROLLOUT_HISTORY_REDIS_URL": redis_url},
    ):
        assert "default/math" in CliRunner().invoke(app, ["ls"], env=environment).output


def test_command_does_not_import_ray_or_vllm() -> None:
    program = (
        "import sys, rollout_store.history_service.cli\n"
        "print([name for name in ('ray', 'vllm', 'torch', 'transformers', 'kubernetes') if name in sys.modules])"
    )
    assert "[]\n" == subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout


# The service.


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "redis", appendonly=True) as one:
        yield one


@pytest.fixture
def served(running: Server, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that runs the service on the server *running*, and its port."""
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout_store.history_service.cli", "serve", "--port", str(port)],
            env={**os.environ, "ROLLOUT_HISTORY_REDIS_URL": running.url},
            stderr=log,
        )
        try:
            wait_for(lambda: get(port, "/readyz")[0] == 200, 20, "The service does not become ready.")
            yield process, port
        finally:
            process.kill()
            process.wait()


def get(port: int, path: str) -> tuple[int, str]:
    """Return the status and text of a reply; status 0 if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def metrics(port: int) -> dict[tuple[str, str], float]:
    """Return the values of all metrics, by name and history."""
    return {
        (sample.name, sample.labels.get("history", "")): sample.value
        for family in text_string_to_metric_families(get(port, "/metrics")[1])
        for sample in family.samples
    }


def test_service_publishes_metrics_and_ends_on_sigterm(
    running: Server, served: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    process, port = served
    client: Any = connect_history(running.url)
    store = HistoryStore(client, KEYS, window=16)
    store.metadata.open("tokenizer", "model", max_bytes=1)
    store.metadata.publish("run", 0)
    store.append("a prompt", record("r", 5, generation=1), newest=1)
    wait_for(
        lambda: metrics(port).get(("rollout_history_evicted_problems_total", "default/math")) == 1,
        20,
        "The problem is not evicted.",
    )
    found = metrics(port)
    for name, value in {
        "lease_held": 1,
        "bytes": 0,
        "max_bytes": 1,
        "problems": 0,
        "window_generations": 16,
        "generation": 1,
        "compacted_problems_total": 0,
        "maintenance_failures_total": 0,
    }.items():
        assert value == found[f"rollout_history_{name}", "default/math"], name
    assert found["rollout_history_evicted_bytes_total", "default/math"] > 100
    assert found["rollout_history_maintenance_seconds_total", "default/math"] > 0
    assert (1, 0) == (found["rollout_history_redis_up", ""], found["rollout_history_expired_histories_total", ""])
    assert "a prompt" not in get(port, "/metrics")[1]
    assert (200, "ok\n") == get(port, "/healthz")
    assert client.exists(KEYS.maintainer_lease)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert 0 == process.wait(timeout=20)
    assert time.monotonic() - began < 5
    assert not client.exists(KEYS.maintainer_lease)
    assert "evicted the 1 least recently used of 1 problems" in (tmp_path / "log").read_text()


def test_service_is_healthy_but_not_ready_while_redis_is_unreachable(
    running: Server, served: tuple[subprocess.Popen[bytes], int]
) -> None:
    _, port = served
    running.kill()
    wait_for(lambda: get(port, "/readyz")[0] == 503, 20, "The service is still ready.")
    assert "ConnectionError" in get(port, "/readyz")[1]
    assert 200 == get(port, "/healthz")[0]
    assert 0 == metrics(port)["rollout_history_redis_up", ""]
    running.start()
    wait_for(lambda: get(port, "/readyz")[0] == 200, 20, "The service does not become ready again.")


def test_occupied_port_is_reported(redis_url: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 – as serve does
        run(
            redis_url,
            "serve",
            "--port",
            str(taken.getsockname()[1]),
            expected="address already in use",
            code=EXIT_STATE,
        )
