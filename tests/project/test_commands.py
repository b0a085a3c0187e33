"""Every command in the documentation works: it is run, parsed by the real program, or compared with what it names.

``CHECKS`` says for each program how its calls are checked. A program without a check fails the test. The commands of
the tutorials for one machine are run as a whole by ``tests/job/test_tutorials.py``, and those of the protocol's example
by ``tests/api/test_protocol.py``.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from rollout_operator.objects.names import BUNDLE_LABEL, JOB_LABEL
from typer.main import get_command

from rollout_api.kubectl_plugin.cli import build_parser
from rollout_store.history_service.cli import app as history_app
from rollout_tools.cli.main import app as rollout_app
from scripts.repository import tracked_files
from tests.support.documentation import ROOT, blocks, console_blocks, titled_files

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPERATORS = {"&&", "||", "|", "&", ";"}
CHART = ROOT / "charts" / "das-rollout"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *tracked_files("docs/*.md", "docs/**/*.md", "charts/*/README.md", "examples/*/README.md", ":!docs/cli.md"),
]
"""The pages whose commands are tested; docs/cli.md is generated from the commands."""
PLACEHOLDERS = {"job.yaml", "rolloutjob.yaml", "FILE"}
"""Files that stand for the reader's own."""


@dataclass(frozen=True)
class Page:
    """A page, and what its commands may refer to."""

    name: str
    text: str

    @property
    def files(self) -> set[str]:
        """Files that the page asks its reader to save, and those that its commands write."""
        written = re.findall(r"--(?:json|page|output)[= ](\S+)", self.text)
        return {*titled_files(self.text), *written}

    def file(self, path: str) -> Path | None:
        """Return a file of the repository that a command names, or None if the reader has it."""
        for folder in (ROOT, ROOT / Path(self.name).parent):
            if (folder / path).exists():
                return folder / path
        assert path in PLACEHOLDERS | self.files, f"the file {path} does not exist"
        return None


@dataclass
class Call:
    """A call of one program."""

    program: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def calls(command: str) -> list[Call]:
    """Return the calls of a command line, also those of command substitutions; assignments alone call nothing.

    Raises:
        ValueError: if quotes are not closed.
    """
    command, substituted = _without_substitutions(command)
    found = [call for inner in substituted for call in calls(inner)]
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in _OPERATORS:
            if call := _call(words):
                found.append(call)
            words = []
        else:
            words.append(word)
    return found


def _without_substitutions(command: str) -> tuple[str, list[str]]:
    """Return a command with a word in place of each ``$(…)``, and the commands within these."""
    inner = []
    while (start := command.find("$(")) >= 0:
        end, depth = start + 2, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(command[end], 0)
            end += 1
        inner.append(command[start + 2 : end - 1])
        command = f"{command[:start]}SUBSTITUTION{command[end:]}"
    return command, inner


def _call(words: list[str]) -> Call | None:
    environment, arguments = {}, []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"<|>>?|>&|&>", word):
            if arguments and arguments[-1] in ("1", "2"):
                arguments.pop()  # the number of a stream, as in 2>&1
            skip = True
        elif not arguments and _ASSIGNMENT.fullmatch(word):
            name, _, value = word.partition("=")
            environment[name] = value
        else:
            arguments.append(word)
    return Call(arguments[0], arguments[1:], environment) if arguments else None


def page_named(name: str) -> Page:
    return Page(name, (ROOT / name).read_text())


# rollout and rollout-history: the real command line parses the arguments, and what is cheap and harmless is run.


def parse_with(app: typer.Typer, arguments: list[str], environment: dict[str, str]) -> None:
    """Parse arguments by an application of Typer, without running the command."""
    group: Any = get_command(app)
    assert arguments and arguments[0] in group.commands, f"there is no command {arguments[:1]}"
    command = group.commands[arguments[0]]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ROLLOUT_REDIS_URL", "ROLLOUT_HISTORY_REDIS_URL"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        command.make_context(arguments[0], list(arguments[1:]))


def exported(page: Page) -> dict[str, str]:
    """Return the variables that the page's commands export."""
    return dict(re.findall(r"^\$ export (\w+)=(\S+)", page.text, re.MULTILINE))


