"""The Ray cluster of one worker, which runs the worker's engines and ends with this process; log files of the engines.

Ray collects the output of an actor and of its child processes, such as vLLM's engine core, and sends it to this
process, which also prints it. Ray has no public way to receive it: the dispatcher is private, and a test runs it with
the version of Ray that the project requires.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_store.job.engines import EngineError
from rollout_store.runtime.log_files import rotating_handler

OBJECT_STORE_BYTES = 128 << 20
"""Size of Ray's object store, which carries little: prompts and rollouts go through Redis."""

_TOKEN_BYTES = 32
_HANDLER = "rollout-engine-logs"
_AUTOSCALER = "autoscaler"
"""What Ray has instead of a pid for its autoscaler, which reports the same resources every few seconds."""
_OTHER = "ray"
"""Name of the log file with the output of Ray's own processes."""


def configure_ray() -> None:
    """Set the environment that Ray reads when it is imported, unless that has been done.

    With it, the processes of a Ray cluster listen on the loopback interface only, and accept only this process and its
    descendants.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this, Ray warns repeatedly about an engine that waits for resources.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        # Otherwise Ray prints escape codes around the prefixes of lines, and around how often it has left out a line.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # In spite of its name, this makes Ray 2.60 use the loopback address on Linux, too.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(_TOKEN_BYTES))


def start_local_ray(engines: int) -> None:
    """Start a Ray cluster with room for *engines* engines; see `configure_ray` for who can reach it.

    Raises:
        EngineError: if Ray does not start.
        KeyboardInterrupt: if SIGTERM was received meanwhile; its handler has been called.
    """
    configure_ray()
    import ray

    from rollout_worker.engine_worker.fleet import ENGINE_RESOURCE

    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            resources={ENGINE_RESOURCE: engines},
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=True,
        )
    except SystemExit:  # Ray's handler of SIGTERM
        ray.shutdown()
        if not callable(sigterm_handler):
            raise
        sigterm_handler(signal.SIGTERM, None)
        raise KeyboardInterrupt from None
    except Exception as error:  # a timeout of Ray is a plain Exception
        ray.shutdown()
        raise EngineError(f"Ray cannot start: {error}; its logs are in /tmp/ray/session_latest/logs") from error
    finally:
        # Ray's core installs a handler that treats SIGTERM as a crash.
        signal.signal(signal.SIGTERM, sigterm_handler)


def stop_local_ray() -> None:
    """End the cluster and everything that runs on it."""
    import ray

    ray.shutdown()


@contextmanager
def engine_logs(directory: Path) -> Iterator[None]:
    """Write the output of each engine to ``NAME.log`` in *directory* within the context."""
    configure_ray()
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    files = _EngineLogFiles(directory)
    global_worker_stdstream_dispatcher.add_handler(_HANDLER, files.write)
    try:
        yield
    finally:
        global_worker_stdstream_dispatcher.remove_handler(_HANDLER)
        files.close()


class _EngineLogFiles:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._handlers: dict[str, logging.Handler] = {}

    def write(self, data: dict[str, Any]) -> None:
        """Write lines that Ray has collected from one process."""
        if data.get("pid") == _AUTOSCALER:
            return
        name = data.get("actor_name") or _OTHER
        if name not in self._handlers:
            self._handlers[name] = rotating_handler(self._directory, name, "%(message)s")
        for line in data.get("lines", ()):
            record = logging.LogRecord(name, logging.INFO, "", 0, "%s", (line,), None)
            self._handlers[name].handle(record)

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.close()
