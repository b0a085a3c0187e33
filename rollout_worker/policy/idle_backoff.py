"""When to look for drafts again, where there were none for a while."""

from __future__ import annotations

_AWAKE = 4
"""Steps without drafts after which the drafter rests."""
_LOOK = 2
"""Steps between two rests: what a step took is known only to who was awake in the one before it."""
_LONGEST = 16


class IdleBackoff:
    """Lets the drafter sleep through some steps while nothing is drafted: looking costs time, too.

    The longer nothing is drafted the longer it rests, up to 16 steps at a time; as soon as something is, it stays
    awake.
    """

    def __init__(self) -> None:
        self._left = _AWAKE
        """Steps that it stays awake, if nothing is drafted."""
        self._length = 1
        self._asleep = 0

    def sleeps(self) -> bool:
        """Asked once a step: whether it sleeps through this one."""
        if self._asleep:
            self._asleep -= 1
            return True
        return False

    def looked(self, drafted: bool) -> None:
        """It was awake in a step, and something was drafted or not."""
        if drafted:
            self._left, self._length = _AWAKE, 1
            return
        self._left -= 1
        if self._left <= 0:
            self._length = min(2 * self._length, _LONGEST)
            self._left, self._asleep = _LOOK, self._length
