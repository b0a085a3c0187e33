"""SkyRL's client of inference servers, which samples from a job's HTTP server and loads an adapter there.

Run ``python skyrl_client.py SKYRL URL NAME ADAPTER``: SKYRL is a folder with the package ``skyrl``, NAME is the model's
name at the server, and ADAPTER a directory. The last line that the program prints is what the client returned, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.http_clients.skyrl_modules import import_from_skyrl

CLIENT = "backends.skyrl_train.inference_servers.remote_inference_client"
SAMPLING = {
    # skyrl.backends.skyrl_train.inference_servers.engine_utils.get_vllm_sampling_params, with SkyRL's defaults
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 40,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}


async def main(folder: str, url: str, name: str, adapter: str) -> None:
    """Make the calls of a training step, and print what they return."""
    module = import_from_skyrl(Path(folder), CLIENT)
    report: dict[str, Any] = {}
    async with module.RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=name, uses_lora_weight_sync=True
    ) as client:
        report["world_size"] = await client.get_world_size()
        prompts = await client.tokenize(["3+4=", "5+6="], add_special_tokens=False)
        batch = {
            "prompt_token_ids": prompts,
            "sampling_params": SAMPLING,
            "session_ids": ["trajectory-0", "trajectory-1"],
            "cache_salt": str(client.weight_version),
        }
        report["prompts"] = prompts
        report["base"] = await client.generate(batch, model=name)
        for _ in range(2):  # SkyRL writes the adapter of each training step to the same directory
            await client.load_lora_adapter(module.SKYRL_LORA_ADAPTER_NAME, adapter)
            await client.reset_prefix_cache(reset_running_requests=True)
            client.increment_weight_version()
        report["adapter"] = await client.generate(batch, model=module.SKYRL_LORA_ADAPTER_NAME)
        await client.finish_session("trajectory-0")
        await client.pause_generation()
        paused = asyncio.create_task(client.generate(batch, model=name))
        await asyncio.sleep(0.5)
        report["is_paused"] = not paused.done()
        await client.resume_generation()
        report["resumed"] = await paused
        chat = {"model": name, "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 40, "session_id": "1"}
        report["chat"] = await client.chat_completion({"json": chat})
        try:
            await client.update_named_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]})
        except Exception as error:
            report["refusal"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
