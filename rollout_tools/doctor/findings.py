"""Findings of an examination, and the text of amounts of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but slower or less safely than they could; or something could not be examined."""
    ERROR = "error"
    """Jobs cannot run."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """What was examined, in a few words."""
    severity: Severity
    seen: str
    """What was seen."""
    advice: str = ""
    """What it means and what to do; empty if nothing needs to be done."""


@dataclass(frozen=True)
class Section:
    """The findings about one subject."""

    title: str
    findings: Sequence[Finding]


def ok(check: str, seen: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(check, Severity.OK, seen)


def warning(check: str, seen: str, advice: str) -> Finding:
    """Return a finding about something that should be changed, but does not prevent jobs from running."""
    return Finding(check, Severity.WARNING, seen, advice)


def error(check: str, seen: str, advice: str) -> Finding:
    """Return a finding about something that prevents jobs from running."""
    return Finding(check, Severity.ERROR, seen, advice)


def has_errors(sections: Iterable[Section]) -> bool:
    """Return whether any finding is an error."""
    return any(finding.severity is Severity.ERROR for section in sections for finding in section.findings)


def as_json(sections: Iterable[Section]) -> dict[str, Any]:
    """Return the findings in the form of ``rollout doctor --json``."""
    sections = list(sections)
    return {
        "fit": not has_errors(sections),
        "findings": [
            {
                "section": section.title,
                "check": finding.check,
                "severity": str(finding.severity),
                "seen": finding.seen,
                "advice": finding.advice,
            }
            for section in sections
            for finding in section.findings
        ],
    }


MIB = 2**20
GIB = 2**30


def size_text(size: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
