"""A job on several machines: one process is its head, the others are workers; each is to be restarted when it ends.

Ray runs inside the job, for placement and for noticing failures. A head that comes back is a new Ray cluster: workers
notice, hand over what they were making, and join it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import psutil
import redis

from rollout_api.asyncio_tasks import end
from rollout_api.errors import JobNotFoundError, RedisAwayError
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.keys import MessageKeys
from rollout_worker.child_process import end_with_parent
from rollout_worker.engine.compat import EngineError
from rollout_worker.history.connection import (
    RedisUnusableError,
    check,
    connect,
    connect_history,
    explain_error,
    retry,
    wait_until_usable,
)
from rollout_worker.job.actors import WORKER_ENV
from rollout_worker.job.dataset_source import Dataset, done_before, run_dataset
from rollout_worker.job.fleet import ENGINE_RESOURCE
from rollout_worker.job.ray_job import OBJECT_STORE_BYTES, RayJob, join_ray, own_address
from rollout_worker.job.setup import JobSetup
from rollout_worker.ray_token import share_token
from rollout_worker.readiness import ReadinessServer

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_STOP_S = 10.0
_REDIS_PAUSE_S = 2.0
_PROBE_S = 0.6
"""Timeouts of ``/readyz`` with Redis, of which several may add up: kubelets wait 3 s for the answer."""
TERMINATION_LOG = Path("/dev/termination-log")
"""Where a container's last words go (Kubernetes' default ``terminationMessagePath``); 4096 bytes at most."""
_LAST_FIGURES = ("done", "total", "epoch", "weight_version", "tokens", "steps", "accepted_per_step")
_DRAIN_S = 25.0
"""How long a worker that is told to end lets its rollouts end: less than Kubernetes' usual 30 s until SIGKILL."""


async def run_head(setup: JobSetup, dataset: Dataset | None, *, host: str | None, port: int) -> None:
    """Be the head of a job until it is closed and answered.

    Ray must not be imported before ``ray_token.share_token`` was called: it reads its token then.

    Args:
        setup: the job.
        dataset: what the job samples by itself; None if it serves trainers.
        host: address of this machine for the others; None: as Ray finds it.
        port: on which workers find the head.

    Raises:
        EngineError: if Ray does not start, or dies; the process is to be started again then.
        RolloutClientError: if the job refuses its own dataset.
    """
    host = host or own_address()
    address = f"{host}:{port}"
    options = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--node-ip-address={host}"]
    server = connect(setup.redis_url)
    head = f"{address} {secrets.token_hex(8)}"
    # before Ray is there, so that no worker joins the new cluster in the belief that it is the old one
    await asyncio.to_thread(retry, server.set, setup.keys.head, head)
    with _ray(options) as processes:
        await asyncio.to_thread(_wait_until_reachable, address, processes)
        join_ray(address)
        job = RayJob(setup)
        await asyncio.to_thread(job.start)
        own = [asyncio.ensure_future(_work_off(setup, dataset, server))] if dataset is not None else []
        try:
            while not await job.ended():
                if processes.poll() is not None:
                    raise EngineError("Ray's head has ended; see its log")
                for work in own:
                    if work.done():
                        work.result()
                with contextlib.suppress(redis.RedisError):
                    await asyncio.to_thread(_remind, server, setup.keys, head)
                await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(_say_last, server, setup.keys)
        finally:
            await end(*own)


def _remind(server: redis.Redis, keys: MessageKeys, head: str) -> None:
    """Tell a Redis that has lost its data how workers join this head."""
    server.set(keys.head, head, nx=True)
    server.set(keys.ray_token, os.environ["RAY_AUTH_TOKEN"], nx=True)


def _say_last(server: redis.Redis, keys: MessageKeys) -> None:
    """Leave the job's last figures as the message of the container's end, where Kubernetes takes one."""
    if not TERMINATION_LOG.exists():
        return
    try:
        found: Any = retry(server.get, keys.status)
        if found is None:
            return  # it is kept for seconds only
        status = json.loads(found)
        TERMINATION_LOG.write_text(json.dumps({name: status[name] for name in _LAST_FIGURES if name in status}))
    except (OSError, ValueError, redis.RedisError) as error:
        logger.warning("The last figures cannot be left for the operator: %s", error)


async def _work_off(setup: JobSetup, dataset: Dataset, server: redis.Redis) -> None:
    """Make the dataset's rollouts; as long as Redis is away, nothing is given up."""
    while True:
        try:
            done = await asyncio.to_thread(done_before, server, setup.keys)
            await run_dataset(setup, dataset, server, done=done)
        except redis.RedisError as error:
            logger.warning("Going on when Redis is back: %s", explain_error(error, setup.redis_url))
        except (RedisAwayError, JobNotFoundError) as error:  # the coordinator, too, may wait for Redis
            logger.warning("Going on when that has passed: %s", error)
        else:
            return
        await asyncio.sleep(_REDIS_PAUSE_S)


