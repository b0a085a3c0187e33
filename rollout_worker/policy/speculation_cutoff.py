"""Whether drafting has paid so little for so long that an engine which cannot draft is the better one."""

from __future__ import annotations

from collections import OrderedDict

LEAST_SECONDS = 1800.0
"""Of decoding, before an engine is given up: starting another takes minutes."""
_OF_ONE_VERSION = 4 * LEAST_SECONDS
"""Where the weights stay the same: with new ones, what was said before may be said again, and drafts begin to pay."""
_TELLING_SECONDS = 60.0
_STOPPED = 0.95
"""Share of the time in which the governor had stopped drafting."""
_VERSIONS = 4


class SpeculationCutoff:
    """Watches an engine's governor, weight version by weight version.

    vLLM with our drafter configured runs its first model runner, with synchronous scheduling, whether anything is
    drafted or not; without speculation it may run faster.
    """

    def __init__(self, *, least_seconds: float = LEAST_SECONDS, stopped: float = _STOPPED) -> None:
        self._least, self._share = least_seconds, stopped
        self._seen: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Weight version → seconds of decoding, and those of them in which drafting was stopped."""
        self._last = 0.0

    def observe(self, *, version: int, seconds: float, stopped: bool) -> None:
        """The engine has decoded for so many seconds since it started."""
        new, self._last = max(0.0, seconds - self._last), seconds
        decoded, idle = self._seen.pop(version, (0.0, 0.0))
        self._seen[version] = decoded + new, idle + new * stopped
        while len(self._seen) > _VERSIONS:
            self._seen.popitem(last=False)

    @property
    def futile(self) -> bool:
        """Whether it is."""
        telling = [
            (decoded, idle) for decoded, idle in self._seen.values() if decoded >= min(_TELLING_SECONDS, self._least)
        ]
        total = sum(decoded for decoded, _ in telling)
        long_enough = total >= (self._least if len(telling) > 1 else _OF_ONE_VERSION / LEAST_SECONDS * self._least)
        return bool(telling) and long_enough and all(idle >= self._share * decoded for decoded, idle in telling)
