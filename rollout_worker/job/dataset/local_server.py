"""An HTTP server of the job on the head itself, from which an environment samples its responses."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import httpx

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.ports import free_port
from rollout_worker.engine.errors import EngineError
from rollout_worker.job.setup import JobSetup
from rollout_worker.runtime.child_process import spawn_with_parent

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.5
_RESTART_DELAY_S = 2.0
_STOP_TIMEOUT_S = 10.0
_SHOWN_BYTES = 2000
_MAX_START_FAILURES = 3


class LocalServer:
    """Runs ``rollout serve`` for one client on this machine, and restarts it when it ends.

    Used as a context manager, from the main thread, with which the server ends.

    Args:
        setup: the job.

    Raises:
        EngineError: when the context is entered, if the server cannot start.
    """

    def __init__(self, setup: JobSetup) -> None:
        self._setup, self._port = setup, free_port()
        self.token = secrets.token_hex(24)
        """Token of the only client."""
        self._directory = TemporaryDirectory(prefix="rollout-server-")
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failures = 0
        self._log = ""

    @property
    def url(self) -> str:
        """Base URL of OpenAI's API."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        """Start the server, and wait until it serves."""
        directory = Path(self._directory.name)
        (directory / "job.yaml").write_text(json.dumps(self._setup.manifest))
        tokens = directory / "tokens"
        tokens.mkdir(mode=0o700)
        (tokens / "environment").write_text(self.token)
        self._start()
        self._keeper = asyncio.ensure_future(self._keep_running())
        try:
            await self._wait_until_it_serves()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _wait_until_it_serves(self) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    if (await client.get(f"http://127.0.0.1:{self._port}/health")).is_success:
                        return
                except httpx.TransportError:
                    pass
                if self._failures >= _MAX_START_FAILURES:
                    raise EngineError(
                        "the HTTP server from which the environment samples cannot start; check spec.server.args. The "
                        f"end of its output: {self._log}"
                    )
                await asyncio.sleep(_CHECK_INTERVAL_S)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server."""
        if self._keeper is not None:
            await cancel_and_wait(self._keeper)
        if self._process is not None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._directory.cleanup()

    def _start(self) -> None:
        directory, spec = Path(self._directory.name), self._setup.job.spec
        command = [sys.executable, "-m", "rollout_worker.cli", "serve", f"--file={directory / 'job.yaml'}"]
        command += [f"--uid={self._setup.uid}", "--host=127.0.0.1", f"--port={self._port}"]
        command += [f"--tokens={directory / 'tokens'}"]
        if self._setup.model_cache:
            command.append(f"--model-cache={self._setup.model_cache}")
        command += spec.server.args if spec.server is not None else []
        with (directory / "log").open("wb") as log:
            # The URL may contain a password, which other users could read in the list of processes.
            self._process = spawn_with_parent(
                command,
                env={**os.environ, "ROLLOUT_REDIS_URL": self._setup.redis_url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def _keep_running(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if self._process is not None and (code := self._process.poll()) is not None:
                self._log = (Path(self._directory.name) / "log").read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
                self._failures += 1
                logger.warning("The environment's HTTP server ended with exit code %d:\n%s", code, self._log)
                await asyncio.sleep(_RESTART_DELAY_S)
                self._start()
