"""Checksum of published weights."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_ADAPTER_CONFIG = "adapter_config.json"
_READERS = 4


def checksum(directory: str | Path) -> str:
    """SHA-256, in hex, of the weights in *directory*.

    Hashed are, for each file that ends in ``.safetensors`` and for ``adapter_config.json``, ordered by the bytes of
    their names: the name in UTF-8, a zero byte, the size in bytes in decimal, a zero byte, and the 32 bytes of the
    file's own SHA-256. Subdirectories are not looked into. Files are read in pieces, some at a time in threads.

    Raises:
        FileNotFoundError: if there is no such directory, or no safetensors file in it.
        OSError: if a file cannot be read.
    """
    root = Path(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no directory")
    files = [path for path in root.iterdir() if path.suffix == ".safetensors" or path.name == _ADAPTER_CONFIG]
    if not any(path.suffix == ".safetensors" for path in files):
        raise FileNotFoundError(f"there is no safetensors file in {root}")
    files.sort(key=lambda path: path.name.encode())
    whole = hashlib.sha256()
    with ThreadPoolExecutor(_READERS) as readers:
        for path, (size, digest) in zip(files, readers.map(_of_file, files), strict=True):
            whole.update(f"{path.name}\0{size}\0".encode() + digest)
    return whole.hexdigest()


def _of_file(path: Path) -> tuple[int, bytes]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        return file.tell(), digest