def check_rollout(call: Call, page: Page) -> None:
    arguments, environment = call.arguments, {**exported(page), **call.environment}
    for option, value in pairwise(arguments):
        if option in ("-f", "--file"):
            page.file(value)
    if arguments[0] == "history":
        parse_with(history_app, arguments[1:], environment)
        return
    parse_with(rollout_app, arguments, environment)
    if arguments[0] == "check":
        file = page.file(arguments[2])
        if file is not None:
            run([sys.executable, "-m", "rollout_tools.cli", "check", "-f", str(file)])


def check_history(call: Call, page: Page) -> None:
    parse_with(history_app, call.arguments, {**exported(page), **call.environment})


# Python


@cache
def options_in(source: Path) -> set[str]:
    """Return the options that a program of argparse defines: all texts in its source that begin with two hyphens.

    The modules of ``benchmarks`` that it imports may define options, too.
    """
    sources = [source]
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks"):
            paths = (node.module, *(f"{node.module}.{name.name}" for name in node.names))
            sources += [ROOT.joinpath(*path.split(".")).with_suffix(".py") for path in paths if path]
    trees = (ast.parse(path.read_text()) for path in sources if path.exists())
    nodes = (node for tree in trees for node in ast.walk(tree))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in texts if text.startswith("--")}


def check_options(arguments: list[str], source: Path) -> None:
    used = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert set() == used - options_in(source), f"{source.relative_to(ROOT)} lacks options"


def module_source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    found = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
    assert found.exists(), f"there is no module {module}"
    return found


def check_python(call: Call, page: Page) -> None:
    first, *rest = call.arguments
    if first == "-c":
        compile(rest[0], page.name, "exec")
    elif first == "-m" and rest[0] == "rollout_api.protocol.access_rules":
        run([sys.executable, *call.arguments])
    elif first == "-m":
        check_options(rest[1:], module_source(rest[0]))
    else:
        script = page.file(first)
        if script is not None:
            check_options(rest, script)


def check_torchrun(call: Call, page: Page) -> None:
    """The script exists and has the options; torchrun's own come before it."""
    position = next(index for index, argument in enumerate(call.arguments) if argument.endswith(".py"))
    script = page.file(call.arguments[position])
    assert script is not None
    check_options(call.arguments[position + 1 :], script)


def check_pytest(call: Call, page: Page) -> None:
    assert (ROOT / call.arguments[0]).exists()


def check_make(call: Call, page: Page) -> None:
    """The targets exist; other arguments are variables."""
    for target in call.arguments:
        if "=" in target:
            continue
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make has no target {target}"


# Docker and Helm


def check_docker(call: Call, page: Page) -> None:
    verb, *rest = call.arguments
    if verb == "buildx":
        assert ["imagetools", "inspect"] == rest[:2]
        return
    assert verb in ("build", "push")
    if verb == "build":
        dockerfile = ROOT / rest[rest.index("-f") + 1]
        declared = set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.MULTILINE))
        given = {rest[index + 1].partition("=")[0] for index, word in enumerate(rest) if word == "--build-arg"}
        assert set() == given - declared, f"{dockerfile} lacks arguments"
        assert {word for word in rest if word.startswith("-")} <= {"-f", "-t", "--build-arg"}


HELM = Path(sys.executable).parent / "helm"


