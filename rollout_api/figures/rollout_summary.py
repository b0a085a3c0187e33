"""What the figures of a training step need of one rollout: a few numbers without its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from rollout_api.protocol.messages import FinishReason, Rollout


@dataclass(frozen=True)
class RolloutSummary:
    """The numbers of one rollout. They are small, so that processes of a trainer can send them to each other."""

    problem_id: str
    """Id of the problem."""
    num_tokens: int
    """Number of response tokens."""
    finish_reason: FinishReason
    """Why the rollout ended."""
    num_decoding_steps: int
    """Decoding steps of the engine that finished the rollout."""
    num_draft_tokens: int
    """Draft tokens that were verified in these steps."""
    num_accepted_tokens: int
    """Draft tokens that were accepted in these steps."""
    accepted_by_source: dict[str, int]
    """Source → number of its draft tokens among them; see ``Rollout.accepted_tokens_by_source``."""
    started_at: float
    """Unix time at which an engine started the rollout; 0 if none did."""
    finished_at: float
    """Unix time at which the rollout finished."""
    weight_version: int | None
    """Newest weight version that sampled a token; None without tokens."""
    staleness: int | None
    """Number of weight versions by which the oldest token was behind the newest published version; None without tokens,
    or if the newest version is unknown."""
    reward: float | None
    """Reward; None if there is none."""

    @classmethod
    def of(cls, rollout: Rollout, *, reward: float | None = None, newest_version: int | None = None) -> Self:
        """Return the summary of a rollout.

        Args:
            rollout: the rollout.
            reward: its reward, if it has one.
            newest_version: newest published weight version when the rollout was taken, if it is known.
        """
        oldest = rollout.oldest_weight_version
        return cls(
            problem_id=rollout.problem_id,
            num_tokens=rollout.num_tokens,
            finish_reason=rollout.finish_reason,
            num_decoding_steps=rollout.num_decoding_steps,
            num_draft_tokens=rollout.num_draft_tokens,
            num_accepted_tokens=rollout.num_accepted_tokens,
            accepted_by_source=rollout.accepted_tokens_by_source,
            started_at=rollout.started_at,
            finished_at=rollout.finished_at,
            weight_version=max((span.weight_version for span in rollout.weight_spans), default=None),
            staleness=None if oldest is None or newest_version is None else max(0, newest_version - oldest),
            reward=reward,
        )