def run_worker(
    job: RolloutJob, redis_url: str, uid: str, *, history_url: str, name: str, host: str | None, http_port: int
) -> None:
    """Be a worker of a job: room for its engines, until SIGTERM, which lets them hand over what they have.

    Args:
        job: the manifest.
        redis_url: the job's server, where a new head makes itself known.
        uid: of the job.
        history_url: of the job's history, where that is not on the job's server; else empty.
        name: under which the job's status shows this worker.
        host: address of this machine for the others; None: as Ray finds it.
        http_port: of ``/readyz``; 0 for none.
    """
    server, keys = connect(redis_url), MessageKeys(uid)
    own_token = "RAY_AUTH_TOKEN" in os.environ
    ending: list[int] = []
    engines = job.spec.engines_per_worker
    membership = _Membership(connect(redis_url, timeout=_PROBE_S), keys, engines)
    readiness = ReadinessServer(http_port, membership.why_not_ready) if http_port else None
    try:
        wait_until_usable(server, redis_url)
        if history_url:
            _say_if_unusable(history_url)
        signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
        while not ending:
            head = _head(server, keys.head)
            address = "" if head is None else head.split()[0].decode()
            if head is None or not _reachable(address):
                time.sleep(_POLL_S)
                continue
            try:
                if not own_token:  # a head that lost its Redis' data has another
                    os.environ.pop("RAY_AUTH_TOKEN", None)
                share_token(server, keys)
            except redis.RedisError as error:
                logger.warning("Joining when Redis is back: %s", explain_error(error, redis_url))
                time.sleep(_REDIS_PAUSE_S)
                continue
            # another with each head: the engines of the last one were told to leave under their own
            membership.worker = os.environ[WORKER_ENV] = f"{name}/{secrets.token_hex(4)}"
            options = [f"--address={address}", "--num-cpus=0", f"--resources={json.dumps({ENGINE_RESOURCE: engines})}"]
            with _ray([*options, f"--node-ip-address={host}"] if host else options) as processes:
                while not ending and processes.poll() is None and _head(server, keys.head) in (head, None):
                    time.sleep(_POLL_S)
                if ending:
                    _let_engines_leave(server, keys, membership.worker, _DRAIN_S)
                elif processes.poll() is None:
                    logger.warning("The head was started anew; joining it as soon as what is here is handed over.")
                    _let_engines_leave(server, keys, membership.worker, 0.0)
    finally:
        if readiness is not None:
            readiness.close()


def _say_if_unusable(history_url: str) -> None:
    """A worker that cannot reach the history makes rollouts all the same; its log should say why they are slow."""
    try:
        with connect_history(history_url) as history:
            check(history, history_url)
    except RedisUnusableError as error:
        logger.warning("Drafting without the job's history until this is mended: %s", error)
    except redis.RedisError as error:
        logger.warning("Drafting without the job's history until this is mended: %s", explain_error(error, history_url))


@dataclass
class _Membership:
    """How far this worker's engines are in the job."""

    server: redis.Redis
    keys: MessageKeys
    engines: int
    worker: str = ""
    _last: str = "there is no head yet"

    def why_not_ready(self) -> str:
        """'' when all engines serve; what was true last while Redis does not answer."""
        with contextlib.suppress(redis.RedisError):
            if not self.worker:
                return self._last
            serving = len(_engines_of(self.server, self.keys, self.worker))
            self._last = "" if serving >= self.engines else f"{serving} of {self.engines} engines serve"
        return self._last


def _engines_of(server: redis.Redis, keys: MessageKeys, worker: str) -> list[dict[str, Any]]:
    reports: Any = server.hvals(keys.engines)
    return [one for data in reports if (one := msgpack.unpackb(data, strict_map_key=False))["worker"] == worker]


def _head(server: redis.Redis, key: str) -> bytes | None:
    """Which head there is; None while Redis does not say."""
    try:
        found = server.get(key)
    except redis.RedisError:
        return None
    return found if isinstance(found, bytes) else None


def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _wait_until_reachable(address: str, processes: subprocess.Popen[bytes]) -> None:
    while not _reachable(address):
        if processes.poll() is not None:
            raise EngineError(f"Ray does not start on {address}; is the port free?")
        time.sleep(_POLL_S)


@contextmanager
def _ray(options: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes on this machine, in a process group of their own."""
    # not by the name of the command, which lies wherever an image's pip puts scripts
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", *options]
    processes = subprocess.Popen(
        command,
        process_group=0,
        stdout=subprocess.DEVNULL,
        preexec_fn=end_with_parent,  # noqa: PLW1509 – see there
    )
    try:
        yield processes
    finally:
        below = _below(processes.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes.wait(_STOP_S)
        processes.kill()
        processes.wait()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _let_engines_leave(server: redis.Redis, keys: MessageKeys, worker: str, grace: float) -> None:
    """Tell a worker's engines to leave the job within *grace* seconds, and wait until they have."""
    deadline = time.monotonic() + grace + _STOP_S
    try:
        if server.hget(keys.job, "state") in (b"closed", b"failed"):
            return  # they have nothing, and no coordinator notices that they leave
        server.set(keys.leaving(worker), grace, ex=600)
        while time.monotonic() < deadline and _engines_of(server, keys, worker):
            time.sleep(_POLL_S / 2)
    except redis.RedisError as error:
        logger.warning("Redis cannot be told that this worker leaves (%s): its leases will run out.", error)
