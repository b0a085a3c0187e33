"""The tutorials that need one machine: their files and commands are used as a reader would use them, in order.

The commands of a page run in one shell, which ends at the first command that fails. Only ports are replaced, by free
ones. A line of output on the page must appear in the output of the page's commands, apart from numbers and spaces.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_api.ports import free_port
from rollout_store.runtime.command_line import default_cache
from rollout_tools.tiny_model import ensure
from tests.support.documentation import ROOT, console_blocks, titled_files

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SKIPPED = {"make env", "source .venv/bin/activate"}
"""Commands that have created the test's environment."""
VARYING = re.compile(r"\b[0-9a-f]{12}\b|\d+(?:[.,]\d+)*|\b(?:B|KiB|MiB)\b|\b[smhd] ago\b|\b(?:right|wrong)\b")
"""Differences between two runs: durations, sizes, hashes, and the model's answers."""


def normalized(line: str) -> str:
    return re.sub(r"\s+", " ", VARYING.sub("#", line)).strip()


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", ["first-job", "agents-over-http"])
def test_a_tutorial_can_be_followed(name: str, tmp_path: Path) -> None:
    ensure(default_cache() / "das" / "tiny-qwen3")
    text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
    ports = {port: str(free_port("127.0.0.1")) for port in ("6390", "8000")}

    def with_ports(source: str) -> str:
        return re.sub(r"\b(6390|8000)\b", lambda match: ports[match[0]], source)

    files = titled_files(text)
    assert files
    for file, content in files.items():
        (tmp_path / file).write_text(with_ports(content))
    blocks = console_blocks(text)
    commands = [command.text for block in blocks for command in block if command.text not in SKIPPED]
    assert commands
    script = "\n".join(["set -eo pipefail", "set -m", *commands]).replace("--dir /tmp", f"--dir {tmp_path}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        ["bash", "-c", with_ports(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    logs = "".join(log.read_text()[-2000:] for log in tmp_path.glob("*.log"))
    assert 0 == process.returncode, process.stdout[-4000:] + process.stderr[-4000:] + logs
    printed = {normalized(line) for line in process.stdout.splitlines()}
    expected = [line for block in blocks for command in block for line in command.output]
    assert [] == [line for line in expected if normalized(line) not in printed], process.stdout
