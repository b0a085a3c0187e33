"""Lets each step of an engine take at least a given time, as on a GPU, and leaves the processor free meanwhile.

The package index of Python environments is searched for vLLM's plugins, so a directory with an entry point suffices.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

_VARIABLE = "BENCHMARK_STEP_SECONDS"
_ENTRY_POINT = "[vllm.general_plugins]\nsimulated_step = benchmarks.simulated_step:register\n"


def environment(directory: Path, seconds: float) -> dict[str, str]:
    """Return environment variables that make vLLM's engines take *seconds* for each step.

    Args:
        directory: empty directory for the entry point.
        seconds: duration of a step.
    """
    metadata = directory / "simulated_step-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-step\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINT)
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(directory), str(root), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, _VARIABLE: str(seconds)}


def register() -> None:
    """Change vLLM's worker. vLLM calls this in each of its processes."""
    from vllm.v1.worker.gpu_worker import Worker

    seconds = float(os.environ[_VARIABLE])
    worker: Any = Worker
    execute = worker.execute_model
    if getattr(execute, "is_simulated", False):
        return

    def execute_slowly(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = execute(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(max(0.0, started + seconds - time.perf_counter()))
        return output

    vars(execute_slowly)["is_simulated"] = True
    worker.execute_model = execute_slowly
