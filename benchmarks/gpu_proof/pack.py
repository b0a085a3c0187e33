"""Builds the archives that the GPU proof needs on a machine without network, and prints the commands to run there.

    make gpu-proof PYTHON312=PROGRAM TRACE=FILE [TOKENIZER=FILE]

The machine has Python 3.12, torch 2.11 for CUDA 13 with its Triton, transformers, and an H100 or H200. Of vLLM's wheel,
everything is left out that such a card does not need for a dense model in bfloat16. The archive with vLLM and other
packages is cached, because it takes minutes to compress; the one with this project is made anew.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import lzma
import os
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.rollout_runs import VOCABULARY
from benchmarks.traces import load_tokenizer, read_trace

VLLM = "0.32.0"
ARCHITECTURE = 90
"""Compute capability of H100 and H200."""
MAX_BYTES = 64 << 20
"""Largest size of both archives together."""
_COMPRESSION = {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 64 << 20}
"""The dictionary is large because the kernels of FlashAttention resemble each other: it saves three quarters."""
_ROOT = Path(__file__).parents[2]
_CACHE = Path.home() / ".cache" / "das-rollout" / "gpu-proof"
_LIBRARIES = ("/_C_stable_libtorch.abi3.so", "/_vllm_fa3_C.abi3.so", "/cumem_allocator.abi3.so")
_EDITED = ("PIL", "pillow.libs", "zmq", "pyzmq.libs")
_LEFT_OUT = ("/fused_moe/configs/", "/static/", "/third_party/deep_gemm/", "/fmha_sm100/", "/tml_fa4/")
_SUFFIXES = (".py", ".json", ".jinja", "METADATA", "entry_points.txt")
DEPENDENCIES = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "annotated-types", "anyio", "attrs", "blake3"),
    *("cachetools", "cbor2", "certifi", "cloudpickle", "compressed-tensors", "einops", "fastapi", "frozenlist", "h11"),
    *("hiredis", "httpcore2", "httpx2", "idna", "iniconfig", "jiter", "jsonpointer", "jsonschema"),
    *("jsonschema-specifications", "loguru", "msgpack", "msgspec", "multidict", "openai", "oss-harmony"),
    *("partial-json-parser", "pillow", "pluggy", "prometheus-client", "propcache", "psutil", "py-cpuinfo", "pybase64"),
    *("pydantic", "pydantic-core", "pygments", "pytest", "python-json-logger", "python-multipart", "pyyaml", "pyzmq"),
    *("redis", "referencing", "rpds-py", "setproctitle", "sniffio", "starlette", "truststore", "typing-inspection"),
    *("uvloop", "yarl", "zstandard"),
)
"""Packages that engines import, and that neither torch nor transformers bring. Their versions are those of this
environment, with which the tests run."""
_BUILD_REQUIREMENTS = ("cmake", "hatchling", "nanobind==2.9.2", "ninja", "scikit-build-core", "setuptools", "wheel")
_TORCH = """class utils:
    cmake_prefix_path = ""
"""
"""Stands in for PyTorch, which arctic-inference's build asks for the place of its libraries, but does not use."""
_STUB = '''"""Stands in for packages that vLLM imports but does not call here."""

import importlib.machinery
import sys
import types


class Anything:
    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {})


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("xgrammar", "llguidance", "outlines_core"):
            return importlib.machinery.ModuleSpec(name, Finder, is_package=True)

    @staticmethod
    def create_module(spec):
        return Module(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(Finder)
'''
_REDIS = """#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH=$here/lib exec "$here/lib/redis-server" "$@"
"""
_OF_THE_SYSTEM = ("linux-vdso", "libc.so", "libm.so", "libstdc++", "libgcc_s", "ld-linux")


def prune(library: bytes, architecture: int = ARCHITECTURE) -> bytes:
    """Return a library whose device code for other architectures is zero, so that it compresses to nothing.

    Where the architecture has no code of its own, code in PTX is kept, which the driver compiles. The format is that of
    CUDA's ``fatbinary``: a header with its own size and that of what follows, and for each architecture another one.
    """
    pruned = bytearray(library)
    for start, size in _sections(library, b".nv_fatbin"):
        place = start
        while place + 16 <= start + size:
            magic, _, header, length = struct.unpack_from("<IHHQ", library, place)
            if magic != 0xBA55ED50:
                place += 8
                continue
            entries = list(_entries(library, place + header, place + header + length))
            has_code = any(kind == 2 and arch == architecture for kind, arch, *_ in entries)
            for kind, arch, first, last in entries:
                runs = arch == architecture if kind == 2 else not has_code and arch <= architecture
                if not runs:
                    pruned[first:last] = bytes(last - first)
            place += header + length
    return bytes(pruned)


