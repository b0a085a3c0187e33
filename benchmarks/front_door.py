"""Measures what a job's HTTP server adds to vLLM's own server with the same engine.

    python -m benchmarks.front_door --json FILE

A job with one engine and ``rollout serve``, and vLLM's own server with the same settings of the engine, run beside each
other on this machine's CPUs and are measured in turns. Neither drafts. Each decoding step takes at least 20 ms, as on a
GPU. Most of this time is a simulated wait, so the processor is free for the servers.

- **End to end**: clients send completions, each the next one when the last one has arrived. Measured is the time until
  all have arrived, at several numbers of clients.
- **First token**: the same with streamed completions. Measured is the time from sending a request to its first token.
  If all responses are equally long, those of all clients end in the same step, and their next requests arrive at the
  same time. The same is therefore also measured with responses of different lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx
import yaml

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.redis_server import redis_server
from benchmarks.simulated_step import environment as simulated_step
from rollout_api.manifest.rollout_job import parse_job
from rollout_api.ports import free_port
from rollout_store.runtime.command_line import default_cache
from rollout_tools.tiny_model import ensure
from rollout_worker.engine.config import EngineConfig, engine_environment, vllm_settings
from tests.support.manifests import SMALL_CPU_ENGINE

STEP_S = 0.02
"""Duration of a decoding step."""
CLIENTS = (1, 8, 32)
"""Numbers of clients that send requests at the same time."""
REQUESTS_PER_CLIENT = 4
PROMPT_TOKENS = 32
TOKENS = 100
"""Tokens of each response, or the mean."""
VARIED_TOKENS = range(TOKENS // 2, TOKENS * 3 // 2 + 1)
"""Tokens of responses of different lengths."""
MAX_ADDED_SHARE = 1.05
MAX_ADDED_MS = 10.0
START_TIMEOUT_S = 240.0


class Kind(StrEnum):
    """What is measured."""

    COMPLETE = "complete"
    """Responses that arrive as a whole."""
    STREAMED = "streamed"
    """Responses that are streamed."""
    VARIED = "streamed, different lengths"
    """Responses of different lengths that are streamed."""


@dataclass(frozen=True)
class Run:
    """One measurement of one server."""

    seconds: float
    """Time until all responses have arrived."""
    first_token_s: list[float]
    """Time to the first token of each request; empty if they were not streamed."""


def make_manifest(model: Path) -> dict[str, Any]:
    """Return the manifest of the job."""
    return {
        "apiVersion": "das.rollout.dev/v1beta1",
        "kind": "RolloutJob",
        "metadata": {"name": "front-door"},
        "spec": {
            "model": {"uri": str(model)},
            "source": {"trainer": {}},
            "engine": {**SMALL_CPU_ENGINE, "maxNumSeqs": max(CLIENTS)},
            "sampling": {"maxTokens": TOKENS},
            "speculation": {"policy": "off"},
            "workers": {"gpusPerWorker": 0},
        },
    }


def vllm_arguments(manifest: dict[str, Any], model: Path, port: int) -> list[str]:
    """Return the arguments that make vLLM's own server run the engine of the job."""
    config = EngineConfig(model=model, spec=parse_job(manifest).spec.engine, cpu=True, drafting=None)
    settings = vllm_settings(config)
    del settings["model"], settings["use_tqdm_on_load"]
    arguments = [f"--model={model}", "--host=127.0.0.1", f"--port={port}", "--served-model-name=front-door"]
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(option if value else f"--no-{name.replace('_', '-')}")
        else:
            arguments.append(f"{option}={value}")
    return [*arguments, "--generation-config=vllm", "--disable-uvicorn-access-log"]


