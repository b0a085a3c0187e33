"""The lease of a history, which ensures that one maintainer at a time works on it."""

from __future__ import annotations

import os
import socket
import time
import uuid

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Call, Function, Redis, run
from rollout_worker.history.limits import LEASE_RENEWAL_S, LEASE_S

_HOLD_LEASE = Function(__package__, "hold_lease")


def new_lease_token() -> str:
    """Return a token for this process's leases, which also names the machine and the process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class MaintainerLease:
    """The lease of one history.

    The lease avoids duplicate work; it does not protect the history. Every operation of a maintainer is atomic and
    idempotent, so that a second maintainer, or one that was killed half-way, does no harm.
    """

    def __init__(self, client: Redis, keys: HistoryKeys, token: str) -> None:
        self.held = False
        """Whether this process held the lease when it last tried to acquire it."""
        self._client = client
        self._keys = keys
        self._token = token
        self._last_attempt = 0.0

    def acquire(self) -> bool:
        """Acquire or renew the lease; return whether this process holds it now."""
        self._last_attempt = time.monotonic()
        self.held = bool(self._hold(LEASE_S))
        return self.held

    def renew_if_due(self) -> bool:
        """Renew the lease if that is due; return whether this process holds it."""
        if time.monotonic() - self._last_attempt > LEASE_RENEWAL_S:
            self.acquire()
        return self.held

    def release(self) -> None:
        """Give up the lease, so that another maintainer need not wait until it expires."""
        self.held = False
        self._hold(0)

    def _hold(self, seconds: float) -> int:
        call = Call(_HOLD_LEASE, [self._keys.maintainer_lease], [self._token, int(seconds * 1000)])
        return int(run(self._client, call))
