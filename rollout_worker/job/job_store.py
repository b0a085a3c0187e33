"""A job's message plane as its coordinator and its engines use it: every read and every atomic step on Redis.

Nothing here decides anything. Each method is idempotent, so that it may be tried again when a reply was lost, and
raises :class:`redis.RedisError` if Redis fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import msgpack
import redis.asyncio

from rollout_api.protocol.dead_letters import add_dead_letter
from rollout_api.protocol.keys import DATA, MessageKeys
from rollout_api.protocol.messages import (
    Message,
    Partial,
    Purpose,
    Rollout,
    RolloutId,
    RolloutRequest,
    WeightUpdate,
    decode,
    encode,
    pack_tokens,
)
from rollout_worker.history.connection import async_server_function
from rollout_worker.history.records import CONTEXT_TOKENS
from rollout_worker.job.canaries import measure
from rollout_worker.job.ledger import META_FIELDS, LedgerEntry

LEASE_S = 5.0
"""How long an engine that does not renew its lease is taken to be alive."""
LEDGER_KEPT_S = 7 * 24 * 3600
"""How long a request that was answered is known, so that it is not answered again."""
TRAJECTORY_KEPT_S = 3600
KEPT_S = 24 * 3600
"""How long what clients of an ended job have not read may still be read."""
_EVENTS_KEPT = 4096
_STATUS_EXPIRES_S = 10
_PAGE = 500


Entry = tuple[str, dict[bytes, bytes]]
"""Id and fields of a stream entry."""


class StaleCoordinatorError(RuntimeError):
    """Another coordinator has taken over; this one must end."""


@dataclass(frozen=True)
class Assignment:
    """An order to an engine to make one rollout."""

    request_id: str
    sample: int
    entry: str
    """Id of the request's entry in the requests stream."""
    resumed: bool = False
    """There may be a partial to go on from."""


@dataclass(frozen=True)
class Order:
    """One entry of an engine's inbox."""

    order_id: str
    kind: str
    """``sample``, ``move`` (hand *assignment* back, as far as it is), ``cancel`` (*request_id*) or ``weights`` (what is
    to be served has changed)."""
    assignment: Assignment | None = None
    request_id: str = ""

    @classmethod
    def read(cls, entry: str, fields: Mapping[bytes, bytes]) -> Order | None:
        """The order in an inbox entry; None if it is none that this program knows."""
        kind, request_id = _text(fields.get(b"k", b"")), _text(fields.get(b"i", b""))
        if kind in ("sample", "move"):
            assignment = Assignment(request_id, int(fields[b"s"]), _text(fields[b"r"]), resumed=b"p" in fields)
            return cls(entry, kind, assignment, request_id)
        return cls(entry, kind, None, request_id) if kind in ("cancel", "weights") else None


@dataclass
class EngineReport:
    """What an engine says of itself with each heartbeat."""

    name: str
    """Of the actor; the engine's id adds which incarnation it is."""
    worker: str = ""
    """The process on its machine that it belongs to."""
    pid: int = 0
    slots: int = 1
    """Rollouts decoded at the same time."""
    plain: bool = False
    """vLLM with no speculation configured, for requests that want no drafts."""
    given_up: bool = False
    """Drafting did not pay: it has gone on with no speculation configured, for all requests."""
    version: int = 0
    """Weight version that it serves."""
    weights: str = ""
    """Which weights those are (``WeightUpdate.identity``); '' for those that the job began with."""
    loading: int | None = None
    """Weight version that it will serve what is begun from now on, while that is being loaded."""
    failed: dict[int, str] = field(default_factory=dict)
    """Weight versions that it could not load, and why."""
    loads: int = 0
    """How often it has tried to load weights."""
    pinned: int = 0
    """Rollouts in the making that are pinned to a weight version."""
    draining: bool = False
    broadcast: str = ""
    """How it takes weights from a trainer's memory: nccl, gloo, or not at all."""
    ranks: int = 1
    """Its worker processes, each of which takes part in a broadcast."""
    counters: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Any) -> EngineReport:
        """The report in an entry of ``engines``; what a later program says beyond this is left out."""
        known = {one.name for one in fields(cls)}
        said: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False)
        return cls(**{name: value for name, value in said.items() if name in known})

    @property
    def to_come(self) -> int:
        """Weight version of what is begun from now on."""
        return self.version if self.loading is None else self.loading


