"""Redis servers, clusters and Sentinels that a test can kill, pause and fail over."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
import redis

from rollout_api.ports import free_port
from rollout_api.redis_client.server_functions import load
from rollout_store.runtime.child_process import spawn_with_parent
from tests.support.waiting import wait_for

_START_TIMEOUT_S = 20.0
_SLOTS = 16384
_wait_for = partial(wait_for, timeout_s=_START_TIMEOUT_S, ignored=redis.RedisError)


@dataclass(frozen=True)
class Certificates:
    """A self-signed certificate for 127.0.0.1 and localhost."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        directory.mkdir(parents=True, exist_ok=True)
        certificates = cls(directory / "certificate.pem", directory / "key.pem")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
                *("-out", str(certificates.certificate), "-keyout", str(certificates.key)),
            ],
            check=True,
            capture_output=True,
        )
        return certificates

    @property
    def query(self) -> str:
        """Query of a URL with which a client trusts the certificate and authenticates with it."""
        return f"ssl_ca_certs={self.certificate}&ssl_certfile={self.certificate}&ssl_keyfile={self.key}"


def create_user(url: str, rules: Sequence[str]) -> str:
    """Create a user and load the functions, as ``rollout-redis-users`` does, and return the user's URL."""
    with redis.Redis.from_url(url) as admin:
        admin.execute_command("ACL", "SETUSER", "user", "reset", "on", ">secret", *rules)
        load(admin)
    return re.sub(r"://(?:[^/?#]*@)?", "://user:secret@", url, count=1)


