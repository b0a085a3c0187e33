"""What an engine learns for engines that start later: the index's state, and what its governor has measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack

from rollout_worker.policy.governor import Gain

if TYPE_CHECKING:
    from rollout_store.history.sync import DrafterStatistics
    from rollout_worker.policy.governor import Governor


class LearnedState:
    """The statistics and the state of an engine's drafter, which it exchanges with the history.

    A gain depends on the model and the machine. It is therefore only used by engines with the same ones.
    """

    def __init__(self, index: DrafterStatistics, governor: Governor, engine: str) -> None:
        """Combine the state of *index* and *governor*; *engine* describes the model and the machine."""
        self._index, self._governor, self._engine = index, governor, engine
        self._earlier: object = None
        """The gain that was loaded, which is passed on until there is a newer one."""

    def verified(self) -> int:
        """See :class:`DrafterStatistics`."""
        return self._index.verified()

    def state_dict(self) -> bytes:
        """Return the state of the index, and the gain with the engine that has measured it."""
        gain = self._governor.gain
        if gain.is_known:
            self._earlier = [self._engine, *gain]
        packed: bytes = msgpack.packb({"index": self._index.state_dict(), "gain": self._earlier})
        return packed

    def load_state_dict(self, state: bytes) -> None:
        """Continue from the state that another engine has learned.

        Raises:
            ValueError: if the index cannot use it.
        """
        match msgpack.unpackb(state):
            case {"index": bytes(index), "gain": gain}:
                self._index.load_state_dict(index)
            case _:
                raise ValueError("the state was not saved by this version")
        self._earlier = gain
        match gain:
            case [self._engine, float(value), float(error)]:
                self._governor.expect(Gain(value, error))
