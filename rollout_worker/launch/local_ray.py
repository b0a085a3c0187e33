"""The Ray cluster of one worker: it runs the worker's engines, and ends with this process."""

from __future__ import annotations

import logging
import os
import signal

from rollout_worker.engine.errors import EngineError
from rollout_worker.job.limits import OBJECT_STORE_BYTES


def start_local_ray(engines: int) -> None:
    """Start a Ray cluster with room for *engines* engines. It listens on the loopback interface only.

    Raises:
        EngineError: if Ray does not start.
        KeyboardInterrupt: if SIGTERM was received meanwhile; its handler has been called.
    """
    # Ray reads these settings from the environment alone.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this, Ray warns repeatedly about an engine that waits for resources.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    from rollout_worker.job.fleet import ENGINE_RESOURCE

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
    except (OSError, RuntimeError, ValueError) as error:
        ray.shutdown()
        raise EngineError(f"Ray cannot start: {error}") from error
    except SystemExit:  # Ray's handler of SIGTERM
        ray.shutdown()
        if not callable(sigterm_handler):
            raise
        sigterm_handler(signal.SIGTERM, None)
        raise KeyboardInterrupt from None
    finally:
        # Ray's core installs a handler that treats SIGTERM as a crash.
        signal.signal(signal.SIGTERM, sigterm_handler)


def stop_local_ray() -> None:
    """End the cluster and everything that runs on it."""
    import ray

    ray.shutdown()
