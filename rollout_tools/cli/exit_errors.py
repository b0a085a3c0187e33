"""Turns the expected errors of a command into a message and an exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from redis.exceptions import RedisError
from rich.console import Console
from rich.markup import escape

from rollout_api.errors import RolloutClientError
from rollout_api.manifest.rollout_job import ManifestError
from rollout_api.protocol.status import (
    EXIT_DEADLINE,
    EXIT_ENGINE,
    EXIT_INTERRUPTED,
    EXIT_MANIFEST,
    EXIT_MODEL,
    EXIT_REDIS,
    EXIT_STATE,
)
from rollout_api.redis_client.connection import RedisUnusableError, explain_error
from rollout_api.status_token import StatusTokenError
from rollout_store.history.metadata import HistoryMismatchError
from rollout_store.job.admission_rules import AdmissionError
from rollout_store.job.engines import EngineError
from rollout_store.models.model_source import ModelError
from rollout_store.runtime.output import exit_with_error
from rollout_tools.cli.job_address import JobAddressError
from rollout_tools.launch.job_state import DeadlineError, StateError

error_console = Console(stderr=True)


@contextmanager
def exit_with_message(
    file: Path | None = None,
    redis: str = "",
    *,
    interrupted: str = "finished rollouts are kept, and the same command continues from there",
) -> Iterator[None]:
    """Turn expected errors into a message and an exit code; unexpected errors keep their traceback.

    Args:
        file: the manifest that messages name.
        redis: URL of the Redis from which errors may come.
        interrupted: what an interruption by the user means.
    """
    prefix = f"{file}: " if file is not None else ""
    try:
        yield
    except ManifestError as error:
        _fail_manifest(file, error)
    except ModelError as error:
        exit_with_error(EXIT_MODEL, f"{prefix}{error}")
    except (RedisUnusableError, HistoryMismatchError) as error:
        exit_with_error(EXIT_REDIS, str(error))
    except RedisError as error:
        if not redis:
            raise
        exit_with_error(EXIT_REDIS, str(explain_error(error, redis)))
    except (EngineError, AdmissionError, RolloutClientError) as error:
        exit_with_error(EXIT_ENGINE, str(error))
    except (StateError, JobAddressError, StatusTokenError) as error:
        exit_with_error(EXIT_STATE, str(error))
    except DeadlineError as error:
        exit_with_error(EXIT_DEADLINE, str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        exit_with_error(EXIT_INTERRUPTED, f"interrupted; {interrupted}")


def _fail_manifest(file: Path | None, error: ManifestError) -> NoReturn:
    count = len(error.errors)
    error_console.print(
        f"[bold red]error:[/] {escape(str(file))} has {count} error{'s' if count > 1 else ''}:", highlight=False
    )
    for field in error.errors:
        error_console.print(f"  {field.path}: {field.message}", markup=False, soft_wrap=True, highlight=False)
    sys.exit(EXIT_MANIFEST)
