"""The Ray cluster of one worker: it runs the worker's engines, and ends with this process."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys

from rollout_worker.engine.errors import EngineError
from rollout_worker.job.limits import OBJECT_STORE_BYTES

_TOKEN_BYTES = 32


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
