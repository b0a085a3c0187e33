"""The gate at which a CUDA stream waits for drafts, with a thread instead of a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from rollout_worker.engine.stream_gate import StreamGate

LONG_S = 600.0


class Stream:
    """Work in order, some of which waits until a number is reached."""

    def __init__(self) -> None:
        self.opened = np.zeros(1, np.uint32)
        self._last: threading.Thread | None = None

    def wait(self, value: int) -> None:
        """Let what is launched from now on wait until the number is at least a value."""
        self.launch(lambda: self._wait(value))

    def launch(self, work: Callable[[], None]) -> None:
        """Launch work behind all work so far."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            work()

        self._last = threading.Thread(target=run, daemon=True)
        self._last.start()

    def synchronize(self) -> None:
        """Wait for all work."""
        assert self._last is not None
        self._last.join()

    def _wait(self, value: int) -> None:
        while np.int32(self.opened[0] - np.uint32(value)) < 0:
            time.sleep(0.001)


@pytest.fixture
def stream() -> Stream:
    """A stream without work."""
    return Stream()


@pytest.mark.parametrize("first", [0, 2**32 - 2])
def test_work_behind_the_gate_sees_what_is_written_before_it_is_opened(stream: Stream, first: int) -> None:
    gate = StreamGate(stream.wait, stream.opened, LONG_S)
    gate._times_closed = gate._times_opened = first
    stream.opened[0] = first
    seen, value = [], [-1]
    for number in range(4):
        gate.close()
        stream.launch(lambda: seen.append(value[0]))
        assert number == len(seen)
        assert gate.open(lambda number=number: value.__setitem__(0, number))  # type: ignore[misc]
        stream.synchronize()
    assert [0, 1, 2, 3] == seen
    assert gate.times_expired == 0


def test_a_gate_that_nobody_opens_is_opened_and_its_input_is_not_written_any_more(stream: Stream) -> None:
    gate = StreamGate(stream.wait, stream.opened, 0.05)
    value = [0]
    gate.close()
    seen: list[int] = []
    stream.launch(lambda: seen.append(value[0]))
    stream.synchronize()
    assert not gate.open(lambda: value.__setitem__(0, 1))
    assert (seen, value, gate.times_expired) == ([0], [0], 1)
    gate._patience_s = LONG_S
    gate.close()
    stream.launch(lambda: seen.append(value[0]))
    assert gate.open(lambda: value.__setitem__(0, 2))
    stream.synchronize()
    assert [0, 2] == seen
