"""The command line's own part: how it ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rollout_worker.cli import _until_terminated


@pytest.mark.timeout(20)
def test_sigterm_ends_it_even_if_a_library_swallows_the_first_cancellation() -> None:
    """As redis-py does with one that meets it while it connects; kubelet says SIGTERM once."""
    swallowed = 0

    async def work() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed > 1:
                    raise

    async def terminated() -> None:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        await _until_terminated(work())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(terminated())
    assert 2 == swallowed
