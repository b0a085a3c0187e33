"""The command line: ``rollout``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.markup import escape

from rollout_api.asyncio_tasks import end as end_task
from rollout_api.errors import RolloutClientError
from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob
from rollout_api.protocol.exit_codes import (
    EXIT_DEADLINE,
    EXIT_ENGINE,
    EXIT_INTERRUPTED,
    EXIT_MANIFEST,
    EXIT_MODEL,
    EXIT_REDIS,
    EXIT_STATE,
)
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_worker.engine.compat import EngineError
from rollout_worker.engine.model_source import (
    ModelError,
    default_cache,
    load_tokenizer,
    resolve_model,
    tokenizer_fingerprint,
)
from rollout_worker.engine.sampling import AdmissionError
from rollout_worker.history.connection import RedisUnusableError, explain_error
from rollout_worker.history.store import HistoryMismatchError
from rollout_worker.history_cli import app as history_app
from rollout_worker.job.report import Mode
from rollout_worker.manifest import read_manifest

app = typer.Typer(
    name="rollout",
    help="RL rollouts with drafts from earlier rollouts of the same problem.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    pretty_exceptions_enable=sys.stderr.isatty(),  # a pod's last lines become the message of its end
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)

_Result = TypeVar("_Result")


ManifestFile = Annotated[Path, typer.Option("-f", "--file", help="A RolloutJob manifest (YAML).")]
RedisUrl = Annotated[str, typer.Option(envvar="ROLLOUT_REDIS_URL", help="Redis URL.")]
HistoryRedisUrl = Annotated[
    str | None,
    typer.Option(
        "--history-redis",
        envvar="ROLLOUT_HISTORY_REDIS_URL",
        help="URL of the Redis that keeps the history [default: the manifest's, else the job's].",
    ),
]
JobUid = Annotated[str, typer.Option(help="Identity of the job, the same for its head and all workers.")]
OwnAddress = Annotated[
    str | None,
    typer.Option(envvar="POD_IP", help="Address under which other machines reach this one [default: Ray finds it]."),
]
ModelCache = Annotated[
    Path | None,
    typer.Option(help="Directory of models [default: $ROLLOUT_MODEL_CACHE, else ~/.cache/das-rollout/models]."),
]
app.add_typer(history_app, name="history")


@app.command()
def run(
    file: ManifestFile,
    redis: Annotated[
        str | None,
        typer.Option(
            envvar="ROLLOUT_REDIS_URL", help="Redis URL; default: the manifest's, else a server of the job's own."
        ),
    ] = None,
    history_redis: HistoryRedisUrl = None,
    state_dir: Annotated[Path, typer.Option(help="Where jobs keep their state and an own Redis its data.")] = Path(
        ".rollout"
    ),
    model_cache: ModelCache = None,
    compare: Annotated[
        bool,
        typer.Option(
            help="Make each epoch also without speculation, on a second engine, and with drafts from the rollout's "
            "own text alone: takes about three times as long."
        ),
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
) -> None:
    """Run a job on this machine. One that was interrupted goes on where it was."""
    from rollout_worker.display import report_lines, report_table, show_progress
    from rollout_worker.local import RunOptions, run_local

    started = time.monotonic()
    with _said_plainly(file):
        job = read_manifest(file)
        if json_file is not None:
            _check_writable(json_file)
        _use_cache(model_cache)
        options = RunOptions(
            state=state_dir,
            redis_url=redis,
            history_url=_history_url(job, history_redis),
            compare=[Mode.SELF, Mode.PLAIN] if compare else [],
        )
        work = run_local(
            job,
            options,
            say=lambda text: console.print(text, markup=False, soft_wrap=True),
            watch=lambda trainer: show_progress(trainer, console),
        )
        report = asyncio.run(_until_terminated(work))
    if report is not None:
        if json_file is not None:
            json_file.write_text(json.dumps(report.as_json(), indent=1))
        console.print(report_table(report))
        for line in report_lines(report):
            console.print(line)
    console.print(f"Ran for {time.monotonic() - started:.0f} s.")


@app.command()
def head(
    file: ManifestFile,
    redis: RedisUrl,
    uid: JobUid,
    history_redis: HistoryRedisUrl = None,
    host: OwnAddress = None,
    port: Annotated[int, typer.Option(help="Port on which workers find this head.")] = 6380,
    http_port: Annotated[int, typer.Option(help="Port of /status, /metrics and /healthz.")] = 8080,
    model_cache: ModelCache = None,
) -> None:
    """Be the head of a job on several machines, until the job is closed; to be started again when it fails."""
    from rollout_worker.history.connection import connect, connect_history, wait_until_usable
    from rollout_worker.ray_token import share_token

    _end_at_once_when_told()
    with _said_plainly(file, redis):
        job = read_manifest(file)
        _use_cache(model_cache)
        server = connect(redis)
        wait_until_usable(server, redis)
        history_url = _history_url(job, history_redis)
        if history_url:
            wait_until_usable(connect_history(history_url), history_url)
        share_token(server, MessageKeys(uid))
        from rollout_worker.distributed import run_head
        from rollout_worker.job.dataset_source import load_dataset
        from rollout_worker.job.setup import JobSetup

        model = resolve_model(job.spec.model, default_cache(), weights=False)
        tokenizer = load_tokenizer(model)
        dataset = load_dataset(job, model, tokenizer)
        setup = JobSetup(
            manifest=job.model_dump(mode="json", by_alias=True),
            uid=uid,
            redis_url=redis,
            history_url=history_url,
            vocabulary=len(tokenizer),
            tokenizer=tokenizer_fingerprint(tokenizer),
            engines_per_machine=job.spec.engines_per_worker,
            rollouts=None if dataset is None else dataset.rollouts(job),
            http_host="0.0.0.0",  # noqa: S104 – for the operator and Prometheus
            http_port=http_port,
        )
        setup.open_history()
        asyncio.run(_until_terminated(run_head(setup, dataset, host=host, port=port)))


@app.command()
def worker(
    file: ManifestFile,
    redis: RedisUrl,
    uid: JobUid,
    history_redis: HistoryRedisUrl = None,
    name: Annotated[
        str | None, typer.Option(envvar="POD_NAME", help="Under which /status shows its engines [default: the host's].")
    ] = None,
    host: OwnAddress = None,
    http_port: Annotated[int, typer.Option(help="Port of /readyz; 0: none.")] = 0,
    model_cache: ModelCache = None,
) -> None:
    """Be a worker of a job on several machines, until SIGTERM; what it was making goes on elsewhere."""
    from rollout_worker.distributed import run_worker

    _end_at_once_when_told()
    with _said_plainly(file, redis):
        job = read_manifest(file)
        _use_cache(model_cache)
        resolve_model(job.spec.model, default_cache())  # once, before each of its engines does
        history_url = _history_url(job, history_redis)
        name = name or socket.gethostname()
        run_worker(job, redis, uid, history_url=history_url, name=name, host=host, http_port=http_port)


@app.command()
def end(
    file: ManifestFile,
    redis: RedisUrl,
    uid: JobUid,
    history_redis: HistoryRedisUrl = None,
    reason: Annotated[str, typer.Option(help="What clients of the job are told.")] = "it was ended",
    delete: Annotated[bool, typer.Option("--delete", help="Remove its messages at once, not after a day.")] = False,
) -> None:
    """End a job of which no part runs any more: what it finished comes into its history, its clients are told."""
    from rollout_worker.history.connection import check, connect, connect_history
    from rollout_worker.history.store import HistoryStore
    from rollout_worker.job.ending import end_job

    with _said_plainly(file, redis):
        job = read_manifest(file)
        server = connect(redis)
        check(server, redis)
        history_url = _history_url(job, history_redis) or redis
        history = connect_history(history_url)
        check(history, history_url)
        store = HistoryStore(
            history, HistoryKeys(job.metadata.namespace, job.history_name), window=job.spec.speculation.window
        )
        name = f"{job.metadata.namespace}/{job.metadata.name}"
        state: Literal["failed", "deleted"] = "deleted" if delete else "failed"
        carried = end_job(server, MessageKeys(uid), store, name, state=state, reason=reason)
    console.print(f"Job {name} ({uid}) is ended; {carried} rollouts came into its history.", soft_wrap=True)


@app.command()
def check(file: ManifestFile) -> None:
    """Check a manifest without running it."""
    with _said_plainly(file):
        job = read_manifest(file)
    console.print(f"{file}: RolloutJob {job.metadata.namespace}/{job.metadata.name} is valid.")


@app.command("tiny-model")
def tiny_model(
    output: Annotated[
        Path | None, typer.Option(help="Directory to make [default: das/tiny-qwen3 in the model cache].")
    ] = None,
    model_cache: ModelCache = None,
    seed: Annotated[int, typer.Option(min=0, max=1023, help="Seed of the training data and the initial weights.")] = 0,
) -> None:
    """Train the examples' small Qwen3 policy from scratch, with several checkpoints; minutes on two cores.

    A model that is there already is left as it is.
    """
    from rollout_worker.display import train_tiny_model

    directory = output or (model_cache or default_cache()) / "das" / "tiny-qwen3"
    try:
        train_tiny_model(directory, seed, console)
    except OSError as error:
        _fail(EXIT_STATE, f"{directory}: {error}")


@contextmanager
def _said_plainly(file: Path | None = None, redis: str = "") -> Iterator[None]:
    """Say what went wrong in one line and end with its exit code; what nobody foresaw keeps its traceback."""
    from rollout_worker.local import DeadlineError, StateError

    named = f"{file}: " if file is not None else ""
    try:
        yield
    except ManifestError as error:
        _fail_manifest(file, error)
    except ModelError as error:
        _fail(EXIT_MODEL, f"{named}{error}")
    except (RedisUnusableError, HistoryMismatchError) as error:
        _fail(EXIT_REDIS, str(error))
    except RedisError as error:
        if not redis:
            raise
        _fail(EXIT_REDIS, str(explain_error(error, redis)))
    except (EngineError, AdmissionError, RolloutClientError) as error:
        _fail(EXIT_ENGINE, str(error))
    except StateError as error:
        _fail(EXIT_STATE, str(error))
    except DeadlineError as error:
        _fail(EXIT_DEADLINE, str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail(EXIT_INTERRUPTED, "Stopped. What is done is kept; the same command goes on from there.")


def _history_url(job: RolloutJob, given: str | None) -> str:
    """Where the job's history is; empty: with its messages.

    Raises:
        ManifestError: if that stands in a Secret alone.
    """
    named = job.spec.history.redis
    if not given and named.url_from is not None:
        message = "no Secret can be read here; give the URL with --history-redis or in ROLLOUT_HISTORY_REDIS_URL"
        raise ManifestError([FieldError("spec.history.redis.urlFrom", message)])
    return given or named.url or ""


async def _until_terminated(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await *work*; SIGTERM cancels it as Ctrl-C does, and again if that is lost: nobody sends it twice."""
    task = asyncio.ensure_future(work)
    ending: list[asyncio.Future[None]] = []
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: ending.append(asyncio.ensure_future(end_task(task)))
    )
    return await task


def _end_at_once_when_told() -> None:
    """Until there is something to hand over: a container's first process ends by no signal that it does not handle."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))


def _use_cache(directory: Path | None) -> None:
    """Have all processes that this one starts find models there."""
    if directory is not None:
        os.environ["ROLLOUT_MODEL_CACHE"] = str(directory.absolute())


def _check_writable(file: Path) -> None:
    """Refuse a report that cannot be written before the job, not after it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        _fail(EXIT_STATE, f"--json {file} cannot be written: {error.strerror}")


def _fail(code: int, message: str) -> NoReturn:
    errors.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)


def _fail_manifest(file: Path | None, error: ManifestError) -> NoReturn:
    count = len(error.errors)
    errors.print(
        f"[bold red]error:[/] {escape(str(file))} has {count} error{'s' if count > 1 else ''}:", highlight=False
    )
    for field in error.errors:
        errors.print(f"  {field.path}: {field.message}", markup=False, soft_wrap=True, highlight=False)
    sys.exit(EXIT_MANIFEST)


def main() -> None:
    """Entry point of the ``rollout`` command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    app()


if __name__ == "__main__":
    main()
