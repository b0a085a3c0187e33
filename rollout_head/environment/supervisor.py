"""Runs an environment in a process of its own, and restarts it when it fails."""

from __future__ import annotations

import logging
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, count
from typing import Any, Final

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.spec import Environment
from rollout_head.environment.process import EnvironmentProcess


class EnvironmentErrorType(StrEnum):
    """Why a rollout got no reward."""

    EXCEPTION = "exception"
    """The environment raised an exception."""
    REWARD = "reward"
    """The environment returned something that is not a finite number."""
    TIMEOUT = "timeout"
    """The environment took longer than ``timeoutSeconds``."""
    MEMORY = "memory"
    """The environment exceeded ``memoryLimit``."""
    EXIT = "exit"
    """The environment's process ended."""
    SAMPLING = "sampling"
    """The job did not answer a turn of the rollout."""
    UNAVAILABLE = "unavailable"
    """The environment could not be loaded again after its process had ended."""


class EnvironmentCallError(Exception):
    """A call of an environment has failed."""

    def __init__(self, error_type: EnvironmentErrorType, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type
        """What has happened."""


class EnvironmentLoadError(Exception):
    """An environment cannot be loaded, or has no usable problems."""


logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.1
"""Seconds between two checks of the memory and the time limit."""
_GRACE_S = 2.0
"""Seconds beyond its time limit after which a process that does not even report a timeout is killed."""
MAX_IN_FLIGHT = 1024
"""Number of calls that the process has at the same time."""
_MIN_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_MAX_LOAD_FAILURES = 4
"""Number of consecutive failures to load the environment again after which the waiting calls fail."""
_MAX_LINES_PER_INTERVAL = 50
_OUTPUT_INTERVAL_S = 10.0


@dataclass
class _Call:
    message: dict[str, Any]
    future: Future[Any]
    is_suspect: bool = False
    """Whether the call is repeated because the process may have ended on account of it."""


@dataclass(frozen=True)
class LoadedEnvironment:
    """What an environment consists of."""

    problems: list[dict[str, Any]]
    """The id and the prompt of each problem: messages or token ids, and nothing if only the environment knows it."""
    samples_itself: bool
    """Whether the environment itself asks for the responses, turn by turn."""


@dataclass
class _State:
    """What is known of one process."""

    process: EnvironmentProcess
    in_flight: dict[int, _Call] = field(default_factory=dict)
    blocking: int | None = None
    """The call whose function blocks the process at the moment."""
    has_abandoned: bool = False
    """Whether a call was cancelled or took too long. Its function may still be running."""
    last_message: float = field(default_factory=time.monotonic)
    next_memory_check: float = 0.0


class _ProcessEndedError(Exception):
    def __init__(self, error_type: EnvironmentErrorType, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class EnvironmentSupervisor:
    """Runs an environment in a process of its own, and restarts the process when it has ended.

    A call that makes the process hang fails with that error, and the other calls of the process are repeated. A call
    that makes the process end or use too much memory is repeated alone, and fails if it happens again. If it is unknown
    which of several calls is to blame, they are repeated in two halves, and one is halved again if it happens
    again.

    Args:
        spec: the environment.
    """

    def __init__(self, spec: Environment) -> None:
        self._spec: Final = spec
        self._timeout_s = float(spec.timeout_seconds)
        self._memory_limit = int(parse_quantity(spec.memory_limit))
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._suspects: deque[list[_Call]] = deque()
        """Groups of calls that are repeated one group at a time."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._is_closed = False
        self._loaded: Future[LoadedEnvironment] = Future()
        self._has_ended_since_success = 0
        self._load_failures = 0
        self._restarts = 0
        self._lines_left, self._lines_from = _MAX_LINES_PER_INTERVAL, 0.0
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)

    @property
    def restarts(self) -> int:
        """Number of times the process was started again."""
        return self._restarts

    def load(self) -> LoadedEnvironment:
        """Start the process and load the environment.

        Raises:
            EnvironmentLoadError: with the reason, if this is impossible.
        """
        self._thread.start()
        try:
            return self._loaded.result()
        except EnvironmentLoadError:
            self.close()
            raise

    def call(self, operation: str, arguments: Mapping[str, Any]) -> Future[Any]:
        """Call the environment, from any thread.

        Args:
            operation: ``reward`` or ``trajectory``.
            arguments: what the operation needs, as data for JSON.

        Returns:
            A future with the result, or with an EnvironmentCallError. If it is cancelled, so is the call.
        """
        call = _Call({"op": operation, **arguments}, Future())
        with self._lock:
            if self._is_closed:
                call.future.set_exception(EnvironmentCallError(EnvironmentErrorType.UNAVAILABLE, "the job has ended"))
                return call.future
            self._waiting.append(call)
        self._wake()
        return call.future

    def close(self) -> None:
        """End the process. Calls that have not ended fail."""
        self._is_closed = True
        self._wake_writer.close()
        if self._thread.is_alive():
            self._thread.join()
        self._wake_reader.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_writer.send(b"\0")

    # The thread

    def _run(self) -> None:
        reason = "the job has ended"
        try:
            while not self._is_closed:
                self._run_process()
                if self._loaded.exception() is not None:
                    return
                self._wait_before_restart()
        except Exception:
            logger.exception("The supervision of the environment has failed")
            reason = "its supervision has failed; the log has the reason"
        finally:
            if not self._loaded.done():
                self._loaded.set_exception(EnvironmentLoadError(reason))
            error = EnvironmentCallError(EnvironmentErrorType.UNAVAILABLE, reason)
            with self._lock:
                self._is_closed = True
            self._fail_waiting(error)

    def _run_process(self) -> None:
        """Run one process to its end."""
        try:
            process = EnvironmentProcess(self._spec.python, self._memory_limit, self._timeout_s)
        except OSError as error:
            self._on_load_failure(f"the interpreter {self._spec.python} cannot be started: {error.strerror}")
            return
        state = _State(process)
        try:
            if self._load(state):
                self._serve(state)
        except _ProcessEndedError as ended:
            self._process_unread(state)
            how = process.kill()
            message = str(ended) if ended.error_type is not EnvironmentErrorType.EXIT else f"{ended} ({how})"
            self._on_end(state, ended.error_type, message)
        finally:
            if not process.has_ended:
                process.kill()
            with self._lock:
                self._waiting.extendleft(reversed(state.in_flight.values()))

    def _load(self, state: _State) -> bool:
        """Load the environment; return whether this has succeeded."""
        is_first = not self._loaded.done()
        message = {
            "call": 0,
            "op": "load",
            "verifiers": self._spec.verifiers,
            "entry_point": self._spec.entry_point,
            "args": self._spec.args,
            "max_problems": self._spec.max_problems,
            "with_problems": is_first,
        }
        deadline = time.monotonic() + self._timeout_s
        try:
            self._send(state, message)
            while not self._is_closed:
                answers = self._wait(state)
                self._check_memory(state)
                for answer in answers:
                    if "result" in answer:
                        self._load_failures = 0
                        if is_first:
                            self._loaded.set_result(LoadedEnvironment(**answer["value"]))
                        return True
                    if "error" in answer:
                        self._on_load_failure(answer["message"])
                        return False
                if time.monotonic() > deadline:
                    raise _ProcessEndedError(
                        EnvironmentErrorType.TIMEOUT,
                        f"loading it took more than {self._timeout_s:g} s (timeoutSeconds)",
                    )
        except _ProcessEndedError as ended:
            how = state.process.kill()
            is_exit = ended.error_type is EnvironmentErrorType.EXIT
            reason = f"{ended} while it was loaded ({how})" if is_exit else str(ended)
            self._on_load_failure(reason, state.process.last_output)
            return False
        if is_first:
            self._loaded.set_exception(EnvironmentLoadError("the job has ended"))
        return False

    def _on_load_failure(self, message: str, last_output: str = "") -> None:
        if not self._loaded.done():
            self._loaded.set_exception(EnvironmentLoadError(message + last_output))
            return
        self._load_failures += 1
        # What it has printed is not part of the calls' errors, which the job's status shows to everyone.
        logger.warning("The environment cannot be loaded again: %s%s", message, last_output)
        if self._load_failures < _MAX_LOAD_FAILURES:
            return
        text = f"the environment cannot be loaded again since its process has ended: {message}"
        self._fail_waiting(EnvironmentCallError(EnvironmentErrorType.UNAVAILABLE, text))

    def _fail_waiting(self, error: EnvironmentCallError) -> None:
        with self._lock:
            calls = [*chain.from_iterable(self._suspects), *self._waiting]
            self._suspects.clear()
            self._waiting.clear()
        for call in calls:
            _fail(call, error)

    def _serve(self, state: _State) -> None:
        while not self._is_closed:
            self._cancel_calls(state)
            calls = {next(self._numbers): call for call in self._next_calls(state) if not call.future.cancelled()}
            state.in_flight |= calls  # before they are sent, so that none is lost if this fails
            for number, call in calls.items():
                self._send(state, {"call": number, **call.message})
            for message in self._wait(state):
                self._process(state, message)
            self._check_memory(state)
            silence = time.monotonic() - state.last_message
            if silence > self._timeout_s + _GRACE_S:
                raise _ProcessEndedError(
                    EnvironmentErrorType.TIMEOUT,
                    f"the environment took more than {self._timeout_s:g} s (timeoutSeconds)",
                )

    def _cancel_calls(self, state: _State) -> None:
        """Let the process end the calls whose results nobody waits for any more."""
        for number in [number for number, call in state.in_flight.items() if call.future.cancelled()]:
            del state.in_flight[number]
            state.has_abandoned = True
            self._send(state, {"call": number, "op": "cancel"})

    def _next_calls(self, state: _State) -> list[_Call]:
        with self._lock:
            if any(call.is_suspect for call in state.in_flight.values()):
                return []
            if self._suspects:
                return [] if state.in_flight else self._suspects.popleft()
            number = min(len(self._waiting), MAX_IN_FLIGHT - len(state.in_flight))
            return [self._waiting.popleft() for _ in range(number)]

    def _send(self, state: _State, message: Mapping[str, Any]) -> None:
        try:
            state.process.send(message)
        except TimeoutError:
            raise _ProcessEndedError(EnvironmentErrorType.TIMEOUT, "the environment's process hangs") from None

    def _wait(self, state: _State) -> list[dict[str, Any]]:
        """Wait a moment for messages.

        Raises:
            _ProcessEndedError: if the process has ended.
        """
        process = state.process
        poll = select.poll()
        descriptors = [process.channel.fileno(), self._wake_reader.fileno()]
        if process.output is not None:
            descriptors.append(process.output)
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        readable = [descriptor for descriptor, _ in poll.poll(_CHECK_INTERVAL_S * 1000)]
        if self._wake_reader.fileno() in readable:
            self._wake_reader.recv(65536)
        if process.output in readable:
            self._show(process.read_output())
        messages = []
        if process.channel.fileno() in readable:
            try:
                messages = process.receive()
            except EOFError:
                raise _ProcessEndedError(EnvironmentErrorType.EXIT, "the environment's process ended") from None
            state.last_message = time.monotonic()
        return messages

    def _check_memory(self, state: _State) -> None:
        if time.monotonic() < state.next_memory_check:
            return
        state.next_memory_check = time.monotonic() + _CHECK_INTERVAL_S
        if state.process.exceeds_memory():
            raise _ProcessEndedError(
                EnvironmentErrorType.MEMORY,
                f"the environment's process used more memory than {self._spec.memory_limit} (memoryLimit)",
            )

    def _process_unread(self, state: _State) -> None:
        """Process what the process has sent and nobody has read yet."""
        with suppress(EOFError):
            while select.select([state.process.channel], [], [], 0)[0]:
                for message in state.process.receive():
                    self._process(state, message)

    def _process(self, state: _State, message: Mapping[str, Any]) -> None:
        if "started" in message:
            state.blocking = message["started"]
        elif "ended" in message:
            state.blocking = None
        elif "result" in message:
            self._has_ended_since_success = 0
            if (call := state.in_flight.pop(message["result"], None)) is not None:
                with suppress(InvalidStateError):
                    call.future.set_result(message["value"])
        elif "error" in message and (call := state.in_flight.pop(message["error"], None)) is not None:
            error_type = EnvironmentErrorType(message["type"])
            state.has_abandoned = state.has_abandoned or error_type is EnvironmentErrorType.TIMEOUT
            _fail(call, EnvironmentCallError(error_type, message["message"]))

    def _on_end(self, state: _State, error_type: EnvironmentErrorType, message: str) -> None:
        """Let the call fail that has ended the process, or find it, and repeat all others."""
        # What it has printed is not part of the error, which the job's status shows to everyone.
        logger.warning("The environment's process is restarted: %s%s", message, state.process.last_output)
        calls, state.in_flight = state.in_flight, {}
        was_alone = len(calls) == 1
        is_known = state.blocking is not None or was_alone
        culprit = None
        if state.blocking is not None:
            # A call that was cancelled may still have been blocking the process, and is not among the calls any more.
            culprit = calls.pop(state.blocking, None)
        elif was_alone:
            _, culprit = calls.popitem()
        others = list(calls.values())
        is_certain = state.blocking is not None and error_type is EnvironmentErrorType.TIMEOUT
        if culprit is not None and culprit.is_suspect and was_alone and not state.has_abandoned:
            is_certain = True
        # The others may have used the memory as well, before the one that is running.
        others_are_suspect = not is_known or error_type is EnvironmentErrorType.MEMORY
        groups = []
        if culprit is not None and is_certain:
            _fail(culprit, EnvironmentCallError(error_type, message))
        elif culprit is not None:
            groups.append([culprit])
        if others_are_suspect:
            half = len(others) // 2
            groups += [others[:half], others[half:]]
            others = []
        with self._lock:
            for call in chain.from_iterable(groups):
                call.is_suspect = True
            for call in others:
                call.is_suspect = False
            self._suspects.extend(group for group in groups if group)
            self._waiting.extendleft(reversed(others))

    def _wait_before_restart(self) -> None:
        self._restarts += 1
        delay = min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2**self._has_ended_since_success)
        self._has_ended_since_success += 1
        deadline = time.monotonic() + delay
        while not self._is_closed and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _CHECK_INTERVAL_S))

    def _show(self, lines: list[str]) -> None:
        """Show the output of the environment, but not so much of it that other messages are lost."""
        now = time.monotonic()
        if now - self._lines_from > _OUTPUT_INTERVAL_S:
            self._lines_left, self._lines_from = _MAX_LINES_PER_INTERVAL, now
        for line in lines:
            if line.strip() and self._lines_left:
                self._lines_left -= 1
                more = "" if self._lines_left else f" (further lines of these {_OUTPUT_INTERVAL_S:g} s are left out)"
                with suppress(OSError, ValueError):  # nobody may read it any more
                    sys.stderr.write(f"environment: {line}{more}\n")


def _fail(call: _Call, error: EnvironmentCallError) -> None:
    with suppress(InvalidStateError):
        call.future.set_exception(error)
