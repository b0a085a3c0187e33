"""The commands of ``rollout``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Coroutine
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.status import (
    EXIT_DEADLINE,
    EXIT_ENGINE,
    EXIT_INTERRUPTED,
    EXIT_MANIFEST,
    EXIT_MODEL,
    EXIT_REDIS,
    EXIT_STATE,
)
from rollout_api.status_token import StatusToken
from rollout_head.dataset.report import EpochMode
from rollout_store.models.model_source import (
    default_cache,
    load_tokenizer,
    resolve_model,
    tokenizer_fingerprint,
)
from rollout_store.runtime.output import exit_with_error
from rollout_tools.cli.doctor import doctor
from rollout_tools.cli.job_address import ModelCache, check_manifest, job_directory, read_manifest
from rollout_tools.cli.job_commands import app as job_app
from rollout_tools.cli.output import exit_with_message, report_lines, report_table, show_progress
from rollout_tools.cli.pod_templates import check_pod_templates
from rollout_tools.cli.report_command import app as report_app
from rollout_tools.cli.report_command import bundle_app, check_writable, write_page_of_run
from rollout_tools.cli.top import app as top_app

_EXIT_CODES = (
    "Exit codes: 0 success; 1 no such history or problem, or an unexpected error; "
    f"{EXIT_MANIFEST} invalid manifest or command line; {EXIT_REDIS} Redis cannot be used; "
    f"{EXIT_ENGINE} vLLM, Ray or the job failed; {EXIT_STATE} a file or directory cannot be used; "
    f"{EXIT_DEADLINE} deadline exceeded; {EXIT_MODEL} model not found; {EXIT_INTERRUPTED} interrupted."
)

app = typer.Typer(
    name="rollout",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    # A pod's last lines of output become its termination message, which should be plain text.
    pretty_exceptions_enable=sys.stderr.isatty(),
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(job_app)
app.add_typer(report_app)
app.add_typer(top_app)
app.add_typer(bundle_app)
console = Console()

_Result = TypeVar("_Result")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"rollout {metadata.version('das-rollout')}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run RL rollouts with speculative drafts from earlier rollouts of the same problem."""


ManifestFile = Annotated[Path, typer.Option("-f", "--file", help="RolloutJob manifest (YAML).")]
RedisUrl = Annotated[str, typer.Option(envvar="ROLLOUT_REDIS_URL", help="URL of the job's Redis.")]
HistoryRedisUrl = Annotated[
    str | None,
    typer.Option(
        "--history-redis",
        envvar="ROLLOUT_HISTORY_REDIS_URL",
        help="URL of the Redis that keeps the history.",
        show_default="the manifest's, else the job's Redis",
    ),
]
JobUid = Annotated[
    str, typer.Option(help="Unique id of the job, the same for its head and all its workers and after restarts.")
]


@app.command()
def run(
    file: ManifestFile,
    redis: Annotated[
        str | None,
        typer.Option(
            envvar="ROLLOUT_REDIS_URL",
            help="URL of the job's Redis.",
            show_default="the manifest's, else a server that this command starts",
        ),
    ] = None,
    history_redis: HistoryRedisUrl = None,
    state_dir: Annotated[
        Path, typer.Option(help="Directory for the state of jobs and the data of Redis servers started here.")
    ] = Path(".rollout"),
    model_cache: ModelCache = None,
    compare: Annotated[
        bool,
        typer.Option(
            help="Repeat each epoch of a dataset on a second engine without speculation, and compare the results. This "
            "takes more than twice as long."
        ),
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--report", help="Write a page about the job to this HTML file at its end.")
    ] = None,
) -> None:
    """Run a job on this machine. A job that was interrupted continues."""
    from rollout_tools.launch.local import RunOptions, run_local

    started = time.monotonic()
    with exit_with_message(file):
        job = read_manifest(file)
        for target, option in ((json_file, "--json"), (html_file, "--report")):
            check_writable(target, option)
        options = RunOptions(
            state=state_dir,
            redis_url=redis,
            history_url=_history_url(job, history_redis),
            baselines=[EpochMode.NON_SPECULATIVE] if compare else [],
            model_cache=model_cache,
        )
        work = run_local(
            job,
            options,
            notify=lambda text: console.print(text, markup=False, soft_wrap=True),
            watch=lambda trainer: show_progress(trainer, console),
        )
        report = asyncio.run(run_until_terminated(work))
    if report is not None:
        if json_file is not None:
            json_file.write_text(json.dumps(report.as_json(), indent=1))
        console.print(report_table(report))
        for line in report_lines(report):
            console.print(line)
    if html_file is not None:
        write_page_of_run(job_directory(state_dir, f"{job.metadata.namespace}/{job.metadata.name}"), html_file)
    console.print(f"Finished after {time.monotonic() - started:.0f} s.")


