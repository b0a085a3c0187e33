"""The processes of a job's pods, started as the pods start them, with a Redis server of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis
import yaml

from rollout_api.ports import free_port
from rollout_api.protocol.access_rules import access_rules
from rollout_api.protocol.keys import HistoryKeys
from rollout_store.runtime.embedded_redis import EmbeddedRedis
from tests.support.history_contents import rollout_ids_in
from tests.support.manifests import SMALL_CPU_ENGINE, rollout_job
from tests.support.random_policies import TASKS, make_policies
from tests.support.redis_servers import create_user
from tests.support.waiting import wait_for

UID = "a-job-of-pods"
EPOCHS = 2


class PodProcesses:
    """The processes of a job, with the environment of its pods."""

    def __init__(self, directory: Path, *, samples: int = 16, **sections: dict[str, Any]) -> None:
        """Start Redis and write the manifest of the job.

        Args:
            directory: directory for its files.
            samples: rollouts of each problem.
            sections: additional fields of sections of its spec; another ``source`` replaces that of the tasks.
        """
        self.num_rollouts = EPOCHS * samples * sum(task["problems"] for task in TASKS)
        """Rollouts of the whole job."""
        make_policies(directory / "models", versions=EPOCHS)
        self._lock = os.open(directory / "redis-lock", os.O_CREAT | os.O_RDWR)
        self.server = EmbeddedRedis(directory / "redis", keep_open=self._lock)
        url = self.server.start()
        self.client = redis.Redis.from_url(url)
        # The permissions of a job on a shared server.
        self.url = create_user(url, access_rules("default", "pods", UID, "pods"))
        self.redis = int(self.client.info()["process_id"])
        self.http_port, self.ready_port = free_port(), free_port()
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        dataset = {"tasks": TASKS, "epochs": EPOCHS, "checkpoints": ["policy/0", "policy/1"]}
        manifest = rollout_job(
            "pods",
            model={"uri": "policy/0"},
            source=sections.get("source", {"dataset": dataset}),
            engine={**SMALL_CPU_ENGINE, "maxNumSeqs": 16, **sections.get("engine", {})},
            sampling={"rolloutsPerPrompt": samples, "maxTokens": 300, **sections.get("sampling", {})},
            workers={"gpusPerWorker": 0, **sections.get("workers", {})},
        )
        (directory / "job.yaml").write_text(yaml.safe_dump(manifest))

    def start(self, name: str, *options: str) -> None:
        command = [sys.executable, "-m", "rollout_tools.cli", name, "-f", str(self._directory / "job.yaml")]
        command += ["--uid", UID, *options]
        environment = {
            "ROLLOUT_REDIS_URL": self.url,
            "ROLLOUT_MODEL_CACHE": str(self._directory / "models"),
            "POD_NAME": f"pods-{name}-0",
            # Ray lowers the priority of its processes, which would hardly run beside other tests.
            "RAY_worker_niceness": "0",
        }
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )

    def start_head(self) -> None:
        self.start("head", "--http-port", str(self.http_port))

    def start_worker(self) -> None:
        self.start("worker", "--http-port", str(self.ready_port))

    def start_follower(self) -> None:
        self.start("follower", "--group", "pods-worker-0", "--rank", "1")

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def kill(self, name: str) -> None:
        """Kill all processes of a pod."""
        for process in psutil.Process(self._processes[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.end(name, 10, signal.SIGKILL)

    def end(self, name: str, seconds: float, number: int | None = None) -> int:
        """Wait for a process to end, if requested after sending it a signal."""
        if number is not None:
            self._processes[name].send_signal(number)
        return self._processes[name].wait(seconds)

    def wait(self, condition: Callable[[], Any], *names: str, seconds: float = 120) -> Any:
        """Wait for a condition while the processes *names* are running."""

        def found() -> Any:
            result = condition()
            if not result:
                for name in names:
                    assert self.alive(name), self.log(name)
            return result

        return wait_for(found, seconds, lambda: str({name: self.log(name)[-3000:] for name in self._processes}))

    def status(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/status", timeout=5) as response:
                found: dict[str, Any] = json.load(response)
        except OSError:
            return {}
        return found

    def ready(self) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ready_port}/readyz", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def in_history(self) -> Counter[str]:
        return rollout_ids_in(self.client, HistoryKeys("default", "pods"))

    def close(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        self.server.stop()
        os.close(self._lock)
