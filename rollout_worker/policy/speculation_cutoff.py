"""Decides when to replace an engine on which drafting does not pay by one without speculation."""

from __future__ import annotations

from collections import OrderedDict

MIN_DECODING_S = 1800.0
"""Seconds of decoding that are observed before an engine is replaced, because starting another takes minutes."""
ONE_VERSION_FACTOR = 4.0
"""Factor on that time while all of it was decoded with one weight version.

Drafting may begin to pay with new weights, under which rollouts may resemble earlier ones more closely."""
_MIN_VERSION_S = 60.0
"""Seconds of decoding below which a weight version is not taken into account."""
_MIN_DISABLED_SHARE = 0.95
"""Share of the decoding time in which the governor must have disabled drafting."""
_MAX_VERSIONS = 4
"""Number of weight versions that are taken into account, the newest ones."""


class SpeculationCutoff:
    """Observes for how long an engine's governor has disabled drafting, by weight version.

    With a drafter configured, an engine still looks for drafts from time to time, and its scheduler plans places for
    them. An engine without speculation may be faster, above all on CPUs, where only such an engine schedules
    asynchronously.
    """

    def __init__(
        self, *, min_decoding_s: float = MIN_DECODING_S, min_disabled_share: float = _MIN_DISABLED_SHARE
    ) -> None:
        """Create a cutoff; see :data:`MIN_DECODING_S`.

        Args:
            min_decoding_s: seconds of decoding that are observed at least.
            min_disabled_share: share of the decoding time in which drafting must have been disabled, per version.
        """
        self._min_decoding_s, self._min_disabled_share = min_decoding_s, min_disabled_share
        self._versions: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Weight version → seconds of decoding, and the part of them in which drafting was disabled."""
        self._total_s = 0.0

    def observe(self, *, weight_version: int, decoding_s: float, drafting_disabled: bool) -> None:
        """Record the engine's state.

        Args:
            weight_version: the version that the engine serves.
            decoding_s: seconds of decoding since the engine started.
            drafting_disabled: whether its governor has disabled drafting.
        """
        added_s, self._total_s = max(0.0, decoding_s - self._total_s), decoding_s
        decoded_s, disabled_s = self._versions.pop(weight_version, (0.0, 0.0))
        self._versions[weight_version] = decoded_s + added_s, disabled_s + added_s * drafting_disabled
        while len(self._versions) > _MAX_VERSIONS:
            self._versions.popitem(last=False)

    @property
    def is_reached(self) -> bool:
        """Whether the engine should be replaced by one without speculation."""
        min_version_s = min(_MIN_VERSION_S, self._min_decoding_s)
        versions = [times for times in self._versions.values() if times[0] >= min_version_s]
        total_s = sum(decoded_s for decoded_s, _ in versions)
        required_s = self._min_decoding_s * (1.0 if len(versions) > 1 else ONE_VERSION_FACTOR)
        return (
            bool(versions)
            and total_s >= required_s
            and all(disabled_s >= self._min_disabled_share * decoded_s for decoded_s, disabled_s in versions)
        )
