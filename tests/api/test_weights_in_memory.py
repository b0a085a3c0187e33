"""Tensors that are sent from a trainer's memory: types, names, senders with several processes, and receivers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rollout_api import InvalidRequestError, ModelInMemory, TensorsInMemory
from rollout_api.client.weight_transfer import _choose_members
from tests.support.gloo_receiver import GlooReceiver
from tests.support.reference_model import make_model, small_qwen3_moe

TENSORS = {
    "scale": torch.tensor(3.5, dtype=torch.bfloat16),
    "bias": torch.arange(5, dtype=torch.float32),
    "none": torch.empty(0, 7),
    "weight": torch.arange(600, dtype=torch.bfloat16).view(20, 30).t(),
    "bytes": torch.arange(3, dtype=torch.uint8),
}


def sent(weights: TensorsInMemory) -> dict[str, torch.Tensor]:
    """Return what an engine receives."""
    receiver = GlooReceiver()
    weights.connect(receiver, 2)
    weights.send(receiver)
    return receiver.tensors


_IN_IPV6_NETWORK = """
ip link set lo up
ip -6 address add 2001:db8:1::5/64 dev lo nodad
ip -6 route add default dev lo
exec "$0" "$@"
"""
_SENDER = """
import torch
from rollout_api import TensorsInMemory
from tests.support.gloo_receiver import GlooReceiver

class Receiver(GlooReceiver):
    def init_weight_transfer_engine(self, init_info):
        print(init_info["master_address"])
        super().init_weight_transfer_engine(init_info)

receiver, weights = Receiver(), TensorsInMemory({"a": torch.ones(2)})
weights.connect(receiver, 2)
weights.send(receiver)
print(receiver.tensors["a"].tolist())
"""
_EXIT = """
import atexit
from pathlib import Path

@atexit.register  # before the modules that the process imports, so that it runs after their functions
def print_threads():
    print("at exit:", *(task.read_text() for task in Path("/proc/self/task").glob("*/comm")))

import torch
from rollout_api.weights.gloo import GlooGroup

group = GlooGroup(torch.distributed.HashStore(), 0, 1)
group.broadcast(torch.ones(2))
"""
_NEW_NETWORK = ["unshare", "--map-root-user", "--net"]


@pytest.mark.skipif(
    shutil.which("ip") is None or subprocess.run([*_NEW_NETWORK, "true"], capture_output=True).returncode != 0,
    reason="network namespaces are not available",
)
def test_a_trainer_whose_network_has_only_ipv6_sends_tensors() -> None:
    command = [*_NEW_NETWORK, "sh", "-ec", _IN_IPV6_NETWORK, sys.executable, "-c", _SENDER]
    sender = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert ["2001:db8:1::5", "[1.0, 1.0]"] == sender.stdout.splitlines(), sender.stderr


def test_the_threads_of_a_group_end_before_the_interpreter() -> None:
    """A thread of gloo that releases a tensor while the interpreter ends makes the process abort."""
    found = subprocess.run([sys.executable, "-c", _EXIT], text=True, capture_output=True, check=True)
    assert "at exit:" in found.stdout
    assert "gloo" not in found.stdout


def test_tensors_of_all_shapes_and_types_arrive_unchanged() -> None:
    found = sent(TensorsInMemory(TENSORS, host="127.0.0.1"))
    assert list(TENSORS) == list(found)
    for name, tensor in TENSORS.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name])


def test_a_function_is_called_for_each_publication_in_the_same_group() -> None:
    values, receiver = iter(range(100)), GlooReceiver()
    weights = TensorsInMemory(lambda: [("a", torch.full((3,), float(next(values))))], host="127.0.0.1")
    weights.connect(receiver, 2)
    found = []
    for _ in range(2):
        weights.send(receiver)
        found.append(receiver.tensors["a"].unique().item())
    assert found[0] < found[1]


def test_tensors_that_change_their_shape_meanwhile_are_not_sent() -> None:
    sizes = iter([2, 3])
    weights = TensorsInMemory(lambda: [("a", torch.zeros(next(sizes)))], host="127.0.0.1")
    with pytest.raises(
        ValueError, match=r"a \(torch.float32 \[2\]\) was announced, and a \(torch.float32 \[3\]\) is to"
    ):
        sent(weights)


class RefusingReceiver(GlooReceiver):
    """An engine that cannot join."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Refuse to."""
        raise InvalidRequestError("the engine is of another model")


def test_a_sender_does_not_wait_for_engines_that_cannot_join() -> None:
    with pytest.raises(InvalidRequestError, match="another model"):
        TensorsInMemory(TENSORS, host="127.0.0.1").connect(RefusingReceiver(), 2)


@pytest.mark.parametrize("tensors", [{}, {"a": torch.empty(1, device="meta")}])
def test_tensors_that_cannot_be_sent_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InvalidRequestError, match="must all be on cpu, or all on cuda"):
        TensorsInMemory(tensors)


def test_experts_have_the_names_and_shapes_of_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_model(tmp_path, create=small_qwen3_moe)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    found = sent(ModelInMemory(model, host="127.0.0.1"))
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
from rollout_api import TensorsInMemory, WeightsError
from tests.support.gloo_receiver import GlooReceiver

class FailingReceiver(GlooReceiver):
    def start_weight_update(self):
        raise WeightsError("the engines refuse")

rank, rendezvous, output = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
weights = TensorsInMemory(dict(model.named_parameters()), host="127.0.0.1")
for action in ("abort", "fail", "send"):
    receiver = FailingReceiver() if action == "fail" else GlooReceiver()
    try:
        if rank == 1:
            weights.take_part()
            print("gathered")
        elif action == "abort":
            weights.abort("the job has no engine")
        else:
            weights.connect(receiver, 2)
            weights.send(receiver)
            torch.save(receiver.tensors, output)
    except WeightsError as error:
        print(error)
dist.destroy_process_group()
"""


def test_sharded_parameters_are_gathered_by_all_processes_of_the_trainer(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    arguments = [str(tmp_path / "rendezvous"), str(tmp_path / "received")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED_TRAINER, str(rank), *arguments], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=150)[0].splitlines() for process in processes)
    assert [0, 0] == [process.returncode for process in processes]
    assert ["the engines refuse"] == first
    not_published = "the process with rank 0 has not published the weights: the job has no engine"
    # A process does not wait for one that fails to send.
    assert [not_published, "gathered", "gathered"] == second
    found = torch.load(tmp_path / "received")
    assert all(torch.equal(parameter, found[name]) for name, parameter in model.named_parameters())


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 20))
def test_engines_take_all_places_without_gaps_or_the_size_is_refused(num: int, ranks: int, places: int) -> None:
    engines = {f"engine-{number}": {"ranks": ranks} for number in range(num)}
    if places % ranks or places > num * ranks:
        with pytest.raises(InvalidRequestError, match=f"use world_size {num * ranks + 1}"):
            _choose_members(engines, {"rank_offset": 1, "world_size": places + 1})
        return
    members = _choose_members(engines, {"rank_offset": 1, "world_size": places + 1})
    taken = [first + offset for first in members.values() for offset in range(ranks)]
    assert list(range(1, places + 1)) == sorted(taken)
