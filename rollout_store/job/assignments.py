"""The engines' inboxes: what the coordinator orders them to do, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollout_api.protocol.keys import MESSAGE_FIELD
from rollout_store.job.part import MAX_EVENTS, StorePart, as_text, check_current
from rollout_store.job.streams import read_entries

MAX_REQUEST_BYTES_IN_ORDER = 32 * 1024
"""Largest size of a request that is part of the order for its first sample on an engine. It is in Redis twice then, but
saves the engine a round trip.
"""

RolloutKey = tuple[str, int]
"""Request id and sample, which identify a rollout within a job."""


@dataclass(frozen=True)
class Assignment:
    """The instruction to an engine to produce one rollout."""

    request_id: str
    sample: int
    entry_id: str
    """Id of the request's entry in the request stream."""
    resumed: bool = False
    """Whether there may be a partial that the engine can continue from."""
    oldest_version: int = 0
    """Oldest weight version that may have sampled, or may sample, a token of the rollout."""
    is_first: bool = False
    """Whether no engine has had the rollout before, so that it has not ended, and has no tokens."""

    @property
    def key(self) -> RolloutKey:
        """The rollout's identity within the job."""
        return self.request_id, self.sample


class OrderKind(StrEnum):
    """What an engine is ordered to do."""

    SAMPLE = "sample"
    """Produce the rollout of an assignment."""
    CANCEL = "cancel"
    """End all rollouts of a request with the tokens that they have."""
    UPDATE_WEIGHTS = "weights"
    """Load the published weights."""
    INIT_TRANSFER = "init-transfer"
    """Join the group of a trainer that sends weights from its memory, as the job's record says."""
    UPDATE_PAUSE = "pause"
    """Pause or resume decoding, as the job's record says."""


@dataclass(frozen=True)
class Order:
    """One entry of an engine's inbox: an assignment or a command."""

    kind: OrderKind
    assignment: Assignment | None = None
    """The rollout to sample."""
    request_id: str = ""
    """The request to cancel, or that of the assignment."""
    order_id: str = ""
    """Id of the entry; '' before the order is sent."""
    request: bytes = field(default=b"", repr=False)
    """The encoded request of the assignment; empty if the engine reads it itself."""
    with_request: bool = False
    """Whether Redis is to put the request into the order that is sent, unless it is large."""

    @classmethod
    def sample(cls, assignment: Assignment, *, with_request: bool = False) -> Order:
        """Return the order to produce a rollout. It contains the request if the engine has no other sample of it."""
        return cls(OrderKind.SAMPLE, assignment, assignment.request_id, with_request=with_request)

    @classmethod
    def cancel(cls, request_id: str) -> Order:
        """Return the order to end all rollouts of a request."""
        return cls(OrderKind.CANCEL, request_id=request_id)

    @classmethod
    def update_weights(cls) -> Order:
        """Return the order to load the published weights."""
        return cls(OrderKind.UPDATE_WEIGHTS)

    @classmethod
    def init_transfer(cls) -> Order:
        """Return the order to join a trainer's group."""
        return cls(OrderKind.INIT_TRANSFER)

    @classmethod
    def update_pause(cls) -> Order:
        """Return the order to pause or resume decoding, as the job's record says."""
        return cls(OrderKind.UPDATE_PAUSE)

    @classmethod
    def read(cls, entry_id: str, fields: Mapping[bytes, bytes]) -> Order | None:
        """Decode an entry of an inbox; return None if its kind is unknown, as after an upgrade of the coordinator."""
        try:
            kind = OrderKind(as_text(fields.get(b"k", b"")))
        except ValueError:
            return None
        request_id = as_text(fields.get(b"i", b""))
        assignment = None
        if kind is OrderKind.SAMPLE:
            assignment = Assignment(
                request_id,
                int(fields[b"s"]),
                as_text(fields[b"r"]),
                resumed=b"p" in fields,
                oldest_version=int(fields.get(b"o", 0)),
                is_first=b"f" in fields,
            )
        request = fields.get(MESSAGE_FIELD.encode(), b"")
        return cls(kind, assignment, request_id, entry_id, request)

    def encode(self) -> list[str | int]:
        """Return the alternating names and values of the entry's fields."""
        fields: list[str | int] = ["k", str(self.kind), "i", self.request_id]
        if self.assignment is not None:
            fields += ["s", self.assignment.sample, "r", self.assignment.entry_id]
            fields += ["p", "1"] if self.assignment.resumed else []
            fields += ["o", self.assignment.oldest_version] if self.assignment.oldest_version else []
            fields += ["f", "1"] if self.assignment.is_first else []
        return fields