@cache
def helm_options(verb: str) -> set[str]:
    text = subprocess.run([HELM, verb, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--[a-z-]+", text))


@cache
def rendered(values: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the objects of the release that the pages use, with all that values can add."""
    command = [str(HELM), "template", "das", str(CHART), "--namespace", "rollouts"]
    for value in values:
        command += ["--set", value]
    return [found for found in yaml.safe_load_all(run(command)) if found]


def check_helm(call: Call, page: Page) -> None:
    """The options exist, and the chart can be rendered with the values, which its schema checks."""
    verb, *rest = call.arguments
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= helm_options(verb)
    if verb in ("install", "upgrade"):
        assert rest[1] in ("charts/das-rollout", "oci://ghcr.io/OWNER/charts/das-rollout")
        rendered(tuple(rest[index + 1] for index, word in enumerate(rest) if word == "--set"))
    else:
        assert verb in ("test", "uninstall")


# kubectl

SUBCOMMANDS = {"create": ("secret", "generic"), "rollout": ("restart",)}
"""Verbs whose options depend on a further word, and the words that the pages use."""
KINDS = {
    *(
        "configmap",
        "configmaps",
        "crd",
        "deployment",
        "job",
        "lease",
        "namespace",
        "node",
        "pod",
        "pods",
        "replicaset",
        "secret",
        "workload",
    ),
    *("rj", "rolloutjob", "rolloutjobs"),
}
NAMED_WORKLOADS = re.compile(r"(?:deploy|deployment)/(\S+)")


KUBECTL = shutil.which("kubectl") or shutil.which(
    "kubectl", path=str(Path.home() / ".cache/das-rollout/kubernetes/bin")
)
"""The kubectl of this machine or of ``make kubernetes``; None if there is none."""


@cache
def real_kubectl_options(verb: str) -> set[str] | None:
    """Return the options that kubectl lists for a verb; None without kubectl."""
    if KUBECTL is None:
        return None
    texts = [
        subprocess.run([KUBECTL, *arguments], capture_output=True, text=True, check=True).stdout
        for arguments in ([verb, *SUBCOMMANDS.get(verb, ()), "--help"], ["options"])
    ]
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", "".join(texts)))


def check_kubectl(call: Call, page: Page) -> None:
    verb, *rest = call.arguments
    if verb == "rollouts":
        build_parser().parse_args(rest)
        return
    inner = rest.index("--") if "--" in rest else len(rest)
    for program in calls(" ".join(rest[inner + 1 :])):
        CHECKS[program.program](Call(program.program, program.arguments, {"ROLLOUT_HISTORY_REDIS_URL": "x"}), page)
    rest = rest[:inner]
    options = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    real = real_kubectl_options(verb)
    assert real is None or options <= real, f"kubectl {verb} has no {options}"
    for option, value in pairwise(rest):
        if option == "-f" and value != "-":
            page.file(value)
        if option == "-l":
            check_selector(value)
    for name in NAMED_WORKLOADS.findall(" ".join(rest)):
        deployments = {found["metadata"]["name"] for found in rendered() if found["kind"] == "Deployment"}
        assert name in deployments, f"the chart has no Deployment {name}"
    if verb in ("get", "describe", "delete", "patch", "label", "annotate") and "-f" not in rest:
        objects = [
            word for word, before in zip(rest, ["", *rest], strict=False) if not before.startswith("--namespace")
        ]
        kind = next(word for word in objects if not word.startswith("-")).partition("/")[0]
        assert kind in KINDS, f"the kind {kind} is not known to this test"


def check_selector(selector: str) -> None:
    """The label is one of the chart's pods or of a job's pods."""
    name, _, value = selector.partition("=")
    if name in (JOB_LABEL, BUNDLE_LABEL):
        return
    pods = (found["spec"]["template"] for found in rendered() if "template" in found.get("spec", {}))
    assert value in {pod["metadata"].get("labels", {}).get(name) for pod in pods}, f"no pod has the label {selector}"


# Other programs


def check_source(call: Call, page: Page) -> None:
    assert ".venv/bin/activate" == call.arguments[0]


def exempt(reason: str) -> Callable[[Call, Page], None]:
    """Return a check that accepts everything, for a *reason* that people should know."""
    assert reason

    def accept(call: Call, page: Page) -> None:
        pass

    return accept


CHECKS: dict[str, Callable[[Call, Page], None]] = {
    "rollout": check_rollout,
    "rollout-history": check_history,
    "python": check_python,
    "python3": check_python,
    ".venv/bin/python": check_python,
    "torchrun": check_torchrun,
    ".venv/bin/pytest": check_pytest,
    "make": check_make,
    "docker": check_docker,
    "helm": check_helm,
    "kubectl": check_kubectl,
    "source": check_source,
    "redis-cli": exempt("run by tests/job/test_tutorials.py"),
    "redis-server": exempt("run by tests/job/test_tutorials.py"),
    "curl": exempt("run by tests/job/test_tutorials.py, except for an address within a cluster"),
    "export": exempt("of the shell; exported URLs are used when the commands of the page are parsed"),
    "pip": exempt("downloads a release, of which there is none yet"),
    "gh": exempt("verifies a release, of which there is none yet"),
    "wait": exempt("of the shell"),
    "kill": exempt("of the shell"),
    "base64": exempt("decodes the output of another command"),
    "grep": exempt("filters the output of another command"),
    "openssl": exempt("makes a random text"),
    "vllm": exempt("the command of another project, which the page compares with"),
}


def run(command: list[str]) -> str:
    """Run a command in the root of the repository, and return its output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'operator'}"}
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert 0 == process.returncode, f"{command}: {process.stdout}{process.stderr}"
    return process.stdout


def commands_of(name: str) -> Iterator[str]:
    for commands in console_blocks((ROOT / name).read_text()):
        yield from (command.text for command in commands)


@pytest.mark.parametrize(("name", "command"), [(name, command) for name in PAGES for command in commands_of(name)])
def test_a_command_can_be_used(name: str, command: str) -> None:
    page = page_named(name)
    found = calls(command)
    assert found or re.match(r"\w+=", command)
    for call in found:
        assert call.program in CHECKS, f"add a check for {call.program} to CHECKS"
        CHECKS[call.program](call, page)


@pytest.mark.parametrize("name", PAGES)
def test_commands_within_sentences_exist(name: str) -> None:
    text = re.sub(
        r"\s+", " ", re.sub(r"^ *```.*?^ *```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    )
    unknown = []
    for program, rest in re.findall(r"`(rollout|rollout-history) ([a-z][^`]*)`", text):
        group: Any = get_command(
            history_app if program == "rollout-history" or rest.startswith("history") else rollout_app
        )
        words = rest.removeprefix("history").split()
        if not words:
            continue
        command = group.commands.get(words[0])
        options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        known = {
            name for option in (command.params if command else ()) for name in (*option.opts, *option.secondary_opts)
        }
        passed_on = command is not None and command.context_settings.get("allow_extra_args", False)
        if command is None or not (passed_on or set(options) <= known | {"--help"}):
            unknown.append(f"{program} {rest}")
    assert [] == unknown


@pytest.mark.parametrize("file", sorted({name for page in PAGES for name in titled_files((ROOT / page).read_text())}))
def test_a_file_of_a_tutorial_is_valid(file: str, tmp_path: Path) -> None:
    for page in PAGES:
        content = titled_files((ROOT / page).read_text()).get(file)
        if content is None:
            continue
        if file.endswith(".py"):
            compile(content, file, "exec")
        elif "kind: RolloutJob" in content:
            (tmp_path / file).write_text(content)
            run([sys.executable, "-m", "rollout_tools.cli", "check", "-f", str(tmp_path / file)])
        elif "kind: PersistentVolumeClaim" in content:
            kubernetes_validate.validate(yaml.safe_load(content), "1.29", strict=True)
        else:
            assert yaml.safe_load(content)["kind"] in ("ClusterRolloutRuntime", "RolloutRuntime")


def usages_of_benchmarks() -> list[str]:
    """Return the usages in benchmarks/README.md, with all optional arguments."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    blocks_of_code = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    usages = (" ".join(block.split()) for block in blocks_of_code)
    parts = (re.split(r"(?=(?:\S+/)?python -m benchmarks)", usage) for usage in usages)
    return [one for found in parts for one in found if "-m benchmarks." in one and "NAME" not in one.split("--")[0]]


@pytest.mark.parametrize("usage", usages_of_benchmarks())
def test_a_benchmark_has_the_options_that_its_description_names(usage: str) -> None:
    module = re.search(r"-m (benchmarks\.[\w.]+)", usage)
    assert module is not None
    check_options(re.findall(r"--[a-z][\w-]*", usage), module_source(module[1]))


def test_histories_can_be_listed_and_maintained(redis_url: str) -> None:
    for arguments in (["ls"], ["ls", "--json"], ["gc", "--dry-run"]):
        run([sys.executable, "-m", "rollout_store.history_service.cli", *arguments, "--redis", redis_url])


def test_yaml_of_the_pages_can_be_parsed() -> None:
    broken = []
    for name in PAGES:
        for _, content in blocks((ROOT / name).read_text(), "yaml"):
            try:
                list(yaml.safe_load_all(content.replace("…", "x")))
            except yaml.YAMLError as error:
                broken.append(f"{name}: {error}")
    assert [] == broken
