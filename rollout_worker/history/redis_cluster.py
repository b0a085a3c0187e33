"""A client of a Redis Cluster that raises what redis-py's other clients raise, and does not try for minutes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import PRIMARY, ClusterNode, ClusterPipeline
from redis.exceptions import (
    ClusterDownError,
    ClusterError,
    NoPermissionError,
    RedisClusterException,
    SlotNotCoveredError,
)
from redis.retry import Retry

_INCOMPLETE = ("All slots are not covered", "startup_nodes could not agree")


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raise what redis-py's cluster client says of a cluster that cannot be used as a :class:`redis.RedisError`.

    It has a family of exceptions of its own for that, which nobody who handles a Redis that is away would catch.
    """
    try:
        yield
    except SlotNotCoveredError as error:
        raise ClusterDownError(str(error)) from error
    except RedisClusterException as error:
        cause = error.__cause__
        if str(error).startswith(_INCOMPLETE):
            raise ClusterDownError(str(error)) from error
        if isinstance(cause, RedisClusterException) and isinstance(cause.__context__, redis.ResponseError):
            refusal = cause.__context__  # of CLUSTER SLOTS
            if isinstance(refusal, NoPermissionError):
                raise NoPermissionError(str(refusal)) from error
            raise redis.ResponseError(str(refusal)) from error
        for kind in (redis.AuthenticationError, redis.TimeoutError, redis.ConnectionError):
            if isinstance(cause, kind):
                raise kind(str(error)) from error
        raise


class _Nodes(redis.RedisCluster):
    """Knows every node that it is sent to."""

    def get_node(self, host: Any = None, port: Any = None, node_name: Any = None) -> Any:
        """A node by its name; also one that has no slot yet, but is being given its first.

        redis-py knows only nodes that have some, and fails with an AttributeError when it is sent to another.
        """
        manager: Any = self.nodes_manager
        node = manager.get_node(host, port, node_name)
        if node is None and node_name is not None:
            host, _, port = str(node_name).rpartition(":")
            node = ClusterNode(host, int(port), PRIMARY)  # type: ignore[no-untyped-call]
        return node


class _Pipeline(ClusterPipeline, _Nodes):
    """One round trip; what its nodes refused because slots were moved is repeated."""

    def __init__(self, client: Cluster, **settings: Any) -> None:
        super().__init__(**settings)
        self.parent_execute_command = self._repeat
        self._client = client
        self._lost: redis.RedisError | None = None

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """The replies, in order."""
        self._lost = None
        with self._client.noticing():
            replies: list[Any] = super().execute(raise_on_error)
        return replies

    def _repeat(self, *args: Any, **options: Any) -> Any:
        # redis-py repeats what failed one command after another, with all timeouts and retries of each: 500 commands
        # for a node that does not answer would take an hour.
        if self._lost is not None:
            raise self._lost
        try:
            return redis.RedisCluster.execute_command(self, *args, **options)  # type: ignore[no-untyped-call]
        except (redis.ConnectionError, redis.TimeoutError, ClusterError) as error:
            self._lost = error
            raise


class Cluster(_Nodes):
    """Connects when it is used first, and again by the addresses it was given when no node that it knows is left."""

    def __init__(self, hosts: Sequence[tuple[str, int]], *, retries: int, **settings: Any) -> None:
        """Send nothing yet.

        Args:
            hosts: host and port of some nodes.
            retries: how often a command is repeated that a node did not answer.
            settings: of the connections to nodes.
        """
        self._hosts, self._retries, self._settings = hosts, retries, settings
        self._connecting = threading.RLock()
        self._connected = self._under_way = False

    def __getattr__(self, name: str) -> Any:
        """What redis-py's client has from its constructor, which connects, and may fail."""
        if name.startswith("__") or "_connecting" not in vars(self):
            raise AttributeError(name)
        with self._connecting:
            if name not in vars(self) and not self._connected and not self._under_way:
                self._under_way = True
                try:
                    self._connect()
                finally:
                    self._under_way = False
            return object.__getattribute__(self, name)

    def _connect(self) -> None:
        with redis_errors():
            super().__init__(
                startup_nodes=[ClusterNode(host, port) for host, port in self._hosts],  # type: ignore[no-untyped-call]
                retry=Retry(NoBackoff(), self._retries),  # of this, redis-py takes the number alone
                **self._settings,
            )
        self._connected = True

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Carry out one command, where its key is.

        Raises:
            redis.RedisError: it failed.
        """
        with self.noticing():
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> Any:
        """Commands that are sent together; see :meth:`redis.RedisCluster.pipeline`."""
        return _Pipeline(
            self,
            nodes_manager=self.nodes_manager,
            commands_parser=self.commands_parser,
            startup_nodes=list(self.nodes_manager.startup_nodes.values()),
            result_callbacks=self.result_callbacks,
            cluster_response_callbacks=self.cluster_response_callbacks,
            reinitialize_steps=self.reinitialize_steps,
            retry=self.retry,
            lock=self._lock,
            transaction=transaction,
        )

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Raise errors as :func:`redis_errors` does, and notice when no node that is known is left."""
        try:
            with redis_errors():
                yield
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if isinstance(error.__cause__, RedisClusterException):
                self.forget()
            raise

    def refresh(self) -> None:
        """Ask which node has which slots.

        Raises:
            redis.RedisError: no node could say.
        """
        with self.noticing():
            self.nodes_manager.initialize()

    def forget(self) -> None:
        """Connect by the addresses that were given when it is used next: pods come back with other addresses."""
        with self._connecting:
            vars(self).pop("nodes_manager", None)
            self._connected = False

    def close(self) -> None:
        """Close all connections."""
        manager = vars(self).get("nodes_manager")
        if manager is not None:
            manager.close()
