"""Skips steps of drafting while there is nothing to draft."""

from __future__ import annotations

_STEPS_UNTIL_SKIPPING = 4
"""Number of consecutive steps without drafts after which steps are skipped."""
_STEPS_BETWEEN_SKIPS = 2
"""Number of steps in which drafts are looked for between two series of skipped steps. It takes two to time a step."""
_MAX_SKIPPED_STEPS = 16
"""Maximum number of consecutive steps that are skipped."""


class IdleBackoff:
    """Lets the drafter skip steps while nothing is drafted, because looking for drafts takes time, too.

    The number of skipped steps doubles up to 16 while nothing is drafted. As soon as something is drafted, no step is
    skipped.
    """

    def __init__(self) -> None:
        self._steps_left = _STEPS_UNTIL_SKIPPING
        """Number of steps without drafts until steps are skipped again."""
        self._series_length = 1
        self._skips_left = 0

    def skip_step(self) -> bool:
        """Return whether the drafter skips this step. Call it once per step."""
        if self._skips_left:
            self._skips_left -= 1
            return True
        return False

    def record_step(self, drafted: bool) -> None:
        """Record whether anything was drafted in a step that was not skipped."""
        if drafted:
            self._steps_left, self._series_length = _STEPS_UNTIL_SKIPPING, 1
            return
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._series_length = min(2 * self._series_length, _MAX_SKIPPED_STEPS)
            self._steps_left, self._skips_left = _STEPS_BETWEEN_SKIPS, self._series_length
