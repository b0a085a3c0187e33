"""Results that are kept for clients: refusals, and how much of its results each client has read."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_api.protocol.keys import REQUEST_FIELD
from rollout_api.protocol.messages import Refusal, RolloutRequest, encode
from rollout_store.job.limits import MAX_EVENTS, REFUSAL_RETENTION_S
from rollout_store.job.part import StorePart


class ResultStore(StorePart):
    """Refuses requests, and measures the results that clients have not read."""

    async def refuse(self, request: RolloutRequest, refusal: Refusal) -> None:
        """Tell the client of a request that it is refused."""
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.set(self._keys.refusal(request.request_id), encode(refusal), ex=REFUSAL_RETENTION_S)
            updates = self._keys.result_updates(request.reply_to)
            pipeline.xadd(updates, {REQUEST_FIELD: request.request_id}, maxlen=MAX_EVENTS)
            await pipeline.execute()

    async def unread_bytes(self, clients: Sequence[str]) -> list[int]:
        """Return for each client how many bytes of its results it has not read."""
        if not clients:
            return []
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hmget(self._keys.results_written, clients)
        pipeline.hmget(self._keys.results_read, clients)
        written, read = await pipeline.execute()
        return [max(0, int(all_bytes or 0) - int(known or 0)) for all_bytes, known in zip(written, read, strict=True)]
