"""Runs the coordinator and the relay of a job as child processes, and restarts one that fails."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections import Counter

from rollout_worker.engine.errors import EngineError
from rollout_worker.job.services import EXIT_SUPERSEDED, Service
from rollout_worker.job.setup import JobSetup
from rollout_worker.launch.limits import (
    FIRST_SERVICE_RESTART_DELAY_S,
    MAX_SERVICE_RESTART_DELAY_S,
    SERVICE_POLL_INTERVAL_S,
    SERVICE_STOP_TIMEOUT_S,
    STABLE_SERVICE_S,
)
from rollout_worker.runtime.child_process import spawn_with_parent

logger = logging.getLogger(__name__)


class JobServices:
    """The processes of one job's coordinator and relay. They end with this process, however it ends."""

    def __init__(self, setup: JobSetup) -> None:
        self._settings = setup.to_json().encode()
        self._stopping = threading.Event()
        self._coordinator_code: int | None = None
        """Exit code with which the coordinator has ended for good."""
        # Linux ends the children together with the thread that has started them.
        self._thread = threading.Thread(target=self._run, name="services", daemon=True)

    def start(self) -> None:
        """Start both processes."""
        self._thread.start()

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

    def _run(self) -> None:
        processes = {service: self._spawn(service) for service in Service}
        started_at = dict.fromkeys(Service, time.monotonic())
        failures: Counter[Service] = Counter()
        restart_at: dict[Service, float] = {}
        while not self._stopping.wait(SERVICE_POLL_INTERVAL_S):
            now = time.monotonic()
            for service, process in processes.items():
                if service in restart_at:
                    if now >= restart_at[service]:
                        del restart_at[service]
                        processes[service], started_at[service] = self._spawn(service), now
                    continue
                if (code := process.poll()) is None:
                    continue
                if service is Service.COORDINATOR and code in (0, EXIT_SUPERSEDED):
                    self._coordinator_code = code
                    continue
                failures[service] = 0 if now - started_at[service] > STABLE_SERVICE_S else failures[service]
                delay = min(FIRST_SERVICE_RESTART_DELAY_S * 2 ** failures[service], MAX_SERVICE_RESTART_DELAY_S)
                failures[service] += 1
                restart_at[service] = now + delay
                logger.warning("The %s has ended with status %s and is restarted.", service, code)
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(SERVICE_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, service: Service) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rollout_worker.job.services", service]
        process = spawn_with_parent(command, stdin=subprocess.PIPE)
        if process.stdin is not None:
            # A process that was killed meanwhile does not read its settings, and is restarted.
            with contextlib.suppress(BrokenPipeError), process.stdin as settings:
                settings.write(self._settings)
        return process
