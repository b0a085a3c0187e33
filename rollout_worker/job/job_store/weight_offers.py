"""Offers of an engine to pass its weights on to another engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout_worker.job.job_store.part import StorePart
from rollout_worker.job.limits import WEIGHT_OFFER_EXPIRY_S


@dataclass(frozen=True)
class WeightOffer:
    """Where an engine passes its full weights on, or why it does not."""

    source: str
    """Id of the engine."""
    version: int
    """Version of the weights."""
    token: str
    """What the other engine must send when it connects. Every offer has its own."""
    addresses: list[tuple[str, int]] = field(default_factory=list)
    """Host and port of each of the engine's worker processes, by rank."""
    error: str = ""
    """Why the engine does not pass its weights on; empty if it does."""


class WeightOfferStore(StorePart):
    """Keeps the last offer to each engine until it expires."""

    async def offer(self, target: str, offer: WeightOffer) -> None:
        """Offer weights to the engine *target*."""
        await self._client.set(self._keys.weight_offer(target), json.dumps(asdict(offer)), ex=WEIGHT_OFFER_EXPIRY_S)

    async def read(self, target: str) -> WeightOffer | None:
        """Return the offer to the engine *target*; None if there is none."""
        found: Any = await self._client.get(self._keys.weight_offer(target))
        if found is None:
            return None
        fields = json.loads(found)
        return WeightOffer(**fields | {"addresses": [(host, port) for host, port in fields["addresses"]]})
