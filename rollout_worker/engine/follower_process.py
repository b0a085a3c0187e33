"""The part of an engine on a machine without the engine's core, as a process.

``python -m rollout_worker.engine.follower_process`` reads vLLM's engine arguments as JSON from stdin. It ends when one
of vLLM's worker processes does.
"""

from __future__ import annotations

import json
import sys

from rollout_worker.engine.config import engine_args


def main() -> int:
    """Run vLLM's worker processes, as ``vllm serve --headless`` does, and return the exit code."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    settings = json.load(sys.stdin)
    config = engine_args(settings).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
