"""A job's side of the protocol in plain Redis commands, written independently of the job's own code."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import redis

from rollout_api import (
    Cancel,
    FinishReason,
    Pause,
    Refusal,
    Resume,
    Rollout,
    RolloutId,
    RolloutRequest,
    Sampling,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
)
from rollout_api.protocol.history_encoding import pack_entry, pack_recent
from rollout_api.protocol.keys import HistoryKeys, MessageKeys, job_uid_key
from rollout_api.protocol.messages import InitWeightTransfer, Message
from rollout_api.redis_client.server_functions import load
from tests.support.waiting import wait_for

VOCABULARY = 1000
"""Number of token ids of the fake job's model."""
HISTORY = HistoryKeys("default", "math-history")
"""Keys of the fake job's history."""


class FakeJob:
    """A job that exists in Redis. Its requests are answered by the test, or by a thread within :meth:`serving`.

    Args:
        url: URL of Redis.
        uid: uid of the job.
        name: ``namespace/name`` of the job.
        max_rollouts: number of rollouts that may be open at once.
    """

    def __init__(
        self, url: str, *, uid: str = "uid-1", name: str = "default/math", max_rollouts: int = 100_000
    ) -> None:
        self.redis = redis.Redis.from_url(url, socket_timeout=5)
        self.keys = MessageKeys(uid)
        self.uid, self.name = uid, name
        self.sampled: list[str] = []
        """Rollout ids in the order of their production."""
        self.answered: dict[str, int] = {}
        """Request id → number of rollouts that were produced for it."""
        self.cancelled: set[str] = set()
        """Ids of requests that were cancelled."""
        self._entries: dict[str, list[bytes]] = {}
        description = {
            "version": 1,
            "model": "das/tiny",
            "vocabulary": VOCABULARY,
            "sampling": Sampling(n=2, max_tokens=64).model_dump_json(),
            "max_model_len": 256,
            "max_request_bytes": 4096,
            "max_image_bytes": 4096,
            "max_rollouts": max_rollouts,
            "history": HISTORY.full_name,
            "state": "running",
            "history_redis": "",
        }
        self.redis.hset(self.keys.job, mapping=description)
        self.redis.set(job_uid_key(name), uid)

    # What the job reads.

    def entries(self) -> list[tuple[bytes, RolloutRequest]]:
        """Return the requests in the stream, each with the id of its entry."""
        found = []
        for entry, fields in self.redis.xrange(self.keys.requests):
            message = decode(fields[b"d"])
            assert isinstance(message, RolloutRequest)
            found.append((entry, message))
            self._entries.setdefault(message.request_id, []).append(entry)
        return found

    def requests(self) -> list[RolloutRequest]:
        """Return the requests in the stream."""
        return [request for _, request in self.entries()]

    def control_messages(self) -> list[Message]:
        """Return the messages in the control stream."""
        return [decode(fields[b"d"]) for _, fields in self.redis.xrange(self.keys.control)]

    def wait_for_requests(self, count: int) -> list[RolloutRequest]:
        """Wait until there are at least *count* requests in the stream, and return them."""
        wait_for(lambda: len(self.requests()) >= count)
        return self.requests()

    # What the job writes.

    def make_rollout(
        self,
        request: RolloutRequest,
        sample: int,
        *,
        length: int = 3,
        finish_reason: FinishReason = FinishReason.STOP,
    ) -> Rollout:
        """Return a rollout whose token ids depend on the sample."""
        tokens = [sample + 1] * length
        return Rollout(
            rollout_id=str(request.rollout_id(sample)),
            problem_id=request.problem,
            purpose=request.purpose,
            token_ids=tokens,
            logprobs=[-0.5] * length,
            weight_spans=[WeightSpan(start=0, weight_version=0)] if tokens else [],
            finish_reason=finish_reason,
        )

    def keep(self, request: RolloutRequest, rollout: Rollout, *, announced: bool = True) -> None:
        """Keep a rollout under the id of its request, and tell the client so, unless the client has released it."""
        self.keep_bytes(request, RolloutId.parse(rollout.rollout_id).sample, encode(rollout), announced=announced)

    def keep_bytes(self, request: RolloutRequest, sample: int, data: bytes, *, announced: bool = True) -> None:
        """Keep bytes in place of a rollout."""
        client, request_id = request.reply_to, request.request_id
        self.admit(request)
        self.redis.hset(self.keys.ledger(request_id), str(sample), b"")
        if self.redis.hexists(self.keys.ledger(request_id), "released"):
            return
        self.redis.hset(self.keys.results(request_id), str(sample), data)
        if request.keep_seconds is None:
            self.redis.sadd(self.keys.unreleased(client), request_id)
        else:
            self.redis.expire(self.keys.results(request_id), request.keep_seconds)
        written = self.redis.hincrby(self.keys.results_written, client, len(data))
        update = {"r": request_id, "s": sample, "b": len(data), "w": written}
        if announced:
            self.redis.xadd(self.keys.result_updates(client), update)

    def refuse(self, request: RolloutRequest, reason: str) -> None:
        """Refuse a request, and delete it."""
        refusal = Refusal(request_id=request.request_id, reason=reason)
        self.redis.set(self.keys.refusal(request.request_id), encode(refusal), ex=600)
        self.redis.xadd(self.keys.result_updates(request.reply_to), {"r": request.request_id})
        self.delete_request(request)
        if request.request_id not in self.answered:  # it was never admitted
            self.redis.delete(self.keys.ledger(request.request_id))

    def admit(self, request: RolloutRequest) -> bool:
        """Record that a request is known; return False if its client has released its results before."""
        ledger = self.keys.ledger(request.request_id)
        if not self.redis.hexists(ledger, "entry"):
            if self.redis.hexists(ledger, "released"):
                return False
            self.redis.hset(ledger, mapping={"entry": "0-0", "n": self.num_samples(request), "cancelled": 0})
        return True

    def answer(
        self, request: RolloutRequest, samples: list[int] | None = None, *, announced: bool = True, **options: Any
    ) -> None:
        """Produce some samples of a request (default: all), and delete the request with the last of them."""
        n = self.num_samples(request)
        for sample in range(n) if samples is None else samples:
            rollout = self.make_rollout(request, sample, **options)
            self.sampled.append(rollout.rollout_id)
            self.answered[request.request_id] = self.answered.get(request.request_id, 0) + 1
            self.keep(request, rollout, announced=announced)
        if self.answered[request.request_id] >= n:
            self.delete_request(request)

    def delete_request(self, request: RolloutRequest) -> None:
        """Delete a request's entries."""
        self.redis.xdel(self.keys.requests, *self._entries.get(request.request_id, ["0-0"]))

    @staticmethod
    def num_samples(request: RolloutRequest) -> int:
        """Return how many samples a request asks for."""
        return request.sampling.n if "n" in request.sampling.model_fields_set else 2

    def adopt_update(self, update: WeightUpdate, entry: bytes) -> None:
        """Record an update as the weights to serve, and delete its entry."""
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.hset(self.keys.weights, update.weights_kind.value, encode(update))
        pipeline.xdel(self.keys.control, entry)
        pipeline.execute()

    def adopt_pause(self, mode: str, entry: bytes) -> None:
        """Record how the job is paused, and delete the entry that says so."""
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.hset(self.keys.job, "pause", mode)
        pipeline.xdel(self.keys.control, entry)
        pipeline.execute()

    def publish_status(self, **status: object) -> None:
        """Publish a status, as a coordinator does once a second."""
        self.redis.set(
            self.keys.status, json.dumps({"waiting": 0, "assigned": 0, "weight_version": 0, **status}), ex=10
        )

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """Make Redis run out of memory until the block ends."""
        load(self.redis)  # as the job would have done when it started
        self.redis.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.redis.config_set("maxmemory", 0)

    def break_connections(self) -> None:
        """Close all other connections, so that readers find that Redis was unreachable and may have lost data."""
        self.redis.client_kill_filter(_type="normal", skipme=True)

    def set_state(self, state: str = "closed", reason: str = "") -> None:
        """Record that the job has ended."""
        self.redis.hset(self.keys.job, mapping={"state": state, "reason": reason})

    def report_engine(
        self,
        engine: str,
        *,
        version: int,
        failed: dict[int, str] | None = None,
        draining: bool = False,
        paused: str = "",
        **fields: object,
    ) -> None:
        """Write an engine's report and its lease, which does not expire."""
        report = {
            "version": version,
            "failed": failed or {},
            "draining": draining,
            "paused": paused,
            "ranks": 1,
            **fields,
        }
        self.redis.hset(self.keys.engines, engine, msgpack.packb(report))
        self.redis.set(self.keys.lease(engine), "1")

    # Serving.

    def serve_once(self, answer: Callable[[RolloutRequest], None] | None = None) -> None:
        """Process all messages: repeated requests are refused, and cancelled ones answered with partial output."""
        for entry, fields in self.redis.xrange(self.keys.control):
            message = decode(fields[b"d"])
            if isinstance(message, Cancel):
                self.cancelled.update(message.request_ids)
                self.redis.xdel(self.keys.control, entry)
            if isinstance(message, WeightUpdate):
                self.adopt_update(message, entry)
            if isinstance(message, InitWeightTransfer):
                self.redis.hset(self.keys.weights, "group", encode(message))
                self.redis.xdel(self.keys.control, entry)
            if isinstance(message, Pause | Resume):
                self.adopt_pause(message.mode if isinstance(message, Pause) else "", entry)
        for entry, request in self.entries():
            if not self.admit(request):
                self.redis.xdel(self.keys.requests, entry)
            elif self.answered.get(request.request_id, 0) >= self.num_samples(request):
                self.redis.xdel(self.keys.requests, entry)
                self.refuse(request, "it was answered before; to sample it again, use another request id")
            elif request.request_id in self.cancelled:
                num_answered = self.answered.get(request.request_id, 0)
                rest = list(range(num_answered, self.num_samples(request)))
                self.answer(request, rest, length=1, finish_reason=FinishReason.CANCELLED)
            elif answer is not None:
                answer(request)
            else:
                self.answer(request)

    @contextmanager
    def serving(self, answer: Callable[[RolloutRequest], None] | None = None) -> Iterator[FakeJob]:
        """Answer requests in a thread until the block ends.

        Args:
            answer: answers one request; default: produce all its samples.
        """
        stopping = threading.Event()
        failures: list[Exception] = []

        def run() -> None:
            while not stopping.is_set():
                try:
                    self.publish_status()
                    self.serve_once(answer)
                except redis.ConnectionError:
                    pass  # the test restarts Redis
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


def record_rewards(
    server: redis.Redis | redis.RedisCluster, problem: str, generation: int, rewards: list[float | None]
) -> None:
    """Write rollouts with these rewards, or without one, to the history as the relay of a job does."""
    entries = [pack_entry(f"{problem}/{generation}/{index}", 10, False, reward) for index, reward in enumerate(rewards)]
    server.hset(HISTORY.lengths(problem), str(generation), b"".join(entries))
    server.hset(HISTORY.meta, "generation", generation)


def record_lengths(server: redis.Redis, problem: str, generation: int, lengths: list[tuple[int, bool]]) -> None:
    """Write lengths of rollouts, each with whether it was cut off, to the history as the relay of a job does."""
    entries = [pack_entry(f"{problem}/{index}", *one) for index, one in enumerate(lengths)]
    server.hset(HISTORY.lengths(problem), str(generation), b"".join(entries))
    server.lpush(
        HISTORY.recent_lengths(HISTORY.shard_of(problem)), *(pack_recent(generation, *length) for length in lengths)
    )
    server.hset(HISTORY.meta, "generation", generation)