class Closing(contextlib.AbstractContextManager["Closing"], ABC):
    """Something that is closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Server(Closing):
    """A ``redis-server`` on a free port. It ends with this process, even if the process is killed."""

    def __init__(
        self,
        directory: Path,
        *,
        appendonly: bool = False,
        password: str = "",
        users: Sequence[str] = (),
        maxmemory: str = "0",
        certificates: Certificates | None = None,
        settings: Mapping[str, str] | None = None,
        sentinel: Sequence[str] | None = None,
        program: str | Path = "redis-server",
        end_with_parent: bool = True,
    ) -> None:
        """Start the server and wait until it answers.

        Args:
            directory: directory of its data, settings and log; created if it is missing.
            appendonly: whether it has an append-only file, so that it keeps its data when it is killed.
            password: password of the default user; '' for none.
            users: ACL rules of further users, each as ``name on >password …``.
            maxmemory: memory limit, as in redis.conf.
            certificates: certificates for TLS, without which no client can connect then.
            settings: further settings of redis.conf by name.
            sentinel: lines of the configuration of a Sentinel; None for an ordinary server.
            program: the executable of a compatible server.
            end_with_parent: whether the server ends when this process is killed. Linux then also ends it together with
                the thread that has started it, so this must be False if a thread that ends may start the server.
        """
        self._program, self._end_with_parent = program, end_with_parent
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.certificates = certificates
        self.password = password
        self._sentinel = sentinel is not None
        lines = {"bind": "127.0.0.1", "dir": f'"{directory}"', "logfile": f'"{directory}/log"', "port": str(self.port)}
        if certificates is not None:
            lines |= {
                "port": "0",
                "tls-port": str(self.port),
                "tls-cert-file": str(certificates.certificate),
                "tls-key-file": str(certificates.key),
                "tls-ca-cert-file": str(certificates.certificate),
                "tls-replication": "yes",
            }
        if password:
            lines["requirepass"] = password
        if sentinel is None:
            if certificates is not None:
                lines["tls-cluster"] = "yes"
            if password:
                lines["masterauth"] = password
            lines |= {
                "appendonly": "yes" if appendonly else "no",
                "appendfsync": "always",
                "save": "''",
                "maxmemory": maxmemory,
                "repl-diskless-sync-delay": "0",
            }
        lines |= settings or {}
        text = "".join(f"{name} {value}\n" for name, value in lines.items())
        text += "".join(f"user {rules}\n" for rules in users) + "".join(f"{line}\n" for line in sentinel or ())
        (directory / "redis.conf").write_text(text)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """URL of the default user."""
        scheme, query = ("redis", "") if self.certificates is None else ("rediss", f"?{self.certificates.query}")
        return f"{scheme}://{self._login}127.0.0.1:{self.port}{query}"

    @property
    def _login(self) -> str:
        return f":{self.password}@" if self.password else ""

    def url_of(self, user: str, password: str) -> str:
        """Return the URL of another user."""
        return self.url.replace(f"://{self._login}", f"://{user}:{password}@")

    @property
    def process(self) -> psutil.Process:
        """The process of the server."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def client(self) -> Any:
        """Return a client of the default user that does not retry commands."""
        return redis.Redis.from_url(self.url, socket_timeout=5, retry=None, decode_responses=True)

    def raw_client(self) -> redis.Redis:
        """Return a client of the default user that does not decode replies."""
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def start(self) -> None:
        """Start the server unless it is running, and wait until it answers."""
        if self._process is not None:
            return
        # SIGKILL, because a paused process does not receive other signals.
        spawn = partial(spawn_with_parent, end_signal=signal.SIGKILL) if self._end_with_parent else subprocess.Popen
        self._process = spawn(
            [self._program, str(self.directory / "redis.conf"), *(["--sentinel"] if self._sentinel else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
            restore_signals=False,  # SIGXFSZ stays ignored, so that a limit of file sizes is an error like a full disk
        )
        with contextlib.closing(self.client()) as client:
            _wait_for(client.ping, message=f"redis-server does not answer; see {self.directory}/log")

    def stop(self) -> None:
        """Shut the server down."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill the server and start it again on the same port."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop answering without closing connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the server, even if it is paused."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=30)
            self._process = None


class SlotMove:
    """The migration of a slot from one primary of a cluster to another."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        """Start the migration. From now on, the old node redirects clients to the new one for keys that it lacks."""
        nodes = cluster.node_ids()
        owner = cluster.owner(key)
        self.slot = int(owner.client().cluster("keyslot", key))
        self.source = owner
        self.target = next(server for server in cluster.servers if server is not owner)
        self._cluster, self._nodes = cluster, nodes
        self.target.client().execute_command("CLUSTER SETSLOT", self.slot, "IMPORTING", nodes[self.source.port])
        self.source.client().execute_command("CLUSTER SETSLOT", self.slot, "MIGRATING", nodes[self.target.port])

    def migrate(self, count: int = 1_000_000) -> None:
        """Migrate up to *count* keys."""
        source = self.source.client()
        keys = source.execute_command("CLUSTER GETKEYSINSLOT", self.slot, count)
        if keys:
            login = ("AUTH", self._cluster.password) if self._cluster.password else ()
            source.execute_command("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, *login, "KEYS", *keys)

    def finish(self) -> None:
        """Assign the slot to the new node, on all nodes."""
        others = [server for server in self._cluster.servers if server not in (self.source, self.target)]
        for server in (self.target, self.source, *others):
            server.client().execute_command("CLUSTER SETSLOT", self.slot, "NODE", self._nodes[self.target.port])


class Cluster(Closing):
    """A Redis Cluster of three primaries without replicas."""

    def __init__(
        self, directory: Path, *, primaries: int = 3, empty: int = 0, password: str = "", **options: Any
    ) -> None:
        """Start the cluster and wait until all nodes serve all slots.

        Args:
            directory: directory of the servers' data.
            primaries: number of nodes that share the slots.
            empty: number of further nodes without slots.
            password: password of the default user on all nodes.
            options: further arguments of each :class:`Server`.
        """
        self.password = password
        self.servers: list[Server] = []
        try:
            for number in range(primaries + empty):
                bus = free_port()
                settings = {
                    "cluster-enabled": "yes",
                    "cluster-port": str(bus),
                    "cluster-node-timeout": "1000",
                }
                server = Server(directory / str(number), password=password, settings=settings, **options)
                self.servers.append(server)
                client = server.client()
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                if number < primaries:
                    first, end = _SLOTS * number // primaries, _SLOTS * (number + 1) // primaries
                    client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
                self.servers[0].client().execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
            self.wait_until_ok()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """URL that names all nodes."""
        scheme, _, rest = self.servers[0].url.partition("://")
        query = rest.partition("?")[2]
        login = f":{self.password}@" if self.password else ""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"{scheme}+cluster://{login}{hosts}{f'?{query}' if query else ''}"

    def wait_until_ok(self) -> None:
        """Wait until every node serves all slots and knows all others."""
        for server in self.servers:
            _wait_for(
                lambda server=server: self._is_ok(server),
                message="A node does not serve all slots, or does not know all others.",
            )

    def _is_ok(self, server: Server) -> bool:
        with contextlib.closing(server.client()) as client:
            state: Any = client.execute_command("CLUSTER INFO")
            return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == len(self.servers)

    def node_ids(self) -> dict[int, str]:
        """Return the id of each node by port."""
        return {server.port: server.client().execute_command("CLUSTER MYID") for server in self.servers}

    def owner(self, key: str) -> Server:
        """Return the node that stores *key*."""
        slot = int(self.servers[0].client().cluster("keyslot", key))
        for first, last, primary, *_ in self._slots():
            if first <= slot <= last:
                return next(server for server in self.servers if server.port == primary)
        raise AssertionError(f"slot {slot} has no node")

    def _slots(self) -> list[tuple[int, int, int]]:
        client = redis.Redis.from_url(self.servers[0].url)
        client.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
        slots: Any = client.execute_command("CLUSTER SLOTS")
        return [(int(first), int(last), int(primary[1])) for first, last, primary, *_ in slots]

    def begin_move(self, key: str) -> SlotMove:
        """Start to move the slot of *key* to another node."""
        return SlotMove(self, key)

    def move_slot(self, key: str) -> None:
        """Move the slot of *key* to another node."""
        move = self.begin_move(key)
        move.migrate()
        move.finish()

    def close(self) -> None:
        """Kill all nodes."""
        for server in self.servers:
            server.close()


class Sentinels(Closing):
    """A primary, a replica and the Sentinels that monitor them."""

    SERVICE = "mymaster"

    def __init__(
        self,
        directory: Path,
        *,
        sentinels: int = 3,
        password: str = "",
        sentinel_password: str = "",
        certificates: Certificates | None = None,
    ) -> None:
        """Start all servers and wait until the Sentinels know the replica and each other.

        Args:
            directory: directory of the servers' data.
            sentinels: number of Sentinels; more than half of them must agree that the primary is gone.
            password: password of the primary and the replica.
            sentinel_password: password of the Sentinels.
            certificates: certificates for TLS.
        """
        self.password, self.sentinel_password = password, sentinel_password
        self.servers: list[Server] = []
        self.sentinels: list[Server] = []
        tls: dict[str, Any] = {"certificates": certificates}
        try:
            self.primary = Server(directory / "first", password=password, **tls)
            self.servers.append(self.primary)
            replica = {"replicaof": f"127.0.0.1 {self.primary.port}"}
            self.servers.append(Server(directory / "second", password=password, settings=replica, **tls))
            with contextlib.closing(self.servers[1].client()) as client:
                _wait_for(
                    lambda: client.info("replication")["master_link_status"] == "up",
                    message="The replica does not follow.",
                )
            lines = [
                f"sentinel monitor {self.SERVICE} 127.0.0.1 {self.primary.port} {sentinels // 2 + 1}",
                f"sentinel down-after-milliseconds {self.SERVICE} 500",
                f"sentinel failover-timeout {self.SERVICE} 3000",
            ]
            if password:
                lines.append(f"sentinel auth-pass {self.SERVICE} {password}")
            if sentinel_password:
                lines.append(f"sentinel sentinel-pass {sentinel_password}")
            for number in range(sentinels):
                where = directory / f"sentinel{number}"
                self.sentinels.append(Server(where, password=sentinel_password, sentinel=lines, **tls))
            for sentinel in self.sentinels:
                _wait_for(
                    lambda sentinel=sentinel: self._knows_all(sentinel), message="The Sentinels do not know each other."
                )
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """URL of the primary, which clients find through the Sentinels."""
        scheme, _, rest = self.sentinels[0].url.partition("://")
        query = [part for part in (rest.partition("?")[2],) if part]
        if self.sentinel_password:
            query.append(f"sentinel_password={self.sentinel_password}")
        login = f":{self.password}@" if self.password else ""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"{scheme}+sentinel://{login}{hosts}/{self.SERVICE}{'?' if query else ''}{'&'.join(query)}"

    def fail_over(self) -> None:
        """Kill the primary and wait until the replica has replaced it and every Sentinel names it."""
        lost = self.primary
        lost.kill()
        self.primary = next(server for server in self.servers if server is not lost)
        with contextlib.closing(self.primary.client()) as client:
            _wait_for(
                lambda: client.role()[0] == "master", timeout_s=60, message="The replica does not become the primary."
            )
        for sentinel in self.sentinels:
            _wait_for(
                lambda sentinel=sentinel: self._names(sentinel) == self.primary.port,
                message="The Sentinels do not name the new primary.",
            )

    def _names(self, sentinel: Server) -> int:
        with contextlib.closing(sentinel.client()) as client:
            return int(client.sentinel_get_master_addr_by_name(self.SERVICE)[1])

    def _knows_all(self, sentinel: Server) -> bool:
        with contextlib.closing(sentinel.client()) as client:
            state = client.sentinel_master(self.SERVICE)
            others = len(self.sentinels) - 1
            return bool(
                state["num-slaves"] == 1 and state["num-other-sentinels"] == others and "down" not in state["flags"]
            )

    def close(self) -> None:
        """Kill all servers."""
        for server in (*self.sentinels, *self.servers):
            server.close()
