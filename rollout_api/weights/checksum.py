"""Checksums of published weights."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_ADAPTER_CONFIG = "adapter_config.json"
_NUM_READERS = 4
_BUFFER_BYTES = 1 << 20


def checksum(directory: str | Path) -> str:
    """Return the SHA-256, in hex, of the weights in *directory*.

    The hash covers each file whose name ends in ``.safetensors``, and ``adapter_config.json``, in the order of the
    bytes of their names. For each file, these are hashed: the name in UTF-8, a zero byte, the size in bytes as a
    decimal number, a zero byte, and the 32 bytes of the file's own SHA-256. Subdirectories are ignored. Several files
    are read in parallel.

    Raises:
        FileNotFoundError: the directory does not exist or contains no safetensors file.
        OSError: a file cannot be read.
    """
    files = weight_files(directory)
    combined = hashlib.sha256()
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        for path, (size, digest) in zip(files, readers.map(_hash_file, files), strict=True):
            combined.update(f"{path.name}\0{size}\0".encode() + digest)
    return combined.hexdigest()


def weight_files(directory: str | Path) -> list[Path]:
    """Return the files that :func:`checksum` covers, in its order.

    Raises:
        FileNotFoundError: the directory does not exist or contains no safetensors file.
    """
    root = Path(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a directory")
    files = [path for path in root.iterdir() if path.suffix == ".safetensors" or path.name == _ADAPTER_CONFIG]
    if not any(path.suffix == ".safetensors" for path in files):
        raise FileNotFoundError(f"there is no safetensors file in {root}")
    files.sort(key=lambda path: path.name.encode())
    return files


def _hash_file(path: Path) -> tuple[int, bytes]:
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return size, digest.digest()