def _sections(library: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and size of the sections with a name in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + number * entry_size) for number in range(count)]
    for offset, _, _, _, start, size in headers:
        if library.startswith(name + b"\0", headers[names][4] + offset):
            yield start, size


def _entries(library: bytes, place: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind (1 is PTX, 2 machine code), architecture, first and last byte of each part of a fat binary."""
    while place < end:
        kind, _, header, length = struct.unpack_from("<HHIQ", library, place)
        (architecture,) = struct.unpack_from("<I", library, place + 28)
        yield kind, architecture, place + header, place + header + length
        place += header + length


def _pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    environment = {"PIP_CONSTRAINT": "", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    if subprocess.run(command, check=False, cwd=_ROOT, env=os.environ | environment).returncode:
        sys.exit(
            f"{' '.join(command)} has failed. Building the GPU proof needs the package index; see the error above."
        )


def _unpack_vllm(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            is_kept = name.endswith(_SUFFIXES) and not any(part in name for part in _LEFT_OUT)
            if is_kept or name.endswith(_LIBRARIES):
                file = site / name
                file.parent.mkdir(parents=True, exist_ok=True)
                data = files.read(name)
                file.write_bytes(prune(data) if name.endswith(".so") else data)


def _add_redis(target: Path) -> None:
    """Copy the Redis server of this machine, with the libraries that others may lack."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("redis-server is not installed; the engines of the GPU proof read their history from it.")
    libraries = target / "lib"
    libraries.mkdir(parents=True)
    shutil.copy(program, libraries / "redis-server")
    for line in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.splitlines():
        name, _, path = line.strip().partition(" => ")
        if path and not name.startswith(_OF_THE_SYSTEM):
            shutil.copy(path.split()[0], libraries / name)
    script = target / "redis-server"
    script.write_text(_REDIS)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def build_packages(python: str) -> Path:
    """Return the archive with vLLM, the other packages and a Redis server, which is built if it is not cached."""
    pinned = [f"{name}=={version(name)}" for name in DEPENDENCIES]
    content = VLLM, ARCHITECTURE, _EDITED, _LIBRARIES, _LEFT_OUT, _SUFFIXES, pinned, _STUB, _REDIS
    archive = _CACHE / f"packages-{hashlib.sha256(repr(content).encode()).hexdigest()[:12]}.tar.xz"
    if archive.exists():
        return archive
    wheels = _CACHE / "wheels"
    _pip(python, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), f"vllm=={VLLM}")
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory) / "site"
        _pip(python, "install", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(site), *pinned)
        for library in site.rglob("*.so"):
            # Libraries whose paths were edited, because they bring others, would be damaged.
            if not library.relative_to(site).parts[0].startswith(_EDITED):
                subprocess.run(["strip", "--strip-debug", library], check=True)
        (wheel,) = wheels.glob(f"vllm-{VLLM}-*.whl")
        _unpack_vllm(wheel, site)
        (site / "sitecustomize.py").write_text(_STUB)
        _add_redis(Path(directory) / "bin")
        _archive(archive, {"site": site, "bin": Path(directory) / "bin"})
    return archive


