"""The engines of a job: their leases and reports, and how the machines of an engine find each other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import redis
import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import CodecError
from rollout_store.job.part import StorePart, as_text

ENGINE_LEASE_S = 5.0
"""Seconds after which an engine that does not renew its lease is considered lost."""
FAILED_ENGINES_EXPIRY_S = 15.0
"""Seconds that a worker's report of engines that cannot start is valid; it is repeated every second."""
OFFER_EXPIRY_S = 10
"""Seconds after which the offer of an engine on several machines, and an answer to it, expire without renewal."""
_ENDED = "ended"


@dataclass
class EngineReport:
    """An engine's state, which it publishes with each heartbeat."""

    name: str
    """Name of the engine, which stays the same over its restarts; the engine's id does not."""
    worker: str = ""
    """Id of the worker process that the engine belongs to."""
    pid: int = 0
    """Process id of the engine's actor."""
    max_running: int = 1
    """Maximum number of rollouts that the engine decodes at once."""
    non_speculative: bool = False
    """Whether vLLM runs without speculation in order to serve requests that want no drafts."""
    speculation_disabled: bool = False
    """Whether vLLM runs without speculation because drafting did not pay; the engine serves all requests."""
    version: int = 0
    """Weight version that the engine serves."""
    weights: str = ""
    """Identity of those weights (``WeightUpdate.identity``); '' for the weights that the job began with."""
    loading: int | None = None
    """Weight version that is being loaded."""
    failed: dict[int, str] = field(default_factory=dict)
    """Weight versions that could not be loaded, with the reasons."""
    loads: int = 0
    """Number of attempts to load weights."""
    pinned: int = 0
    """Number of running rollouts that are pinned to a weight version."""
    draining: bool = False
    """Whether the engine is leaving the job and takes no new rollouts."""
    transfer_backend: str = ""
    """The backend of vLLM's weight transfer from a trainer's memory; '' if there is none."""
    ranks: int = 1
    """Number of the engine's worker processes. Each has a rank in a trainer's group."""
    transfer_group: str = ""
    """Id of the trainer's group that the engine was last told to join; '' if there was none."""
    transfer_error: str = ""
    """Why the engine is no member of this group; '' if it is."""
    receiving: str = ""
    """Identity of the weights that a trainer sends now, or may send; '' if there are none."""
    received: int = 0
    """Number of parts of these weights that the engine has received."""
    full_version: int = 0
    """Version of the engine's full weights, regardless of an adapter."""
    sampled_version: int | None = None
    """Newest weight version of which the engine has returned log-probabilities, all finite; None if there is none."""
    unusable_version: int | None = None
    """Newest weight version with which an output of the engine could not be used; None if there is none."""
    missed: int | None = None
    """Version of weights from a trainer's memory that the engine should have but has not received."""
    paused: str = ""
    """How the engine is paused (a :class:`~rollout_api.PauseMode`); '' if it is not."""
    can_sleep: bool = False
    """Whether the engine can free the memory of its GPUs while it is paused."""
    counters: dict[str, float] = field(default_factory=dict)
    """Statistics of the engine and its drafter by name."""
    labeled_counters: dict[str, dict[str, int]] = field(default_factory=dict)
    """Numbers by name and label, those of :data:`~rollout_store.runtime.engine_metrics.LABELED_ENGINE_METRICS`."""

    @classmethod
    def read(cls, data: Any) -> EngineReport:
        """Decode a report; fields that only a later release knows are ignored.

        Raises:
            CodecError: it is no report.
        """
        known = {one.name for one in fields(cls)}
        try:
            report: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False)
            return cls(**{name: value for name, value in report.items() if name in known})
        except Exception as error:  # msgpack raises many unrelated types
            raise CodecError(f"not a report of an engine: {error or type(error).__name__}") from None

    def pack(self) -> bytes:
        """Encode the report."""
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @property
    def upcoming_version(self) -> int:
        """Weight version that samples new rollouts: the one being loaded, if there is one."""
        return self.version if self.loading is None else self.loading

    def has_full_weights(self, version: int) -> bool:
        """Return whether the engine serves full weights of *version*, now or soon."""
        return not self.draining and version in (self.full_version, self.loading)


class RegisteredEngine(NamedTuple):
    """An engine that has not been removed."""

    report: EngineReport
    alive: bool
    """Whether its lease is valid."""


class LeaseState(IntEnum):
    """The state of an engine's lease after a heartbeat."""

    LOST = 0
    """It had expired, so that the engine's rollouts are reassigned."""
    VALID = 1
    OBSERVED = 2
    """It is valid, and someone observes the running rollouts."""


