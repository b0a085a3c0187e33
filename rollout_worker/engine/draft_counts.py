"""Reads the drafter's counts of responses that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from rollout_api.protocol.draft_sources import DRAFT_SOURCES, SAMPLED
from rollout_worker.engine.vllm_client import VllmClient, ignore_failure


class ResponseDraftCounts(NamedTuple):
    """What the drafter knows about the draft tokens of one response."""

    drafted_by_source: Sequence[int] = (0,) * len(DRAFT_SOURCES)
    """Number of verified draft tokens of each of the :data:`~rollout_api.protocol.draft_sources.DRAFT_SOURCES`."""
    token_sources: bytes = b""
    """Code of each response token up to the last accepted draft token; see
    :mod:`rollout_api.protocol.draft_sources`.

    It includes the prefix, and accepted draft tokens beyond the end of the response, which vLLM cuts off."""

    @property
    def drafted(self) -> int:
        """Number of verified draft tokens."""
        return sum(self.drafted_by_source)

    def sources_of(self, num_tokens: int) -> bytes:
        """Return the code of each of the response's *num_tokens* tokens."""
        return self.token_sources[:num_tokens].ljust(num_tokens, bytes([SAMPLED]))


class DraftCountReader:
    """Reads the counts; the responses that end in the same step share one round trip to the worker processes."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client
        self._ended: list[str] = []
        self._reading: asyncio.Task[dict[str, ResponseDraftCounts]] | None = None

    async def take(self, call_id: str) -> ResponseDraftCounts:
        """Return the counts of a response that has ended; the drafter forgets it."""
        return (await asyncio.shield(self._request(call_id))).get(call_id, ResponseDraftCounts())

    def discard(self, call_id: str) -> None:
        """Let the drafter forget a response, in the background."""
        self._request(call_id).add_done_callback(ignore_failure)

    def _request(self, call_id: str) -> asyncio.Task[dict[str, ResponseDraftCounts]]:
        self._ended.append(call_id)
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        return self._reading

    async def _read(self) -> dict[str, ResponseDraftCounts]:
        await asyncio.sleep(0)  # so that the other responses that end in this step are included
        ended, self._ended, self._reading = self._ended, [], None
        counts: dict[str, ResponseDraftCounts] = {}
        for rank in await self._client.collective_rpc("das_take_counts", ended, action="reading draft counts"):
            counts |= {call_id: ResponseDraftCounts(*fields) for call_id, fields in rank.items()}
        return counts
