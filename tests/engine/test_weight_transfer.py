"""Weights that a trainer sends to an engine through vLLM's weight transfer, over gloo."""

from __future__ import annotations

import asyncio
import math
import pickle
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from rollout_api import TensorsInMemory, WeightsError
from rollout_api.manifest.spec import Sampling
from rollout_api.ports import free_port
from rollout_api.protocol.messages import UpdateMode
from rollout_store.job.engines import EngineError
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import UnusableOutputError
from rollout_worker.engine.vllm_patches import load_nccl_id, unpickling_nccl_ids_only
from rollout_worker.engine.worker_extension import EngineExtension
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import LoopThread, ReferenceDistribution, make_model
from tests.support.responses import MAX_LOGPROB_ERROR, PROMPT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SENDER = """
import sys
from safetensors.torch import load_file
from torch.distributed import TCPStore
from rollout_api.weights.gloo import GlooGroup

port, path, num_tensors = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
group = GlooGroup(TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False), 0, 2)
for tensor in list(load_file(path).values())[:num_tensors]:
    group.broadcast(tensor)
group.destroy()
"""
SAMPLING = Sampling(n=8, max_tokens=12, logprobs=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models with tied embeddings, of which vLLM on CPUs keeps packed copies."""
    directory = tmp_path_factory.mktemp("models")
    return [make_model(directory / str(seed), seed=seed, tied=True) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(models: list[Path], loop: LoopThread) -> Iterator[EngineHarness]:
    """An engine with the first model."""
    engine = loop.run(Engine.start(replace(engine_config(models[0]), weight_transfer="gloo")))
    yield EngineHarness(engine, loop)
    engine.close()


def update_info(directory: Path) -> dict[str, Any]:
    """Describe the tensors of a checkpoint."""
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        names = list(file.keys())  # the file itself is not iterable
        tensors = [file.get_tensor(name) for name in names]
    return {
        "names": names,
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


async def transfer(engine: Engine, directory: Path, version: int, num_tensors: int = 1000) -> None:
    """Load weights that another process sends; it ends after a number of tensors."""
    port, described = free_port(), update_info(directory)

    async def updates() -> AsyncIterator[dict[str, Any]]:
        yield described

    path = directory / "model.safetensors"
    with subprocess.Popen([sys.executable, "-c", SENDER, str(port), str(path), str(num_tensors)]) as process:
        init_info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        await asyncio.to_thread(_await_listener, process, port)
        await engine.init_weight_transfer(init_info)
        await engine.load_transferred(updates(), version, UpdateMode.RECOMPUTE, described)
        assert 0 == await asyncio.to_thread(process.wait)


def _await_listener(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the sender, which imports torch first, listens."""
    while process.poll() is None:
        try:
            torch.distributed.TCPStore("127.0.0.1", port, wait_for_workers=False)
        except (RuntimeError, ValueError):
            continue
        return


def check(engine: EngineHarness, directory: Path, version: int) -> None:
    """Check the distribution that the engine samples from."""
    reference = ReferenceDistribution(directory)
    for response in engine.sample([PROMPT], SAMPLING):
        assert [version] == [span.weight_version for span in response.weight_spans]
        assert response.logprobs is not None
        assert reference.max_error(PROMPT, response.token_ids, response.logprobs, SAMPLING) < MAX_LOGPROB_ERROR


def test_vllm_receives_the_weights_of_another_process_and_serves_them(
    engine: EngineHarness, models: list[Path]
) -> None:
    engine.loop.run(engine.engine.load_weights(models[0], 0))
    with pytest.raises(EngineError, match="continues with weight version 0"):
        engine.loop.run(transfer(engine.engine, models[1], 1, num_tensors=4))
    check(engine, models[0], 0)
    engine.loop.run(transfer(engine.engine, models[1], 2))
    check(engine, models[1], 2)


def test_weights_that_are_not_finite_are_refused_or_named(
    engine: EngineHarness, models: list[Path], tmp_path: Path
) -> None:
    diverged = Path(shutil.copytree(models[1], tmp_path / "diverged"))
    tensors = load_file(diverged / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = math.nan
    save_file(tensors, diverged / "model.safetensors")
    engine.loop.run(engine.engine.load_weights(models[0], 0))
    with pytest.raises(
        EngineError, match=r"down_proj.weight has values that are NaN.* continues with weight version 0"
    ):
        engine.loop.run(transfer(engine.engine, diverged, 1))
    check(engine, models[0], 0)
    # The engine cannot return to weights that came from a trainer's memory, too.
    engine.loop.run(transfer(engine.engine, models[1], 2))
    engine.loop.run(transfer(engine.engine, diverged, 3))
    with pytest.raises(UnusableOutputError, match="weight version 3 must have values that are NaN"):
        engine.sample([PROMPT], SAMPLING)
    engine.loop.run(transfer(engine.engine, models[1], 4))
    check(engine, models[1], 4)


def test_the_identifier_that_a_trainer_of_vllm_sends_is_received() -> None:
    store = torch.distributed.HashStore()
    sent = ncclUniqueId.from_buffer_copy(bytes(range(128)))
    StatelessProcessGroup(rank=0, world_size=2, store=store).broadcast_obj(sent, 0)
    with unpickling_nccl_ids_only():
        received = StatelessProcessGroup(rank=1, world_size=2, store=store).broadcast_obj(None, 0)
    assert bytes(range(128)) == bytes(received)


@pytest.mark.parametrize("sent", [print, subprocess.Popen, [1, 2], ncclUniqueId])
def test_nothing_else_is_unpickled(sent: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_nccl_id(pickle.dumps(sent))
    store = torch.distributed.HashStore()
    StatelessProcessGroup(rank=0, world_size=2, store=store).broadcast_obj(sent, 0)
    with unpickling_nccl_ids_only(), pytest.raises(pickle.UnpicklingError):
        StatelessProcessGroup(rank=1, world_size=2, store=store).broadcast_obj(None, 0)


@pytest.mark.parametrize(
    ("variables", "message"),
    [({"VLLM_DISABLE_PYNCCL": "1"}, "unset the environment"), ({"VLLM_NCCL_SO_PATH": "/no/nccl.so"}, "/no/nccl.so")],
)
def test_no_weights_are_sent_or_received_where_nccl_is_disabled(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    """vLLM's communicator would return at once, and the engine would load memory that nobody has written to."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    called: list[object] = []
    worker: Any = EngineExtension()
    worker.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="sparse_nccl"))
    worker.shutdown_weight_transfer_engine, worker.init_weight_transfer_engine = lambda: None, called.append
    assert message in (worker.das_init_weight_transfer({}) or "")
    trainer = TensorsInMemory({"a": torch.zeros(1)}, host="127.0.0.1", device="cuda")
    client: Any = SimpleNamespace(init_weight_transfer_engine=called.append)
    with pytest.raises(WeightsError, match=message):
        trainer.connect(client, 2)
    assert [] == called
