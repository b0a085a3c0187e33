"""The runbook explains every condition, every reason and every Event that the operator can report."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rollout_api.manifest.status import ConditionType, State

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator" / "rollout_operator"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
REASON = re.compile(r"[A-Z][a-z]+(?:[A-Z][A-Za-z]*)*")
MODULES = (
    "apply",
    "conditions",
    "failures",
    "job_planner",
    "plan",
    "pod_planner",
    "runtimes",
    "teardown",
)
"""Modules that decide about conditions and Events."""
NOT_REASONS = {"Error", "FailJob", "Ignore", "Replace"}
"""Actions about failed pods, and the reason for which the Event is PodFailed."""
KUBERNETES_ONLY = {"CreateContainerConfigError", "ErrImageNeverPull", "InvalidImageName"}
"""Reasons of the kubelet that the operator compares with; it passes on all of the kubelet's reasons."""


def constants(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression can have, and the names of constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from constants(node.body)
        yield from constants(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from constants(value)
    elif isinstance(node, ast.Tuple) and node.elts:
        yield from constants(node.elts[0])
    elif isinstance(node, ast.Starred):
        yield from constants(node.value)


def reasons_in(module: str) -> set[str]:
    """Return the reasons that a module names in calls, results and constants."""
    found: set[str] = set()
    tree = ast.parse(next(OPERATOR.glob(f"**/{module}.py")).read_text())
    for node in ast.walk(tree):
        expressions: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "set":
                expressions = node.args[2:3]
            elif name == "_complete":
                expressions = node.args[1:2]
            elif name == "warn":
                expressions = node.args[:1]
            elif name == "Event":
                expressions = node.args[1:2]
        elif isinstance(node, ast.Return | ast.Assign) and node.value is not None:
            expressions = [node.value]
        for expression in expressions:
            found.update(text for text in constants(expression) if REASON.fullmatch(text))
    return found - NOT_REASONS


def disruptions() -> set[str]:
    """Return the reasons of failed pods that are listed in sets and mappings."""
    tree = ast.parse((OPERATOR / "planning" / "failures.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    actions = {"FailJob", "Replace", "Ignore", "In", "Error"}
    return {text for text in texts if REASON.fullmatch(text)} - actions


def section(heading: str) -> str:
    return RUNBOOK.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def explained(text: str) -> set[str]:
    """Return the names that headings and the first cells of tables explain."""
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE)
    return {name for heading in headings for name in re.split(r", ", heading)} | {
        name for cell in cells for name in re.findall(r"`(\w+)`", cell)
    }


def test_every_condition_has_a_section() -> None:
    headings = re.findall(r"^### (.*)$", section("Conditions"), re.MULTILINE)
    assert [kind.value for kind in ConditionType] == headings


def test_every_reason_and_every_event_is_explained() -> None:
    reported = disruptions().union(*(reasons_in(module) for module in MODULES))
    assert {"BackoffLimitExceeded", "CleanupFailed", "DistributionDrift", "NotReady", "RuntimeNotFound"} <= reported
    assert set() == reported - explained(section("Conditions")) - explained(section("Events"))


def test_every_explained_reason_exists() -> None:
    code = "".join(path.read_text() for path in OPERATOR.glob("**/*.py"))
    conditions, events = explained(section("Conditions")), explained(section("Events"))
    names = (conditions | events) - {kind.value for kind in ConditionType} - {state.value for state in State}
    # Those that the kubelet and the scheduler report, and the operator passes on.
    passed_on = {"ErrImagePull", "ImagePullBackOff", "CrashLoopBackOff", "OOMKilled", "Unschedulable"} | KUBERNETES_ONLY
    passed_on |= {"Evicted", "NodeAffinity", "NodeShutdown", "OutOfcpu", "OutOfmemory", "OutOfpods", "Preempting"}
    passed_on |= {"Terminated", "TopologyAffinityError", "UnexpectedAdmissionError"}
    assert set() == {name for name in names if REASON.fullmatch(name) and f'"{name}"' not in code} - passed_on
