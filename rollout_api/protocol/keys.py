"""Every Redis key of the project, in one place.

The keys of a job carry the job's uid as their hash tag, and the keys of a history carry the problem or the shard. On a
Redis Cluster, each server-side function therefore runs within one hash slot, while histories spread over all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from typing_extensions import Self

MESSAGE_FIELD = "d"
"""Field of a stream entry that holds an encoded message."""
REQUEST_FIELD = "r"
"""Field of an entry of ``result_updates`` and ``token_updates`` with the id of a request."""
CONTEXT_FIELD = "c"
"""Field of an outbox entry with the packed last tokens of the prompt; only set for later turns of a trajectory."""
TRACE_FIELD = "t"
"""Field of an entry of the outbox and of the timeline with the trace of the request; only set if the trace does not
follow from the id of the request."""
HISTORY_NAMES = "history:names"
"""Set of the full names (``namespace/name``) of all histories on a server."""
NUM_SHARDS = 16
"""Number of shards into which a history's problems are divided, so that no single key receives every write."""
LEDGER_RETENTION_S = 7 * 24 * 3600
"""Seconds to remember an answered request, so that a repetition of it is refused, a reward finds its problem, and a
dataset source that continues does not sample it again. Requests whose results expire are remembered for a day.
"""
IMAGE_RETENTION_S = 3600
"""Seconds to keep an image after an engine has read it, or its client has last shown that it is needed."""


def job_uid_key(job: str) -> str:
    """Return the key of a string with the uid of the job that currently runs as ``namespace/name``.

    The coordinator writes it. Every job has its own key, so that an ACL can limit a user to one job.
    """
    return f"rollout:jobs:{job}"


