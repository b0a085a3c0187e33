"""The operator as a separate process, as it runs in its pod."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_api.ports import free_port
from tests.support.cluster.control_plane import ControlPlane
from tests.support.waiting import wait_for

READY_TIMEOUT_S = 60.0
"""Seconds until a started operator has reached the API server. Most of them are an allowance for slow machines."""
STOP_TIMEOUT_S = 20.0
"""Seconds within which a terminated operator ends: the termination grace period of its pod."""
_CRASHING_OPERATOR = Path(__file__).with_name("crashing_operator.py")


class OperatorProcess:
    """An operator that can be started, killed and started again."""

    def __init__(self, kubeconfig: Path, log_file: Path, *options: str) -> None:
        self._kubeconfig, self._log_file, self._options = kubeconfig, log_file, options
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, crashing: bool = False) -> None:
        """Start the operator; if *crashing*, it is run again and again, see crashing_operator.py."""
        self._port = free_port()
        script = [str(_CRASHING_OPERATOR)] if crashing else ["-m", "rollout_operator"]
        command = [sys.executable, *script, "--worker-image=worker:1", f"--port={self._port}", *self._options]
        environment = {**os.environ, "KUBECONFIG": str(self._kubeconfig)}
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def port(self) -> int:
        """The port of its HTTP endpoints."""
        return self._port

    @property
    def pid(self) -> int:
        """The process id."""
        return self._started.pid

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("The operator was not started.")
        return self._process

    def wait_until_ready(self) -> None:
        """Wait until the operator has reached the API server."""

        def is_ready() -> bool:
            if not self.is_running():
                raise RuntimeError(f"The operator has ended:\n{self.log()[-3000:]}")
            try:
                return self.get("readyz") == "ok\n"
            except OSError:
                return False

        wait_for(is_ready, READY_TIMEOUT_S, "The operator does not become ready.")

    def get(self, path: str) -> str:
        """Return the response of one of the HTTP endpoints."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{path}", timeout=5) as response:
            return str(response.read(), "utf-8")

    def log(self) -> str:
        """Return the log of all runs so far."""
        return self._log_file.read_text()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        lines = (line.rpartition(" ") for line in self.get("metrics").splitlines() if not line.startswith("#"))
        return sum(float(value) for sample, _, value in lines if sample.partition("{")[0] == name)

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self._started.terminate()
        return self._started.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self._started.kill()
        self._started.wait()

    def pause(self) -> None:
        """Stop the process without ending it."""
        self._started.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process continue."""
        self._started.send_signal(signal.SIGCONT)

    def is_running(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None


def new_operator(cluster: ControlPlane, namespace: str, name: str = "operator", *options: str) -> OperatorProcess:
    """Return an operator for one namespace, which has still to be started.

    Args:
        cluster: the cluster, on which the operator has an administrator's rights.
        namespace: the namespace.
        name: distinguishes the logs of several operators for a namespace.
        options: further options.
    """
    log_file = cluster.directory / "log" / f"{name}-{namespace}.log"
    return OperatorProcess(cluster.kubeconfig, log_file, f"--namespace={namespace}", "--log-format=text", *options)


@contextmanager
def running_operator(cluster: ControlPlane, namespace: str) -> Iterator[OperatorProcess]:
    """Run an operator for one namespace."""
    process = new_operator(cluster, namespace)
    process.start()
    try:
        process.wait_until_ready()
        yield process
    finally:
        if process.is_running():
            process.terminate()
