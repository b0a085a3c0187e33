"""The program of an environment's process. It loads the environment and answers the calls of the job.

The process may run another Python interpreter than the worker, for example one that has ``verifiers``. This file and
``verifiers_host.py`` therefore import nothing of this project, and run on Python 3.10 and newer.

Calls and answers are JSON documents, each after its length (4 bytes, big-endian), on a socket that only this program
knows. What the environment prints cannot disturb them. If the socket is closed, the job has ended, and the process
ends with its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import http.client
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar, cast

HEADER = struct.Struct(">I")
"""Length of a message."""
TICK_S = 0.25
"""Seconds between two checks of the time limits."""
HEARTBEAT_S = 1.0
"""Seconds between two signs of life."""
MAX_MESSAGE_CHARS = 2000
"""Maximum length of the text of an error."""
_MAX_CONNECTIONS = 1024
_STACK_BYTES = 512 << 10
"""Stack of a thread that waits for a response."""
RETRY_DELAYS_S = (0.5, 1, 2, 4, 8)
RETRIED_STATUSES = (429, 502, 503, 504)
"""Statuses of the job's HTTP server while it is restarted or has no room.

500 is none of them: it stands for a rollout that has failed, and repeated requests have the same rollout."""
_DATA_RESERVE = 2 << 30
"""Bytes that the process may reserve beyond its memory limit. Libraries such as pyarrow reserve memory unused."""
_PR_SET_CHILD_SUBREAPER = 36
_T = TypeVar("_T")


class CallError(Exception):
    """A call has failed; ``error_type`` is a value of ``EnvironmentErrorType`` in ``supervisor.py``."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class UsageError(Exception):
    """The environment does not do what the job expects; the text says what, where and what to do."""


class TimeBudget:
    """The time that the environment may still compute for one call."""

    def __init__(self, limit: float) -> None:
        self._limit, self._used, self._paused = limit, 0.0, 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time that the model takes to sample."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def tick(self, seconds: float) -> bool:
        """Count *seconds*; return whether the limit is exceeded."""
        if not self._paused:
            self._used += seconds
        return self._used > self._limit


class RolloutRecord:
    """One rollout of a trajectory: its identity, and the responses that were sampled for it."""

    def __init__(self, call: Mapping[str, Any], budget: TimeBudget) -> None:
        self.call, self.budget = call, budget
        self.rollout_ids: list[str] = []
        """Ids of the sampled responses."""
        self._occurrences: dict[bytes, int] = {}

    def headers(self, body: bytes) -> dict[str, str]:
        """Return the headers of the next request for a response.

        A request has the same ``Idempotency-Key`` whenever the environment arrives at it again, so that a repeated
        trajectory gets the responses that were sampled before.
        """
        digest = hashlib.blake2b(body, digest_size=16).digest()
        occurrence = self._occurrences[digest] = self._occurrences.get(digest, 0) + 1
        identity = [self.call["epoch"], self.call["problem"], self.call["sample"], digest.hex(), occurrence]
        key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
        return {
            "Idempotency-Key": f"environment-{self.call['epoch']}-{key}",
            "X-Rollout-Problem": self.call["problem"],
            "X-Rollout-Step": str(self.call["epoch"]),
        }

    def record(self, headers: Mapping[str, str]) -> None:
        """Record the response with these HTTP headers."""
        if entry := headers.get("X-Rollout-Request-Ids"):
            self.rollout_ids.append(f"{entry}/0/{headers.get('X-Rollout-Turn') or 0}")


