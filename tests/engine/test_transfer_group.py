"""Process groups in which trainers send weights as to vLLM's own server, with vLLM's unmodified functions."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, packed_nccl_broadcast_producer

from rollout_api.ports import free_port
from rollout_api.weights.broadcast import TensorTuple, nccl_rendezvous
from rollout_api.weights.buckets import plan_packed
from rollout_worker.engine import transfer_group
from rollout_worker.engine.transfer_group import GroupMembership, TransferGroup, load_unique_id, receive_unique_id
from tests.support.vllm_sender_on_cpu import GlooCommunicator, install

TENSORS = {
    "scale": torch.tensor(3.5, dtype=torch.bfloat16),
    "bias": torch.arange(5, dtype=torch.float32),  # begins at an odd multiple of its size's half
    "none": torch.empty(0, 7),
    "weight": torch.arange(600, dtype=torch.bfloat16).view(20, 30).t(),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "last": torch.arange(7, dtype=torch.float64),
}
SPECS: list[TensorTuple] = [
    (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in TENSORS.items()
]
NUMBERS = itertools.count()


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 150))
def test_blocks_are_those_that_vllm_packs(sizes: list[int], limit: int) -> None:
    tensors = ((str(place), torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes))
    found = []
    while (chunk := pack_tensors(tensors, lambda item: item[1], limit)) is not None:
        found.append((chunk.packed_tensor.numel(), len(chunk.names)))
    planned = list(plan_packed(sizes, limit))
    assert found == [(block.size, len(block.offsets)) for block in planned]
    ends = itertools.accumulate(sizes)
    assert len(sizes) == sum(len(block.offsets) for block in planned)
    assert list(itertools.accumulate(block.size for block in planned))[-1:] == list(ends)[-1:]


def test_the_identifier_that_a_trainer_of_vllm_sends_is_received() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    sent = ncclUniqueId()
    sent.internal[:] = list(range(-64, 64))
    sender = StatelessProcessGroup(rank=0, world_size=2, store=store)
    sender.broadcast_obj(sent, 0)
    receiver = nccl_rendezvous(store, 1, 2, receive_unique_id)
    assert bytes(sent) == bytes(receiver.broadcast_obj(ncclUniqueId(), 0))


@pytest.mark.parametrize("sent", [print, subprocess.Popen, [1, 2], ncclUniqueId])
def test_nothing_else_is_accepted_as_an_identifier(sent: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_unique_id(pickle.dumps(sent))


@pytest.fixture(autouse=True)
def senders_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch.setattr)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def form(pool: ThreadPoolExecutor, ranks: list[int]) -> tuple[Future[Any], list[Future[TransferGroup]]]:
    """Form a group of a trainer and of one-process engines with these ranks; it has room for ranks 1 and 2."""
    port, name = free_port(), f"group-{next(NUMBERS)}"
    address = {"master_address": "127.0.0.1", "master_port": port, "world_size": 3}
    trainer = pool.submit(trainer_init, address)
    members = [GroupMembership(name, "gloo", "127.0.0.1", port, rank, 3) for rank in ranks]
    return trainer, [pool.submit(TransferGroup, member, 0, torch.device("cpu")) for member in members]


@pytest.mark.parametrize("packed_bytes", [0, 1, 30, 1300, 1 << 20])
def test_all_engines_receive_what_vllm_sends(pool: ThreadPoolExecutor, packed_bytes: int) -> None:
    trainer, engines = form(pool, [1, 2])
    communicator: GlooCommunicator = trainer.result()
    groups = [engine.result() for engine in engines]

    def send() -> None:
        if packed_bytes:
            packed_nccl_broadcast_producer(
                iter(TENSORS.items()), communicator, 0, lambda item: item[1], buffer_size_bytes=packed_bytes
            )
            return
        for tensor in TENSORS.values():  # as NCCLTrainerWeightTransferEngine._broadcast does
            communicator.broadcast(tensor.contiguous(), src=0)

    def receive(group: TransferGroup) -> dict[str, torch.Tensor]:
        group.meet()
        return dict(group.receive(SPECS, packed_bytes))

    for _ in range(2):
        sending = pool.submit(send)
        for received in [pool.submit(receive, group) for group in groups]:
            assert list(TENSORS) == list(received.result())
            for name, tensor in TENSORS.items():
                assert tensor.dtype == received.result()[name].dtype
                assert torch.equal(tensor, received.result()[name])
        sending.result()
    for group in groups:
        group.leave()
    communicator.destroy()


def test_engines_do_not_wait_forever_for_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "JOIN_TIMEOUT_S", 1)
    pool = ThreadPoolExecutor()
    _, [engine] = form(pool, [1])
    with pytest.raises(RuntimeError, match="1 of 2 processes of the engines take part"):
        engine.result(timeout=30)
    pool.shutdown(wait=False)  # the trainer waits for longer


def test_an_engine_does_not_wait_long_for_a_trainer_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "TRANSFER_CONNECT_TIMEOUT_S", 1)
    membership = GroupMembership("group", "gloo", "127.0.0.1", free_port(), 1, 2)
    errors: list[BaseException] = []

    def join() -> None:
        try:
            TransferGroup(membership, 0, torch.device("cpu"))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert 1 == len(errors)
