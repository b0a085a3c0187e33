"""SkyRL's sender of full weights, as its trainers use it to send a model to a job's HTTP server.

Run ``python skyrl_sender.py SKYRL URL MODEL``: SKYRL is a folder with the package ``skyrl``, and MODEL a directory.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.http_clients.skyrl_modules import import_from_skyrl
from tests.support.vllm_sender_on_cpu import install


async def main(folder: Path, url: str, directory: str) -> None:
    """Form the process group and send the model, as SkyRL's policy worker does, twice."""
    servers = "backends.skyrl_train.inference_servers.remote_inference_client"
    async with import_from_skyrl(folder, servers).RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="model"
    ) as client:
        world_size, _ = await client.get_world_size()
    # SkyRL's module with this function imports packages that need Python 3.12.
    utilities: Any = ModuleType("skyrl.train.utils.utils")
    utilities.str_to_torch_dtype = lambda name: getattr(torch, name)
    sys.modules[utilities.__name__] = utilities
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    sources = import_from_skyrl(folder, "backends.skyrl_train.weight_sync.sources")
    engine = import_from_skyrl(folder, "backends.skyrl_train.weight_sync.weight_senders").build_trainer_engine(
        ie_cfg=SimpleNamespace(
            weight_sync_backend="nccl", model_dtype="float32", weight_transfer_threshold_cuda_ipc_GB=1.0
        ),
        colocate_all=False,
        rank=0,
        inference_world_size=world_size,
        source_factory=lambda dtype, backend: sources.FsdpWeightSource(model, dtype),
        draft_source_factory=lambda dtype: None,
        server_urls=[url],
        data_parallel_size=1,
        base_model_path=directory,
    )
    for _ in range(2):
        engine.send_weights()


if __name__ == "__main__":
    install()
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
