"""Publishes weights for HTTP requests, which do not always name a version."""

from __future__ import annotations

from rollout_api.client.weight_publisher import PublishedWeights, WeightPublisher
from rollout_api.protocol.messages import WeightsKind

PUBLISH_TIMEOUT_S = 600.0
"""Seconds that the engines have to load weights."""


async def publish_directory(
    publisher: WeightPublisher, directory: str, kind: WeightsKind, version: int | None
) -> PublishedWeights:
    """Publish the weights in a directory, and wait until all engines serve them.

    Args:
        publisher: publisher of the job.
        directory: directory of the weights, as the engines see it.
        kind: what it contains.
        version: weight version; None for the one after the newest.

    Raises:
        InvalidRequestError: the version cannot be used.
        WeightsError: some engine could not load the weights, or took too long.
        RolloutClientError: Redis is unavailable.
    """
    return await publisher.publish_next(directory, kind=kind, version=version, timeout=PUBLISH_TIMEOUT_S)
