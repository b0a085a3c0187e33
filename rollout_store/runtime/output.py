"""Log files that are bounded, rotated and can be merged by their times, and error messages of commands."""

from __future__ import annotations

import logging
import logging.handlers
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

MAX_FILE_BYTES = 8 << 20
"""Size at which a log file is rotated, in bytes."""
NUM_OLD_FILES = 2
"""Number of rotated files that are kept of each process."""
_PACKAGES = ("rollout_head", "rollout_store", "rollout_tools", "rollout_worker")
"""Packages whose messages are logged from the level INFO on; those of others only from WARNING on."""
_CONSOLE_FORMAT = "%(levelname)s %(name)s: %(message)s"


class TimestampFormatter(logging.Formatter):
    """Begins each record with its time in UTC, as ``2026-11-27T22:31:18.123Z``."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


def rotating_handler(
    directory: Path, process: str, message: str = _CONSOLE_FORMAT, *, max_bytes: int = MAX_FILE_BYTES
) -> logging.Handler:
    """Return a handler that appends to the log file of a process, which is created with the first record.

    *message* is the format of what follows the time.

    Raises:
        OSError: if the directory cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        directory / f"{process}.log",
        maxBytes=max_bytes,
        backupCount=NUM_OLD_FILES,
        encoding="utf-8",
        errors="backslashreplace",
        delay=True,
    )
    handler.setFormatter(TimestampFormatter(f"%(asctime)s {message}"))
    return handler


@contextmanager
def logging_to_file(directory: Path | None, process: str) -> Iterator[None]:
    """Log within the context: warnings to standard error, and further messages to a log file if there is a directory.

    Raises:
        OSError: if the directory cannot be created.
    """
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter(_CONSOLE_FORMAT))
    console.setLevel(logging.WARNING)
    handlers = [console] if directory is None else [console, rotating_handler(directory, process)]
    root, own = logging.getLogger(), [logging.getLogger(package) for package in _PACKAGES]
    levels = [logger.level for logger in own]
    for logger in own:
        logger.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(own, levels, strict=True):
            logger.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def exit_with_error(code: int, message: str) -> NoReturn:
    """Print ``error:`` and a message to standard error, and exit.

    The message says what is wrong, where, and what to do.
    """
    from rich.console import Console  # here, because not only commands import this module
    from rich.markup import escape

    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)
