"""The namespaces with the labels by which they are selected, as the watch delivers them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rollout_operator.observed import Manifest
from rollout_operator.resource_kinds import ResourceKind

NAMESPACES = ResourceKind("Namespace", "", "v1", "namespaces")


class SelectedNamespaces:
    """The names of the namespaces that an informer with a label selector finds."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        """Begin without namespaces.

        Args:
            on_change: called with the name of a namespace that was added or removed.
        """
        self._on_change = on_change
        self._names: dict[str, str] = {}
        """By uid."""
        self._counts: Counter[object] = Counter()
        """Name → number of its uids, of which a namespace that was created again has two for a moment."""

    def __contains__(self, name: object) -> bool:
        """Return whether a namespace is selected."""
        return self._counts[name] > 0

    def uids(self, kind: str, namespace: str) -> set[str]:
        """Return the uids of all selected namespaces."""
        return set(self._names)

    def update(self, body: Manifest, kind: str) -> None:
        """Add a namespace."""
        name, uid = body["metadata"]["name"], body["metadata"]["uid"]
        if uid not in self._names:
            self._names[uid] = name
            self._counts[name] += 1
            self._on_change(name)

    def remove(self, body: Manifest, kind: str) -> None:
        """Remove a namespace that was deleted or has lost the labels."""
        self.remove_uid(kind, body["metadata"]["uid"])

    def remove_uid(self, kind: str, uid: str) -> None:
        """Remove the namespace with this uid."""
        if (name := self._names.pop(uid, None)) is not None:
            self._counts[name] -= 1
            self._on_change(name)
