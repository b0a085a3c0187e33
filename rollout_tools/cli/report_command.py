"""The commands ``rollout report`` and ``rollout bundle``, which write down what has happened to a job."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollout_api.protocol.messages import CodecError
from rollout_api.protocol.status import EXIT_STATE
from rollout_api.redis_client.connection import RedisUnusableError
from rollout_store.models.model_source import default_cache, local_tokenizer
from rollout_store.runtime.output import exit_with_error
from rollout_tools.cli.job_address import (
    JobAddressError,
    JobArgument,
    JobHistoryRedis,
    JobManifest,
    JobRedis,
    JobUid,
    StateDirectory,
    find_job,
    find_job_directory,
)
from rollout_tools.cli.output import exit_with_message

if TYPE_CHECKING:
    from rollout_tools.report.recording import JobRecording

app = typer.Typer()
bundle_app = typer.Typer()
console = Console()


@app.command()
def report(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB|FILE",
            help="Name of the job, or NAMESPACE/NAME; or a file that --save has written.",
            show_default="the only job there is",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page to this file.", show_default=False)] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Save the recording from which the page is made to this file.", show_default=False),
    ] = None,
    file: JobManifest = None,
    redis: JobRedis = None,
    history_redis: JobHistoryRedis = None,
    uid: JobUid = None,
    state_dir: StateDirectory = Path(".rollout"),
    model_cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory of models, for the tokenizer with which rollouts are decoded.",
            show_default="$ROLLOUT_MODEL_CACHE, else ~/.cache/das-rollout/models",
        ),
    ] = None,
) -> None:
    """Write a page about a job: makespans, drafting, lengths, rewards, engines, and the texts of rollouts.

    It is one HTML file, which needs no network. The job may be running or have ended.
    """
    if html is None and save is None:
        exit_with_error(EXIT_STATE, "pass --html FILE for the page, or --save FILE for the recording of the job")
    for target, option in ((html, "--html"), (save, "--save")):
        check_writable(target, option)
    with exit_with_message(file, redis or "", interrupted="no report was written"):
        if job is not None and Path(job).is_file():
            recording = _load(Path(job))
        else:
            recording = _read_job(job, file, redis, history_redis, uid, state_dir, model_cache or default_cache())
    if save is not None:
        from rollout_tools.report.recording import save_recording

        _write(save, "recording", partial(save_recording, recording))
    if html is not None:
        _write_page(recording, html)


def check_writable(file: Path | None, option: str) -> None:
    """Exit with a message if a file that an option names cannot be written."""
    if file is None:
        return
    existed = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        exit_with_error(EXIT_STATE, f"cannot write {file} ({option}): {error.strerror}")


def _write(file: Path, what: str, write: Callable[[Path], object], hint: str = "") -> None:
    """Write a file, and say where it is."""
    try:
        write(file)
    except OSError as error:
        exit_with_error(EXIT_STATE, f"cannot write {file}: {error.strerror}")
    console.print(f"The {what} is in {file}.{hint}", markup=False, soft_wrap=True)


def _write_page(recording: JobRecording, file: Path) -> None:
    from rollout_tools.report.page import render_page

    page = render_page(recording)
    _write(file, "report", lambda file: file.write_text(page, encoding="utf-8"))


def write_page_of_run(directory: Path, file: Path) -> None:
    """Write the page about the job whose last run in the state directory *directory* has just ended."""
    from rollout_tools.launch.job_state import RECORDING_FILE

    recording = directory / RECORDING_FILE
    if not recording.is_file():
        exit_with_error(EXIT_STATE, "there is no report, because no rollout has ended")
    _write_page(_load(recording), file)


def _read_job(
    job: str | None,
    file: Path | None,
    redis_url: str | None,
    history_url: str | None,
    uid: str | None,
    state: Path,
    cache: Path,
) -> JobRecording:
    from rollout_tools.report.reading import NothingToReportError, read_recording

    try:
        found = find_job(job, file=file, redis_url=redis_url, uid=uid, state=state)
    except (JobAddressError, RedisUnusableError):
        # The Redis server of a local job may have ended.
        if redis_url is None and uid is None and (saved := _saved_recording(job, file, state)) is not None:
            return _load(saved)
        raise
    try:
        reading = read_recording(
            found.redis_url,
            found.uid,
            name=found.name,
            history_url=history_url or found.history_url,
            tokenizer_of=lambda model: local_tokenizer(model, cache),
        )
        with found.connected():
            return asyncio.run(reading)
    except NothingToReportError as error:
        exit_with_error(EXIT_STATE, str(error))
    except CodecError as error:
        exit_with_error(EXIT_STATE, f"the timeline of job {found.name} cannot be read: {error}")


def _saved_recording(job: str | None, file: Path | None, state: Path) -> Path | None:
    """Return the recording that the last ``rollout run`` of a job has saved; None if there is none."""
    from rollout_tools.launch.job_state import RECORDING_FILE

    try:
        recording = find_job_directory(job, file=file, state=state) / RECORDING_FILE
    except JobAddressError:
        return None
    return recording if recording.is_file() else None


def _load(file: Path) -> JobRecording:
    from rollout_tools.report.recording import RecordingError, load_recording

    try:
        return load_recording(file)
    except RecordingError as error:
        exit_with_error(EXIT_STATE, str(error))


_STANDARD_OUTPUT = Path("-")


@bundle_app.command()
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
    from rollout_tools.cli.bundle_parts import Subject, pack_bundle

    with exit_with_message(file, interrupted="no bundle was written"):
        subject = Subject.find(job, file=file, redis_url=redis, history_url=history_redis, uid=uid, state=state_dir)
        content = pack_bundle(subject, with_rollouts=with_rollouts)
    if output == _STANDARD_OUTPUT:
        sys.stdout.buffer.write(content)
        return
    target = output or Path(f"{subject.folder}.tar.gz")
    _write(target, "bundle", lambda file: file.write_bytes(content), " Its README.md says what it contains.")
