"""TCP ports of test servers."""

from __future__ import annotations

import socket


def accepts(port: int) -> bool:
    """Return whether something listens on *port*."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
