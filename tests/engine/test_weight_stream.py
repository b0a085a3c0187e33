"""Tensors that one process sends to another."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from rollout_worker.engine import weight_stream
from rollout_worker.engine.weight_stream import (
    StagedTensors,
    StreamError,
    StreamTensor,
    TensorReceiver,
    TensorSender,
    find_difference,
)

TOKEN = "0123456789abcdef"
Tensors = list[tuple[StreamTensor, torch.Tensor]]


def describe(name: str, tensor: torch.Tensor) -> StreamTensor:
    return StreamTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    values = {
        "float": torch.randn(300, 7),
        "half": torch.randn(5, 5).bfloat16(),
        "fp8": torch.randn(4, 8).to(torch.float8_e4m3fn),
        "transposed": torch.randn(6, 9).t(),
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "special": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
    }
    return [(describe(name, value), value) for name, value in values.items()]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "STREAM_CHUNK_BYTES", 1000)
    monkeypatch.setattr(weight_stream, "STREAM_IDLE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(weight_stream, "STREAM_CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(weight_stream, "STREAM_OFFER_TIMEOUT_S", 5.0)


@pytest.fixture
def sender(tensors: Tensors) -> Iterator[TensorSender]:
    sender = TensorSender(TOKEN, tensors)
    yield sender
    sender.stop()
    sender._thread.join(10)
    assert not sender._thread.is_alive()


def connect(sender: TensorSender, tensors: Tensors, token: str = TOKEN) -> TensorReceiver:
    return TensorReceiver("127.0.0.1", sender.port, token, [description for description, _ in tensors])


def equal_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


@pytest.mark.parametrize("staged", [False, True])
def test_all_bytes_arrive(sender: TensorSender, tensors: Tensors, staged: bool) -> None:
    receiver: TensorReceiver | StagedTensors = connect(sender, tensors)
    if staged:
        assert isinstance(receiver, TensorReceiver)
        receiver = StagedTensors(receiver, [description for description, _ in tensors])
    for description, value in tensors:
        received = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        receiver.receive(received)
        assert equal_bytes(value, received), description
    receiver.close()
    sender._thread.join(5)
    assert not sender.active


def test_strangers_neither_get_the_tensors_nor_disturb(sender: TensorSender, tensors: Tensors) -> None:
    with socket.create_connection(("127.0.0.1", sender.port)):
        pass  # such as a port scan
    with pytest.raises(StreamError, match="has stopped sending its weights"):
        connect(sender, tensors, "x" * len(TOKEN))
    connect(sender, tensors).close()


def test_a_stranger_that_sends_too_slowly_does_not_keep_the_receiver_waiting(
    sender: TensorSender, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "STREAM_TOKEN_TIMEOUT_S", 0.5)
    stopped = threading.Event()

    def drip() -> None:
        with socket.create_connection(("127.0.0.1", sender.port)) as stranger:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    stranger.sendall(b"x")
                if stopped.wait(0.2):
                    return

    stranger = threading.Thread(target=drip)
    stranger.start()
    time.sleep(0.1)
    connect(sender, tensors).close()
    stopped.set()
    stranger.join()


def test_other_tensors_are_refused(sender: TensorSender, tensors: Tensors) -> None:
    other = [(StreamTensor("float", "float32", (300, 8)), tensors[0][1]), *tensors[1:]]
    with pytest.raises(
        StreamError, match=r"has float \(float32, \[300, 7\]\) in place of float \(float32, \[300, 8\]\)"
    ):
        connect(sender, other)
    assert "has 8 tensors in place of 7" == find_difference(
        [description for description, _ in tensors], [description for description, _ in tensors[:-1]]
    )


def test_a_receiver_that_does_not_come_is_not_awaited_for_long(sender: TensorSender, tensors: Tensors) -> None:
    sender._thread.join(10)
    assert not sender.active
    with pytest.raises(StreamError, match="cannot be reached"):
        connect(sender, tensors)


@pytest.mark.parametrize("moment", ["before the receiver connects", "while it receives", "while it does not read"])
def test_the_tensors_may_change_once_the_sender_is_stopped(moment: str) -> None:
    large = torch.zeros(20_000_000, dtype=torch.uint8)
    description = describe("large", large)
    sender = TensorSender(TOKEN, [(description, large)])
    received = torch.zeros_like(large)
    receiver = None
    if moment != "before the receiver connects":
        receiver = TensorReceiver("127.0.0.1", sender.port, TOKEN, [description])
    failed: list[str] = []

    def receive() -> None:
        try:
            (receiver or TensorReceiver("127.0.0.1", sender.port, TOKEN, [description])).receive(received)
        except StreamError as error:
            failed.append(str(error))

    thread = threading.Thread(target=receive)
    if moment == "while it receives":
        thread.start()
    else:
        time.sleep(0.1)  # until the sender blocks
    started = time.monotonic()
    sender.stop()
    assert time.monotonic() - started < 0.5
    large.fill_(1)
    if moment != "while it receives":
        thread.start()
    thread.join(10)
    assert not received.any()
    assert failed or moment == "while it receives"
    assert not sender.active
    sender._thread.join(5)
    assert not sender._thread.is_alive()


def test_a_silent_peer_is_given_up(tensors: Tensors) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(StreamError, match="timed out"):
            TensorReceiver("127.0.0.1", port, TOKEN, [])
        connection, _ = server.accept()
        connection.close()
        accepted: list[socket.socket] = []

        def send_header_only() -> None:
            connection, _ = server.accept()
            accepted.append(connection)
            connection.sendall(struct.pack("<Q", 2) + b"[]")

        thread = threading.Thread(target=send_header_only)
        thread.start()
        receiver = TensorReceiver("127.0.0.1", port, TOKEN, [])
        thread.join()
        with pytest.raises(StreamError, match="has stopped sending its weights: timed out"):
            receiver.receive(torch.empty(10))
        assert time.monotonic() - started < 5
        accepted[0].close()


def test_a_receiver_that_does_not_read_is_given_up() -> None:
    large = torch.zeros(50_000_000, dtype=torch.uint8)
    description = describe("large", large)
    sender = TensorSender(TOKEN, [(description, large)])
    receiver = TensorReceiver("127.0.0.1", sender.port, TOKEN, [description])
    sender._thread.join(10)
    assert not sender.active
    receiver.close()