@app.command()
def head(
    file: ManifestFile,
    redis: RedisUrl,
    uid: JobUid,
    history_redis: HistoryRedisUrl = None,
    http_port: Annotated[int, typer.Option(help="Port of /status, /metrics and /healthz.")] = 8080,
    model_cache: ModelCache = None,
) -> None:
    """Run the head of a job on several machines until the job is closed. Restart the head if it fails."""
    from rollout_api.redis_client.connection import connect, connect_history, wait_until_usable
    from rollout_api.redis_client.retry import MAX_OUTAGE_S, RetryPolicy, retry
    from rollout_head.head import HeadInputs, run_head
    from rollout_store.job.launcher import LauncherStore
    from rollout_store.job.setup import JobSetup

    _exit_on_sigterm()
    with exit_with_message(file, redis):
        job = read_manifest(file)
        StatusToken.from_environment()  # the coordinator, a child process, could only report an error in its log
        cache = model_cache or default_cache()
        server = connect(redis)
        wait_until_usable(server, redis)
        history_url = _history_url(job, history_redis)
        if history_url:
            wait_until_usable(connect_history(history_url), history_url)
        store = LauncherStore(server, MessageKeys(uid))
        inputs = HeadInputs(job, cache)
        facts = retry(store.head_facts)
        is_first = facts is None
        facts = facts or inputs.facts()
        setup = JobSetup(
            manifest=job.model_dump(mode="json", by_alias=True),
            uid=uid,
            redis_url=redis,
            history_url=history_url,
            vocabulary_size=facts.vocabulary_size,
            tokenizer=facts.tokenizer,
            total_rollouts=facts.total_rollouts,
            http_host=None,  # for the operator and Prometheus
            http_port=http_port,
        )
        if is_first:
            setup.open_history()
            retry(store.set_head_facts, facts, policy=RetryPolicy(max_outage=MAX_OUTAGE_S))
        asyncio.run(run_until_terminated(run_head(setup, inputs.dataset)))


