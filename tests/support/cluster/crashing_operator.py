"""Runs the operator again and again, and crashes each run at one of its changes to the cluster.

The runs crash before or after their first, second or third change, in turn, so that every change is interrupted at
some time. Each run is a child process of its own, forked after the imports, which take longer than most runs.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from types import FrameType
from typing import Any

from rollout_operator.__main__ import main
from rollout_operator.cluster.kubernetes_api import KubernetesApi

CRASH_EXIT_CODE = 9
_CRASHES = [(moment, changes) for changes in range(3) for moment in ("after", "before")]
"""The moment of a run's crash, and the number of complete changes before it."""


def crash_at(moment: str, number: int) -> None:
    """Make this process end before or after change *number* of the cluster, counted from 0."""
    changes = itertools.count()
    request = KubernetesApi.request

    async def crashing_request(self: KubernetesApi, verb: str, *arguments: Any, **options: Any) -> Any:
        if verb == "GET":
            return await request(self, verb, *arguments, **options)
        is_last = next(changes) >= number
        if is_last and moment == "before":
            os._exit(CRASH_EXIT_CODE)
        try:
            return await request(self, verb, *arguments, **options)
        finally:
            if is_last:
                os._exit(CRASH_EXIT_CODE)

    KubernetesApi.request = crashing_request


def run_repeatedly() -> None:
    """Run the operator until SIGTERM, and log every crash."""
    child = 0

    def stop(number: int, frame: FrameType | None) -> None:
        if child:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    for moment, number in itertools.cycle(_CRASHES):
        # A signal between fork and assignment would leave the child running.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            crash_at(moment, number)
            main()
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != CRASH_EXIT_CODE:
            sys.exit(f"The operator ended with status {status} instead of crashing.")
        print(f"Crashed {moment} change {number}.", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_repeatedly()
