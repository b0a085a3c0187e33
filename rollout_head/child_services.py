"""Runs the coordinator and the relay of a job as child processes, and restarts one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from rollout_head.services import EXIT_SUPERSEDED, Service
from rollout_store.job.engine_errors import EngineError
from rollout_store.job.setup import JobSetup
from rollout_store.runtime.child_process import spawn_with_parent

logger = logging.getLogger(__name__)

_RELAY_START_DELAY_S = 1.0
"""Seconds after the coordinator at which the relay starts."""
_SERVICE_POLL_INTERVAL_S = 0.05
"""Seconds between two checks whether the processes are running."""
_FIRST_SERVICE_RESTART_DELAY_S = 0.1
"""Seconds after which a process that has ended is started again; the delay doubles with each consecutive failure."""
_MAX_SERVICE_RESTART_DELAY_S = 10.0
"""Maximum of this delay, in seconds."""
_STABLE_SERVICE_S = 60.0
"""Seconds after which a process that ends is no longer considered to fail again."""
_SERVICE_STOP_TIMEOUT_S = 20.0
"""Seconds that the relay has to complete its batch and the maintenance of the history; each takes 15 s at most."""
END_POLL_INTERVAL_S = 0.2
"""Seconds between two checks whether the job has ended."""


@dataclass
class _Supervised:
    """The process of one service, and when it is started again."""

    process: subprocess.Popen[bytes] | None = None
    """None while it waits for its next start, and after its end for good."""
    start_at: float = 0.0
    started_at: float = 0.0
    failures: int = 0
    """Number of consecutive failures."""


class JobServices:
    """The processes of one job's coordinator and relay. They end with this process, however it ends."""

    def __init__(self, setup: JobSetup) -> None:
        self._settings = setup.to_json().encode()
        self._stopping = threading.Event()
        self._coordinator_code: int | None = None
        """Exit code of a coordinator that has ended for good."""
        self._started = threading.Event()
        # Linux ends the children together with the thread that has started them.
        self._thread = threading.Thread(target=self._run, name="services", daemon=True)

    def start(self) -> None:
        """Start both processes."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """End both processes; the relay completes its batch."""
        self._stopping.set()
        self._thread.join()

    def ended(self) -> bool:
        """Return whether the job was closed and all its requests are answered.

        Raises:
            EngineError: if another coordinator has taken over, so that this process has become useless.
        """
        if self._coordinator_code == EXIT_SUPERSEDED:
            raise EngineError("another head has taken over this job; end one of them")
        return self._coordinator_code == 0

    async def wait_ended(self, timeout: float = math.inf) -> None:
        """Wait until the job has ended, for at most *timeout* seconds.

        Raises:
            EngineError: as :meth:`ended`.
        """
        deadline = time.monotonic() + timeout
        while not self.ended() and time.monotonic() < deadline:
            await asyncio.sleep(END_POLL_INTERVAL_S)

    def _run(self) -> None:
        # Rollouts wait for the coordinator, so on a busy machine it should have the processor for itself at first.
        services = {
            Service.COORDINATOR: _Supervised(),
            Service.RELAY: _Supervised(start_at=time.monotonic() + _RELAY_START_DELAY_S),
        }
        while not self._stopping.is_set():
            for service, supervised in services.items():
                if supervised.process is not None:
                    self._check(service, supervised)
                elif time.monotonic() >= supervised.start_at:
                    self._start(service, supervised)
            self._started.set()
            self._stopping.wait(_SERVICE_POLL_INTERVAL_S)
        running = [supervised.process for supervised in services.values() if supervised.process is not None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_SERVICE_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _check(self, service: Service, supervised: _Supervised) -> None:
        """Notice that a process has ended."""
        if supervised.process is None or (code := supervised.process.poll()) is None:
            return
        if service is Service.COORDINATOR and code in (0, EXIT_SUPERSEDED):
            self._coordinator_code = code
            supervised.process, supervised.start_at = None, math.inf
            return
        if time.monotonic() - supervised.started_at > _STABLE_SERVICE_S:
            supervised.failures = 0
        self._postpone(supervised)
        logger.warning("The %s has ended with status %s and is restarted.", service, code)

    def _postpone(self, supervised: _Supervised) -> None:
        delay = min(_FIRST_SERVICE_RESTART_DELAY_S * 2**supervised.failures, _MAX_SERVICE_RESTART_DELAY_S)
        supervised.process, supervised.start_at = None, time.monotonic() + delay
        supervised.failures += 1

    def _start(self, service: Service, supervised: _Supervised) -> None:
        command = [sys.executable, "-m", "rollout_head.services", service]
        supervised.started_at = time.monotonic()
        try:
            # A process group of its own shields it from Ctrl-C, after which the relay still has to complete its batch.
            process = spawn_with_parent(command, stdin=subprocess.PIPE, process_group=0)
        except (OSError, subprocess.SubprocessError) as error:
            self._postpone(supervised)
            logger.warning("The %s cannot be started; trying again: %s", service, error)
            return
        supervised.process = process
        if process.stdin is not None:
            # A process that was killed meanwhile does not read its settings, and is restarted.
            with contextlib.suppress(BrokenPipeError), process.stdin as settings:
                settings.write(self._settings)