@app.command()
def worker(
    file: ManifestFile,
    redis: RedisUrl,
    uid: JobUid,
    history_redis: HistoryRedisUrl = None,
    name: Annotated[
        str | None,
        typer.Option(envvar="POD_NAME", help="Name of this worker in /status.", show_default="the host name"),
    ] = None,
    http_port: Annotated[int, typer.Option(help="Port of /readyz; 0 to disable it.")] = 0,
    group: Annotated[
        str | None,
        typer.Option(help="Name by which followers find this worker (workers.podsPerWorker).", show_default="the name"),
    ] = None,
    model_cache: ModelCache = None,
) -> None:
    """Run a worker of a job on several machines until SIGTERM. Other workers then continue its running rollouts.

    The exit code is 130 unless the job has ended.
    """
    from rollout_store.job.setup import JobSetup
    from rollout_worker.engine_worker.worker_process import run_worker

    _exit_on_sigterm()
    with exit_with_message(file, redis):
        job = read_manifest(file)
        cache = model_cache or default_cache()
        name = name or socket.gethostname()
        model = resolve_model(job.spec.model, cache)  # downloads it once, before several engines would
        tokenizer = load_tokenizer(model)
        setup = JobSetup(
            manifest=job.model_dump(mode="json", by_alias=True),
            uid=uid,
            redis_url=redis,
            history_url=_history_url(job, history_redis),
            vocabulary_size=len(tokenizer),
            tokenizer=tokenizer_fingerprint(tokenizer),
            engines_per_machine=job.spec.engines_per_worker,
            model_cache=str(cache.absolute()),
            machines_per_engine=job.spec.workers.pods_per_worker,
            group=group or name,
        )
        has_ended = run_worker(setup, name=name, http_port=http_port)
    if not has_ended:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def follower(
    file: ManifestFile,
    redis: RedisUrl,
    uid: JobUid,
    group: Annotated[str, typer.Option(help="The --group of the worker to whose engine this machine belongs.")],
    rank: Annotated[int, typer.Option(min=1, help="Number of this machine in the engine. The worker's is 0.")],
    http_port: Annotated[int, typer.Option(help="Port of /readyz; 0 to disable it.")] = 0,
    model_cache: ModelCache = None,
) -> None:
    """Run a part of a worker's engine on this machine, for a model that does not fit on one (workers.podsPerWorker)."""
    from rollout_store.job.setup import JobSetup
    from rollout_worker.engine_worker.engine_group import run_follower

    _exit_on_sigterm()
    with exit_with_message(file, redis, interrupted="the engine starts again when a follower of this rank runs"):
        job = read_manifest(file)
        if rank >= (pods := job.spec.workers.pods_per_worker):
            message = (
                f"the ranks of {pods} pods are 0 to {pods - 1}, so --rank {rank} does not exist; use a lower --rank or "
                "increase podsPerWorker"
            )
            raise ManifestError([FieldError("spec.workers.podsPerWorker", message)])
        cache = model_cache or default_cache()
        resolve_model(job.spec.model, cache)
        setup = JobSetup(
            manifest=job.model_dump(mode="json", by_alias=True),
            uid=uid,
            redis_url=redis,
            vocabulary_size=0,
            tokenizer="",
            model_cache=str(cache.absolute()),
            machines_per_engine=job.spec.workers.pods_per_worker,
            group=group,
        )
        run_follower(setup, rank=rank, http_port=http_port)
    raise typer.Exit(EXIT_INTERRUPTED)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    file: ManifestFile,
    redis: RedisUrl,
    uid: Annotated[
        str | None, typer.Option(help="Unique id of the job.", show_default="the newest job with the manifest's name")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; empty for all addresses, of IPv4 and IPv6.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Directory with one file for each client, which contains its bearer token, such as a mounted Secret.",
            show_default="no tokens, so that everyone may use the server",
        ),
    ] = None,
    max_requests_per_token: Annotated[
        int, typer.Option(min=0, help="Number of requests that a client may have in progress; 0 for any number.")
    ] = 0,
    max_model_tokens_per_token: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of tokens of prompts and responses, counted with max_tokens, that a client may have in "
            "progress; 0 for any number.",
        ),
    ] = 0,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate (PEM), with its chain.")] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="Key of the TLS certificate (PEM).")] = None,
    model_cache: ModelCache = None,
) -> None:
    """Serve a job over HTTP, with the APIs of OpenAI and vLLM. If it does not run yet, the server waits for it.

    Further options are passed to vLLM's API server, for example --enable-auto-tool-choice --tool-call-parser=hermes.
    """
    from rollout_api.client.request_client import RequestClient
    from rollout_api.redis_client.connection import check, connect
    from rollout_server.access import AccessMiddleware, Tokens, TokensError
    from rollout_server.server import ServerArgumentError, build_app, serve

    async def run() -> None:
        name = None if uid else f"{job.metadata.namespace}/{job.metadata.name}"
        client = await RequestClient.wait_for_job(redis, name, uid=uid)
        try:
            names = [job.spec.model.uri, job.metadata.name]
            try:
                app = await build_app(client, model, names, job.spec, context.args)
            except ServerArgumentError as error:
                exit_with_error(EXIT_MANIFEST, str(error))
            await serve(
                app,
                partial(
                    AccessMiddleware,
                    tokens=permitted,
                    max_requests=max_requests_per_token,
                    max_model_tokens=max_model_tokens_per_token,
                ),
                host=host,
                port=port,
                ssl_certfile=certificate,
                ssl_keyfile=certificate_key,
            )
        finally:
            await client.close()

    with exit_with_message(file, redis):
        job = read_manifest(file)
        try:
            permitted = Tokens() if tokens is None else Tokens.read(tokens)
        except TokensError as error:
            exit_with_error(EXIT_STATE, str(error))
        _check_certificate(certificate, certificate_key)
        check(connect(redis), redis)
        model = resolve_model(job.spec.model, model_cache or default_cache(), weights=False)
        uvloop.run(run())


@app.command()
def prefetch(file: ManifestFile, model_cache: ModelCache = None) -> None:
    """Download a job's model, as its workers would, unless it is in the model cache already.

    If VLLM_CACHE_ROOT names a directory for compiled code, it is created.
    """
    _exit_on_sigterm()
    with exit_with_message(file, interrupted="complete files are kept, and the same command downloads the rest"):
        job = read_manifest(file)
        directory = resolve_model(job.spec.model, model_cache or default_cache())
        if compiled := os.environ.get("VLLM_CACHE_ROOT"):
            Path(compiled).mkdir(parents=True, exist_ok=True)
    console.print(f"Model {job.spec.model.uri} is in {directory}.", soft_wrap=True)