class Calls:
    """Runs the functions of the environment."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._threads = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="http")

    async def run(self, call: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, or a coroutine function, of the environment.

        Raises:
            Exception: what the function raises; SystemExit is an exception like others.
        """
        is_blocking = not inspect.iscoroutinefunction(function)
        if is_blocking:
            await asyncio.sleep(0)
            # The job then knows which call is to blame if the process hangs or dies.
            self._send({"started": call})
        try:
            result = function(*args)
            if inspect.isawaitable(result):
                if is_blocking:
                    self._send({"ended": call})
                    is_blocking = False
                result = await result
        except (SystemExit, KeyboardInterrupt) as error:
            raise CallError("exception", describe(error)) from error
        finally:
            if is_blocking:
                self._send({"ended": call})
        return result

    def wait_in_thread(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Call a function that waits for the job in a thread."""
        # The stacks of so many threads, 8 MiB each by default, would exceed what the process may reserve.
        size = threading.stack_size(_STACK_BYTES)
        try:
            return asyncio.get_running_loop().run_in_executor(self._threads, function)
        finally:
            threading.stack_size(size)


class PythonEnvironment:
    """An environment as ``rollout_api.environment`` describes it."""

    def __init__(self, environment: Any, calls: Calls) -> None:
        self._environment, self._calls = environment, calls
        self._problems: dict[str, Any] = {}
        self._reply: Any = getattr(environment, "reply", None)

    @classmethod
    def create(cls, name: str, arguments: Mapping[str, Any], calls: Calls) -> PythonEnvironment:
        """Import and call the entry point *name*.

        Raises:
            UsageError: if there is no such function, or its result is no environment.
            Exception: what the function raises.
        """
        module_name, _, path = name.partition(":")
        try:
            module: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(
                f"there is no module {error.name!r} for {sys.executable}; install its package into an image that is "
                "based on the worker's (spec.image), or add its directory to PYTHONPATH"
            ) from None
        try:
            factory = functools.reduce(getattr, path.split("."), module)
        except AttributeError:
            raise UsageError(f"the module {module_name} ({module.__file__}) has no {path}") from None
        environment = factory(**arguments)
        for method in ("problems", "reward"):
            if not callable(getattr(environment, method, None)):
                raise UsageError(
                    f"{name} returned {type(environment).__name__!r}, which has no method {method}; see "
                    "rollout_api.environment"
                )
        return cls(environment, calls)

    @property
    def samples_itself(self) -> bool:
        """Whether the environment itself asks for responses."""
        return self._reply is not None

    async def load_problems(self, limit: int | None) -> list[dict[str, Any]]:
        """Return the problems' ids and prompts.

        Raises:
            UsageError: if one is malformed, or two have the same id.
        """
        found = self._environment.problems()
        if inspect.isawaitable(found):
            found = await found
        loaded = []
        for number, problem in enumerate(itertools.islice(found, limit)):
            problem_id, prompt = _field(problem, "problem_id"), _field(problem, "prompt")
            if not isinstance(problem_id, str) or not problem_id:
                raise UsageError(
                    f"problem {number}: problem_id is {problem_id!r}, but must be a text that is not empty"
                )
            if self.samples_itself:
                check_header(problem_id)
            if problem_id in self._problems:
                raise UsageError(f"two problems have the problem_id {problem_id!r}; each needs its own")
            self._problems[problem_id] = problem
            prompt = _plain_prompt(prompt, problem_id)
            if self.samples_itself and prompt and isinstance(prompt[0], int):
                raise UsageError(
                    f"problem {problem_id!r}: an environment that replies needs prompts of text or messages, not token "
                    "ids"
                )
            loaded.append({"id": problem_id, "prompt": prompt})
        return loaded

    async def reward(self, call: Mapping[str, Any]) -> float:
        """Return the reward of the rollout in *call*."""
        problem = self._problem(call["problem"])
        prompt = _plain_prompt(_field(problem, "prompt"), call["problem"])
        conversation = [] if prompt and isinstance(prompt[0], int) else prompt
        response = {"role": "assistant", "content": call["text"], "token_ids": call["token_ids"]}
        return await self._score(call, problem, [*conversation, response])

    async def trajectory(self, call: Mapping[str, Any], budget: TimeBudget) -> dict[str, Any]:
        """Run a trajectory; return its rollouts, and its reward or its error."""
        record = RolloutRecord(call, budget)
        problem = self._problem(call["problem"])
        messages = list(_plain_prompt(_field(problem, "prompt"), call["problem"]))
        result: dict[str, Any] = {"rollouts": record.rollout_ids}
        try:
            while True:
                messages.append({"role": "assistant", "content": await self._sample(messages, record)})
                reply = await self._calls.run(call["call"], self._reply, problem, list(messages))
                if not reply:
                    break
                messages += _plain_reply(reply, call["problem"])
            result["reward"] = await self._score(call, problem, messages)
        except Exception as error:
            result["error"] = as_error(error)
        return result

    async def _score(self, call: Mapping[str, Any], problem: Any, messages: list[Any]) -> float:
        return as_reward(await self._calls.run(call["call"], self._environment.reward, problem, messages))

    async def _sample(self, messages: list[Any], record: RolloutRecord) -> str:
        call = record.call
        body = json.dumps({"model": call["model"], "messages": messages}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {call['token']}"}
        headers |= record.headers(body)
        request = _Request(f"{call['url']}/chat/completions", body, headers)
        with record.budget.paused():
            try:
                response_headers, reply = await self._calls.wait_in_thread(request.send)
            finally:
                request.cancel()
        record.record(response_headers)
        return reply["choices"][0]["message"].get("content") or ""

    def _problem(self, problem_id: str) -> Any:
        try:
            return self._problems[problem_id]
        except KeyError:
            raise CallError(
                "exception",
                f"the environment has no problem {problem_id!r} since its process was restarted; it must always return "
                "the same problems",
            ) from None


class _Request:
    """A request to the job's HTTP server, which a thread sends until the server answers.

    Args:
        url: where it is sent to.
        body: the body.
        headers: the headers.
    """

    def __init__(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        self._path, self._body, self._headers = f"/{path}", body, dict(headers)
        self._connection = http.client.HTTPConnection(host)
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """Let the thread return, from another thread."""
        self._is_cancelled.set()
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def send(self) -> tuple[Any, Any]:
        """Return the headers and the body of the response.

        Raises:
            CallError: if the server refuses the request.
            CancelledError: if the request is cancelled.
        """
        for delay in itertools.chain(RETRY_DELAYS_S, itertools.repeat(RETRY_DELAYS_S[-1])):
            if self._is_cancelled.is_set():
                raise asyncio.CancelledError
            try:
                self._connection.connect()
                if self._is_cancelled.is_set():  # when there was no connection yet
                    raise asyncio.CancelledError
                self._connection.request("POST", self._path, self._body, self._headers)
                response = self._connection.getresponse()
                data = response.read()
            except (OSError, http.client.HTTPException):  # the server is being restarted
                self._is_cancelled.wait(delay)
                continue
            finally:
                self._connection.close()
            if response.status == HTTPStatus.OK:
                return response.headers, json.loads(data)
            if response.status not in RETRIED_STATUSES:
                text = data[:MAX_MESSAGE_CHARS].decode(errors="replace")
                raise CallError("sampling", f"the job answered with status {response.status}: {text}")
            self._is_cancelled.wait(delay)
        raise AssertionError("not reached")


def check_header(problem_id: str) -> None:
    """Check that a problem's id can be sent in a header.

    Raises:
        UsageError: if it cannot.
    """
    if not (problem_id.isascii() and problem_id.isprintable() and problem_id == problem_id.strip()):
        raise UsageError(
            f"problem_id {problem_id!r}: an environment that samples turn by turn can only use printable ASCII "
            "characters, without spaces at the ends"
        )


def _field(problem: Any, name: str) -> Any:
    try:
        return problem[name] if isinstance(problem, Mapping) else getattr(problem, name)
    except (KeyError, AttributeError):
        raise UsageError(f"a problem of the type {type(problem).__name__} has no {name}: {problem!r:.200}") from None


def _plain_prompt(prompt: Any, problem_id: str) -> list[Any]:
    """Return messages or token ids as plain data."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    try:
        prompt = list(prompt)
        plain = _plain_messages(prompt)
        if plain is None:
            if any(isinstance(one, (str, bytes, Mapping, float)) for one in prompt):
                raise TypeError
            plain = [int(cast(Any, one)) for one in prompt]
    except (TypeError, ValueError):
        raise UsageError(
            f"problem {problem_id!r}: the prompt is neither a text, nor messages with role and content, nor token ids: "
            f"{prompt!r:.200}"
        ) from None
    if not plain:
        raise UsageError(f"problem {problem_id!r}: the prompt is empty")
    return plain


def _plain_reply(reply: Any, problem_id: str) -> list[Any]:
    """Return the messages that continue a conversation as plain data."""
    if isinstance(reply, str):
        return [{"role": "user", "content": reply}]
    try:
        messages = _plain_messages(reply)
    except TypeError:
        messages = None
    if messages is None:
        raise UsageError(
            f"problem {problem_id!r}: the reply is neither a text nor messages with role and content: {reply!r:.200}"
        )
    return messages


def _plain_messages(messages: Any) -> list[Any] | None:
    """Return messages as plain data; None if other things are among them.

    Raises:
        TypeError: if *messages* cannot be iterated.
    """
    listed = list(messages)
    if all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in listed):
        return [dict(one) for one in listed]
    return None