class AssignmentStore(StorePart):
    """Sends orders to engines, and takes assignments back."""

    # The coordinator's side

    async def take_over(self) -> int:
        """Become the job's coordinator and return its number. Earlier coordinators can send no orders any more."""
        return int(await self._client.incr(self._keys.fencing_token))

    async def current_coordinator(self) -> int:
        """Return the number of the coordinator that took over last; 0 if Redis has lost it."""
        return int(await self._client.get(self._keys.fencing_token) or 0)

    async def send(self, coordinator: int, engine: str, orders: Sequence[Order]) -> bool:
        """Append orders to an engine's inbox; return False if the engine's lease has expired.

        Raises:
            StaleCoordinatorError: if another coordinator has taken over.
        """
        args: list[Any] = [coordinator, MAX_REQUEST_BYTES_IN_ORDER]
        for order in orders:
            fields = order.encode()
            args += [order.assignment.entry_id if order.with_request and order.assignment else "", len(fields), *fields]
        keys = self._keys
        reply = await self._call(
            "assign", keys=[keys.fencing_token, keys.lease(engine), keys.inbox(engine), keys.requests], args=args
        )
        check_current(reply)
        return bool(reply != b"gone")

    async def reclaim(self, coordinator: int, engine: str) -> list[Order] | None:
        """Remove an engine whose lease has expired; return the orders of its inbox, or None if it has a lease again.

        Raises:
            StaleCoordinatorError: if another coordinator has taken over.
        """
        keys = self._keys
        reply: Any = await self._call(
            "reclaim",
            keys=[keys.fencing_token, keys.lease(engine), keys.inbox(engine), keys.engines],
            args=[coordinator, engine],
        )
        check_current(reply)
        if reply == b"alive":
            return None
        pairs = [(as_text(entry_id), dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in reply]
        return [order for entry_id, fields in pairs if (order := Order.read(entry_id, fields)) is not None]

    async def inbox(self, engine: str) -> list[Order]:
        """Return all orders in an engine's inbox."""
        entries = await read_entries(self._client, self._keys.inbox(engine))
        return [order for entry in entries if (order := Order.read(entry.entry_id, entry.fields)) is not None]

    async def count_losses(self, rollout_ids: Sequence[str]) -> list[int]:
        """Record that an engine was lost with these rollouts; return how many were since each last made progress."""
        pipeline = self._client.pipeline(transaction=False)
        for rollout_id in rollout_ids:
            pipeline.hincrby(self._keys.attempts, rollout_id, 1)
        return [int(count) for count in await pipeline.execute()]

    async def loss_counts(self) -> dict[str, int]:
        """Return the counts of :meth:`count_losses` by rollout id."""
        return {as_text(key): int(value) for key, value in (await self._client.hgetall(self._keys.attempts)).items()}

    # The engine's side

    async def read_inbox(
        self, engine: str, cursor: str, *, timeout_s: float, max_orders: int
    ) -> tuple[list[Order], str]:
        """Read new orders; wait up to *timeout_s* for the first one.

        The *cursor* is the id of the last order that was read; "0" for none.

        Returns:
            The orders and the new cursor.
        """
        streams: Any = {self._keys.inbox(engine): cursor}
        replies: Any = await self._client.xread(streams, count=max_orders, block=max(1, int(timeout_s * 1000)))
        entries = [(as_text(entry_id), fields) for _, found in replies for entry_id, fields in found]
        orders = [order for entry_id, fields in entries if (order := Order.read(entry_id, fields)) is not None]
        return orders, entries[-1][0] if entries else cursor

    async def acknowledge(self, engine: str, order_id: str) -> None:
        """Delete an order that was executed, or needs no work, from an engine's inbox."""
        await self._client.xdel(self._keys.inbox(engine), order_id)

    async def return_assignment(
        self, engine: str, order_id: str, assignment: Assignment, reason: str, *, failed: bool = False
    ) -> None:
        """Return an assignment that an engine cannot execute.

        The coordinator assigns the rollout elsewhere, or ends it for this *reason* if it has *failed*.
        """
        await self._call(
            "return_assignment",
            keys=[self._keys.inbox(engine), self._keys.events],
            args=[
                order_id,
                assignment.request_id,
                assignment.sample,
                engine,
                reason,
                MAX_EVENTS,
                "1" if failed else "",
            ],
        )
