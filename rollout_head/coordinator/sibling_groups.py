"""The open requests whose rollouts are siblings: those of one problem, whether one request or several ask for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollout_head.coordinator.open_request import OpenRequest
from rollout_head.coordinator.sibling_lengths import SiblingLengths

_MIN_RELATIVE_CHANGE = 0.01
"""Change of the expected length of a group from which its waiting samples are reordered. It limits the work for groups
of very many requests."""


@dataclass
class SiblingGroup:
    """The open requests of one problem, turn and purpose, in one or several processes of the trainer."""

    name: str
    lengths: SiblingLengths
    """Lengths of earlier rollouts, and of siblings that have ended, also of requests that are answered."""
    requests: dict[str, OpenRequest] = field(default_factory=dict)
    """Open requests by id."""
    started: bool = False
    """Whether a rollout was assigned to an engine."""
    assigned: Counter[str] = field(default_factory=Counter)
    """Id of an engine → number of rollouts that are assigned to it, if there are any."""

    expected_length: float = 0.0
    """Expected length of a rollout in tokens, as it was last used for the order of the waiting samples."""

    def update_expected_length(self, length: float) -> bool:
        """Replace the expected length by *length* if it differs enough; return whether it does."""
        if abs(length - self.expected_length) <= _MIN_RELATIVE_CHANGE * self.expected_length:
            return False
        self.expected_length = length
        return True

    def assign(self, engine: str) -> None:
        """Record that a rollout is assigned to an engine."""
        self.started = True
        self.assigned[engine] += 1

    def unassign(self, engine: str) -> None:
        """Record that a rollout is not assigned to an engine any more."""
        self.assigned[engine] -= 1
        if not self.assigned[engine]:
            del self.assigned[engine]


class SiblingGroups:
    """Groups the open requests. A group exists as long as one of its requests is open.

    Some trainers request each sample of a prompt separately (verl, and clients of the HTTP server), and others divide a
    group among their processes (TRL).
    """

    def __init__(self) -> None:
        self._groups: dict[str, SiblingGroup] = {}

    def add(self, request: OpenRequest) -> SiblingGroup:
        """Add an open request to its group, and return the group."""
        group = self._groups.setdefault(request.group, SiblingGroup(request.group, request.lengths))
        group.requests[request.request_id] = request
        if request.lengths.history.count:  # it is newer, unless the history could not be read
            group.lengths.history = request.lengths.history
        request.lengths = group.lengths
        return group

    def of(self, request: OpenRequest) -> SiblingGroup:
        """Return the group of an open request."""
        return self._groups[request.group]

    def remove(self, request: OpenRequest) -> None:
        """Remove a request that is answered."""
        group = self.of(request)
        del group.requests[request.request_id]
        if not group.requests:
            del self._groups[group.name]

    def named(self, name: str) -> SiblingGroup:
        """Return the group that has a name and an open request."""
        return self._groups[name]
