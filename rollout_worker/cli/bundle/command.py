"""The command ``rollout bundle``."""

from __future__ import annotations

import io
import sys
from collections import deque
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollout_api.protocol.exit_codes import EXIT_STATE
from rollout_worker.cli.exit_errors import exit_with_message
from rollout_worker.cli.job_address import JobArgument, JobHistoryRedis, JobManifest, JobRedis, JobUid, StateDirectory
from rollout_worker.runtime.exit_message import exit_with_error

if TYPE_CHECKING:
    from rollout_api.bundle.archive import BundleArchive
    from rollout_worker.cli.bundle.subject import Subject

app = typer.Typer()
console = Console()

_STANDARD_OUTPUT = Path("-")
_MAX_LOG_LINES = 100_000
_LOGS = ("logs.txt", "The last lines of the logs of all processes of `rollout run`, in the order of their times (UTC).")
_MANIFEST = ("manifest.json", "The job's manifest.")


@app.command()
def bundle(
    job: JobArgument = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write; - for standard output.",
            show_default="bundle-NAMESPACE-NAME.tar.gz",
        ),
    ] = None,
    file: JobManifest = None,
    redis: JobRedis = None,
    history_redis: JobHistoryRedis = None,
    uid: JobUid = None,
    state_dir: StateDirectory = Path(".rollout"),
    with_rollouts: Annotated[
        bool,
        typer.Option("--with-rollouts", help="Include prompts and responses: of shown rollouts and of dead letters."),
    ] = False,
) -> None:
    """Collect all that explains what has happened to a job in one archive, before it is deleted.

    Passwords, tokens and keys are replaced by ***. What cannot be collected is named in the archive's README.md, with
    the reason.
    """
    from rollout_worker.cli.bundle.subject import find_subject

    with exit_with_message(file, interrupted="no bundle was written"):
        subject = find_subject(job, file=file, redis_url=redis, history_url=history_redis, uid=uid, state=state_dir)
        content = _collect(subject, with_rollouts=with_rollouts)
    if output == _STANDARD_OUTPUT:
        sys.stdout.buffer.write(content)
        return
    target = output or Path(f"{_folder(subject.name)}.tar.gz")
    try:
        target.write_bytes(content)
    except OSError as error:
        exit_with_error(EXIT_STATE, f"cannot write {target}: {error.strerror}")
    console.print(f"The bundle is in {target}. Its README.md says what it contains.", markup=False, soft_wrap=True)


def _folder(name: str) -> str:
    return f"bundle-{name.replace('/', '-')}"


def _collect(subject: Subject, *, with_rollouts: bool) -> bytes:
    from rollout_api.bundle.archive import BundleArchive
    from rollout_api.bundle.redaction import Redactor
    from rollout_worker.cli.bundle.machine_parts import (
        DOCTOR,
        ENVIRONMENT,
        VERSIONS,
        read_environment,
        read_findings,
        read_versions,
    )
    from rollout_worker.cli.bundle.redis_part import REDIS, read_redis_facts

    file = io.BytesIO()
    archive = BundleArchive(file, folder=_folder(subject.name), redactor=Redactor(subject.secrets()))
    archive.collect(*_MANIFEST, subject.manifest_document)
    _collect_job(archive, subject, with_rollouts=with_rollouts)
    if subject.redis_url:
        url = subject.redis_url
        archive.collect(*REDIS, lambda: read_redis_facts(url))
    else:
        archive.note_missing(*REDIS, subject.why_not_found)
    _collect_logs(archive, subject)
    archive.collect(*VERSIONS, read_versions)
    archive.collect(*ENVIRONMENT, read_environment)
    archive.collect(*DOCTOR, lambda: read_findings(subject))
    private = (
        "Prompts and responses are included (`--with-rollouts`)."
        if with_rollouts
        else "There are no prompts and no responses, except for what programs of yours may have logged."
    )
    archive.close(
        f"Bundle of job {subject.name}",
        f"Collected by `rollout bundle` of das-rollout {version('das-rollout')} at {datetime.now(UTC):%F %T} UTC. "
        f"Passwords, tokens and keys are replaced by `***`. {private}",
    )
    return file.getvalue()


def _collect_job(archive: BundleArchive, subject: Subject, *, with_rollouts: bool) -> None:
    from rollout_worker.cli.bundle.job_parts import REDIS_PARTS, collect_job, collect_saved_recording
    from rollout_worker.cli.bundle.metrics_part import METRICS, read_metrics

    found = subject.job
    if found is not None:
        collect_job(archive, found, subject.history_url, with_rollouts=with_rollouts)
        archive.collect(*METRICS, lambda: read_metrics(found))
        return
    for part in (*REDIS_PARTS, METRICS):
        archive.note_missing(*part, subject.why_not_found)
    if subject.directory is not None:
        collect_saved_recording(archive, subject.directory, with_rollouts=with_rollouts)


def _collect_logs(archive: BundleArchive, subject: Subject) -> None:
    from rollout_worker.cli.merged_logs import JobLogs

    directory = subject.directory
    if directory is None:
        archive.note_missing(
            *_LOGS,
            "the job has not run with rollout run in the state directory; processes that were started by themselves "
            "write their logs to standard error",
        )
        return

    def read() -> str:
        lines = deque(JobLogs(directory).written(), maxlen=_MAX_LOG_LINES)
        return "".join(f"{line.time} {line.process} {line.text}\n" for line in lines)

    archive.collect(*_LOGS, read)
