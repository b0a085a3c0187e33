"""Writes what the engines of this machine print to log files of their own.

Ray collects the output of an actor and of its child processes, such as vLLM's engine core, and sends it to this
process, which also prints it. Ray has no public way to receive it: the dispatcher is private, and a test runs it with
the version of Ray that the project requires.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_worker.launch.local_ray import configure_ray
from rollout_worker.runtime.log_files import rotating_handler

_HANDLER = "rollout-engine-logs"
_AUTOSCALER = "autoscaler"
"""What Ray has instead of a pid for its autoscaler, which reports the same resources every few seconds."""
_OTHER = "ray"
"""Name of the log file with the output of Ray's own processes."""


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
