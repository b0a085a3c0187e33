"""Counters of an engine: those of vLLM as the host process sees them, and those of draft tokens with a label.

The label is a draft token's source, or its position in the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout_worker.drafting.index import SuffixIndex


@dataclass
class EngineCounters:
    """Counters since the engine started, except where noted."""

    running: int = 0
    """Rollouts in the batch of the last step."""
    waiting: int = 0
    """Rollouts that vLLM has queued, at the last step."""
    kv_cache_usage: float = 0.0
    """Share of the KV cache that is in use at the last step, 0 to 1."""
    prompt_tokens: int = 0
    """Tokens of prompts and prefixes that were read."""
    cached_tokens: int = 0
    """The part of them whose keys and values were cached."""
    tokens: int = 0
    """Response tokens."""
    preemptions: int = 0
    """How often a running rollout lost its keys and values, because of a lack of memory or a weight update."""
    draft_tokens: int = 0
    """Draft tokens that were verified; with V2, as of the last :meth:`Engine.stats`."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""

    def as_stat_logger(self) -> Any:
        """Return a factory of a vLLM stat logger that updates these counters."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counters = self

        class CounterUpdater(StatLoggerBase):  # type: ignore[misc]  # mypy skips vLLM, so the base class is Any
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                # V2 counts the places that it has planned for drafts; the worker process counts the drafts.
                self._counts_drafts = not vllm_config.use_v2_model_runner

            def log_engine_initialized(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    counters.running = scheduler_stats.num_running_reqs
                    counters.waiting = scheduler_stats.num_waiting_reqs
                    counters.kv_cache_usage = scheduler_stats.kv_cache_usage
                    if scheduler_stats.spec_decoding_stats is not None:
                        if self._counts_drafts:
                            counters.draft_tokens += scheduler_stats.spec_decoding_stats.num_draft_tokens
                        counters.accepted_tokens += scheduler_stats.spec_decoding_stats.num_accepted_tokens
                if iteration_stats is not None:
                    counters.prompt_tokens += iteration_stats.prompt_token_stats.total
                    counters.cached_tokens += iteration_stats.prompt_token_stats.cached_tokens
                    counters.tokens += iteration_stats.num_generation_tokens
                    counters.preemptions += iteration_stats.num_preempted_reqs

        return CounterUpdater


def labeled_counters(index: SuffixIndex) -> dict[str, dict[str, int]]:
    """Return an index's counters of draft tokens by name, and then by label.

    Labels are sources, or the positions 1, 2, … of a draft, of which the last one, such as 16+, also counts all later
    positions. Positions after the last one that was verified are left out.
    """
    by_source, by_position = index.verification_counts()
    positions = [str(number) for number in range(1, len(by_position))] + [f"{len(by_position)}+"]
    used = {label: counts for label, counts in zip(positions, by_position, strict=True) if counts.verified}
    return {
        "source_proposed_tokens": {source: counts.drafted for source, counts in index.counters().items()},
        "source_draft_tokens": {source: counts.verified for source, counts in by_source.items()},
        "source_accepted_tokens": {source: counts.accepted for source, counts in by_source.items()},
        "position_draft_tokens": {label: counts.verified for label, counts in used.items()},
        "position_accepted_tokens": {label: counts.accepted for label, counts in used.items()},
    }
