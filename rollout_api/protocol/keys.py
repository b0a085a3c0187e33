"""Every Redis key of the project, in one place.

The message plane of a job is hash-tagged by the job's uid and a history by problem, so that on a Redis Cluster
each server-side function stays on one slot while histories spread over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

TRAINER_GROUP = "trainer"
"""Consumer group in which a client reads its result stream."""
DATA = "d"
"""The one field of a stream entry that holds an encoded message."""
CONTEXT = "c"
"""Field of an outbox entry: the last tokens before the response, packed; only in later turns of a trajectory."""
HISTORIES = "history:names"
"""Set of ``namespace/name`` of every history on a server."""
SHARDS = 16
"""Among which a history's problems are divided, so that no key of a history takes every write of it."""
CLIENT_LEASE_MS = 6000
"""How long a client name stays taken after the process that has it was killed."""


def named(job: str) -> str:
    """String: uid of the job that runs as ``namespace/name`` now.

    A key for each, so that the user of one job can be kept from another's.
    """
    return f"rollout:jobs:{job}"


@dataclass(frozen=True)
class MessageKeys:
    """Keys of one job's message plane. See docs/protocol.md for who writes and who reads them."""

    uid: str
    """The job's uid."""

    @property
    def prefix(self) -> str:
        """What all keys of this job begin with."""
        return f"rollout:{{{self.uid}}}:"

    def _key(self, name: str) -> str:
        return self.prefix + name

    def every(self) -> str:
        """Pattern of all keys of this job."""
        return self._key("*")

    # what trainers use

    @property
    def job(self) -> str:
        """Hash: what a client must know of the job before it asks for anything."""
        return self._key("job")

    @property
    def requests(self) -> str:
        """Stream of requests; an entry stays until the last of its rollouts is in the ledger."""
        return self._key("requests")

    @property
    def control(self) -> str:
        """Stream of weight updates, cancellations and the close; an entry stays until it is carried out."""
        return self._key("control")

    @property
    def rewards(self) -> str:
        """Stream of the trainer's rewards; an entry stays until it is recorded."""
        return self._key("rewards")

    def results(self, client: str) -> str:
        """Stream of ended rollouts for *client*; an entry stays until the slowest group has acknowledged it."""
        return self._key(f"results:{client}")

    def client(self, name: str) -> str:
        """String: which process reads the results of client *name*, so that no second one does; expires."""
        return self._key(f"client:{name}")

    @property
    def status(self) -> str:
        """String: the coordinator's last status, as JSON; expires when no coordinator renews it."""
        return self._key("status")

    @property
    def waiting(self) -> str:
        """Hash: rollouts, tokens: for each engine, what waits and may come to it, as expected; expires."""
        return self._key("waiting")

    @property
    def canaries(self) -> str:
        """String: what the test of rollouts without drafts beside their siblings has come to, as JSON."""
        return self._key("canaries")

    @property
    def dead(self) -> str:
        """Stream of messages that could not be read or carried out, each with the reason."""
        return self._key("dead")

    # what the coordinator and the engines use among themselves

    def ledger(self, request_id: str) -> str:
        """Hash of one request: entry, n, cancelled, and sample → what became of it."""
        return self._key(f"ledger:{request_id}")

    @property
    def outbox(self) -> str:
        """Stream of ended rollouts on their way into the history."""
        return self._key("outbox")

    @property
    def partials(self) -> str:
        """Hash: rollout id → its response so far."""
        return self._key("partials")

    @property
    def attempts(self) -> str:
        """Hash: rollout id → engines that were lost with it since it last made progress."""
        return self._key("attempts")

    @property
    def events(self) -> str:
        """Stream that wakes the coordinator: what ended and which engine is free; short, may be lost."""
        return self._key("events")

    @property
    def totals(self) -> str:
        """Hash: rollouts, tokens, decoding steps, drafted and accepted tokens since the job began."""
        return self._key("totals")

    @property
    def weights(self) -> str:
        """Hash: ``full`` → the last update of full weights, ``lora`` → that of an adapter, if one came after it."""
        return self._key("weights")

    @property
    def engines(self) -> str:
        """Hash: engine id → its last report."""
        return self._key("engines")

    def lease(self, engine: str) -> str:
        """String that exists as long as *engine* is taken to be alive."""
        return self._key(f"lease:{engine}")

    def inbox(self, engine: str) -> str:
        """Stream of what *engine* is to do; a rollout's entry stays until it is in the ledger."""
        return self._key(f"inbox:{engine}")

    @property
    def head(self) -> str:
        """String: which Ray head runs the job now."""
        return self._key("head")

    @property
    def ray_token(self) -> str:
        """String: what the job's Ray processes authenticate themselves with."""
        return self._key("ray-token")

    def leaving(self, worker: str) -> str:
        """String: seconds that the engines of a worker may take to leave; set when it is told to end."""
        return self._key(f"leaving:{worker}")

    @property
    def coordinator(self) -> str:
        """Counter: the number of the coordinator that may give out work; a new one raises it."""
        return self._key("coordinator")

    def trajectory(self, trajectory_id: str) -> str:
        """String: the engine that holds a trajectory's prefix; expires."""
        return self._key(f"trajectory:{trajectory_id}")


