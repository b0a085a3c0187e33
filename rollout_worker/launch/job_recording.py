"""Saves the recording of a local job, so that a report can be made when its Redis has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from rollout_api.redis_client.checks import RedisUnusableError
from rollout_worker.job.setup import JobSetup
from rollout_worker.report.reading import NothingToReportError, read_recording
from rollout_worker.report.recording import save_recording

logger = logging.getLogger(__name__)

RECORDING_FILE = "recording.json.gz"
"""Name of the file in the state directory of a job."""


@contextmanager
def recorded(
    setup: JobSetup,
    directory: Path,
    tokenizer: Any,
    prompts: Mapping[str, Sequence[int]],
    notify: Callable[[str], None],
) -> Iterator[None]:
    """Save the recording of a job to *directory* at the end of the context, unless Redis has failed in it.

    Args:
        setup: the job.
        directory: its state directory.
        tokenizer: the tokenizer of its model.
        prompts: token ids of the prompts by problem, as far as they are known.
        notify: receives a message for the user if the recording cannot be saved.
    """
    try:
        yield
    except redis.RedisError:
        raise
    except BaseException:
        _save(setup, directory, tokenizer, prompts, notify)
        raise
    _save(setup, directory, tokenizer, prompts, notify)


def _save(
    setup: JobSetup,
    directory: Path,
    tokenizer: Any,
    prompts: Mapping[str, Sequence[int]],
    notify: Callable[[str], None],
) -> None:
    name = f"{setup.job.metadata.namespace}/{setup.job.metadata.name}"
    reading = read_recording(
        setup.redis_url,
        setup.uid,
        name=name,
        history_url=setup.history_url,
        tokenizer_of=lambda _: tokenizer,
        prompts=prompts,
    )
    try:
        # In an event loop of its own, because that of the job may be about to be cancelled again.
        with ThreadPoolExecutor(1) as executor:
            recording = executor.submit(asyncio.run, reading).result()
        save_recording(recording, directory / RECORDING_FILE)
    except NothingToReportError:
        return
    except Exception as error:  # the rollouts are finished, and the job must not fail because of its report
        logger.warning(
            "Cannot record job %s",
            name,
            exc_info=not isinstance(error, redis.RedisError | RedisUnusableError | OSError),
        )
        notify(f"The recording of the job, from which reports are made, cannot be saved: {error}")