@app.command()
def end(
    file: ManifestFile,
    redis: RedisUrl,
    uid: JobUid,
    history_redis: HistoryRedisUrl = None,
    reason: Annotated[str, typer.Option(help="Reason that the job's clients are told.")] = "it was ended",
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the job's messages at once instead of after a day.")
    ] = False,
) -> None:
    """End a job whose head and workers have all stopped.

    Finished rollouts are moved to the job's history, and its clients are told the reason.
    """
    from rollout_api.redis_client.connection import check, connect, connect_history
    from rollout_head.ending import EndState, end_job
    from rollout_store.history.store import HistoryStore

    with exit_with_message(file, redis):
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
        state: EndState = "deleted" if delete else "failed"
        moved = end_job(server, MessageKeys(uid), store, name, state=state, reason=reason)
    console.print(f"Ended job {name} ({uid}). Moved {moved} finished rollouts to its history.", soft_wrap=True)


@app.command()
def check(file: ManifestFile) -> None:
    """Check a manifest without running it.

    What a job takes over from its runtime (spec.runtimeRef) is not checked, nor whether its model exists.
    """
    with exit_with_message(file):
        job = check_manifest(file)
        if job.spec.source.dataset is not None:
            from rollout_head.dataset.problems import check_tasks

            check_tasks(job.spec.source.dataset)
        has_names = check_pod_templates(job)
    if not has_names:
        console.print("The fields of pod templates were not checked: install the package kubernetes.", soft_wrap=True)
    console.print(f"{file}: RolloutJob {job.metadata.namespace}/{job.metadata.name} is valid.")


app.command()(doctor)


@app.command("tiny-model")
def tiny_model(
    output: Annotated[
        Path | None, typer.Option(help="Directory of the model.", show_default="das/tiny-qwen3 in the model cache")
    ] = None,
    model_cache: ModelCache = None,
) -> None:
    """Write the examples' small Qwen3 model, which is part of this package, with its checkpoints."""
    from rollout_tools.tiny_model import ensure

    directory = output or (model_cache or default_cache()) / "das" / "tiny-qwen3"
    try:
        checkpoints = ensure(directory)
    except OSError as error:
        exit_with_error(EXIT_STATE, f"cannot write {directory}: {error}")
    names = ", ".join(checkpoint.name for checkpoint in checkpoints)
    console.print(f"{directory}: {names}", markup=False, soft_wrap=True)


async def run_until_terminated(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await *work*, and cancel it on SIGTERM as on Ctrl-C.

    The cancellation is repeated if a library swallows it, because SIGTERM is sent only once.
    """
    task = asyncio.ensure_future(work)
    cancelling: list[asyncio.Future[None]] = []
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: cancelling.append(asyncio.ensure_future(cancel_and_wait(task)))
    )
    return await task


def _history_url(job: RolloutJob, option: str | None) -> str:
    """Return the URL of the Redis that keeps the job's history; empty if it is the job's own server.

    Raises:
        ManifestError: if only a Secret has the URL.
    """
    redis = job.spec.history.redis
    if not option and redis.url_from is not None:
        message = "only the operator can read Secrets; set the URL with --history-redis or ROLLOUT_HISTORY_REDIS_URL"
        raise ManifestError([FieldError("spec.history.redis.urlFrom", message)])
    return option or redis.url or ""


def _exit_on_sigterm() -> None:
    """Exit on SIGTERM until there are rollouts to hand over.

    The first process of a container ignores signals without a handler.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Exit with a message if a TLS certificate cannot be used."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        exit_with_error(EXIT_STATE, "--certificate and --certificate-key belong together; pass both or neither")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        exit_with_error(
            EXIT_STATE,
            f"the TLS certificate {certificate} with the key {key} cannot be used: {error}; pass two PEM files that "
            "belong together",
        )


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def history(context: typer.Context) -> None:
    """Inspect, move and maintain histories of rollouts in Redis."""
    # The other commands start faster without its modules, and rollouts wait for the start of a head.
    from rollout_store.history_service.cli import app as history_app

    history_app(context.args, prog_name="rollout history")


def main() -> None:
    """Entry point of the ``rollout`` command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    app()
