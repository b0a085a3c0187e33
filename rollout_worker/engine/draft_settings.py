"""The drafting configuration of an engine, and the drafting settings of a request.

The host process sends the configuration to vLLM's worker processes when the engine starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.manifest.spec import PolicyName
from rollout_api.protocol.messages import DraftMode

PROPOSER = "rollout_worker.engine.proposer.HistoryProposer"
"""The class that identifies this drafter in vLLM's speculative configuration; V1 creates an object of it."""
EXTRA_ARGS_KEY = "das"
"""Key of the settings in vLLM's ``SamplingParams.extra_args``."""
SOURCES: dict[DraftMode, tuple[str, ...]] = {
    DraftMode.HISTORY: ("history", "self", "siblings", "cross_problem"),
    DraftMode.OWN_TEXT: ("self",),
    # The drafter follows every rollout, because siblings draft from it. A budget of 0 prevents drafts.
    DraftMode.OFF: ("self",),
}
"""The index's sources that a request's drafts may come from."""


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
    history: HistoryLocation | None
    """None if rollouts are added to the index by the worker process itself."""
    engines: int = 1
    """Number of engines that share the processors of the machine or pod."""
    min_survival: float = 0.0
    """Survival below which all drafts end."""
    governed: bool = True
    """Whether drafting is disabled where it does not pay; False only in tests and benchmarks."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DraftingConfig:
        """Reverse ``dataclasses.asdict``; vLLM's collective calls only carry plain values."""
        history = values["history"]
        return cls(**{**values, "history": None if history is None else HistoryLocation(**history)})


@dataclass(frozen=True)
class DraftSettings:
    """The drafting settings of one response, passed to the worker processes in vLLM's ``extra_args``."""

    key: str
    """Id of the response, for reading its counts afterwards."""
    problem: str
    max_tokens: int
    """Maximum number of response tokens, beyond which nothing is drafted."""
    min_tokens: int = 0
    """Minimum number of response tokens, which no draft may cross.

    While a response is shorter, vLLM bars its end one position too far in a step with drafts, and for the token after
    the draft regardless of its length (vllm#41768, seen in 0.32). A step that stays below this number is correct.
    """
    budget: int | None = None
    """Maximum number of draft tokens per step; None for the job's ``maxDraftTokens``."""
    sources: Sequence[str] = SOURCES[DraftMode.HISTORY]
    later_turn: bool = False
    """Whether the response continues a trajectory, so that the end of its prompt is its context."""
    undrafted_tokens: int = 0
    """Number of the first response tokens that get no drafts."""
    prefix_tokens: int = 0
    """Number of tokens at the end of vLLM's prompt that belong to the response and were sampled earlier."""

    def as_extra_args(self) -> dict[str, Any]:
        """Return the value of ``SamplingParams.extra_args``."""
        return {EXTRA_ARGS_KEY: {**vars(self), "sources": list(self.sources)}}

    @classmethod
    def from_extra_args(cls, extra_args: dict[str, Any] | None) -> DraftSettings | None:
        """Return the settings in a request's ``extra_args``; None for a request that gets no drafts."""
        if not extra_args or EXTRA_ARGS_KEY not in extra_args:
            return None
        return cls(**extra_args[EXTRA_ARGS_KEY])


def settings_of_request(request: Any) -> DraftSettings | None:
    """Return the settings that a job has given a request; None if it gets no drafts."""
    params = request.sampling_params
    return DraftSettings.from_extra_args(None if params is None else params.extra_args)
