"""A follower: the part of a worker's engine that runs on another machine, for models that do not fit on one.

The leader, which is the worker, decides when the engine starts and ends. The follower finds its offers in Redis, runs
one process for each start of the engine, and ends it with the engine. That process, ``python -m
rollout_worker.engine_worker.follower_machine``, reads vLLM's engine arguments as JSON from stdin, and ends when one of
vLLM's worker processes does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

from rollout_api.redis_client.checks import wait_until_usable
from rollout_api.redis_client.connection import connect
from rollout_store.job.engines import EngineGroupStore, GroupMember, GroupOffer
from rollout_store.job.setup import JobSetup
from rollout_store.runtime.child_process import spawn_with_parent
from rollout_worker.engine.config import engine_args, engine_environment
from rollout_worker.engine_worker.engine_group import GROUP_INTERVAL_S, GROUP_LOSS_S
from rollout_worker.engine_worker.engine_setup import engine_config
from rollout_worker.engine_worker.worker_process import HANDOVER_MARGIN_S, ReadinessServer

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.25
"""Seconds between two looks at the leader's offer and at the own part of the engine."""


def run_follower(setup: JobSetup, *, rank: int, http_port: int) -> None:
    """Run the part of an engine that belongs on this machine, until SIGTERM.

    The leader needs this machine while it hands over its rollouts. After SIGTERM, the follower therefore waits for the
    end of the engine, for as long as the leader may take.

    Args:
        setup: the job.
        rank: number of this machine in the engine, which is at least 1.
        http_port: port of ``/readyz``; 0 for none.
    """
    terminated = threading.Event()
    wait_until_usable(connect(setup.redis_url), setup.redis_url)
    model = setup.model()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    follower = Follower(setup.group_store(), rank, model, _environment(setup, model))
    readiness = ReadinessServer(http_port, follower.why_not_ready) if http_port else None
    try:
        while not terminated.wait(_POLL_INTERVAL_S):
            follower.run_once()
        deadline = time.monotonic() + setup.job.spec.workers.drain_seconds + HANDOVER_MARGIN_S
        while follower.takes_part and time.monotonic() < deadline:
            follower.run_once(may_start=False)
            time.sleep(_POLL_INTERVAL_S)
    finally:
        follower.leave()
        if readiness is not None:
            readiness.close()


def _environment(setup: JobSetup, model: Path) -> dict[str, str]:
    """Return the environment variables of vLLM's processes on this machine."""
    config = engine_config(setup, model, speculative=True)
    return {**os.environ, **engine_environment(config, os.environ)}


@dataclass
class Follower:
    """Follows the offers of one leader."""

    store: EngineGroupStore
    rank: int
    model: Path
    """The model on this machine."""
    environment: dict[str, str] = field(repr=False)
    """Environment variables of vLLM's processes."""
    command: Sequence[str] = (sys.executable, "-m", "rollout_worker.engine_worker.follower_machine")
    """Program that runs the part of an engine for which it reads vLLM's engine arguments from stdin."""
    _process: subprocess.Popen[bytes] | None = None
    _member: GroupMember | None = None
    """The last answer to an offer; None if there was none."""
    _confirmed_at: float = 0.0
    """When the offer was last known to be valid."""
    _answered_at: float = 0.0

    @property
    def takes_part(self) -> bool:
        """Whether a part of an engine runs here."""
        return self._process is not None

    def why_not_ready(self) -> str:
        """Return why no part of an engine runs here, or '' if it does."""
        return "" if self.takes_part else "the leader has not started an engine"

    def run_once(self, *, may_start: bool = True) -> None:
        """Start, keep or end the part of the engine, as the leader's offer requires."""
        try:
            offer = self.store.offer()
            if self._process is not None:
                self._check(self._process, offer, is_ending=not may_start)
            elif may_start and offer is not None and (self._member is None or self._member.offer != offer.id):
                self._start(offer)
            self._answer()
        except redis.RedisError as error:
            logger.debug("The leader's offer is not known at the moment: %s", error)
            self._confirmed_at = time.monotonic()  # it may have expired meanwhile

    def stop(self) -> None:
        """End the part of the engine, if one runs."""
        process, self._process = self._process, None
        if process is None:
            return
        # vLLM's worker processes are in the same process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def leave(self) -> None:
        """End the part of the engine, if one runs, and tell the leader, which cannot continue without it."""
        if self._process is None or self._member is None:
            return
        self.stop()
        try:
            self.store.renew_member(self.rank, self._member._replace(ended=True))
        except redis.RedisError as error:
            logger.info("The leader is not told that a part of its engine has ended: %s", error)

    def _start(self, offer: GroupOffer) -> None:
        settings = {**offer.settings, "model": str(self.model), "node_rank": self.rank}
        self._process = spawn_with_parent(self.command, stdin=subprocess.PIPE, process_group=0, env=self.environment)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(json.dumps(settings).encode())
        self._member = GroupMember(offer.id, secrets.token_hex(8), ended=False)
        self._confirmed_at, self._answered_at = time.monotonic(), 0.0

    def _check(self, process: subprocess.Popen[bytes], offer: GroupOffer | None, *, is_ending: bool) -> None:
        """End the process if its engine has ended, and tell the leader if it has ended by itself."""
        if self._member is None:
            return
        if offer is not None and offer.id == self._member.offer:
            self._confirmed_at = time.monotonic()
        if (code := process.poll()) is not None:
            logger.warning("The part of the engine on this machine has ended with status %s.", code)
            self._member, self._answered_at = self._member._replace(ended=True), 0.0
            self.stop()
            return
        has_expired = is_ending or time.monotonic() - self._confirmed_at > GROUP_LOSS_S
        if has_expired if offer is None else offer.id != self._member.offer:
            self.stop()

    def _answer(self) -> None:
        """Renew the answer to the offer while the process runs; tell once that it has ended."""
        if self._member is None or (self._process is None and not self._member.ended):
            return
        if time.monotonic() - self._answered_at >= GROUP_INTERVAL_S and (self._process or not self._answered_at):
            self.store.renew_member(self.rank, self._member)
            self._answered_at = time.monotonic()


def _run_part_of_engine() -> int:
    """Run vLLM's worker processes, as ``vllm serve --headless`` does, and return the exit code."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    settings = json.load(sys.stdin)
    config = engine_args(settings).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    return 1


if __name__ == "__main__":
    sys.exit(_run_part_of_engine())
