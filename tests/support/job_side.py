"""A job's side of the protocol, in plain Redis commands: what docs/protocol.md says a coordinator does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import redis

from rollout_api import (
    Cancel,
    FinishReason,
    Refusal,
    Rollout,
    RolloutRequest,
    Sampling,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.protocol.keys import HistoryKeys, MessageKeys, named
from rollout_api.protocol.length_entries import pack_entry, pack_recent
from rollout_api.protocol.messages import Message

VOCABULARY = 1000
HISTORY = HistoryKeys("default", "math-history")


class JobSide:
    """One job that exists in Redis; :meth:`serving` answers its requests."""

    def __init__(
        self, url: str, *, uid: str = "uid-1", name: str = "default/math", max_rollouts: int = 100_000
    ) -> None:
        self.redis = redis.Redis.from_url(url, socket_timeout=5)
        self.keys = MessageKeys(uid)
        self.uid, self.name = uid, name
        self.sampled: list[str] = []
        """Rollout ids in the order in which they were made."""
        self.answered: dict[str, int] = {}
        """Request id → rollouts that were made for it."""
        self.cancelled: set[str] = set()
        self._entries: dict[str, list[bytes]] = {}
        """Request id → its entries, as they were last read."""
        about = {
            "version": 1,
            "model": "das/tiny",
            "vocabulary": VOCABULARY,
            "sampling": Sampling(n=2, max_tokens=64).model_dump_json(),
            "max_model_len": 256,
            "max_request_bytes": 4096,
            "max_rollouts": max_rollouts,
            "history": HISTORY.full_name,
            "state": "running",
        }
        self.redis.hset(self.keys.job, mapping=about)
        self.redis.set(named(name), uid)

    # what it reads

    def entries(self) -> list[tuple[bytes, RolloutRequest]]:
        """Requests that are in the stream."""
        found = []
        for entry, fields in self.redis.xrange(self.keys.requests):
            message = decode(fields[b"d"])
            assert isinstance(message, RolloutRequest)
            found.append((entry, message))
            self._entries.setdefault(message.request_id, []).append(entry)
        return found

    def requests(self) -> list[RolloutRequest]:
        return [request for _, request in self.entries()]

    def control(self) -> list[Message]:
        return [decode(fields[b"d"]) for _, fields in self.redis.xrange(self.keys.control)]

    def wait_for_requests(self, count: int) -> list[RolloutRequest]:
        wait_until(lambda: len(self.requests()) >= count)
        return self.requests()

    # what it writes

    def rollout(
        self,
        request: RolloutRequest,
        sample: int,
        *,
        length: int = 3,
        finish_reason: FinishReason = FinishReason.STOP,
    ) -> Rollout:
        tokens = [sample + 1] * length
        return Rollout(
            rollout_id=str(request.rollout_id(sample)),
            problem_id=request.problem,
            purpose=request.purpose,
            token_ids=tokens,
            logprobs=[-0.5] * length,
            spans=[WeightSpan(start=0, weight_version=0)] if tokens else [],
            finish_reason=finish_reason,
        )

    def reply(self, client: str, message: Message) -> None:
        self.redis.xadd(self.keys.results(client), {"d": encode(message)})

    def answer(self, request: RolloutRequest, samples: list[int] | None = None, **about: Any) -> None:
        """End some samples of a request (default: all), and the request with the last of them."""
        n = self.samples_of(request)
        for sample in range(n) if samples is None else samples:
            rollout = self.rollout(request, sample, **about)
            self.sampled.append(rollout.rollout_id)
            self.answered[request.request_id] = self.answered.get(request.request_id, 0) + 1
            self.reply(request.reply_to, rollout)
        if self.answered[request.request_id] >= n:
            self.forget(request)

    def forget(self, request: RolloutRequest) -> None:
        """Delete a request's entries."""
        self.redis.xdel(self.keys.requests, *self._entries.get(request.request_id, ["0-0"]))

    @staticmethod
    def samples_of(request: RolloutRequest) -> int:
        return request.sampling.n if "n" in request.sampling.model_fields_set else 2

    def take_up(self, update: WeightUpdate, entry: bytes) -> None:
        """From now on these are the weights to serve."""
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.hset(self.keys.weights, update.weights.value, encode(update))
        pipeline.xdel(self.keys.control, entry)
        pipeline.execute()

    def say(self, **status: object) -> None:
        """Publish a status, as a coordinator does once a second."""
        self.redis.set(self.keys.status, json.dumps({"waiting": 0, "assigned": 0, **status}), ex=10)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Let Redis be out of memory until the block ends."""
        self.redis.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.redis.config_set("maxmemory", 0)

    def interrupt(self) -> None:
        """Break every other connection: whoever reads finds that Redis was away, and may have lost what was sent."""
        self.redis.client_kill_filter(_type="normal", skipme=True)

    def end(self, state: str = "closed", reason: str = "") -> None:
        self.redis.hset(self.keys.job, mapping={"state": state, "reason": reason})

    def engine(
        self, engine: str, *, version: int, failed: dict[int, str] | None = None, draining: bool = False
    ) -> None:
        report = {"version": version, "failed": failed or {}, "draining": draining}
        self.redis.hset(self.keys.engines, engine, msgpack.packb(report))
        self.redis.set(self.keys.lease(engine), "1", px=60_000)

    # all of it, in a thread

    def serve_once(self, answer: Callable[[RolloutRequest], None] | None = None) -> None:
        """Answer what is there: each request once, however often it was sent; cancelled ones as they are."""
        for entry, fields in self.redis.xrange(self.keys.control):
            message = decode(fields[b"d"])
            if isinstance(message, Cancel):
                self.cancelled.update(message.request_ids)
                self.redis.xdel(self.keys.control, entry)
            if isinstance(message, WeightUpdate):
                self.take_up(message, entry)
        for entry, request in self.entries():
            if self.answered.get(request.request_id, 0) >= self.samples_of(request):
                self.redis.xdel(self.keys.requests, entry)
                reason = "it was answered before; to sample it again, ask under another request id"
                self.reply(request.reply_to, Refusal(request_id=request.request_id, reason=reason, answered=True))
            elif request.request_id in self.cancelled:
                done = self.answered.get(request.request_id, 0)
                rest = list(range(done, self.samples_of(request)))
                self.answer(request, rest, length=1, finish_reason=FinishReason.CANCELLED)
            elif answer is not None:
                answer(request)
            else:
                self.answer(request)

    @contextmanager
    def serving(self, answer: Callable[[RolloutRequest], None] | None = None) -> Iterator[JobSide]:
        """Answer whatever comes, by *answer*, until the block ends."""
        stopping = threading.Event()
        failures: list[Exception] = []

        def run() -> None:
            while not stopping.is_set():
                try:
                    self.say()
                    self.serve_once(answer)
                except redis.ConnectionError:
                    pass  # it is back soon
                except Exception as error:
                    failures.append(error)
                    return
                stopping.wait(0.02)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stopping.set()
            thread.join(timeout=10)
            assert failures == []


def remember(server: redis.Redis, problem: str, generation: int, lengths: list[tuple[int, bool]]) -> None:
    """Write the lengths of ended rollouts, each with whether it was cut off, as the relay of a job does."""
    entries = [pack_entry(f"{problem}/{index}", *one) for index, one in enumerate(lengths)]
    server.hset(HISTORY.lengths(problem), str(generation), b"".join(entries))
    server.lpush(HISTORY.recent(HISTORY.shard(problem)), *(pack_recent(generation, *one) for one in lengths))
    server.hset(HISTORY.meta, "generation", generation)


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
