"""Counters that vLLM updates after each step, as the host process sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
