"""The drafting configuration of an engine, which the host process sends to vLLM's worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_worker.policy.policies import PolicyName


@dataclass(frozen=True)
class HistoryLocation:
    """The Redis server and history that a worker process reads."""

    redis_url: str
    namespace: str
    name: str
    window: int
    """Number of generations whose rollouts are drafted from."""


@dataclass(frozen=True)
class DraftingConfig:
    """The drafting configuration of an engine."""

    policy: PolicyName
    max_draft_tokens: int
    """Maximum number of tokens of one draft."""
    max_index_bytes: int
    """Maximum memory of the suffix index."""
    history: HistoryLocation
    governed: bool = True
    """Whether drafting is disabled where it does not pay; False only in tests and benchmarks."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DraftingConfig:
        """Reverse ``dataclasses.asdict``; vLLM's collective calls only carry plain values."""
        return cls(**{**values, "history": HistoryLocation(**values["history"])})
