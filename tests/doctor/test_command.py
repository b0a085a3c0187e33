"""The command ``rollout doctor``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from rollout_tools.cli import doctor as command
from rollout_tools.cli.main import app
from rollout_tools.doctor.findings import Section, error, ok, warning
from tests.support.manifests import rollout_job
from tests.support.redis_servers import Server

OPTIONAL = ("vllm", "torch", "ray", "transformers", "huggingface_hub")


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ROLLOUT_REDIS_URL", "ROLLOUT_HISTORY_REDIS_URL", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROLLOUT_MODEL_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., str]:
    """A function that writes the manifest of a job on CPUs with changed sections, and returns the path of the file."""

    def write(**sections: Any) -> str:
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(rollout_job(**{"workers": {"gpusPerWorker": 0}, **sections})))
        return str(file)

    return write


def examine(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the command; return its exit code and its findings by section and check."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    document = json.loads(result.stdout)
    assert document["fit"] == (result.exit_code == 0)
    found: dict[str, dict[str, Any]] = {}
    for finding in document["findings"]:
        found.setdefault(finding["section"], {})[finding["check"]] = finding
    return result.exit_code, found


def test_a_machine_without_faults_gives_the_exit_code_0() -> None:
    code, found = examine()
    assert 0 == code
    assert ["machine", "vLLM", "GPUs", "Redis"] == list(found)


def test_an_error_gives_the_exit_code_1(job_file: Callable[..., str]) -> None:
    code, found = examine("-f", job_file(sampling={"topP": 2}))
    assert (1, "error") == (code, found["manifest"]["spec.sampling.topP"]["severity"])


def test_the_servers_of_the_manifest_are_examined(tmp_path: Path, job_file: Callable[..., str]) -> None:
    with (
        Server(tmp_path / "messages", appendonly=True, maxmemory="100mb") as messages,
        Server(tmp_path / "history", maxmemory="100mb") as history,
    ):
        file = job_file(redis={"url": messages.url}, history={"redis": {"url": history.url}})
        code, found = examine("-f", file)
    assert 0 == code
    assert messages.url in found["Redis"]["connection"]["seen"]
    assert ("ok", "warning") == (
        found["Redis"]["persistence"]["severity"],
        found["history's Redis"]["persistence"]["severity"],
    )
    assert "the history" in found["history's Redis"]["persistence"]["advice"]


def test_what_pods_of_a_cluster_use_is_not_expected_on_this_machine(
    tmp_path: Path, job_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    _, found = examine("-f", job_file(), "--cluster")
    server, model = found["Redis"]["server"], found["manifest"]["model"]
    assert "warning" == server["severity"] == model["severity"]
    assert "rollout run" not in server["seen"] + server["advice"]
    assert "ROLLOUT_REDIS_URL" in server["advice"]
    assert "not examined" in model["seen"]


def test_options_and_variables_name_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_REDIS_URL", "redis://127.0.0.1:1")
    code, found = examine("--history-redis", "redis://127.0.0.1:2")
    assert 1 == code
    assert ("redis://127.0.0.1:1", "redis://127.0.0.1:2") == (
        found["Redis"]["connection"]["seen"],
        found["history's Redis"]["connection"]["seen"],
    )


def test_the_keys_of_a_job_are_examined_by_its_uid(tmp_path: Path) -> None:
    users = ["job on >pw ~rollout:{uid-1}:* +@all"]
    with Server(tmp_path, users=users, maxmemory="100mb") as server:
        url = server.url_of("job", "pw")
        severities = [
            examine("--redis", url, *uid)[1]["Redis"]["permissions"]["severity"]
            for uid in ((), ("--uid", "uid-1"), ("--uid", "uid-2"))
        ]
    assert ["error", "ok", "error"] == severities


@pytest.mark.parametrize(("cluster", "severity"), [((), "error"), (("--cluster",), "ok")])
def test_a_machine_beside_the_cluster_needs_no_gpus(
    cluster: tuple[str, ...],
    severity: str,
    tmp_path: Path,
    job_file: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    _, found = examine("-f", job_file(workers={"gpusPerWorker": 64}), *cluster)
    assert severity == found["GPUs"]["GPUs"]["severity"]


def test_without_a_kubeconfig_a_cluster_is_not_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, found = examine("--cluster")
    assert 1 == code
    assert "set KUBECONFIG" in found["cluster"]["API server"]["advice"]


SECTION = Section(
    "machine",
    [ok("Python", "3.12.1"), warning("CPU", "2 [cores]", "use more"), error("memory", "full", "free some " * 20)],
)


def test_elsewhere_than_on_a_terminal_each_finding_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    command.show(SECTION, Console(width=60))
    assert [
        "ok: machine: Python: 3.12.1",
        "warning: machine: CPU: 2 [cores] → use more",
        f"error: machine: memory: full → {'free some ' * 20}".rstrip(),
    ] == [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_on_a_terminal_findings_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=60, force_terminal=True, color_system=None)
    command.show(SECTION, console)
    title, *lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "machine" == title
    assert "warning  CPU                     2 [cores]" in lines
    (column,) = {line.index(text) for line in lines for text in ("3.12.1", "2 [cores]", "use more") if text in line}
    assert {" " * column} == {line[:column] for line in lines if line.lstrip().startswith("free some")}
    assert 20 == " ".join(lines).count("some")


def test_it_runs_without_optional_packages(job_file: Callable[..., str]) -> None:
    script = (
        "import importlib.metadata as metadata, importlib.util as util, sys\n"
        f"missing = {OPTIONAL!r}\n"
        "class Missing:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.partition('.')[0] in missing: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        "find_spec, version = util.find_spec, metadata.version\n"
        "util.find_spec = lambda name, *more: None if name in missing else find_spec(name, *more)\n"
        "def installed(name):\n"
        "    if name.removesuffix('-cpu') in missing: raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = installed\n"
        "from rollout_tools.cli.main import main\n"
        f"sys.argv = ['rollout', 'doctor', '--cluster', '--json', '-f', {job_file()!r}]\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"PATH": ""}
    )
    assert "" == result.stderr
    found = {(one["section"], one["check"]): one for one in json.loads(result.stdout)["findings"]}
    assert "not installed" == found["vLLM", "vLLM"]["seen"]
    assert "kubectl is not on the PATH" in found["cluster", "API server"]["advice"]
    assert "warning" == found["manifest", "model"]["severity"]
    assert 1 == result.returncode
