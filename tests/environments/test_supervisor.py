"""The process of an environment: everything that happens to it is the result of a call."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_api.manifest.spec import Environment
from rollout_head.environment import process
from rollout_head.environment.supervisor import (
    MAX_IN_FLIGHT,
    EnvironmentCallError,
    EnvironmentErrorType,
    EnvironmentLoadError,
    EnvironmentSupervisor,
)
from tests.support.waiting import wait_for

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"
VERIFIERS = Path(__file__).parents[2] / ".venv" / "verifiers" / "bin" / "python"
ALL_ACTIONS = ["one", "raise", "sys_exit", "cancelled", "nan", "none", "text", "die", "segfault", "print"]
EXPECTED = {
    "one": 1.0,
    "print": 1.0,
    "raise": EnvironmentErrorType.EXCEPTION,
    "sys_exit": EnvironmentErrorType.EXCEPTION,
    "cancelled": EnvironmentErrorType.EXCEPTION,
    "nan": EnvironmentErrorType.REWARD,
    "none": EnvironmentErrorType.REWARD,
    "text": EnvironmentErrorType.REWARD,
    "die": EnvironmentErrorType.EXIT,
    "segfault": EnvironmentErrorType.EXIT,
    "hang": EnvironmentErrorType.TIMEOUT,
    "hog": EnvironmentErrorType.MEMORY,
    "child_hog": EnvironmentErrorType.MEMORY,
}
Start = Callable[..., EnvironmentSupervisor]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Load an environment of scripted.py."""
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    started = []

    def start(
        actions: list[str], factory: str = "make", calls: Path | None = None, **settings: Any
    ) -> EnvironmentSupervisor:
        settings = {"timeout_seconds": 60, "memory_limit": "1Gi", **settings}
        args: dict[str, Any] = {"actions": actions, "calls": calls and str(calls)}
        spec = Environment(entry_point=f"scripted:{factory}", args=args, **settings)
        supervisor = EnvironmentSupervisor(spec)
        started.append(supervisor)
        supervisor.load()
        return supervisor

    yield start
    for supervisor in started:
        supervisor.close()


def outcomes(supervisor: EnvironmentSupervisor, actions: list[str]) -> list[float | EnvironmentErrorType]:
    """Score one response of each problem; return each reward, or the type of the error."""
    calls = [
        supervisor.call("reward", {"problem": f"{number}-{action}", "text": "7", "token_ids": [7]})
        for number, action in enumerate(actions)
    ]
    found: list[float | EnvironmentErrorType] = []
    for call in calls:
        try:
            found.append(call.result(timeout=60))
        except EnvironmentCallError as error:
            found.append(error.error_type)
    return found


def test_each_call_has_its_own_outcome_whatever_the_others_do(start: Start) -> None:
    actions = [*ALL_ACTIONS, "one"]
    supervisor = start(actions)
    assert [EXPECTED[action] for action in actions] == outcomes(supervisor, actions)
    assert 4 == supervisor.restarts  # a call that has ended the process is repeated once


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.sampled_from(["one", "raise", "none", "die"]), min_size=1, max_size=4), is_async=st.booleans()
)
def test_outcomes_do_not_depend_on_order_and_concurrency(start: Start, actions: list[str], is_async: bool) -> None:
    supervisor = start(actions, "make_async" if is_async else "make")
    assert [EXPECTED[action] for action in actions] == outcomes(supervisor, actions)
    supervisor.close()


def test_a_function_that_hangs_is_killed_and_named(start: Start) -> None:
    limit = 5  # which also applies to loading it again
    supervisor = start(["one", "hang", "one"], timeout_seconds=limit)
    began = time.monotonic()
    assert [1.0, EnvironmentErrorType.TIMEOUT, 1.0] == outcomes(supervisor, ["one", "hang", "one"])
    assert limit < time.monotonic() - began
    assert 1 == supervisor.restarts


@pytest.mark.parametrize("factory", ["make", "make_async"])
def test_the_time_limit_of_a_call_does_not_include_the_others(start: Start, factory: str) -> None:
    actions = ["nap"] * 12  # each takes 0.4 s, and blocks the others
    supervisor = start(actions, factory, timeout_seconds=3)
    assert [1.0] * 12 == outcomes(supervisor, actions)
    assert 0 == supervisor.restarts


