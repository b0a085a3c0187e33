"""Tensors that are broadcast from a trainer's memory: buckets, names, and trainers with several processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from rollout_api import InvalidRequestError, ModelInMemory, TensorsInMemory
from rollout_api.ports import free_port
from rollout_api.protocol.messages import Broadcast
from rollout_api.weights.broadcast import join, nccl_rendezvous, receive
from rollout_api.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from tests.support.reference_model import make_model, small_qwen3_moe

ENGINES = itertools.count()
"""Numbers of engines; each one joins a group of its own."""
TENSORS = {
    "scale": torch.tensor(3.5, dtype=torch.bfloat16),
    "bias": torch.arange(5, dtype=torch.float32),
    "none": torch.empty(0, 7),
    "weight": torch.arange(600, dtype=torch.bfloat16).view(20, 30).t(),
    "bytes": torch.arange(3, dtype=torch.uint8),
}


def received(uri: str, offer: Broadcast) -> dict[str, torch.Tensor]:
    """Take part in a broadcast as the only engine."""
    address = urlsplit(uri)
    group = join("gloo", str(address.hostname), int(address.port or 0), rank=1, world_size=2, device="cpu")
    specs = [(spec.name, spec.dtype, spec.shape) for spec in offer.tensors]
    try:
        return {
            name: tensor.clone()
            for name, tensor in receive(group, specs, bucket_bytes=offer.bucket_bytes, device="cpu")
        }
    finally:
        group.leave()


def sent(weights: TensorsInMemory, *, buckets: bool) -> dict[str, torch.Tensor]:
    """Return what an engine receives from this process."""
    uri, offer = weights.offer({f"engine-{next(ENGINES)}": 1}, buckets=buckets)
    thread = threading.Thread(target=weights.send, args=(uri, offer))
    thread.start()
    try:
        return received(uri, offer)
    finally:
        thread.join()


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 150))
def test_buckets_hold_all_tensors_in_order_and_within_the_limit(sizes: list[int], limit: int) -> None:
    buckets = list(plan_buckets(sizes, limit))
    assert len(sizes) == sum(len(bucket.offsets) for bucket in buckets)
    remaining = iter(sizes)
    for bucket in buckets:
        ends = [offset + next(remaining) for offset in bucket.offsets]
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert bucket.size == ends[-1]
        assert all(offset % 16 == 0 for offset in bucket.offsets)
        assert len(bucket.offsets) == 1 or bucket.size <= limit


@pytest.mark.parametrize("buckets", [True, False])
def test_tensors_of_all_shapes_and_types_arrive_unchanged(buckets: bool) -> None:
    weights = TensorsInMemory(TENSORS, host="127.0.0.1")
    found = sent(weights, buckets=buckets)
    assert list(TENSORS) == list(found)
    for name, tensor in TENSORS.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name])


def test_a_function_is_called_for_each_publication() -> None:
    values = iter(range(100))
    weights = TensorsInMemory(lambda: [("a", torch.full((3,), float(next(values))))], host="127.0.0.1")
    first, second = sent(weights, buckets=True), sent(weights, buckets=True)
    assert first["a"].unique().item() < second["a"].unique().item()


def test_tensors_that_change_their_shape_meanwhile_are_not_sent() -> None:
    sizes = iter([2, 3])
    weights = TensorsInMemory(lambda: [("a", torch.zeros(next(sizes)))], host="127.0.0.1")
    uri, offer = weights.offer({"engine": 1}, buckets=True)
    errors: list[Exception] = []

    def send() -> None:
        try:
            weights.send(uri, offer)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(RuntimeError):
        received(uri, offer)
    thread.join()
    assert "a (float32 [2]) was announced, and a (torch.float32 [3]) is to be sent" in str(errors[0])


@pytest.mark.parametrize("tensors", [{}, {"a": torch.empty(1, device="meta")}])
def test_tensors_that_cannot_be_broadcast_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InvalidRequestError, match="must all be on cpu, or all on cuda"):
        TensorsInMemory(tensors)


def test_experts_have_the_names_and_shapes_of_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_model(tmp_path, create=small_qwen3_moe)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    found = sent(ModelInMemory(model, host="127.0.0.1"), buckets=True)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        names = file.keys()  # the file itself is not iterable
        expected = {name: file.get_tensor(name) for name in names}
    assert any(".experts.7." in name for name in expected)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


SHARDED_TRAINER = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from rollout_api import DeltaWeights, TensorsInMemory, WeightsError
from rollout_api.protocol.messages import Broadcast

rank, rendezvous, action, uri, offer = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
weights = TensorsInMemory(dict(model.named_parameters()), host="127.0.0.1", port=int(uri.rpartition(":")[2]))
if rank == 0 and action == "send":
    weights.send(uri, Broadcast.model_validate_json(offer))
elif rank == 0 and action == "write":
    print(DeltaWeights(weights, offer).write(1).directory)
elif rank == 0:
    weights.abort("the job has no engine")
else:
    try:
        weights.take_part()
        print("gathered")
    except WeightsError as error:
        print(error)
dist.destroy_process_group()
"""


def sharded_trainer(directory: Path, action: str, uri: str, offer: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED_TRAINER, str(rank), str(directory / "rendezvous"), action, uri, offer],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    found = [process.communicate(timeout=90)[0].strip() for process in processes]
    assert [0, 0] == [process.returncode for process in processes]
    return found


def test_sharded_parameters_are_gathered_by_all_processes_of_the_trainer(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    _, offer = TensorsInMemory(model.named_parameters, host="127.0.0.1").offer({"engine": 1}, buckets=True)
    assert DEFAULT_BUCKET_BYTES == offer.bucket_bytes
    uri = f"gloo://127.0.0.1:{free_port()}"
    processes = sharded_trainer(tmp_path, "send", uri, offer.model_dump_json())
    found = received(uri, offer)
    assert ["", "gathered"] == outputs(processes)
    assert all(torch.equal(parameter, found[name]) for name, parameter in model.named_parameters())


def test_sharded_parameters_are_gathered_for_a_keyframe(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    processes = sharded_trainer(tmp_path, "write", "gloo://127.0.0.1:1", str(tmp_path / "deltas"))
    directory, gathered = outputs(processes)
    assert "gathered" == gathered
    found = load_file(f"{directory}/model.safetensors")
    assert all(torch.equal(parameter, found[name]) for name, parameter in model.named_parameters())


def test_processes_that_wait_to_gather_learn_why_nothing_is_published(tmp_path: Path) -> None:
    processes = sharded_trainer(tmp_path, "abort", "gloo://127.0.0.1:1", "")
    expected = "the process with rank 0 has not published the weights: the job has no engine"
    assert ["", expected] == outputs(processes)


def test_the_identifier_of_a_nccl_communicator_is_exchanged_without_pickle() -> None:
    import torch.distributed as dist
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    store = dist.HashStore()
    sent = ncclUniqueId.from_buffer_copy(bytes(range(128)))
    nccl_rendezvous(store, 0, 2).broadcast_obj(sent, src=0)
    received = nccl_rendezvous(store, 1, 2).broadcast_obj(ncclUniqueId(), src=0)
    assert bytes(range(128)) == bytes(received)

    class Trainer(dist.HashStore):
        """A trainer that sends pickled code in place of the identifier."""

        def get(self, key: str) -> bytes:
            return b"cos\nsystem\n(S'exit 1'\ntR."

    with pytest.raises(ValueError, match="Buffer size too small"):
        nccl_rendezvous(Trainer(), 1, 2).broadcast_obj(ncclUniqueId(), src=0)
