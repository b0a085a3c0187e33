"""What the stand-ins for Kubernetes' controllers have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import urllib3
from kubernetes import client

from tests.support.cluster.raw_api import RawApi

_RETRY_DELAY_S = 0.2


class Controller(ABC):
    """Compares the cluster with what it should be, again and again, in a thread."""

    period_s = 0.1
    """Seconds between two passes."""

    def __init__(self, api: client.ApiClient) -> None:
        self.api = RawApi(api)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abstractmethod
    def reconcile(self) -> None:
        """Make one pass. A pass that the API server rejects is repeated."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self.period_s):
            try:
                self.reconcile()
            except (client.ApiException, urllib3.exceptions.HTTPError):
                # An object has changed or gone meanwhile, or a test has killed the API server.
                self._stopping.wait(_RETRY_DELAY_S)