def test_a_coroutine_that_hangs_ends_alone(start: Start) -> None:
    actions = ["one", "hang", "one"]
    supervisor = start(actions, "make_async", timeout_seconds=2)
    assert [1.0, EnvironmentErrorType.TIMEOUT, 1.0] == outcomes(supervisor, actions)
    assert 0 == supervisor.restarts


def test_coroutines_run_at_the_same_time(start: Start) -> None:
    actions = ["one"] * 20
    supervisor = start(actions, "make_async")
    began = time.monotonic()
    assert [1.0] * 20 == outcomes(supervisor, actions)
    assert time.monotonic() - began < 5  # each of them waits for 0.5 s


@pytest.mark.parametrize("action", ["hog", "child_hog"])
def test_memory_of_the_process_and_its_children_is_limited(start: Start, action: str) -> None:
    supervisor = start(["one", action], memory_limit="256Mi")
    assert [1.0, EnvironmentErrorType.MEMORY] == outcomes(supervisor, ["one", action])
    assert [1.0] == outcomes(supervisor, ["one"])


def test_a_process_that_is_killed_from_outside_is_restarted(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    actions = ["one"] * 4
    supervisor = start(actions, "make_async", calls=file)
    assert [1.0] == outcomes(supervisor, ["one"])
    calls = [supervisor.call("reward", {"problem": f"{n}-one", "text": "", "token_ids": []}) for n in range(4)]
    time.sleep(0.2)  # the calls wait for 0.5 s
    os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
    assert [1.0] * 4 == [call.result(timeout=60) for call in calls]
    assert 1 == supervisor.restarts


def test_the_process_ends_with_the_job_although_it_has_unread_calls(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    program = (
        "import time\n"
        "from rollout_api.manifest.spec import Environment\n"
        "from rollout_head.environment.supervisor import EnvironmentSupervisor\n"
        f"args = {{'actions': ['hang'], 'calls': {str(file)!r}}}\n"
        "supervisor = EnvironmentSupervisor(Environment(entry_point='scripted:make', args=args))\n"
        "supervisor.load()\n"
        "for _ in range(100):\n"
        "    supervisor.call('reward', {'problem': '0-hang', 'text': 'x' * 1000, 'token_ids': []})\n"
        "time.sleep(1000)\n"
    )
    job = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ENVIRONMENTS)})
    wait_for(lambda: file.exists() and bool(file.read_text()), 60)
    pid = int(file.read_text().split()[0])
    job.kill()
    job.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 15)


def test_the_call_that_ends_the_process_is_found_by_halving(start: Start) -> None:
    actions = ["die", *["one"] * 80]
    supervisor = start(actions, "make_async")
    began = time.monotonic()
    assert [EXPECTED[action] for action in actions] == outcomes(supervisor, actions)
    assert time.monotonic() - began < 25  # one after the other, they would take 40 s


def test_calls_that_only_use_too_much_memory_together_succeed(start: Start) -> None:
    actions = ["keep"] * 12
    supervisor = start(actions, "make_async", memory_limit="256Mi")
    assert [1.0] * 12 == outcomes(supervisor, actions)
    assert supervisor.restarts


def test_calls_that_are_given_up_make_room_for_others(start: Start) -> None:
    supervisor = start(["hang", "one"], "make_async")
    given_up = [
        supervisor.call("reward", {"problem": "0-hang", "text": "", "token_ids": []}) for _ in range(MAX_IN_FLIGHT)
    ]
    time.sleep(1)
    assert all(call.cancel() for call in given_up)
    began = time.monotonic()
    call = supervisor.call("reward", {"problem": "1-one", "text": "", "token_ids": []})
    assert 1.0 == call.result(timeout=60)
    assert time.monotonic() - began < 20  # the others would take a minute to fail
    assert 0 == supervisor.restarts


def test_a_coroutine_that_is_given_up_and_blocks_the_others_is_not_blamed_on_them(start: Start) -> None:
    supervisor = start(["block", "one"], "make_async", timeout_seconds=1)
    blocking = supervisor.call("reward", {"problem": "0-block", "text": "", "token_ids": []})
    time.sleep(1)  # it blocks the process after half a second
    assert blocking.cancel()
    assert 1.0 == supervisor.call("reward", {"problem": "1-one", "text": "", "token_ids": []}).result(timeout=60)


