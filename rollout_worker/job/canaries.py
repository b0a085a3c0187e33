"""Collects what is measured of groups that have a canary, and tests it; see :mod:`rollout_worker.policy.canary`."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

from rollout_api.protocol.messages import FinishReason, Rollout, RolloutRequest
from rollout_worker.policy.canary import CANARY_TOKENS, DriftTest, canary_of, uniform_rank

_QUANTITIES = 2


class Measured(NamedTuple):
    """What is measured of one sample."""

    version: int
    """The one weight version that sampled it."""
    length: int
    logprob: float | None
    """Mean of its first tokens; None where logprobs were not asked for."""


def measure(request: RolloutRequest, rollout: Rollout, sample: int) -> bytes:
    """For the coordinator; empty where the group has no canary, or this sample cannot be compared with its siblings."""
    if canary_of(request.request_id, request.sampling.n) is None or not rollout.token_ids:
        return b""
    versions = {span.weight_version for span in rollout.spans}
    if rollout.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or len(versions) != 1:
        return b""
    first = None if rollout.logprobs is None else list(rollout.logprobs[:CANARY_TOKENS])
    logprob = sum(first) / len(first) if first else None
    return json.dumps(Measured(versions.pop(), len(rollout.token_ids), logprob)).encode()


class Canaries:
    """The groups whose canaries have not all ended, and the test."""

    def __init__(self) -> None:
        self.test = DriftTest(_QUANTITIES)
        self._measured: dict[str, dict[int, Measured]] = {}

    def note(self, request: RolloutRequest, sample: int, measured: bytes) -> None:
        """A sample of a group has ended; *measured* as :func:`measure` has it."""
        canary = canary_of(request.request_id, request.sampling.n)
        if canary is None:
            return
        group = self._measured.setdefault(request.request_id, {})
        if measured:
            group[sample] = Measured(*json.loads(measured))
        if len(group) < request.sampling.n or len({one.version for one in group.values()}) > 1:
            return
        del self._measured[request.request_id]
        # chance of its own, the same for whoever tests this group
        chance = random.Random(request.request_id)
        own, others = group.pop(canary), list(group.values())
        logprobs = [one.logprob for one in others if one.logprob is not None]
        self.test.observe(
            [
                uniform_rank(own.length, [one.length for one in others], chance),
                None if own.logprob is None else uniform_rank(own.logprob, logprobs, chance),
            ]
        )

    def forget(self, request_id: str) -> None:
        """A request is answered, or cannot be."""
        self._measured.pop(request_id, None)

    def pack(self) -> str:
        """The test so far."""
        return json.dumps({"wealth": self.test.wealth, "canaries": self.test.canaries})

    def unpack(self, kept: str) -> None:
        """Go on with the test of an earlier coordinator."""
        found = json.loads(kept)
        self.test = DriftTest(_QUANTITIES, found["wealth"], found["canaries"])
