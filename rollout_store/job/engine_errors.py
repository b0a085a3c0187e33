"""The errors of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EngineError(RuntimeError):
    """The engine cannot do what was requested. The message says why, and what to do where something can be done."""


class AdmissionError(ValueError):
    """The engine cannot serve a request as it is. The message names the setting."""


@contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Raise vLLM's errors, some of which are plain ``Exception``, as :class:`EngineError`.

    Args:
        action: the failing action, for the message, such as "generating".
    """
    try:
        yield
    except (EngineError, AdmissionError):
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM failed while {action}: {error or type(error).__name__}; the log of the engine's worker has details"
        ) from error
