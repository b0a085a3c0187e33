"""Free ports."""

from __future__ import annotations

import random
import socket

import pytest

from rollout_api import ports
from rollout_api.ports import free_port


def test_a_port_that_is_used_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener, socket.socket() as other:
        listener.bind(("127.0.0.1", 0))
        used = listener.getsockname()[1]
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        monkeypatch.setattr(ports._random, "sample", lambda *_: [used, free])
        assert free == free_port()
        monkeypatch.setattr(ports._random, "sample", lambda *_: [used])
        assert free_port() != used


def test_processes_with_the_same_seed_choose_different_ports() -> None:
    random.seed(7)
    chosen = [free_port() for _ in range(5)]
    random.seed(7)
    assert chosen != [free_port() for _ in range(5)]


def test_linux_gives_the_port_to_no_outgoing_connection_by_default() -> None:
    by_default = range(32_768, 61_000)  # net.ipv4.ip_local_port_range
    assert not any(free_port() in by_default for _ in range(100))
