"""The drafter's statistics in vLLM's ``/metrics``."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from rollout_store.runtime.engine_metrics import EngineStatistics, engine_metrics
from rollout_worker.drop_in.reporter import DIRECTORY_VARIABLE, read_reports
from rollout_worker.engine import vllm_plugin


class ReportCollector:
    """A ``prometheus_client`` collector of the reports that an engine's worker processes write to a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family for each statistic."""
        engines = (
            EngineStatistics([report.name], report.counters, report.labeled_counters)
            for report in read_reports(self._directory)
        )
        yield from engine_metrics(engines, ["engine"])


def serve_reports() -> None:
    """Let this process, if it serves vLLM's ``/metrics``, add the reports of the worker processes that it starts.

    The processes of several API servers inherit the directory of their parent.
    """
    from vllm.v1.metrics import prometheus

    if DIRECTORY_VARIABLE not in os.environ:
        os.environ[DIRECTORY_VARIABLE] = tempfile.mkdtemp(prefix="das-engines-")
        atexit.register(shutil.rmtree, os.environ[DIRECTORY_VARIABLE], ignore_errors=True)
    collector = ReportCollector(Path(os.environ[DIRECTORY_VARIABLE]))
    registries: list[CollectorRegistry] = []

    def add_collector(original: Callable[[], CollectorRegistry]) -> Callable[[], CollectorRegistry]:
        def get_registry() -> CollectorRegistry:
            registry = original()
            if registry not in registries:
                registries.append(registry)
                registry.register(collector)
            return registry

        return get_registry

    # The second module has imported the function by name.
    for module in (prometheus, sys.modules.get("vllm.entrypoints.serve.instrumentator.metrics")):
        if module is not None:
            vllm_plugin.replace(module, "get_prometheus_registry", add_collector)
