"""The operator as a process of its own, as it runs in its pod."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.cluster.control_plane import wait_for
from tests.support.ports import free_port

DYING = Path(__file__).with_name("crashing_operator.py")


class OperatorProcess:
    """Starts, is killed, starts again."""

    def __init__(self, kubeconfig: Path, log: Path, *options: str) -> None:
        self._kubeconfig, self._log, self._options = kubeconfig, log, options
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, die_at: str | None = None) -> None:
        """Start; *die_at*: as in ``before:7`` or ``after:7``, at which call to the API server to be killed."""
        self.port = free_port()
        script = ["-m", "rollout_operator"] if die_at is None else [str(DYING), die_at]
        command = [sys.executable, *script, "--worker-image=worker:1", f"--port={self.port}", *self._options]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "KUBECONFIG": str(self._kubeconfig)}
            )

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(self._log.read_text()[-3000:])
            try:
                return self.get("readyz") == "ok\n"
            except OSError:
                return False

        wait_for(ready, 60, "the operator does not get ready")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5) as response:
            return str(response.read(), "utf-8")

    def log(self) -> str:
        return self._log.read_text()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = (line.rpartition(" ") for line in self.get("metrics").splitlines() if not line.startswith("#"))
        return sum(float(value) for about, _, value in lines if about.partition("{")[0] == name)

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None
