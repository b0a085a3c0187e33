"""How an engine drafts, as its host tells its worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_worker.policy.policies import PolicyName


@dataclass(frozen=True)
class HistoryBinding:
    """Where a worker reads the history from."""

    redis_url: str
    namespace: str
    name: str
    window: int
    """Generations that are drafted from."""


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts."""

    policy: PolicyName
    max_draft_tokens: int
    """Of one draft."""
    index_bytes: int
    """Most memory of the index."""
    history: HistoryBinding
    governed: bool = True
    """Whether drafting that does not pay is stopped; without, it can be looked at alone."""

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Drafting:
        """From what ``dataclasses.asdict`` makes of it: collective calls carry nothing else."""
        return cls(**{**plain, "history": HistoryBinding(**plain["history"])})
