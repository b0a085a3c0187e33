"""A stream of tensors from a process of one engine to the corresponding process of another, over TCP.

The sender runs in a thread, so that its engine continues to decode. A process group of torch.distributed would not do:
NCCL waits forever for a process that was killed, on a GPU that is decoding, whereas a connection closes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout_worker.engine.limits import (
    STREAM_CHUNK_BYTES,
    STREAM_CONNECT_TIMEOUT_S,
    STREAM_IDLE_TIMEOUT_S,
    STREAM_MAX_HEADER_BYTES,
    STREAM_OFFER_TIMEOUT_S,
    STREAM_POLL_INTERVAL_S,
    STREAM_TOKEN_TIMEOUT_S,
)

logger = logging.getLogger(__name__)

_HEADER_SIZE = struct.Struct("<Q")


@dataclass(frozen=True)
class StreamTensor:
    """A tensor of a stream."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {list(self.shape)})"

    def empty(self) -> Any:
        """Return a tensor of this type and shape in main memory."""
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


class StreamError(RuntimeError):
    """Tensors cannot be received. The message says why."""


class TensorSender:
    """Sends tensors once, to the first process that connects with the right token.

    The tensors are read while they are sent; :meth:`stop` must be called before they change.
    """

    def __init__(self, token: str, tensors: Sequence[tuple[StreamTensor, Any]]) -> None:
        """Listen on a free port of all addresses, and wait in a thread for the receiver.

        Args:
            token: what the receiver must send.
            tensors: descriptions and tensors, in the order in which they are sent.
        """
        self._token, self._tensors = token.encode(), list(tensors)
        self._header = _encode_header([description for description, _ in tensors])
        self._listener = _listen()
        self.port: int = self._listener.getsockname()[1]
        """Port on which the receiver must connect."""
        self._lock = threading.Lock()
        """Held while a tensor is read."""
        self._stopped = False
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._listener.close()
            raise

    @property
    def connected(self) -> bool:
        """Whether the receiver has connected."""
        return self._connection is not None

    @property
    def active(self) -> bool:
        """Whether tensors are still read."""
        return self._thread.is_alive() and not self._stopped

    def stop(self) -> None:
        """Stop sending, which the receiver notices. The tensors may change as soon as this returns."""
        with self._lock:
            self._stopped = True
            if self._connection is not None:
                _shut_down(self._connection)

    def _run(self) -> None:
        started = time.monotonic()
        try:
            with self._listener:
                connection = self._accept()
            if connection is None:
                return
            with connection:
                if self._send(connection):
                    logger.info("Passed the weights on to another engine in %.1f s.", time.monotonic() - started)
        except OSError as error:
            logger.warning("Cannot pass the weights on to another engine: %s", error)
        finally:
            self._tensors.clear()

    def _accept(self) -> socket.socket | None:
        """Return the connection of the receiver; None if it does not come."""
        deadline = time.monotonic() + STREAM_OFFER_TIMEOUT_S
        self._listener.settimeout(STREAM_POLL_INTERVAL_S)
        while time.monotonic() < deadline and not self._stopped:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            if self._admit(connection):
                return connection
            connection.close()
        return None

    def _admit(self, connection: socket.socket) -> bool:
        """Return whether the receiver has connected, and not somebody else, who must not keep it waiting."""
        try:
            token = _receive_within(connection, len(self._token), STREAM_TOKEN_TIMEOUT_S)
        except (OSError, StreamError):
            return False
        connection.settimeout(STREAM_IDLE_TIMEOUT_S)
        with self._lock:
            if self._stopped or not hmac.compare_digest(token, self._token):
                return False
            self._connection = connection
        return True

    def _send(self, connection: socket.socket) -> bool:
        """Send the header and all tensors; return False if :meth:`stop` was called."""
        connection.sendall(_HEADER_SIZE.pack(len(self._header)) + self._header)
        staging = None
        for _, tensor in self._tensors:
            for chunk in _chunks(tensor):
                with self._lock:
                    if self._stopped:
                        return False
                    if staging is None:
                        staging = _Staging(tensor.device)
                    data = staging.fill(chunk())
                connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # returns when the receiver has closed the connection
        return True


