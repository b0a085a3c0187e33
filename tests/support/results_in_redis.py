"""The results that a job keeps in Redis for its clients."""

from __future__ import annotations

from typing import Any

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import Refusal, Rollout, decode


def kept_rollouts(server: Any, keys: MessageKeys, client: str = "trainer") -> list[Rollout]:
    """Return the rollouts that a client has not released, ordered by request and sample."""
    requests = sorted(request_id.decode() for request_id in server.smembers(keys.unreleased(client)))
    pipeline = server.pipeline(transaction=False)
    for request_id in requests:
        pipeline.hgetall(keys.results(request_id))
    found = [decode(data) for results in pipeline.execute() for _, data in sorted(results.items(), key=_sample)]
    return [rollout for rollout in found if isinstance(rollout, Rollout)]


def num_kept(server: Any, keys: MessageKeys, client: str = "trainer") -> int:
    """Return the number of rollouts that a client has not released."""
    pipeline = server.pipeline(transaction=False)
    for request_id in server.smembers(keys.unreleased(client)):
        pipeline.hlen(keys.results(request_id.decode()))
    return sum(pipeline.execute())


def refusals(server: Any, keys: MessageKeys) -> dict[str, str]:
    """Return the requests that the job has refused lately, with the reasons."""
    found = [decode(server.get(key)) for key in server.keys(keys.refusal("*"))]
    return {refusal.request_id: refusal.reason for refusal in found if isinstance(refusal, Refusal)}


def _sample(item: tuple[bytes, bytes]) -> int:
    return int(item[0])