class JobStore:
    """One job's streams, hashes and server-side functions."""

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys) -> None:
        self.keys = keys
        self.client = client
        functions = ("admit", "assign", "cancel", "checkpoint", "finish", "give_back", "heartbeat", "reclaim")
        self._functions = {name: async_server_function(client, __package__, name) for name in functions}

    # requests

    async def read(self, streams: Mapping[str, str], *, block: float, count: int) -> dict[str, list[Entry]]:
        """Entries behind the given ids: stream → (entry id, fields); waits up to *block* seconds for the first."""
        cursors: Any = dict(streams)
        replies: Any = await self.client.xread(cursors, count=count, block=max(1, int(block * 1000)))
        return {
            _text(stream): [(_text(entry_id), fields) for entry_id, fields in entries] for stream, entries in replies
        }

    async def entries(self, stream: str, after: str = "-") -> list[Entry]:
        """All entries of a stream now, read in pages."""
        found: list[Entry] = []
        while True:
            page: Any = await self.client.xrange(stream, min=after, count=_PAGE)
            found += [(_text(entry_id), fields) for entry_id, fields in page]
            if len(page) < _PAGE:
                return found
            after = f"({found[-1][0]}"

    async def last(self, stream: str) -> str:
        """Id of a stream's newest entry; reading behind it gives what comes from now on."""
        newest: Any = await self.client.xrevrange(stream, count=1)
        return _text(newest[0][0]) if newest else "0"

    async def admit(self, entry: str, request: RolloutRequest) -> int:
        """Take a request up.

        Returns:
            1; or 0 if it is open already (a repetition), -1 if it was answered before, -2 if a request by this id is
            open that asks for another number of samples.
        """
        ledger = self.keys.ledger(request.request_id)
        return int(await self._functions["admit"](keys=[ledger, self.keys.requests], args=[entry, request.sampling.n]))

    async def progress(self, request_ids: Sequence[str]) -> list[tuple[frozenset[int], bool]]:
        """What is done of each request, and whether it is cancelled."""
        pipeline = self.client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hkeys(self.keys.ledger(request_id))
            pipeline.hget(self.keys.ledger(request_id), "cancelled")
        replies = await pipeline.execute()
        return [
            (frozenset(int(key) for key in fields if key not in META_FIELDS), cancelled == b"1")
            for fields, cancelled in zip(replies[::2], replies[1::2], strict=True)
        ]

    async def request(self, entry: str) -> RolloutRequest | None:
        """The request of an entry, as the client sent it; None once it is answered."""
        found: Any = await self.client.xrange(self.keys.requests, min=entry, max=entry)
        if not found:
            return None
        message = decode(found[0][1][DATA.encode()])
        return message if isinstance(message, RolloutRequest) else None

    async def delete(self, stream: str, *entries: str) -> None:
        """Delete entries that were carried out."""
        if entries:
            await self.client.xdel(stream, *entries)

    async def bury(self, stream: str, entry: str, data: bytes, reason: str) -> None:
        """Move an entry that cannot be read or carried out to the dead letters."""
        async with self.client.pipeline(transaction=True) as pipeline:
            add_dead_letter(pipeline, self.keys.dead, stream=stream, data=data, reason=reason)
            pipeline.xdel(stream, entry)
            await pipeline.execute()

    async def reply(self, client: str, message: Message) -> None:
        """Put a message into a client's result stream."""
        await self.client.xadd(self.keys.results(client), {DATA: encode(message)})

    async def mark_cancelled(self, request_ids: Sequence[str]) -> None:
        """Remember that requests were cancelled, if they are known."""
        await self._functions["cancel"](keys=[self.keys.ledger(request_id) for request_id in request_ids])

    async def finish(self, request: RolloutRequest, rollout: Rollout, *, engine: str = "", order: str = "") -> bool:
        """Record that a rollout has ended, answer the client and queue it for its history, in one atomic step.

        Args:
            request: what asked for it.
            rollout: what came out.
            engine: id of the engine that made it.
            order: the order in the engine's inbox that this carries out.

        Returns:
            False if it was recorded before, or nobody asks for it any more; nothing is changed then.
        """
        return bool(await self._finish(request, rollout, engine, order, self.client) == 1)

    async def finish_all(self, ended: Sequence[tuple[RolloutRequest, Rollout]]) -> None:
        """:meth:`finish` for many that no engine had, each by itself."""
        pipeline = self.client.pipeline(transaction=False)
        for request, rollout in ended:
            await self._finish(request, rollout, "", "", pipeline)
        await pipeline.execute()

    async def _finish(
        self, request: RolloutRequest, rollout: Rollout, engine: str, order: str, client: redis.asyncio.Redis
    ) -> Any:
        keys, rollout_id = self.keys, RolloutId.parse(rollout.rollout_id)
        for_history = rollout.purpose is Purpose.TRAIN and bool(rollout.token_ids)
        context = request.prompt_token_ids[-CONTEXT_TOKENS:] if request.turn else []
        return await self._functions["finish"](
            keys=[
                keys.ledger(request.request_id),
                keys.requests,
                keys.results(request.reply_to),
                keys.outbox,
                keys.partials,
                keys.attempts,
                keys.events,
                keys.inbox(engine),
                keys.trajectory(request.trajectory_id or ""),
                keys.totals,
            ],
            args=[
                rollout.rollout_id,
                rollout_id.sample,
                LedgerEntry.of(rollout).pack(),
                encode(rollout, half_logprobs=request.half_logprobs),
                encode(rollout.model_copy(update={"logprobs": None})) if for_history else b"",
                order,
                engine,
                request.request_id,
                LEDGER_KEPT_S,
                TRAJECTORY_KEPT_S if request.trajectory_id else 0,
                _EVENTS_KEPT,
                len(rollout.token_ids),
                rollout.steps,
                rollout.drafted,
                rollout.accepted,
                pack_tokens(context),
                measure(request, rollout, rollout_id.sample),
            ],
            client=client,
        )

    # partial rollouts

    async def checkpoint(self, request: RolloutRequest, sample: int, partial: Partial) -> bool:
        """Keep a response so far; False if the rollout has ended."""
        kept = await self._functions["checkpoint"](
            keys=[self.keys.ledger(request.request_id), self.keys.partials, self.keys.attempts],
            args=[str(request.rollout_id(sample)), sample, encode(partial)],
        )
        return bool(kept)

    async def partials(self, samples: Sequence[tuple[RolloutRequest, int]]) -> list[Partial | None]:
        """The response so far that was kept last, of each sample of a request."""
        ids = [str(request.rollout_id(sample)) for request, sample in samples]
        found: Any = await self.client.hmget(self.keys.partials, ids)
        messages = [None if data is None else decode(data) for data in found]
        return [message if isinstance(message, Partial) else None for message in messages]

    async def before(self, request: RolloutRequest, sample: int, resumed: bool) -> tuple[bool, bool, Partial | None]:
        """What an engine must know before it begins a rollout.

        Returns:
            Whether it has ended, whether its request was cancelled, and, if *resumed*, the response so far.
        """
        pipeline = self.client.pipeline(transaction=False)
        ledger = self.keys.ledger(request.request_id)
        pipeline.hexists(ledger, str(sample))
        pipeline.hget(ledger, "cancelled")
        if resumed:
            pipeline.hget(self.keys.partials, str(request.rollout_id(sample)))
        done, cancelled, *partial = await pipeline.execute()
        message = decode(partial[0]) if partial and partial[0] is not None else None
        return bool(done), cancelled == b"1", message if isinstance(message, Partial) else None

    async def partial_ids(self) -> set[str]:
        """Rollouts of which there is a partial."""
        return {_text(key) for key in await self.client.hkeys(self.keys.partials)}

    # coordinator

    async def take_over(self) -> int:
        """Become the coordinator; whoever was it before can give out nothing any more."""
        return int(await self.client.incr(self.keys.coordinator))

    async def coordinator(self) -> int:
        """Number of the coordinator that took over last; 0 in a Redis that has lost it."""
        return int(await self.client.get(self.keys.coordinator) or 0)

    async def assign(
        self, number: int, engine: str, orders: Iterable[Assignment | str], kind: Literal["sample", "move"] = "sample"
    ) -> list[str] | None:
        """Put orders into an engine's inbox; None if the engine is gone.

        Args:
            number: of this coordinator.
            engine: its id.
            orders: rollouts to make, or ``weights``, or ``cancel <request id>``.
            kind: what to do with the rollouts.

        Raises:
            StaleCoordinatorError: see there.
        """
        args: list[Any] = [number]
        for order in orders:
            if isinstance(order, Assignment):
                fields = ["k", kind, "i", order.request_id, "s", order.sample, "r", order.entry]
                fields += ["p", "1"] if order.resumed else []
            else:
                what, _, request_id = order.partition(" ")
                fields = ["k", what, "i", request_id]
            args += [len(fields), *fields]
        reply = await self._functions["assign"](
            keys=[self.keys.coordinator, self.keys.lease(engine), self.keys.inbox(engine)], args=args
        )
        if reply == b"stale":
            raise StaleCoordinatorError("another coordinator has taken over")
        return None if reply == b"gone" else [_text(entry) for entry in reply]

    async def reclaim(self, number: int, engine: str) -> list[Order] | None:
        """What a lost engine had to do; None if its lease has been renewed meanwhile.

        Raises:
            StaleCoordinatorError: see there.
        """
        keys = self.keys
        reply: Any = await self._functions["reclaim"](
            keys=[keys.coordinator, keys.lease(engine), keys.inbox(engine), keys.engines], args=[number, engine]
        )
        if reply == b"stale":
            raise StaleCoordinatorError("another coordinator has taken over")
        if reply == b"alive":
            return None
        pairs = [(_text(entry), dict(zip(fields[::2], fields[1::2], strict=True))) for entry, fields in reply]
        return [order for entry, fields in pairs if (order := Order.read(entry, fields)) is not None]

    async def count_loss(self, rollout_ids: Sequence[str]) -> list[int]:
        """Count that an engine was lost with these rollouts; how often that was so since each made progress."""
        pipeline = self.client.pipeline(transaction=False)
        for rollout_id in rollout_ids:
            pipeline.hincrby(self.keys.attempts, rollout_id, 1)
        return [int(count) for count in await pipeline.execute()]

    async def attempts(self) -> dict[str, int]:
        """As :meth:`count_loss` left them."""
        return {_text(key): int(value) for key, value in (await self.client.hgetall(self.keys.attempts)).items()}

    async def engines(self) -> dict[str, tuple[EngineReport, bool]]:
        """Every engine that was not reclaimed: id → its last report and whether its lease holds."""
        reports = await self.client.hgetall(self.keys.engines)
        ids = [_text(engine) for engine in reports]
        alive = await self.client.mget([self.keys.lease(engine) for engine in ids]) if ids else []
        return {
            engine: (EngineReport.read(report), lease is not None)
            for engine, report, lease in zip(ids, reports.values(), alive, strict=True)
        }

    async def orders(self, engine: str) -> list[Order]:
        """All that an engine has to do now."""
        entries = await self.entries(self.keys.inbox(engine))
        return [order for entry, fields in entries if (order := Order.read(entry, fields)) is not None]

    async def set_status(self, status: bytes) -> None:
        """Publish the coordinator's status."""
        await self.client.set(self.keys.status, status, ex=_STATUS_EXPIRES_S)

    async def set_waiting(self, rollouts: int, tokens: float) -> None:
        """Tell engines what waits for them, for each of them: how many rollouts, and tokens of all of these."""
        batch = self.client.pipeline(transaction=False)
        batch.hset(self.keys.waiting, mapping={"rollouts": rollouts, "tokens": tokens})
        batch.expire(self.keys.waiting, _STATUS_EXPIRES_S)
        await batch.execute()

    async def keep_canaries(self, test: str) -> None:
        """Keep what the test of the job's canaries has come to."""
        await self.client.set(self.keys.canaries, test)

    async def canaries(self) -> str | None:
        """What was kept of it last."""
        kept = await self.client.get(self.keys.canaries)
        return None if kept is None else _text(kept)

    async def waiting(self) -> tuple[int, float]:
        """What :meth:`set_waiting` said last; nothing if no coordinator has said so for a while."""
        rollouts, tokens = await self.client.hmget(self.keys.waiting, "rollouts", "tokens")
        return int(rollouts or 0), float(tokens or 0)

    async def totals(self) -> dict[str, int]:
        """Since the job began: rollouts, tokens, steps, drafted, accepted."""
        return {_text(key): int(value) for key, value in (await self.client.hgetall(self.keys.totals)).items()}

    async def unread(self, client: str) -> tuple[int, int]:
        """Results that a client has not read yet: how many, and about how many bytes."""
        stream = self.keys.results(client)
        length = int(await self.client.xlen(stream))
        if not length:
            return 0, 0
        groups = await self.client.xinfo_groups(stream)
        lags = [group.get("lag") for group in groups]
        # an unknown lag (None) counts as all of it
        unread = max((length if lag is None else int(lag) for lag in lags), default=length)
        size = int(await self.client.memory_usage(stream, samples=5) or 0)
        return unread, size * unread // length

    # weights

    async def set_weights(self, update: WeightUpdate) -> None:
        """From now on these are the weights to serve."""
        async with self.client.pipeline(transaction=True) as pipeline:
            pipeline.hset(self.keys.weights, update.weights.value, encode(update))
            if update.weights.value == "full":
                pipeline.hdel(self.keys.weights, "lora")
            await pipeline.execute()

    async def weights(self) -> list[WeightUpdate]:
        """What is to be served: full weights, if any were published, and an adapter, if one came after them."""
        stored = await self.client.hmget(self.keys.weights, ["full", "lora"])
        updates = [decode(data) for data in stored if isinstance(data, bytes)]
        return [update for update in updates if isinstance(update, WeightUpdate)]

    # engines

    async def heartbeat(self, engine: str, report: EngineReport, *, begin: bool = False) -> bool:
        """Renew an engine's lease, or *begin* it; False if it had ended."""
        renewed = await self._functions["heartbeat"](
            keys=[self.keys.lease(engine), self.keys.engines],
            args=[engine, msgpack.packb(asdict(report)), int(LEASE_S * 1000), 1 if begin else 0],
        )
        return bool(renewed)

    async def asked_to_leave(self, worker: str) -> float | None:
        """Seconds in which the engines of a worker are to leave; None if nobody told it to end."""
        seconds = await self.client.get(self.keys.leaving(worker))
        return None if seconds is None else float(seconds)

    async def head(self) -> str:
        """Which Ray head runs the job; '' if none has said so."""
        return _text(await self.client.get(self.keys.head) or "")

    async def leave(self, engine: str) -> None:
        """End an engine's lease; what it still had to do is taken back by the coordinator."""
        await self.client.delete(self.keys.lease(engine))

    async def give_back(self, engine: str, order_id: str, assignment: Assignment, reason: str) -> None:
        """Return a rollout that this engine cannot make now; the coordinator finds another way."""
        await self._functions["give_back"](
            keys=[self.keys.inbox(engine), self.keys.events],
            args=[order_id, assignment.request_id, assignment.sample, engine, reason, _EVENTS_KEPT],
        )

    async def let_expire(self) -> None:
        """Of a job that has ended: what its clients have not read yet may be read for a day."""
        batch = self.client.pipeline(transaction=False)
        async for key in self.client.scan_iter(self.keys.every(), count=_PAGE):
            batch.expire(key, KEPT_S, lt=True)  # a lease still ends when it would have
            if len(batch) >= _PAGE:
                await batch.execute()
        await batch.execute()

    async def server(self) -> str:
        """Which run of which server this is: another one may have lost the last moments of the one before."""
        found: dict[str, Any] = await self.client.info("server")
        return str(found["run_id"])

    async def clock(self) -> float:
        """Redis' own time, in which deadlines count."""
        seconds, micros = await self.client.time()
        return float(seconds) + micros / 1e6


def arrival(entry: str) -> float:
    """Unix time, by Redis' clock, at which a stream entry arrived."""
    return int(entry.partition("-")[0]) / 1000


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