def test_no_call_is_lost_if_the_process_reads_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SEND_TIMEOUT_S", 1.0)
    supervisor = start(["keep_lock", "one"])
    hanging = supervisor.call("reward", {"problem": "0-keep_lock", "text": "", "token_ids": []})
    time.sleep(0.5)
    text = "x" * 5000
    calls = [supervisor.call("reward", {"problem": "1-one", "text": text, "token_ids": []}) for _ in range(400)]
    with pytest.raises(EnvironmentCallError, match="hangs"):
        hanging.result(timeout=30)
    assert [1.0] * 400 == [call.result(timeout=60) for call in calls]


def test_an_environment_may_close_its_output(start: Start) -> None:
    supervisor = start(["close_output"])
    assert [1.0] == outcomes(supervisor, ["close_output"])
    used = time.process_time()
    time.sleep(1)
    # The supervisor waits instead of reading the end of the output again and again.
    assert time.process_time() - used < 0.5


def test_a_closed_standard_error_of_the_job_does_not_matter(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        assert [1.0] == outcomes(start(["one"]), ["one"])
        monkeypatch.setattr(sys, "stderr", sys.__stderr__)


def test_closing_ends_the_process_and_open_calls(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    supervisor = start(["hang"], calls=file)
    call = supervisor.call("reward", {"problem": "0-hang", "text": "", "token_ids": []})
    wait_for(lambda: file.exists() and bool(file.read_text()), 30)
    pid = int(file.read_text().split()[0])
    supervisor.close()
    with pytest.raises(EnvironmentCallError, match="the job has ended"):
        call.result(timeout=10)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entry_point": "no_such_module:make"}, "no module 'no_such_module'.*PYTHONPATH"),
        ({"entry_point": "scripted:create"}, "has no create"),
        ({"entry_point": "scripted:make"}, "TypeError.*actions"),
        ({"entry_point": "scripted:make_nothing"}, "has no method problems"),
        ({"entry_point": "scripted:fail"}, r"OSError: the data set is offline \(.*scripted.py, line \d+\)"),
        ({"entry_point": "scripted:die"}, "(?s)ended while it was loaded.*exit code 9.*out of disk space"),
        ({"entry_point": "scripted:RepeatedIds", "args": {"actions": ["one"]}}, "problem_id '0-one'.*its own"),
        ({"entry_point": "scripted:StrangePrompts", "args": {"actions": []}}, "'a': the prompt is neither"),
        ({"entry_point": "scripted:Prompts", "args": {"actions": [7]}}, "'0': the prompt is neither"),
        ({"entry_point": "scripted:make", "python": "/no/python"}, "/no/python cannot be started"),
        ({"verifiers": "gsm8k"}, "has no package verifiers; install it"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_an_error_with_advice(
    start: Start, settings: dict[str, Any], message: str
) -> None:
    supervisor = EnvironmentSupervisor(Environment(**settings))
    with pytest.raises(EnvironmentLoadError, match=message):
        supervisor.load()


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"entry_point": "scripted:Dialogue", "args": {"actions": ["one"]}}, "0-one"),
        pytest.param(
            {"verifiers": "sums-for-verifiers", "python": str(VERIFIERS)},
            "sums-for-verifiers/0",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    not VERIFIERS.exists(), reason="verifiers is not installed; run scripts/get-verifiers"
                ),
            ],
        ),
    ],
    ids=["python", "verifiers"],
)
def test_a_response_that_has_failed_is_an_error_after_retries_while_the_server_is_away(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], problem: str
) -> None:
    """The server answers a repeated request with the same rollout, and waiting for it does not count as time."""
    statuses = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            statuses.append(500 if statuses else 503)
            body = b'{"error": {"message": "6 engines were lost with it"}}'
            self.send_response(statuses[-1])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    supervisor = EnvironmentSupervisor(Environment(**environment))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            supervisor.load()
            url = f"http://127.0.0.1:{server.server_port}/v1"
            call = {"problem": problem, "sample": 0, "epoch": 1, "model": "tiny", "url": url, "token": "t"}
            result = supervisor.call("trajectory", call).result(timeout=60)
        finally:
            server.shutdown()
            supervisor.close()
    assert "6 engines were lost with it" in result["error"]["message"]
    assert [503, 500] == statuses


def test_the_environment_does_not_see_the_jobs_secrets(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_REDIS_URL", "redis://:hunter2@redis")
    monkeypatch.setenv("OTHER", "1")
    assert [0.0] == outcomes(start(["sees_secret"], python=sys.executable), ["sees_secret"])
