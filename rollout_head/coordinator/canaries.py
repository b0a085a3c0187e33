"""Compares canaries with their siblings; :mod:`rollout_store.job.canary` contains the statistical test."""

from __future__ import annotations

import json
import random

from rollout_api.protocol.messages import RolloutRequest
from rollout_store.job.canary import DriftTest, Measurement, canary_sample, uniform_rank

_NUM_QUANTITIES = 2


class CanaryTest:
    """Collects the measurements of groups with a canary, and tests each group once all its samples have ended."""

    def __init__(self) -> None:
        self.drift = DriftTest(_NUM_QUANTITIES)
        """The sequential test."""
        self._measurements: dict[str, dict[int, Measurement]] = {}
        """Request id → sample → measurement, for groups that are not complete."""

    def record(self, request: RolloutRequest, sample: int, measurement: bytes) -> None:
        """Add a sample that has ended, with the result of :func:`measure`; test its group if it was the last one."""
        canary = canary_sample(request.request_id, request.sampling.n)
        if canary is None:
            return
        group = self._measurements.setdefault(request.request_id, {})
        if measurement:
            group[sample] = Measurement(*json.loads(measurement))
        if len(group) < request.sampling.n or len({each.version for each in group.values()}) > 1:
            return
        del self._measurements[request.request_id]
        # Seeded by the request, so that every coordinator breaks the ties of a group in the same way.
        rng = random.Random(request.request_id)
        own, others = group.pop(canary), list(group.values())
        logprobs = [each.logprob for each in others if each.logprob is not None]
        self.drift.observe(
            [
                uniform_rank(own.length, [each.length for each in others], rng),
                None if own.logprob is None else uniform_rank(own.logprob, logprobs, rng),
            ]
        )

    def discard(self, request_id: str) -> None:
        """Forget a group that is answered, and may be incomplete."""
        self._measurements.pop(request_id, None)

    def to_json(self) -> str:
        """Return the state of the test."""
        return json.dumps({"log_e_values": self.drift.log_e_values, "canaries": self.drift.canaries})

    def load_json(self, state: str) -> None:
        """Continue the test of an earlier coordinator from :meth:`to_json`.

        Raises:
            ValueError: if *state* is not such a state. This test is not changed then.
        """
        try:
            stored = json.loads(state)
            log_e_values, canaries = list(map(float, stored["log_e_values"])), int(stored["canaries"])
            self.drift = DriftTest(_NUM_QUANTITIES, log_e_values, canaries)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not the state of a canary test: {type(error).__name__}: {error}") from None