class _Key:
    """A key that has the prefix of its owner and the name of the attribute, with dashes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.replace("_", "-")

    def __get__(self, keys: MessageKeys | HistoryKeys, owner: type) -> str:
        return keys.prefix + self._name


@dataclass(frozen=True)
class MessageKeys:
    """Keys of one job's messages and state. docs/protocol.md describes the most important ones."""

    uid: str
    """Uid of the job."""

    @property
    def prefix(self) -> str:
        """Prefix of all keys of this job."""
        return f"rollout:{{{self.uid}}}:"

    def _key(self, name: str) -> str:
        return self.prefix + name

    def pattern(self) -> str:
        """Return the glob pattern that matches all keys of this job."""
        return self._key("*")

    # Keys that clients use.

    job = _Key()
    """Hash, written by the coordinator: what a client must know about the job before its first request."""
    requests = _Key()
    """Stream, written by clients: requests. An entry stays until all its rollouts are in the ledger."""
    control = _Key()
    """Stream, written by clients: weight updates, cancellations and other commands, deleted once processed."""

    def image(self, digest: str) -> str:
        """String with expiry, written by clients: an encoded image of their prompts, by its SHA-256 in hex."""
        return self._key(f"image:{digest}")

    images = _Key()
    """Sorted set, written by clients: hash and size of each stored image → time at which it was needed."""
    image_bytes = _Key()
    """Counter, written by clients: bytes of all stored images."""

    def transfer_steps(self, weights: str) -> str:
        """Stream with expiry, written by clients: the steps of a transfer of weights, by the identity of these."""
        return self._key(f"transfer-steps:{weights}")

    def results(self, request_id: str) -> str:
        """Hash, written by the job: sample → rollout. It is kept until the client releases it, or expires."""
        return self._key(f"results:{request_id}")

    def refusal(self, request_id: str) -> str:
        """String with expiry, written by the job: why a request was refused."""
        return self._key(f"refusal:{request_id}")

    def result_updates(self, client: str) -> str:
        """Short, lossy stream, written by the job: the results of *client* that were written.

        An entry has the request, the sample, the bytes of the result, and those of all results of the client so far.
        That of a refusal has only the request.
        """
        return self._key(f"result-updates:{client}")

    def unreleased(self, client: str) -> str:
        """Set, written by the job: ids of requests of *client* with results that it has not released."""
        return self._key(f"unreleased:{client}")

    results_written = _Key()
    """Hash, written by the job: client → bytes of all its results."""
    results_read = _Key()
    """Hash, written by clients: client → bytes of its results that it has read."""
    results_noticed = _Key()
    """Hash, written by clients: client → bytes of its results that it knows to be in Redis, read or not."""
    newest_steps = _Key()
    """Hash, written by clients: client → greatest number of a step that it has opened."""
    rewards = _Key()
    """Stream, written by clients: rewards of rollouts, each deleted once it is recorded in the history."""
    status = _Key()
    """String with expiry, written by the coordinator: its status as JSON."""
    canaries = _Key()
    """String, written by the coordinator: state of the sequential test of canaries against siblings, as JSON."""
    dead_letters = _Key()
    """Stream, written by the job and by clients: messages that could not be decoded or processed, with reasons."""
    token_updates = _Key()
    """Short, lossy stream, written by engines: ids of requests with new tokens."""

    def turn(self, record_id: str) -> str:
        """String with expiry, written by servers: a turn of a conversation, by a hash of its tokens."""
        return self._key(f"turn:{record_id}")

    def turn_name(self, name: str) -> str:
        """String with expiry, written by servers: id of the only turn with this hash of its conversation."""
        return self._key(f"turn-name:{name}")

    def idempotency(self, key: str) -> str:
        """String with expiry, written by servers: fingerprint of the request that an idempotency key belongs to."""
        return self._key(f"idempotency:{key}")

    adapters = _Key()
    """Hash, written by servers: name of a LoRA adapter → its directory and weight version, as JSON."""

    # Keys that only the processes of the job use.

    def ledger(self, request_id: str) -> str:
        """Hash: ``entry``, ``n``, ``cancelled``, ``released`` by the client, and sample → ledger entry."""
        return self._key(f"ledger:{request_id}")

    outbox = _Key()
    """Stream, written when rollouts finish: rollouts that the relay has yet to append to the history."""
    partials = _Key()
    """Hash, written by engines: rollout id → checkpointed partial rollout."""

    def tokens(self, request_id: str, sample: int) -> str:
        """Stream, written by engines: tokens of a rollout that is streamed, until it finishes.

        The id of an entry is ``<number of tokens including those of the entry>-0``. The entries take the place of a
        checkpoint in :attr:`partials`.
        """
        return self._key(f"tokens:{request_id}:{sample}")

    attempts = _Key()
    """Hash, written by the coordinator: rollout id → engines lost with it since it last made progress."""
    events = _Key()
    """Short, lossy stream, written by engines: wakes the coordinator when a rollout ends or an engine is free."""
    environment_results = _Key()
    """Hash, written by the dataset source: rollout → what its environment returned, as far as it is kept."""
    environment_errors = _Key()
    """String, written by the dataset source: summary of the errors of its environment, as JSON."""
    totals = _Key()
    """Hash, written when rollouts finish: rollouts, tokens, decoding steps, draft and accepted tokens."""
    timeline = _Key()
    """Stream, written when rollouts finish: when each ran where (see ``timeline``); the oldest are trimmed."""
    measurements = _Key()
    """Stream, written by the coordinator: measurements of the job over time (see ``timeline``)."""
    observed = _Key()
    """String with expiry, written by whoever watches the running rollouts, which engines report while it exists."""
    running = _Key()
    """Hash with expiry, written by engines while they are observed: engine id → its running rollouts."""
    weights = _Key()
    """Hash, written by the coordinator: ``full`` → last update of full weights, ``lora`` → that of a later adapter,
    ``group`` → the last group of a trainer."""
    engines = _Key()
    """Hash, written by engines: engine id → its last report."""

    def lease(self, engine: str) -> str:
        """String with expiry, renewed by *engine*: exists as long as the engine is considered alive."""
        return self._key(f"lease:{engine}")

    def inbox(self, engine: str) -> str:
        """Stream, written by the coordinator: orders to *engine*.

        An assignment stays until its rollout is in the ledger.
        """
        return self._key(f"inbox:{engine}")

    def weight_checksum(self, files: str) -> str:
        """String with expiry, written by the first engine that reads published files: their checksum."""
        return self._key(f"weight-checksum:{files}")

    def weight_checksum_claim(self, files: str) -> str:
        """String with expiry, written by the engine that computes a checksum while the others wait for it."""
        return self._key(f"weight-checksum-claim:{files}")

    failed_engines = _Key()
    """Hash, written by workers: worker → the engines that it cannot start, with the reasons and the time."""
    head_facts = _Key()
    """Hash, written by the first head: what its successors would otherwise have to read from the model."""
    write_check = _Key()
    """String with expiry, written by ``rollout run``: shows that the server accepts writes."""

    def shutdown_grace(self, worker: str) -> str:
        """String with expiry, written by a worker that is told to end.

        It holds the seconds within which its engines must leave the job.
        """
        return self._key(f"shutdown-grace:{worker}")

    def engine_group(self, group: str) -> str:
        """String with expiry, written by a worker whose engine spans several machines: how the others take part."""
        return self._key(f"engine-group:{group}")

    def engine_group_member(self, group: str, rank: int) -> str:
        """String with expiry, written by a follower of such a worker: the part of the engine that it runs."""
        return self._key(f"engine-group:{group}:{rank}")

    fencing_token = _Key()
    """Counter, incremented by each new coordinator: only the coordinator with this number may assign rollouts."""

    def trajectory(self, trajectory_id: str) -> str:
        """String with expiry, written when a turn finishes: the engine whose cache holds the trajectory's prefix."""
        return self._key(f"trajectory:{trajectory_id}")


