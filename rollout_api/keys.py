"""Every Redis key of the project, in one place.

The message plane of a job is hash-tagged by the job's uid and a history by problem, so that on a Redis Cluster
each server-side function stays on one slot while histories spread over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAINER_GROUP = "trainer"
"""Consumer group in which a client reads its result stream."""
DATA = "d"
"""The one field of a stream entry that holds an encoded message."""
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
    """Keys of one history."""

    namespace: str
    name: str

    @property
    def meta(self) -> str:
        """Hash: tokenizer fingerprint, the generation counter and the generation of each published version."""
        return f"history:{{{self.namespace}/{self.name}}}:meta"

    def log(self, problem: str) -> str:
        """Stream of one problem's rollouts, oldest first."""
        return f"history:{self.namespace}/{self.name}:{{{problem}}}:log"

    def lengths(self, problem: str) -> str:
        """Hash: rollout id → its generation, length and how it ended, for one problem."""
        return f"history:{self.namespace}/{self.name}:{{{problem}}}:lengths"

    def rewards(self, problem: str) -> str:
        """Hash: rollout id → the reward that a trainer reported for it, for one problem."""
        return f"history:{self.namespace}/{self.name}:{{{problem}}}:rewards"