def as_reward(value: Any) -> float:
    """Return a reward as a number.

    Raises:
        CallError: if it is none.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        reward = float(value)
    except (TypeError, ValueError):
        raise CallError("reward", f"the reward is {value!r:.200}, which is no number") from None
    if not math.isfinite(reward):
        raise CallError("reward", f"the reward is {reward}, which is not finite")
    return reward


def describe(error: BaseException) -> str:
    """Return the type and the text of an exception, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parent)
    frame = next((one for one in reversed(frames) if not one.filename.startswith((here, "<frozen"))), None)
    where = "" if frame is None else f" ({frame.filename}, line {frame.lineno})"
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}"[:MAX_MESSAGE_CHARS] + where


def as_error(error: BaseException) -> dict[str, str]:
    """Return an exception as the error of a rollout."""
    if isinstance(error, CallError):
        return {"type": error.error_type, "message": str(error)}
    message = str(error) if isinstance(error, UsageError) else describe(error)
    return {"type": "memory" if isinstance(error, MemoryError) else "exception", "message": message}


class Host:
    """Receives calls, runs them in the main thread, and sends the results."""

    def __init__(self, channel: socket.socket, timeout: float) -> None:
        self._channel, self._timeout = channel, timeout
        self._lock = threading.Lock()
        self._calls = Calls(self.send)
        self._environment: Any = None
        self._running: dict[int, tuple[asyncio.Task[Any], TimeBudget]] = {}
        self._abandoned: set[asyncio.Task[Any]] = set()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the job."""
        data = json.dumps(message).encode()
        with self._lock:
            self._channel.sendall(HEADER.pack(len(data)) + data)

    async def run(self) -> None:
        """Answer calls until the process ends."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, args=(loop,), daemon=True).start()
        last = beat = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            # A function that blocks the process delays all calls. Hardly any of this time is counted for them; the job
            # itself watches how long one function takes.
            seconds, last = now - last, now
            if seconds > 2 * TICK_S:
                seconds = TICK_S
            for call, (task, budget) in list(self._running.items()):
                if budget.tick(seconds):
                    self._give_up(call, task)
            if now - beat >= HEARTBEAT_S:
                beat = now
                self.send({})

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            stream = self._channel.makefile("rb")
            while header := stream.read(HEADER.size):
                (size,) = HEADER.unpack(header)
                loop.call_soon_threadsafe(self._start, json.loads(stream.read(size)))
        finally:  # a job that is killed before it has read all answers resets the connection, which is an error
            os.killpg(0, signal.SIGKILL)

    def _start(self, call: dict[str, Any]) -> None:
        if call["op"] == "cancel":
            if (running := self._running.pop(call["call"], None)) is not None:
                self._abandon(running[0])
            return
        budget = TimeBudget(math.inf if call["op"] == "load" else self._timeout)
        task = asyncio.ensure_future(self._answer(call, budget))
        self._running[call["call"]] = (task, budget)

    def _give_up(self, call: int, task: asyncio.Task[Any]) -> None:
        self._running.pop(call, None)
        self._abandon(task)
        message = f"the environment took more than {self._timeout:g} s"
        self.send({"error": call, "type": "timeout", "message": message})

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        task.cancel()

    async def _answer(self, call: dict[str, Any], budget: TimeBudget) -> None:
        number = call["call"]
        answer: dict[str, Any]
        try:
            answer = {"result": number, "value": await self._dispatch(call, budget)}
            json.dumps(answer)
        except asyncio.CancelledError as error:
            if number not in self._running:
                raise
            answer = {"error": number, **as_error(error)}  # the environment itself has raised it
        except Exception as error:
            if call["op"] == "load" and not isinstance(error, UsageError):
                traceback.print_exception(error)
            answer = {"error": number, **as_error(error)}
        if self._running.pop(number, None) is not None:
            self.send(answer)

    async def _dispatch(self, call: Mapping[str, Any], budget: TimeBudget) -> Any:
        if call["op"] == "load":
            return await self._load(call)
        if call["op"] == "reward":
            return await self._environment.reward(call)
        return await self._environment.trajectory(call, budget)

    async def _load(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if call["verifiers"] is not None:
            self._environment = _verifiers_host().VerifiersEnvironment.create(call["verifiers"], call["args"])
        else:
            self._environment = PythonEnvironment.create(call["entry_point"], call["args"], self._calls)
        environment = self._environment
        problems = await environment.load_problems(call["max_problems"])
        return {
            "problems": problems if call["with_problems"] else [],
            "samples_itself": environment.samples_itself,
        }


def _verifiers_host() -> Any:
    """Import the module beside this file, whose directory is not on the path of imports."""
    try:
        importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        if error.name != "verifiers":
            raise
        raise UsageError(
            f"{sys.executable} has no package verifiers; install it and the environment into an image that is based on "
            "the worker's (spec.image): in a virtual environment of its own (pip install verifiers), whose interpreter "
            "the field python names, because it needs other versions of packages than the worker"
        ) from None
    # This program is the module __main__, and the adapter must not import a second copy of it.
    sys.modules["environment_host"] = sys.modules["__main__"]
    path = Path(__file__).with_name("verifiers_host.py")
    spec: Any = importlib.util.spec_from_file_location("environment_verifiers_host", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the process: ``host.py FILE_DESCRIPTOR MEMORY_LIMIT TIMEOUT``."""
    descriptor, memory_limit, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    # Modules are found from the working directory, as with python -m, and not from the directory of this file.
    sys.path[0] = str(Path.cwd())
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The job measures the memory in use, a few times per second. This bounds how much can be used in between.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    reserve = memory_limit + _DATA_RESERVE
    resource.setrlimit(resource.RLIMIT_DATA, (reserve if hard < 0 else min(reserve, hard), hard))
    # Orphans stay descendants of this process, so that their memory counts and they end with it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather this process than the head
    asyncio.run(Host(channel, timeout).run())


if __name__ == "__main__":
    main()
