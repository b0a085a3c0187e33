"""Drafts for speculative decoding, taken from earlier rollouts of the same problem and from a request's own text."""

from rollout_worker.drafting.index import (
    Draft,
    Rollout,
    Source,
    SourceCounts,
    SuffixIndex,
    TokenArray,
    TokenIds,
)

__all__ = ["Draft", "Rollout", "Source", "SourceCounts", "SuffixIndex", "TokenArray", "TokenIds"]
