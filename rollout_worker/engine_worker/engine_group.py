"""An engine that spans several machines: the leader's part and the follower's.

The leader, which is the worker, decides when the engine starts and ends, gathers the followers, and notices when one of
them is lost. A follower finds the leader's offers in Redis, runs one process for each start of the engine, and ends it
with the engine. That process, ``python -m rollout_worker.engine_worker.engine_group``, reads vLLM's engine arguments
as JSON from stdin, and ends when one of vLLM's worker processes does.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from rollout_api.redis_client.connection import connect, wait_until_usable
from rollout_store.job.engines import OFFER_EXPIRY_S, EngineGroupStore, EngineOffer, FollowerAnswer
from rollout_store.job.setup import JobSetup
from rollout_store.runtime.child_process import spawn_with_parent
from rollout_worker.engine.config import engine_args, engine_environment
from rollout_worker.engine_worker.engine_setup import engine_config
from rollout_worker.engine_worker.worker_process import HANDOVER_MARGIN_S, serving_readiness

logger = logging.getLogger(__name__)

GROUP_INTERVAL_S = 0.5
"""Seconds between two renewals of the leader's offer and of a follower's answer."""
GROUP_LOSS_S = 5.0
"""Seconds for which the leader or a follower may be missing after its offer or answer has expired, until it is lost.

A lost process is usually noticed at once by the others. A false alarm would cost a start of the engine."""
GROUP_WAIT_LOG_INTERVAL_S = 60.0
"""Seconds after which it is logged again that a leader waits for its followers."""
_POLL_INTERVAL_S = 0.25
"""Seconds between two looks at the leader's offer and at the own part of the engine."""


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
        self._offer = EngineOffer(secrets.token_hex(8), settings)
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
                answers = self._store.answers(self._size)
            except redis.RedisError as error:
                logger.debug("The followers are not known at the moment: %s", error)
                self._seen_at = time.monotonic()  # their answers may have been lost as well
            else:
                if reason := self._observe(answers):
                    self._on_loss(reason)
                    return
            self._closing.wait(GROUP_INTERVAL_S)

    def _observe(self, answers: Sequence[FollowerAnswer | None]) -> str:
        """Record the followers' answers, and return why the engine has lost one of them; empty if it has not."""
        own = [answer if answer is not None and answer.offer == self._offer.id else None for answer in answers]
        running = [answer.process for answer in own if answer is not None and not answer.ended]
        if not self._processes:
            if any(answer is not None and answer.ended for answer in own):
                # It answers only a new offer.
                return "a part of the engine has ended while the leader waited for other machines"
            if len(running) == len(answers):
                self._processes = running
                self._seen_at = time.monotonic()
                self._joined.set()
            return ""
        if running == self._processes:
            self._seen_at = time.monotonic()
            return ""
        for rank, (answer, process) in enumerate(zip(own, self._processes, strict=True), start=1):
            if answer is not None and (answer.ended or answer.process != process):
                return f"the part of the engine on machine {rank} has ended"
        if time.monotonic() - self._seen_at > GROUP_LOSS_S:
            return f"another machine of the engine has not answered for about {OFFER_EXPIRY_S + GROUP_LOSS_S:.0f} s"
        return ""


def run_follower(setup: JobSetup, *, rank: int, http_port: int) -> None:
    """Run the part of an engine that belongs on this machine, until SIGTERM.

    The leader needs this machine while it hands over its rollouts. After SIGTERM, the follower therefore waits for the
    end of the engine, for as long as the leader may take. The *rank* of this machine in the engine is at least 1.
    ``/readyz`` is served if *http_port* is not 0.
    """
    terminated = threading.Event()
    wait_until_usable(connect(setup.redis_url), setup.redis_url)
    model = setup.model()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    follower = Follower(setup.group_store(), rank, model, _environment(setup, model))
    with serving_readiness(http_port, follower.why_not_ready):
        try:
            while not terminated.wait(_POLL_INTERVAL_S):
                follower.run_once()
            deadline = time.monotonic() + setup.job.spec.workers.drain_seconds + HANDOVER_MARGIN_S
            while follower.takes_part and time.monotonic() < deadline:
                follower.run_once(may_start=False)
                time.sleep(_POLL_INTERVAL_S)
        finally:
            follower.leave()


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
    command: Sequence[str] = (sys.executable, "-m", "rollout_worker.engine_worker.engine_group")
    """Program that reads vLLM's engine arguments from stdin and runs this part of the engine."""
    _process: subprocess.Popen[bytes] | None = None
    _last_answer: FollowerAnswer | None = None
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
            elif may_start and offer is not None and (self._last_answer is None or self._last_answer.offer != offer.id):
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
        if self._process is None or self._last_answer is None:
            return
        self.stop()
        try:
            self.store.renew_answer(self.rank, self._last_answer._replace(ended=True))
        except redis.RedisError as error:
            logger.info("The leader is not told that a part of its engine has ended: %s", error)

    def _start(self, offer: EngineOffer) -> None:
        settings = {**offer.settings, "model": str(self.model), "node_rank": self.rank}
        self._process = spawn_with_parent(self.command, stdin=subprocess.PIPE, process_group=0, env=self.environment)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(json.dumps(settings).encode())
        self._last_answer = FollowerAnswer(offer.id, secrets.token_hex(8), ended=False)
        self._confirmed_at, self._answered_at = time.monotonic(), 0.0

    def _check(self, process: subprocess.Popen[bytes], offer: EngineOffer | None, *, is_ending: bool) -> None:
        """End the process if its engine has ended, and tell the leader if it has ended by itself."""
        if self._last_answer is None:
            return
        if offer is not None and offer.id == self._last_answer.offer:
            self._confirmed_at = time.monotonic()
        if (code := process.poll()) is not None:
            logger.warning("The part of the engine on this machine has ended with status %s.", code)
            self._last_answer, self._answered_at = self._last_answer._replace(ended=True), 0.0
            self.stop()
            return
        has_expired = is_ending or time.monotonic() - self._confirmed_at > GROUP_LOSS_S
        if has_expired if offer is None else offer.id != self._last_answer.offer:
            self.stop()

    def _answer(self) -> None:
        """Renew the answer to the offer while the process runs; tell once that it has ended."""
        if self._last_answer is None or (self._process is None and not self._last_answer.ended):
            return
        if time.monotonic() - self._answered_at >= GROUP_INTERVAL_S and (self._process or not self._answered_at):
            self.store.renew_answer(self.rank, self._last_answer)
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
