"""The leader of an engine that spans several machines: gathers the followers, and notices when one of them is lost."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from rollout_store.job.engines import GROUP_EXPIRY_S, EngineGroupStore, GroupMember, GroupOffer

logger = logging.getLogger(__name__)

GROUP_INTERVAL_S = 0.5
"""Seconds between two renewals of the leader's offer and of a follower's answer."""
GROUP_LOSS_S = 5.0
"""Seconds for which the leader or a follower may be missing after its offer or answer has expired, until it is lost.

A lost process is usually noticed at once by the others. A false alarm would cost a start of the engine."""
GROUP_WAIT_LOG_INTERVAL_S = 60.0
"""Seconds after which it is logged again that a leader waits for its followers."""


class EngineGroup:
    """Offers followers a part in one start of an engine, until :meth:`close`.

    vLLM's processes on the machines are bound to each other: an engine that has lost one of them cannot get another. A
    follower therefore counts as lost, too, if another process answers for it.
    """

    def __init__(
        self, store: EngineGroupStore, size: int, settings: dict[str, Any], on_loss: Callable[[str], None]
    ) -> None:
        """Create the offer.

        Args:
            store: the offer's place in Redis.
            size: number of machines, including this one.
            settings: vLLM's engine arguments on this machine.
            on_loss: called once with a reason, in another thread, when a part of the engine has ended or is lost.
        """
        self._store, self._size, self._on_loss = store, size, on_loss
        self._offer = GroupOffer(secrets.token_hex(8), settings)
        self._processes: list[str] = []
        """The followers' processes, by rank; empty until all have joined."""
        self._seen_at = 0.0
        """When all followers were last known to take part."""
        self._closing = threading.Event()
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-group", daemon=True)

    def gather(self) -> None:
        """Wait until all followers have started their part of the engine, or until :meth:`close`.

        This takes as long as their machines do.
        """
        self._thread.start()
        started = time.monotonic()
        while not self._joined.wait(GROUP_WAIT_LOG_INTERVAL_S) and not self._closing.is_set():
            waited = time.monotonic() - started
            logger.warning(
                "This engine has waited %.0f s for its followers. Check that rollout follower runs with the same "
                "--group and each --rank from 1 to %d.",
                waited,
                self._size - 1,
            )

    def close(self) -> None:
        """Tell the followers that the engine has ended."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._store.withdraw_offer()
        except redis.RedisError as error:
            logger.info("The offer to the followers is left to expire: %s", error)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._store.renew_offer(self._offer)
                members = self._store.members(self._size)
            except redis.RedisError as error:
                logger.debug("The followers are not known at the moment: %s", error)
                self._seen_at = time.monotonic()  # their answers may have been lost as well
            else:
                if reason := self._observe(members):
                    self._on_loss(reason)
                    return
            self._closing.wait(GROUP_INTERVAL_S)

    def _observe(self, members: Sequence[GroupMember | None]) -> str:
        """Record the followers' answers, and return why the engine has lost one of them; empty if it has not."""
        own = [member if member is not None and member.offer == self._offer.id else None for member in members]
        running = [member.process for member in own if member is not None and not member.ended]
        if not self._processes:
            if any(member is not None and member.ended for member in own):
                # It answers only a new offer.
                return "a part of the engine has ended while the leader waited for other machines"
            if len(running) == len(members):
                self._processes = running
                self._seen_at = time.monotonic()
                self._joined.set()
            return ""
        if running == self._processes:
            self._seen_at = time.monotonic()
            return ""
        for rank, (member, process) in enumerate(zip(own, self._processes, strict=True), start=1):
            if member is not None and (member.ended or member.process != process):
                return f"the part of the engine on machine {rank} has ended"
        if time.monotonic() - self._seen_at > GROUP_LOSS_S:
            return f"another machine of the engine has not answered for about {GROUP_EXPIRY_S + GROUP_LOSS_S:.0f} s"
        return ""