class EngineRegistry(StorePart):
    """Renews and reads the leases and reports of engines."""

    async def heartbeat(self, engine: str, report: EngineReport, *, register: bool = False) -> LeaseState:
        """Publish a report and renew the engine's lease, or create it."""
        state = await self._call(
            "heartbeat",
            keys=[self._keys.lease(engine), self._keys.engines, self._keys.observed],
            args=[engine, report.pack(), int(ENGINE_LEASE_S * 1000), 1 if register else 0],
        )
        return LeaseState(state)

    async def release(self, engine: str) -> None:
        """End an engine's lease, so that the coordinator reassigns its rollouts at once."""
        await self._client.delete(self._keys.lease(engine))

    async def engines(self) -> dict[str, RegisteredEngine]:
        """Return all engines by id. Those whose lease has expired stay until the coordinator reclaims their inbox.

        An engine whose report cannot be read counts as one whose lease has expired.
        """
        reports = await self._client.hgetall(self._keys.engines)
        ids = [as_text(engine) for engine in reports]
        leases = await self._client.mget([self._keys.lease(engine) for engine in ids]) if ids else []
        return {
            engine: _registered(engine, report, lease is not None)
            for engine, report, lease in zip(ids, reports.values(), leases, strict=True)
        }

    async def report(self, engine: str) -> EngineReport | None:
        """Return the report of one engine; None if it was removed."""
        report = await self._client.hget(self._keys.engines, engine)
        return None if report is None else EngineReport.read(report)

    async def shutdown_grace(self, worker: str) -> float | None:
        """Return the seconds within which the engines of a worker must leave the job; None if they stay."""
        seconds = await self._client.get(self._keys.shutdown_grace(worker))
        return None if seconds is None else float(seconds)

    async def failed(self) -> dict[str, str]:
        """Return the engines that cannot start, with the reasons, as their workers have reported them lately."""
        reports = await self._client.hgetall(self._keys.failed_engines)
        if not reports:
            return {}
        now, _ = await self._client.time()
        failed: dict[str, str] = {}
        for data in reports.values():
            report = json.loads(data)
            if now - report["time"] <= FAILED_ENGINES_EXPIRY_S:
                failed |= report["errors"]
        return failed


class EngineOffer(NamedTuple):
    """What the followers have to know to start their part of an engine."""

    id: str
    """Identifies this start of the engine."""
    settings: dict[str, Any]
    """vLLM's engine arguments on the leader."""


class FollowerAnswer(NamedTuple):
    """The answer of a follower."""

    offer: str
    """Id of the offer that it answers."""
    process: str
    """Identifies the process that runs its part of the engine."""
    ended: bool
    """Whether this process has ended."""


class EngineGroupStore:
    """The offer of one leader and the answers to it. All of them expire unless they are renewed."""

    def __init__(self, client: redis.Redis, keys: MessageKeys, group: str) -> None:
        """Use the keys of the group that is called *group*."""
        self._client, self._keys, self._group = client, keys, group

    def offer(self) -> EngineOffer | None:
        """Return the leader's offer; None if it has no engine."""
        found: Any = self._client.get(self._keys.engine_group(self._group))
        return None if found is None else EngineOffer(**json.loads(found))

    def renew_offer(self, offer: EngineOffer) -> None:
        """Publish an offer, or renew it."""
        self._client.set(self._keys.engine_group(self._group), json.dumps(offer._asdict()), ex=OFFER_EXPIRY_S)

    def withdraw_offer(self) -> None:
        """Tell the followers that the engine has ended."""
        self._client.delete(self._keys.engine_group(self._group))

    def answers(self, size: int) -> list[FollowerAnswer | None]:
        """Return the answers of the followers with the ranks 1 to *size* - 1; None for one that has not answered."""
        found: Any = self._client.mget([self._keys.engine_group_member(self._group, rank) for rank in range(1, size)])
        return [None if value is None else _parse_answer(as_text(value)) for value in found]

    def renew_answer(self, rank: int, answer: FollowerAnswer) -> None:
        """Answer an offer, or renew the answer."""
        value = f"{answer.offer}/{answer.process}/{_ENDED if answer.ended else ''}"
        self._client.set(self._keys.engine_group_member(self._group, rank), value, ex=OFFER_EXPIRY_S)


def _parse_answer(value: str) -> FollowerAnswer:
    offer, process, ended = value.split("/")
    return FollowerAnswer(offer, process, ended == _ENDED)


class EngineError(RuntimeError):
    """The engine cannot do what was requested. The message says why, and what to do where something can be done."""


def _registered(engine: str, report: Any, alive: bool) -> RegisteredEngine:
    try:
        return RegisteredEngine(EngineReport.read(report), alive)
    except CodecError:
        return RegisteredEngine(EngineReport(engine), alive=False)