@contextlib.contextmanager
def servers(directory: Path) -> Iterator[dict[str, str]]:
    """Start both servers, and yield their URLs by name."""
    model = ensure(default_cache() / "das" / "tiny-qwen3")[-1]
    manifest = make_manifest(model)
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    config = EngineConfig(model=model, spec=parse_job(manifest).spec.engine, cpu=True, drafting=None)
    environment = {**os.environ, **engine_environment(config, {}), **simulated_step(directory / "plugin", STEP_S)}
    ports = {"job": free_port(), "vLLM": free_port()}
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: list[str]) -> None:
        with (directory / f"{name}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))

    rollout = [sys.executable, "-m", "rollout_tools.cli"]
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    with redis_server() as redis:
        common = ["-f", str(file), "--redis", redis]
        try:
            start("job", [*rollout, "run", *common, "--no-compare", "--state-dir", str(directory / "state")])
            start("server", [*rollout, "serve", *common, "--port", str(ports["job"])])
            start("vllm", [*vllm, *vllm_arguments(manifest, model, ports["vLLM"])])
            urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
            for url in urls.values():
                _wait_until_served(url, processes, directory)
            yield urls
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait()


def _wait_until_served(url: str, processes: list[subprocess.Popen[bytes]], directory: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                break
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            logs = "\n".join(log.read_text()[-2000:] for log in directory.glob("*.log"))
            raise RuntimeError(f"a server has not started:\n{logs}")
        time.sleep(0.5)


async def measure(url: str, num_clients: int, kind: Kind, seed: int) -> Run:
    """Send requests to a server, and wait for the responses."""
    rng = random.Random(seed)
    number, streamed = num_clients * REQUESTS_PER_CLIENT, kind is not Kind.COMPLETE
    prompts = [[rng.randrange(10, 300) for _ in range(PROMPT_TOKENS)] for _ in range(number)]
    lengths = [rng.choice(VARIED_TOKENS) if kind is Kind.VARIED else TOKENS for _ in range(number)]
    first_token_s: list[float] = []

    async def request(session: aiohttp.ClientSession, prompt: list[int], length: int) -> None:
        body = {"model": "front-door", "prompt": prompt, "max_tokens": length, "min_tokens": length, "stream": streamed}
        sent = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            if streamed:
                await response.content.readany()
                first_token_s.append(time.perf_counter() - sent)
            text = await response.text()
        if not streamed and json.loads(text)["usage"]["completion_tokens"] != length:
            raise RuntimeError(f"{url} has not returned {length} tokens: {text}")

    async def run_client(session: aiohttp.ClientSession) -> None:
        while prompts:
            await request(session, prompts.pop(), lengths.pop())

    connector = aiohttp.TCPConnector(limit=num_clients)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(run_client(session) for _ in range(num_clients)))
        return Run(time.perf_counter() - started, first_token_s)


async def measure_in_turns(urls: dict[str, str], rounds: int) -> dict[tuple[str, int, Kind], list[Run]]:
    """Measure all servers in turns; the key of a measurement has the server, the number of clients, and the kind."""
    for url in urls.values():
        await measure(url, max(CLIENTS), Kind.STREAMED, seed=0)
    runs: dict[tuple[str, int, Kind], list[Run]] = {}
    for number in range(1, rounds + 1):
        for num_clients in CLIENTS:
            for kind in Kind:
                order = sorted(urls, reverse=bool(number % 2))
                for name in order:
                    run = await measure(urls[name], num_clients, kind, seed=number)
                    runs.setdefault((name, num_clients, kind), []).append(run)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return runs


def figures_of(runs: dict[tuple[str, int, Kind], list[Run]]) -> list[Figure]:
    """Return the figures."""
    figures = []
    for num_clients in CLIENTS:
        job, peer = (runs[name, num_clients, Kind.COMPLETE] for name in ("job", "vLLM"))
        ratio = median(one.seconds / other.seconds for one, other in zip(job, peer, strict=True))
        target = MAX_ADDED_SHARE if num_clients >= 8 else None
        figures.append(Figure(f"end to end, {num_clients} clients", ratio, "ratio", "vLLM's server", "<=", target))
    quantiles = (("median", 0.5, MAX_ADDED_MS), ("p99", 0.99, None))
    for num_clients, kind, (what, share, target) in product(CLIENTS, (Kind.STREAMED, Kind.VARIED), quantiles):
        job_ms, peer_ms = (
            1000 * quantile([time_s for run in runs[name, num_clients, kind] for time_s in run.first_token_s], share)
            for name in ("job", "vLLM")
        )
        lengths = ", different lengths" if kind is Kind.VARIED else ""
        name = f"first token later, {what}, {num_clients} clients{lengths}"
        figures.append(Figure(name, job_ms - peer_ms, "ms", "vLLM's server", "<=", target))
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, servers(Path(directory)) as urls:
        runs = asyncio.run(measure_in_turns(urls, args.rounds))
    seconds = {
        f"{name}, {num_clients} clients, {kind}": spread([run.seconds for run in found])
        for (name, num_clients, kind), found in runs.items()
    }
    report(args.json, figures_of(runs), step_s=STEP_S, tokens=TOKENS, rounds=args.rounds, seconds=seconds)


if __name__ == "__main__":
    main()