@dataclass(frozen=True)
class HistoryKeys:
    """Keys of one history.

    What belongs to a problem is hash-tagged by it. What is asked of all problems at once (which were used last, which
    have changed, how long rollouts are) is kept in shards of problems, each with a tag of its own.
    """

    namespace: str
    name: str

    @property
    def full_name(self) -> str:
        """``namespace/name``, as it stands in :data:`HISTORIES`."""
        return f"{self.namespace}/{self.name}"

    @property
    def meta(self) -> str:
        """Hash: tokenizer, model, byte cap, window, and the generation of each published version."""
        return f"history:{{{self.full_name}}}:meta"

    @property
    def keeper(self) -> str:
        """String: which service looks after this history; expires."""
        return f"history:{{{self.full_name}}}:keeper"

    @property
    def ages(self) -> str:
        """Hash: ``<age>:drafted`` and ``<age>:accepted`` → tokens, of drafts from history of that age."""
        return f"history:{{{self.full_name}}}:ages"

    @property
    def learned(self) -> str:
        """String: what an engine has learned of drafts from this history, for engines that begin."""
        return f"history:{{{self.full_name}}}:learned"

    def log(self, problem: str) -> str:
        """Stream of one problem's rollouts, oldest first; compacted ones are in :meth:`blocks`."""
        return self._of(problem, "log")

    def blocks(self, problem: str) -> str:
        """Hash: newest generation and last entry → rollouts that were taken from the log and packed together."""
        return self._of(problem, "blocks")

    def lengths(self, problem: str) -> str:
        """Hash: generation → an entry of 16 bytes for each rollout of a problem, see ``history_lengths``."""
        return self._of(problem, "lengths")

    def of_problem(self, problem: str) -> tuple[str, str, str]:
        """Log, lengths and blocks: all that a problem has."""
        return self.log(problem), self.lengths(problem), self.blocks(problem)

    def used(self, shard: int) -> str:
        """Sorted set: problem → when it was appended to or drafted from last, in seconds since the epoch."""
        return self._in(shard, "used")

    def changed(self, shard: int) -> str:
        """Sorted set: problem → a number that grows with every change of any problem of the shard."""
        return self._in(shard, "changed")

    def sizes(self, shard: int) -> str:
        """Sorted set: problem → bytes that its keys take."""
        return self._in(shard, "sizes")

    def recent(self, shard: int) -> str:
        """List: lengths of the last rollouts of a shard's problems, newest first, see ``history_lengths``."""
        return self._in(shard, "recent")

    def of_shard(self, shard: int) -> tuple[str, str, str, str]:
        """Used, changed, sizes and recent: all that a shard has."""
        return self.used(shard), self.changed(shard), self.sizes(shard), self.recent(shard)

    @staticmethod
    def shard(problem: str) -> int:
        """The shard of a problem."""
        return blake2b(problem.encode(), digest_size=1).digest()[0] % SHARDS

    def patterns(self) -> tuple[str, ...]:
        """Patterns of all keys of this history, for the rights of its users."""
        tag = self.full_name
        return f"history:{{{tag}}}:*", f"history:{{{tag}#*}}:*", f"history:{tag}:{{*}}:*"

    def _of(self, problem: str, what: str) -> str:
        # a brace in a problem's id would end the hash tag early, and an empty tag is none
        quoted = problem.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        return f"history:{self.full_name}:{{{quoted}}}:{what}"

    def _in(self, shard: int, what: str) -> str:
        return f"history:{{{self.full_name}#{shard}}}:{what}"


def history_of(full_name: str) -> HistoryKeys:
    """The keys of ``namespace/name``."""
    namespace, _, name = full_name.partition("/")
    return HistoryKeys(namespace, name)
