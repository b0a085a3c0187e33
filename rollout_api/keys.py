"""Every Redis key of the project, in one place.

The message plane of a job is hash-tagged by the job's uid and a history by problem, so that on a Redis Cluster
each server-side function stays on one slot while histories spread over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MessageKeys:
    """Keys of one job's message plane."""

    uid: str
    """The job's uid."""

    def _key(self, name: str) -> str:
        return f"rollout:{{{self.uid}}}:{name}"

    @property
    def ledger(self) -> str:
        """Hash: rollout id → the finished rollout. What is in it is done, once and for all."""
        return self._key("ledger")

    @property
    def outbox(self) -> str:
        """Stream of finished rollouts on their way into the history."""
        return self._key("outbox")

    @property
    def dead(self) -> str:
        """Stream of messages that could not be read, each with the reason."""
        return self._key("dead")


@dataclass(frozen=True)
class HistoryKeys:
    """Keys of one history."""

    namespace: str
    name: str

    @property
    def meta(self) -> str:
        """Hash: tokenizer fingerprint, the generation counter and the generation of each published version."""
        return f"history:{{{self.namespace}/{self.name}}}:meta"

    def log(self, problem: str) -> str:
        """Stream of one problem's rollouts, oldest first."""
        return f"history:{self.namespace}/{self.name}:{{{problem}}}:log"

    def lengths(self, problem: str) -> str:
        """Hash: rollout id → its generation, length and how it ended, for one problem."""
        return f"history:{self.namespace}/{self.name}:{{{problem}}}:lengths"
