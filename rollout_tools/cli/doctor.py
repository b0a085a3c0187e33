"""The command ``rollout doctor``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout_api.manifest.rollout_job import ManifestError, RolloutJob
from rollout_store.models.model_source import default_cache
from rollout_tools.cli.job_address import ModelCache, check_manifest
from rollout_tools.doctor.findings import Section, Severity, as_json, has_errors

_ERRORS_FOUND = 1
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
_WIDTHS = (7, 22)
"""Width of the columns of severities and checks, so that they are aligned in all sections."""


def doctor(
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="RolloutJob manifest (YAML) to be examined, too.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(envvar="ROLLOUT_REDIS_URL", help="URL of the job's Redis.", show_default="the manifest's"),
    ] = None,
    history_redis: Annotated[
        str | None,
        typer.Option(
            envvar="ROLLOUT_HISTORY_REDIS_URL",
            help="URL of the Redis that keeps the history.",
            show_default="the manifest's",
        ),
    ] = None,
    uid: Annotated[
        str | None,
        typer.Option(help="Unique id of a job whose keys the Redis user must be able to use.", show_default="any job"),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Examine the cluster of the kubeconfig, or of this pod, too.")
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            "-n", "--namespace", help="Namespace of jobs.", show_default="the manifest's, else the kubeconfig's"
        ),
    ] = None,
    model_cache: ModelCache = None,
    as_document: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Examine whether this machine, a Redis server, a manifest and a cluster are fit for jobs.

    The exit code is 0 if no error was found, and 1 otherwise.
    """
    # The other commands start faster without these modules.
    from rollout_tools.doctor.examination import Request, examine

    request = Request(
        manifest=_manifest(file) if file is not None else None,
        redis_url=redis,
        history_url=history_redis,
        uid=uid,
        model_cache=model_cache or default_cache(),
        cluster=cluster,
        namespace=namespace,
    )
    console = Console()
    sections = []
    for section in examine(request):
        sections.append(section)
        if not as_document:
            show(section, console)
    if as_document:
        typer.echo(json.dumps(as_json(sections), indent=1, ensure_ascii=False))
    else:
        _show_summary(sections, console)
    if has_errors(sections):
        raise typer.Exit(_ERRORS_FOUND)


def _manifest(file: Path) -> RolloutJob | ManifestError:
    try:
        return check_manifest(file)
    except ManifestError as failure:
        return failure


def show(section: Section, console: Console) -> None:
    """Print a section: on a terminal as a table, elsewhere each finding on one line."""
    if not console.is_terminal:
        for finding in section.findings:
            advice = f" → {finding.advice}" if finding.advice else ""
            line = f"{finding.severity}: {section.title}: {finding.check}: {finding.seen}{advice}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(
        title=section.title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    for width in _WIDTHS:
        table.add_column(min_width=width)
    table.add_column()
    for finding in section.findings:
        text = Text(finding.seen)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="dim")
        table.add_row(Text(str(finding.severity), style=_STYLES[finding.severity]), Text(finding.check), text)
    console.print(table)


def _show_summary(sections: list[Section], console: Console) -> None:
    counts = {
        severity: sum(finding.severity is severity for section in sections for finding in section.findings)
        for severity in Severity
    }
    console.print(", ".join(f"{severity}: {count}" for severity, count in counts.items()), highlight=False)
