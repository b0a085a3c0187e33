"""TCP ports of this machine."""

from __future__ import annotations

import random
import socket

SERVER_PORTS = range(20_000, 30_000)
"""Ports below those that Linux gives to outgoing connections by default. One of these could take a port before it is
used. Ray's workers use ports below these, and Kubernetes' node ports are above them."""
_MAX_ATTEMPTS = 100
_random = random.SystemRandom()
"""Not the generator that programs seed: processes with the same seed would choose the same ports."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on now.

    Args:
        host: address of this machine where the port must be free; empty for all.
    """
    for port in _random.sample(SERVER_PORTS, _MAX_ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
