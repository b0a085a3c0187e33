"""Reports of engines that use a history without a job."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Redis

REPORT_INTERVAL_S = 2.0
"""Seconds between two reports of an engine."""
_EXPIRY_S = 10
"""Seconds after which an engine that does not report is forgotten."""
_MAX_CLOCK_DIFFERENCE_S = 3600.0


@dataclass(frozen=True)
class OwnEngineReport:
    """What an engine without a job tells about itself."""

    id: str
    name: str
    """Name of its machine, and the number of its process there."""
    version: int
    """Number of times that its weights were replaced, or the training step that its trainer has named."""
    running: int
    """Number of requests that it decodes."""
    tokens_per_second: float
    counters: Mapping[str, float]
    """Its statistics by name, those of ``rollout_engine_*`` metrics."""
    labeled_counters: Mapping[str, Mapping[str, int]]
    """Its numbers by name and label, those of ``rollout_engine_*`` metrics with a further label."""

    def to_json(self) -> str:
        """Encode the report."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> OwnEngineReport:
        """Decode a report, which a newer version may have written with further fields."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class EngineReports:
    """The reports of the engines that use one history without a job."""

    def __init__(self, client: Redis, keys: HistoryKeys) -> None:
        self._client, self._keys = client, keys

    def write(self, report: OwnEngineReport) -> None:
        """Replace an engine's last report."""
        now = time.time()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._keys.engine(report.id), report.to_json(), ex=_EXPIRY_S)
        pipeline.zadd(self._keys.engines, {report.id: now})
        pipeline.zremrangebyscore(self._keys.engines, "-inf", now - _MAX_CLOCK_DIFFERENCE_S)
        pipeline.expire(self._keys.engines, _EXPIRY_S)
        pipeline.execute()

    def remove(self, engine: str) -> None:
        """Forget an engine that ends."""
        self._client.delete(self._keys.engine(engine))

    def read(self) -> list[OwnEngineReport]:
        """Return the reports of the engines that run, ordered by name."""
        engines: Any = self._client.zrange(self._keys.engines, 0, -1)
        if not engines:
            return []
        stored: Any = self._client.mget([self._keys.engine(engine.decode()) for engine in engines])
        reports = [OwnEngineReport.from_json(report) for report in stored if report is not None]
        return sorted(reports, key=lambda report: (report.name, report.id))
