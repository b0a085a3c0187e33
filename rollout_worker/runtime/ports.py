"""TCP ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of the loopback interface on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