class TensorReceiver:
    """Receives the tensors of a :class:`TensorSender`."""

    def __init__(self, host: str, port: int, token: str, tensors: Sequence[StreamTensor]) -> None:
        """Connect, and check that the sender has the expected tensors.

        Args:
            host: host of the sender.
            port: port of the sender.
            token: the sender's token.
            tensors: the expected tensors.

        Raises:
            StreamError: the sender cannot be reached, does not answer, or has other tensors.
        """
        self._peer = f"{host}:{port}"
        self._staging: _Staging | None = None
        try:
            self._connection = socket.create_connection((host, port), STREAM_CONNECT_TIMEOUT_S)
        except OSError as error:
            raise StreamError(f"the engine at {self._peer} cannot be reached: {error}") from None
        try:
            self._connection.settimeout(STREAM_CONNECT_TIMEOUT_S)
            with self._translated_errors():
                self._connection.sendall(token.encode())
                [size] = _HEADER_SIZE.unpack(_receive(self._connection, _HEADER_SIZE.size))
                if size > STREAM_MAX_HEADER_BYTES:
                    raise StreamError(f"it announces a list of tensors of {size} bytes")
                header = _receive(self._connection, size)
            if difference := find_difference(_decode_header(header), list(tensors)):
                raise StreamError(f"the engine at {self._peer} {difference}")
            self._connection.settimeout(STREAM_IDLE_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def receive(self, tensor: Any) -> None:
        """Receive the next tensor into *tensor*.

        Raises:
            StreamError: the sender has ended, or does not answer.
        """
        if self._staging is None:
            self._staging = _Staging(tensor.device)
        target = tensor if tensor.is_contiguous() else tensor.contiguous()
        for chunk in _chunks(target):
            destination = chunk()
            data = self._staging.view(destination.numel())
            with self._translated_errors():
                _receive_into(self._connection, data)
            self._staging.empty_into(destination)
        if target is not tensor:
            tensor.copy_(target)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _translated_errors(self) -> _TranslatedErrors:
        return _TranslatedErrors(self._peer)


@dataclass(frozen=True)
class _TranslatedErrors:
    """Raises errors of a connection as :class:`StreamError`."""

    peer: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | StreamError):
            raise StreamError(f"the engine at {self.peer} has stopped sending its weights: {error}") from None


class StagedTensors:
    """Tensors that were all received into main memory, before the first of them is used."""

    def __init__(self, receiver: TensorReceiver, tensors: Sequence[StreamTensor]) -> None:
        """Receive *tensors*.

        Raises:
            StreamError: the sender has ended, or does not answer.
        """
        self._tensors: deque[Any] = deque()
        for description in tensors:
            tensor = description.empty()
            receiver.receive(tensor)
            self._tensors.append(tensor)
        receiver.close()

    def receive(self, tensor: Any) -> None:
        """Move the next tensor into *tensor*."""
        tensor.copy_(self._tensors.popleft())

    def close(self) -> None:
        """Release the memory."""
        self._tensors.clear()


def find_difference(found: Sequence[StreamTensor], expected: Sequence[StreamTensor]) -> str:
    """Say in which tensor a sender differs from a receiver; empty if they have the same ones."""
    for theirs, ours in zip(found, expected, strict=False):
        if theirs != ours:
            return f"has {theirs} in place of {ours}"
    if len(found) != len(expected):
        return f"has {len(found)} tensors in place of {len(expected)}"
    return ""


class _Staging:
    """A buffer in main memory through which tensors of any device are sent and received in chunks."""

    def __init__(self, device: Any) -> None:
        import torch

        cuda: Any = torch.cuda
        self._cuda = cuda
        on_gpu = device.type == "cuda"
        self._buffer = torch.empty(STREAM_CHUNK_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        # A stream of its own, so that a copy does not wait for the steps that are queued on the GPU.
        self._stream = cuda.Stream(device) if on_gpu else None

    def view(self, size: int) -> memoryview:
        """Return the first bytes of the buffer."""
        array: Any = self._buffer.numpy()
        return memoryview(array)[:size]

    def fill(self, chunk: Any) -> memoryview:
        """Copy a chunk into the buffer and return it."""
        self._copy(self._buffer[: chunk.numel()], chunk)
        return self.view(chunk.numel())

    def empty_into(self, chunk: Any) -> None:
        """Copy the buffer into a chunk."""
        self._copy(chunk, self._buffer[: chunk.numel()])

    def _copy(self, target: Any, source: Any) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _chunks(tensor: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that return the tensor's bytes piece by piece, so that each piece is read when it is needed."""
    import torch

    def read(start: int) -> Any:
        return tensor.detach().reshape(-1).view(torch.uint8)[start : start + STREAM_CHUNK_BYTES]

    for start in range(0, tensor.numel() * tensor.element_size(), STREAM_CHUNK_BYTES):
        yield partial(read, start)


def _encode_header(tensors: Sequence[StreamTensor]) -> bytes:
    return json.dumps([[tensor.name, tensor.dtype, tensor.shape] for tensor in tensors]).encode()


def _decode_header(header: bytes) -> list[StreamTensor]:
    return [StreamTensor(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(header)]


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_within(connection: socket.socket, size: int, seconds: float) -> bytes:
    """Receive *size* bytes, which must all arrive within *seconds*."""
    deadline = time.monotonic() + seconds
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := connection.recv(size - len(data))):
            raise StreamError("the connection was closed")
        data += part
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return data


def _receive_into(connection: socket.socket, data: memoryview) -> None:
    while data:
        count = connection.recv_into(data)
        if not count:
            raise StreamError("the connection was closed")
        data = data[count:]


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the receiver may have closed it
        connection.shutdown(socket.SHUT_RDWR)
