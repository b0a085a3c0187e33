"""A client of a Redis Cluster that raises the same errors as redis-py's other clients and fails within seconds."""

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
    """Convert the errors of redis-py's cluster client into the :class:`redis.RedisError` that the other clients raise.

    For an unusable cluster, that client raises other exceptions, which handlers of an unreachable Redis do not catch.
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
            refusal = cause.__context__  # the reply to CLUSTER SLOTS
            if isinstance(refusal, NoPermissionError):
                raise NoPermissionError(str(refusal)) from error
            raise redis.ResponseError(str(refusal)) from error
        for kind in (redis.AuthenticationError, redis.TimeoutError, redis.ConnectionError):
            if isinstance(cause, kind):
                raise kind(str(error)) from error
        raise


class _Nodes(redis.RedisCluster):
    """A cluster client that accepts redirections to any node."""

    def get_node(self, host: Any = None, port: Any = None, node_name: Any = None) -> Any:
        """Return a node by its name, even if it has no slot yet.

        redis-py only knows nodes that have slots. When the first slot of a node is being migrated to it, a redirection
        to that node would fail with an AttributeError.
        """
        manager: Any = self.nodes_manager
        node = manager.get_node(host, port, node_name)
        if node is None and node_name is not None:
            host, _, port = str(node_name).rpartition(":")
            node = ClusterNode(host, int(port), PRIMARY)
        return node


class _Pipeline(ClusterPipeline, _Nodes):
    """A pipeline that repeats commands that nodes refused because their slots were migrated."""

    def __init__(self, client: Cluster, **settings: Any) -> None:
        super().__init__(**settings)
        self.parent_execute_command = self._repeat
        self._client = client
        self._lost: redis.RedisError | None = None

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Return the replies, in order."""
        self._lost = None
        with self._client.reconnect_when_lost():
            replies: list[Any] = super().execute(raise_on_error)
        return replies

    def _repeat(self, *args: Any, **options: Any) -> Any:
        # redis-py repeats failed commands one after another, each with all its timeouts and retries: 500 commands for a
        # node that does not answer would take an hour.
        if self._lost is not None:
            raise self._lost
        try:
            return redis.RedisCluster.execute_command(self, *args, **options)
        except (redis.ConnectionError, redis.TimeoutError, ClusterError) as error:
            self._lost = error
            raise


class Cluster(_Nodes):
    """A client that connects on first use.

    If no known node answers any longer, it connects again to the addresses that it was given.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]], *, retries: int, **settings: Any) -> None:
        """Create the client; nothing is sent yet.

        Args:
            hosts: host and port of some nodes.
            retries: number of times that a command is repeated if its node does not answer.
            settings: settings of the connections to nodes.
        """
        self._hosts, self._retries, self._settings = hosts, retries, settings
        self._connecting = threading.RLock()
        self._connected = self._in_progress = False

    def __getattr__(self, name: str) -> Any:
        """Connect, then return an attribute that the constructor of redis-py's client sets."""
        if name.startswith("__") or "_connecting" not in vars(self):
            raise AttributeError(name)
        with self._connecting:
            if name not in vars(self) and not self._connected and not self._in_progress:
                self._in_progress = True
                try:
                    self._connect()
                finally:
                    self._in_progress = False
            return object.__getattribute__(self, name)

    def _connect(self) -> None:
        with redis_errors():
            super().__init__(
                startup_nodes=[ClusterNode(host, port) for host, port in self._hosts],
                retry=Retry(NoBackoff(), self._retries),  # redis-py only uses the number
                **self._settings,
            )
        self._connected = True

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute one command on the node that has its key.

        Raises:
            redis.RedisError: the command failed.
        """
        execute: Any = super().execute_command
        with self.reconnect_when_lost():
            return execute(*args, **options)

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> Any:
        """Return a pipeline; see :meth:`redis.RedisCluster.pipeline`."""
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
    def reconnect_when_lost(self) -> Iterator[None]:
        """Convert errors as :func:`redis_errors` does, and call :meth:`discard_nodes` if no known node answers."""
        try:
            with redis_errors():
                yield
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if isinstance(error.__cause__, RedisClusterException):
                self.discard_nodes()
            raise

    def refresh(self) -> None:
        """Ask the nodes which node has which slots.

        Raises:
            redis.RedisError: no node answered.
        """
        with self.reconnect_when_lost():
            self.nodes_manager.initialize()

    def discard_nodes(self) -> None:
        """Connect with the given addresses on the next use, because restarted pods have new addresses."""
        with self._connecting:
            vars(self).pop("nodes_manager", None)
            self._connected = False

    def close(self) -> None:
        """Close all connections."""
        manager = vars(self).get("nodes_manager")
        if manager is not None:
            manager.close()