@dataclass(frozen=True)
class HistoryKeys:
    """Keys of one history.

    The keys of a problem carry the problem as their hash tag. Data that is read for all problems at once (last use,
    last change, sizes, recent lengths) is divided into shards, each with its own hash tag.
    """

    namespace: str
    name: str

    @classmethod
    def from_full_name(cls, full_name: str) -> Self:
        """Return the keys of the history with the full name ``namespace/name``."""
        namespace, _, name = full_name.partition("/")
        return cls(namespace, name)

    @property
    def full_name(self) -> str:
        """``namespace/name``, as in :data:`HISTORY_NAMES`."""
        return f"{self.namespace}/{self.name}"

    @property
    def prefix(self) -> str:
        """Prefix of the keys that concern no problem and no shard."""
        return f"history:{{{self.full_name}}}:"

    meta = _Key()
    """Hash, written by jobs: tokenizer, model, byte cap, window, and the generation of each published version."""
    maintainer_lease = _Key()
    """String with expiry, renewed by the maintainer: the process that currently maintains this history."""
    drafter_state = _Key()
    """String, written by engines: a drafter's learned state. New engines start with it."""
    engines = _Key()
    """Sorted set with expiry, written by engines without a job: engine id → Unix time of its last report."""

    def engine(self, engine: str) -> str:
        """String with expiry, written by an engine without a job: its report."""
        return f"{self.prefix}engine:{engine}"

    def log(self, problem: str) -> str:
        """Stream, written by the relay: the problem's recent rollouts, oldest first; see :meth:`blocks` for others."""
        return self._problem_key(problem, "log")

    def blocks(self, problem: str) -> str:
        """Hash, written by the maintainer: newest generation and last entry → compressed block of older rollouts."""
        return self._problem_key(problem, "blocks")

    def lengths(self, problem: str) -> str:
        """Hash, written by the relay: generation → the problem's length entries (see ``history_encoding``)."""
        return self._problem_key(problem, "lengths")

    def problem_keys(self, problem: str) -> tuple[str, str, str]:
        """Return all keys of a problem: log, lengths and blocks."""
        return self.log(problem), self.lengths(problem), self.blocks(problem)

    def last_used(self, shard: int) -> str:
        """Sorted set, written by jobs: problem → Unix time of the last append to it or draft from it."""
        return self._shard_key(shard, "last-used")

    def last_changed(self, shard: int) -> str:
        """Sorted set, written with every change: problem → change number, which increases within the shard."""
        return self._shard_key(shard, "last-changed")

    def sizes(self, shard: int) -> str:
        """Sorted set, written with every change: problem → bytes of its keys."""
        return self._shard_key(shard, "sizes")

    def recent_lengths(self, shard: int) -> str:
        """List, written by the relay: lengths of the shard's latest rollouts, newest first."""
        return self._shard_key(shard, "recent-lengths")

    def shard_keys(self, shard: int) -> tuple[str, str, str, str]:
        """Return all keys of a shard: last use, last change, sizes and recent lengths."""
        return self.last_used(shard), self.last_changed(shard), self.sizes(shard), self.recent_lengths(shard)

    @staticmethod
    def shard_of(problem: str) -> int:
        """Return the shard that a problem belongs to."""
        return blake2b(problem.encode(), digest_size=1).digest()[0] % NUM_SHARDS

    def patterns(self) -> tuple[str, ...]:
        """Return the glob patterns that match all keys of this history, for access rules."""
        tag = self.full_name
        return f"history:{{{tag}}}:*", f"history:{{{tag}#*}}:*", f"history:{tag}:{{*}}:*"

    def _problem_key(self, problem: str, name: str) -> str:
        # A brace in a problem id would end the hash tag early, and Redis ignores an empty tag.
        quoted = problem.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        return f"history:{self.full_name}:{{{quoted}}}:{name}"

    def _shard_key(self, shard: int, name: str) -> str:
        return f"history:{{{self.full_name}#{shard}}}:{name}"
