"""Exit codes of the ``rollout`` command: how a pod says, when it is gone, why it ended."""

from __future__ import annotations

EXIT_MANIFEST = 2
"""The manifest is refused."""
EXIT_REDIS = 3
"""Redis cannot be used."""
EXIT_ENGINE = 4
"""vLLM, Ray or the job in them failed."""
EXIT_STATE = 5
"""The state directory cannot be used."""
EXIT_DEADLINE = 6
"""``lifecycle.activeDeadlineSeconds`` is over."""
EXIT_MODEL = 7
"""The model is not to be found, or no model."""
EXIT_INTERRUPTED = 130