def build_project(python: str, trace: Path, tokenizer: Path | None, archive: Path) -> None:
    """Write the archive with this project, vLLM's library for suffix decoding, and the trace."""
    subprocess.run([python, "-m", "venv", _CACHE / "builder"], check=True)
    builder = str(_CACHE / "builder/bin/python")
    _pip(builder, "install", *_BUILD_REQUIREMENTS)
    (_CACHE / "builder/lib/python3.12/site-packages/torch.py").write_text(_TORCH)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        peers = (_ROOT / "requirements/peers.txt").read_text().splitlines()
        peer = next(line for line in peers if line.startswith("arctic-inference"))
        _pip(builder, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", name, "./rollout_api", ".", peer)
        project = directory / "project"
        wheels = map(str, directory.glob("*.whl"))
        _pip(builder, "install", "--no-deps", "--no-compile", "--target", str(project), *wheels)
        for plugin in project.glob("arctic_inference-*.dist-info"):
            shutil.rmtree(plugin)  # vLLM finds its suffix decoding without, and does not load its plugins
        tracked = subprocess.run(
            ["git", "ls-files", "benchmarks", "tests/__init__.py", "tests/support"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for file in (file for file in tracked.splitlines() if file.endswith(".py")):
            (project / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(_ROOT / file, project / file)
        _write_tokens(trace, tokenizer, directory / "trace.jsonl.gz")
        _archive(archive, {"project": project, "trace.jsonl.gz": directory / "trace.jsonl.gz"})


def _write_tokens(trace: Path, tokenizer: Path | None, file: Path) -> None:
    """Write the rollouts of one turn of a trace as token ids, so that no tokenizer is needed."""
    trajectories = read_trace(trace, None if tokenizer is None else load_tokenizer(tokenizer))
    with gzip.open(file, "wt") as lines:
        for trajectory in trajectories:
            if len(trajectory.segments) == 1:
                tokens = trajectory.segments[0].tokens
                if max(tokens.max(initial=0), trajectory.prompt.max(initial=0)) >= VOCABULARY:
                    sys.exit(f"{trace} has token ids of {VOCABULARY} and more, which the benchmark's models lack.")
                entry = {
                    "problem_id": trajectory.problem,
                    "sample_index": trajectory.sample,
                    "epoch_or_checkpoint": trajectory.checkpoint,
                    "prompt_tokens": _encode(trajectory.prompt),
                    "tokens": _encode(tokens),
                }
                lines.write(json.dumps(entry) + "\n")


def _encode(tokens: np.ndarray) -> str:
    return base64.b64encode(tokens.astype("<u2").tobytes()).decode()


def _archive(archive: Path, members: dict[str, Path]) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    with lzma.open(partial, "wb", filters=[_COMPRESSION]) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, path in members.items():
            tar.add(path, name)
    partial.replace(archive)


def commands(archives: Iterable[Path]) -> list[str]:
    """Return the commands to run in the repository's root on the GPU machine, where OUT is the folder for results."""
    here = "build/gpu-proof"
    checks = " && ".join(
        f"echo {hashlib.sha256(archive.read_bytes()).hexdigest()} {here}/{archive.name} | sha256sum -c"
        f" && python3 -m tarfile -e {here}/{archive.name} {here}/unpacked"
        for archive in archives
    )
    # Elsewhere, Python would import the packages of the checkout, which are built for another version.
    environment = (
        f"cd {here}/unpacked && PYTHONPATH=$PWD/project:$PWD/site PATH=$PWD/bin:$PATH VLLM_CACHE_ROOT=$PWD/cache "
        "VLLM_USE_FLASHINFER_SAMPLER=0"
    )
    proof = f"{environment} python3 -m benchmarks.gpu_proof --out $OUT --trace $PWD/trace.jsonl.gz"
    return [f"{checks} && {proof} start exposed", f"{proof} steady", f"{proof} exactness weights drafter"]


def main() -> None:
    """Build both archives, check them, and print the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", default="python3.12", help="a Python 3.12 with headers and pip [%(default)s]")
    parser.add_argument("--trace", type=Path, required=True, help="recorded rollouts; see benchmarks/traces.py")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, if the trace consists of text")
    options = parser.parse_args()
    found = subprocess.run([options.python, "--version"], check=False, capture_output=True, text=True)
    if not found.stdout.startswith("Python 3.12."):
        parser.error(f"{options.python} is not Python 3.12: {(found.stdout + found.stderr).strip()}")
    folder = _ROOT / "build/gpu-proof"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packages, project = folder / "packages.tar.xz", folder / "project.tar.xz"
    build_project(options.python, options.trace, options.tokenizer, project)
    shutil.copy(build_packages(options.python), packages)
    total = packages.stat().st_size + project.stat().st_size
    for archive in (packages, project):
        with tarfile.open(archive) as tar:
            tar.getmembers()
        print(f"{archive.relative_to(_ROOT)}: {archive.stat().st_size / 1e6:.1f} MB")
    if total > MAX_BYTES:
        sys.exit(f"The archives have {total / 1e6:.1f} MB together, more than {MAX_BYTES / 1e6:.1f} MB.")
    print(
        "Copy build/gpu-proof to the GPU machine, set OUT, and run within half an hour, each for at most ten minutes:"
    )
    print("\n".join(commands((packages, project))))


if __name__ == "__main__":
    main()
