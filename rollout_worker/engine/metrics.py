"""Counts that vLLM reports after each step, as the host sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class EngineCounters:
    """Since the engine started, except where noted."""

    running: int = 0
    """Rollouts in the batch at the last step."""
    waiting: int = 0
    """Rollouts queued at the last step."""
    kv_cache_usage: float = 0.0
    """Share of the KV cache in use at the last step, 0 to 1."""
    prompt_tokens: int = 0
    """Tokens of prompts (and of what responses went on from) that were read."""
    cached_tokens: int = 0
    """Those of them whose keys and values were cached."""
    tokens: int = 0
    """Response tokens."""
    preemptions: int = 0
    """Times that a running rollout lost its keys and values, for want of memory or by a weight update."""
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens accepted."""

    def as_stat_logger(self) -> Any:
        """A vLLM stat logger factory that keeps these counters up to date."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counters = self

        class Counting(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def log_engine_initialized(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    counters.running = scheduler_stats.num_running_reqs
                    counters.waiting = scheduler_stats.num_waiting_reqs
                    counters.kv_cache_usage = scheduler_stats.kv_cache_usage
                    if scheduler_stats.spec_decoding_stats is not None:
                        counters.drafted += scheduler_stats.spec_decoding_stats.num_draft_tokens
                        counters.accepted += scheduler_stats.spec_decoding_stats.num_accepted_tokens
                if iteration_stats is not None:
                    counters.prompt_tokens += iteration_stats.prompt_token_stats.total
                    counters.cached_tokens += iteration_stats.prompt_token_stats.cached_tokens
                    counters.tokens += iteration_stats.num_generation_tokens
                    counters.preemptions += iteration_stats.num_preempted_reqs

        return Counting
