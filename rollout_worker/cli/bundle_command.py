"""The command ``rollout bundle``."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollout_api.protocol.exit_codes import EXIT_STATE
from rollout_worker.cli.exit_errors import exit_with_message
from rollout_worker.cli.job_address import JobArgument, JobHistoryRedis, JobManifest, JobRedis, JobUid, StateDirectory
from rollout_worker.runtime.command_line import exit_with_error

if TYPE_CHECKING:
    from rollout_worker.cli.bundle_parts import Subject

app = typer.Typer()
console = Console()

_STANDARD_OUTPUT = Path("-")


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
    from rollout_worker.cli.bundle_parts import Subject

    with exit_with_message(file, interrupted="no bundle was written"):
        subject = Subject.find(job, file=file, redis_url=redis, history_url=history_redis, uid=uid, state=state_dir)
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
    from rollout_worker.cli.bundle_parts import collect

    file = io.BytesIO()
    archive = BundleArchive(file, folder=_folder(subject.name), redactor=Redactor(subject.secrets()))
    collect(archive, subject, with_rollouts=with_rollouts)
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
