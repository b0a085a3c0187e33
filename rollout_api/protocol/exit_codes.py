"""Exit codes of the ``rollout`` command. The operator derives the reason of a failed pod from them."""

from __future__ import annotations

EXIT_MANIFEST = 2
"""The manifest is invalid."""
EXIT_REDIS = 3
"""Redis is unreachable or cannot be used."""
EXIT_ENGINE = 4
"""vLLM, Ray or the job has failed."""
EXIT_STATE = 5
"""A file or the state directory cannot be used."""
EXIT_DEADLINE = 6
"""The job has exceeded ``lifecycle.activeDeadlineSeconds``."""
EXIT_MODEL = 7
"""The model does not exist or cannot be loaded."""
EXIT_INTERRUPTED = 130
"""The command was interrupted."""
