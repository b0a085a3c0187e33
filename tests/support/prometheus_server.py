"""A real Prometheus server that scrapes targets on this machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from rollout_api.ports import free_port
from tests.support.waiting import wait_for

MISSING = "Prometheus is not installed (Debian: apt-get install prometheus)"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=MISSING)


class PrometheusServer:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query: a list of ``metric`` and ``value``."""
        reply = requests.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10).json()
        assert "success" == reply["status"], (expression, reply)
        result: list[dict[str, Any]] = reply["data"]["result"]
        return result

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        reply = requests.get(f"{self.url}/api/v1/alerts", timeout=10).json()
        return {alert["labels"]["alertname"] for alert in reply["data"]["alerts"] if alert["state"] == "firing"}


@contextmanager
def prometheus_server(
    directory: Path,
    targets: Mapping[str, Mapping[str, str]],
    rules: list[dict[str, Any]],
    **scraping: Any,
) -> Iterator[PrometheusServer]:
    """Run a server that scrapes once per second.

    Args:
        directory: where its configuration and data are written.
        targets: ``host:port`` of each target → labels of the target, as a PodMonitor would set them.
        rules: alerting rules.
        **scraping: fields of the scrape configuration; by default, labels of metrics override those of targets.
    """
    listening = f"127.0.0.1:{free_port()}"
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "tested", "rules": rules}]}))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(directory / "rules.yaml")],
        "scrape_configs": [
            {
                "job_name": "pods",
                **(scraping or {"honor_labels": True}),
                "static_configs": [{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()],
            }
        ],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={listening}",
        "--log.level=warn",
    ]
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = PrometheusServer(f"http://{listening}")
        wait_for(lambda: _is_ready(server, process), message=(directory / "prometheus.log").read_text)
        yield server
    finally:
        process.terminate()
        process.wait()


def _is_ready(server: PrometheusServer, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Prometheus has ended"
    try:
        return requests.get(f"{server.url}/-/ready", timeout=5).ok
    except requests.ConnectionError:
        return False
