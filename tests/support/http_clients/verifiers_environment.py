"""A multi-turn environment of ``verifiers`` that samples from a job's HTTP server.

Run ``python verifiers_environment.py URL NAME MODEL CLIENT_TYPE`` in an environment that has ``verifiers``. NAME is the
model's name at the server, MODEL the directory of its tokenizer. The program prints its rollouts as JSON. It imports
nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.clients import resolve_client

NUM_ROLLOUTS = 4
NUM_TURNS = 3


class SumsEnvironment(vf.MultiTurnEnv):
    """Asks for one sum after the other; each contains the turn's number."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        """Return the next question."""
        return [vf.UserMessage(content=f"{len(state['trajectory'])}+4=")]


def reward(completion: vf.Messages, **_: Any) -> float:
    """Return how many answers contain a number."""
    return float(sum(message.role == "assistant" and bool(re.search(r"\d", message.content)) for message in completion))


async def main(url: str, name: str, model: str, client_type: str) -> None:
    """Sample rollouts and print them."""
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "3+4="}], "answer": "7"}])
    environment = SumsEnvironment(dataset=dataset, rubric=vf.Rubric(funcs=[reward]), max_turns=NUM_TURNS)
    config = vf.ClientConfig(
        client_type=client_type,
        api_base_url=f"{url}/v1",
        api_key_var="ROLLOUT_TOKEN",
        extra_headers_from_state={"X-Rollout-Problem": "example_id"},
        max_retries=0,
        renderer_model_name=model,
    )
    client = resolve_client(config)
    prefixes: list[str | None] = []

    async def record(response: Any) -> None:
        prefixes.append(response.headers.get("X-Rollout-Prefix"))

    client.client._client.event_hooks["response"].append(record)
    sampling = {"temperature": 1.0, "max_tokens": 40, "logprobs": True, "extra_body": {"return_token_ids": True}}
    outputs = await environment.generate(
        environment.get_dataset().repeat(NUM_ROLLOUTS).to_list(),
        client,
        name,
        sampling_args=sampling,
        state_columns=["trajectory"],
    )
    await client.close()
    rollouts = [
        {
            "reward": output["reward"],
            "error": output.get("error"),
            "answers": [one["content"] for one in output["completion"] if one["role"] == "assistant"],
            "turns": [step["tokens"] for step in output["trajectory"]],
        }
        for output in outputs["outputs"]
    ]
    print(json.dumps({"rollouts": rollouts, "prefixes": prefixes}, default=str))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
