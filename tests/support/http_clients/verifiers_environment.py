"""Runs an environment of ``verifiers`` that samples from a job's HTTP server.

Run ``python verifiers_environment.py URL NAME ENVIRONMENT`` in an environment that has ``verifiers``. NAME is the
model's name at the server, and ENVIRONMENT the configuration of the environment, as JSON. The program prints its
rollouts as JSON. It imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

NUM_ROLLOUTS = 2


async def main(url: str, name: str, environment_config: str) -> None:
    """Sample rollouts of the first task and print them."""
    prefixes: list[str | None] = []
    build = eval_client.build_async_httpx

    async def record(response: Any) -> None:
        prefixes.append(response.headers.get("X-Rollout-Prefix"))

    def build_recording(config: Any) -> Any:
        client = build(config)
        client.event_hooks["response"].append(record)
        return client

    eval_client.build_async_httpx = build_recording
    environment = load_environment(resolve_env_config(json.loads(environment_config)))
    client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="ROLLOUT_TOKEN")
    context = ModelContext(name, client, vf.Sampling(temperature=0.0, max_tokens=100))
    task = next(iter(environment.taskset))
    async with environment.serving():
        episodes = await asyncio.gather(*(environment.run_episode(task, context) for _ in range(NUM_ROLLOUTS)))
    rollouts = [
        {
            "reward": trace.reward,
            "errors": [error.message for error in (*episode.errors, *trace.errors)],
            "roles": [message.role for branch in trace.branches for message in branch.messages],
        }
        for episode in episodes
        for trace in episode.traces
    ]
    print(json.dumps({"rollouts": rollouts, "prefixes": prefixes}, default=str))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
