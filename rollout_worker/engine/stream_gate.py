"""Lets a CUDA stream wait for the host, so that work can be launched before its input is known."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)
_WAIT_GEQ = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: wait until the memory has at least the value, which may wrap around."""
_PROBE_TIMEOUT_S = 1.0


class StreamGate:
    """Work that is launched after :meth:`close` runs when :meth:`open` is called.

    The host may itself be waiting for the device meanwhile, for example because CUDA loads a kernel. So that this ends,
    a thread opens a gate that nobody opens in time. Such waits release Python's global interpreter lock.
    """

    def __init__(self, wait: Callable[[int], None], opened: NDArray[np.uint32], patience_s: float) -> None:
        """Create an open gate.

        Args:
            wait: lets the current stream wait until the number in *opened* is at least the one that is passed, modulo
                2³².
            opened: memory that the device can read, shape (1,), initially 0.
            patience_s: the gate stays closed for at most twice as long.
        """
        self.times_expired = 0
        """How often the gate was opened because nobody had opened it in time."""
        self._wait, self._opened, self._patience_s = wait, opened, patience_s
        self._times_closed = self._times_opened = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="das-stream-gate", daemon=True).start()

    @classmethod
    def for_cuda(cls, patience_s: float) -> StreamGate:
        """Return a gate for the streams of the current device (``cuStreamWaitValue32``), which was tried out.

        Raises:
            OSError: if there is no CUDA driver.
            RuntimeError: if streams of this device cannot wait for the host.
        """
        wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        wait_value.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)

        def wait(value: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            if error := wait_value(stream, memory.data_ptr(), value, _WAIT_GEQ):
                raise RuntimeError(f"the CUDA driver does not let a stream wait for the host (error {error})")

        gate = cls(wait, memory.numpy().view(np.uint32), patience_s)
        gate._probe()
        return gate

    def close(self) -> None:
        """Let the current stream wait until the gate is opened."""
        with self._lock:
            self._times_closed += 1
            self._wait(self._times_closed % 2**32)

    def open(self, write: Callable[[], None] = lambda: None) -> bool:
        """Call *write*, which writes the input of the work behind the gate, and let all streams go on.

        Returns:
            Whether that was in time. If not, the work may have read its input, and *write* is not called.
        """
        with self._lock:
            if self._times_opened == self._times_closed:
                return False
            write()
            self._let_go_on()
            return True

    def _let_go_on(self) -> None:
        self._times_opened = self._times_closed
        self._opened[0] = self._times_opened % 2**32

    def _watch(self) -> None:
        times_closed = 0
        while True:
            time.sleep(self._patience_s)
            with self._lock:
                if self._times_opened < self._times_closed == times_closed:
                    self._let_go_on()
                    self.times_expired += 1
                    logger.warning(
                        "The device has waited %.1f s for drafts; this step goes on without them.", self._patience_s
                    )
                times_closed = self._times_closed

    def _probe(self) -> None:
        """Check that a stream waits for the host, and goes on afterwards."""
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            self.close()
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record()
        time.sleep(0.01)
        waits = not reached.query()  # type: ignore[no-untyped-call]
        self.open()
        deadline = time.monotonic() + _PROBE_TIMEOUT_S
        goes_on = False
        while not goes_on and time.monotonic() < deadline:
            time.sleep(0.001)
            goes_on = reached.query()  # type: ignore[no-untyped-call]
        if not (waits and goes_on):
            raise RuntimeError("streams of this device do not wait for the host, or do not go on after that")
