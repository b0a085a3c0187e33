"""The commands ``rollout history`` and, where neither Ray nor vLLM is installed, ``rollout-history``."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError, ResponseError
from rich.console import Console
from rich.text import Text

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.status import EXIT_INTERRUPTED, EXIT_REDIS, EXIT_STATE
from rollout_api.redis_client.connection import RedisUnusableError, connect_history, explain_error
from rollout_api.redis_client.server_functions import Redis
from rollout_api.status_token import StatusToken, StatusTokenError
from rollout_store.history.archive import ArchiveError, export_history, import_history
from rollout_store.history.catalog import StoredProblem
from rollout_store.history.contents import (
    Decoder,
    ProblemContents,
    TableError,
    TokenizerError,
    export_dataset,
    export_parquet,
    load_decoder,
    read_problem,
    show_ids,
)
from rollout_store.history.engine_reports import EngineReports
from rollout_store.history.maintenance.maintainer import RETENTION_S, HistoryMaintainer, new_lease_token
from rollout_store.history.maintenance.planner import MaintenancePlan
from rollout_store.history.maintenance.run import MaintenanceCounts, MaintenanceOperations
from rollout_store.history.metadata import HistoryMismatchError, list_histories
from rollout_store.history.records import encode_record
from rollout_store.history.store import HistoryStore, UnknownHistoryError
from rollout_store.history_service.service import HistoryServer, HistoryService
from rollout_store.history_service.views import (
    ProblemRow,
    compare_rollouts,
    console,
    count_histogram,
    format_age,
    format_bytes,
    format_duration,
    legend,
    length_quantiles,
    length_shares,
    new_table,
    num_drafted,
    print_json,
    problem_rows,
    share_histogram,
    show_rollout,
    statistics_document,
)
from rollout_store.models.model_source import default_cache
from rollout_store.runtime.output import exit_with_error

app = typer.Typer(
    name="rollout-history",
    help="Inspect, move and maintain histories of rollouts in Redis.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    pretty_exceptions_enable=sys.stderr.isatty(),
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True)
_EXIT_FAILED = 1
_STOP_TIMEOUT_S = 8.0
"""Seconds that the service may take to end; Kubernetes waits for 20."""
_MAX_LISTED_PROBLEMS = 5
"""Maximum number of problem ids in an error message."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class ExportFormat(StrEnum):
    """What a history is exported as."""

    ARCHIVE = "archive"
    PARQUET = "parquet"
    DATASET = "dataset"


class ProblemOrder(StrEnum):
    """The order of a list of problems."""

    LENGTH = "length"
    USED = "used"
    BYTES = "bytes"


_PROBLEM_ORDER: dict[ProblemOrder, Callable[[ProblemRow], float]] = {
    ProblemOrder.LENGTH: lambda row: row.mean_length,
    ProblemOrder.USED: lambda row: row.last_used,
    ProblemOrder.BYTES: lambda row: row.bytes,
}
"""Order → figure that is greatest for the problem that is listed first."""


def _parse_duration(duration: str | float) -> float:
    """Return a duration in seconds; a number, which is the default of an option, is one already."""
    if not isinstance(duration, str):
        return duration
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise typer.BadParameter(f"{duration!r} is not a duration; write a number and s, m, h or d, as in 30d")
    return float(match[1]) * _UNIT_SECONDS[match[2]]


RedisUrl = Annotated[
    str,
    typer.Option(
        envvar=["ROLLOUT_HISTORY_REDIS_URL", "ROLLOUT_REDIS_URL"],
        show_envvar=False,  # Typer would show a list of two as Python writes it
        help="URL of the Redis with the histories: redis://, redis+sentinel:// or redis+cluster://; rediss… for TLS. "
        "Default: ROLLOUT_HISTORY_REDIS_URL, else ROLLOUT_REDIS_URL.",
    ),
]
HistoryName = Annotated[
    str, typer.Argument(metavar="HISTORY", help="NAMESPACE/NAME, or NAME for a history in namespace default.")
]
Retention = Annotated[
    float,
    typer.Option(
        parser=_parse_duration,
        metavar="DURATION",
        show_default=f"{RETENTION_S / 86400:g}d",
        help="Delete histories that were unused for this long, for example 90m, 12h or 30d.",
    ),
]
TokenizerSource = Annotated[
    str | None,
    typer.Option(
        help="Directory with tokenizer.json, or name of a model on the Hugging Face hub, for the texts of rollouts.",
        show_default="the history's model, if it is in the model cache",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def serve(
    redis: RedisUrl,
    port: Annotated[int, typer.Option(help="Port of /healthz, /readyz and /metrics.")] = 8080,
    retention: Retention = RETENTION_S,
) -> None:
    """Maintain all histories on a server until SIGTERM. If several services run, one of them does the work."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with _exit_with_message(redis):
        connect_history(redis).close()  # fails for a malformed URL, but not if the server is unreachable for now
        service = HistoryService(lambda: connect_history(redis), token=new_lease_token(), retention=retention)
        asyncio.run(_serve(service, port))


@app.command("ls")
def ls(redis: RedisUrl, as_json: AsJson = False) -> None:
    """List the histories on a server, with the number of engines without a job that use them now."""
    with _connected(redis) as client:
        rows = [_overview(client, keys) for keys in list_histories(client)]
    if as_json:
        print_json(rows)
        return
    output = console()
    if not rows:
        output.print("There are no histories on this server.")
        return
    table = new_table(
        "history",
        "tokenizer",
        "model",
        ">problems",
        ">bytes",
        ">cap",
        ">generation",
        ">window",
        ">engines",
        "last used",
    )
    for row in rows:
        if "error" in row:
            table.add_row(row["history"], Text(row["error"], style="red"))
            continue
        table.add_row(
            row["history"],
            row["tokenizer"][:12],
            row["model"] or "–",
            f"{row['problems']:,}",
            format_bytes(row["bytes"]),
            "–" if row["max_bytes"] is None else format_bytes(row["max_bytes"]),
            f"{row['generation']:,}",
            f"{row['window']}",
            f"{row['engines']}",
            format_age(row["unused_seconds"]),
        )
    output.print(table)


@app.command()
def problems(
    history: HistoryName,
    redis: RedisUrl,
    sort: Annotated[
        ProblemOrder, typer.Option(help="Begin with the greatest mean length, the last used, or the greatest size.")
    ] = ProblemOrder.LENGTH,
    limit: Annotated[int, typer.Option(min=1, help="Show this number of problems.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List a history's problems with the lengths and rewards of their rollouts, by default the longest first."""
    with _connected(redis) as client:
        keys = _parse_history_name(history)
        store, _ = HistoryStore.open_existing(client, keys)
        rows = problem_rows(store)
    shown = sorted(rows, key=lambda row: (-_PROBLEM_ORDER[sort](row), row.problem))[:limit]
    if as_json:
        print_json([asdict(row) for row in shown])
        return
    table = new_table("problem", ">rollouts", ">mean length", ">longest", ">mean reward", ">bytes", "last used (UTC)")
    for row in shown:
        table.add_row(
            Text(row.problem),
            f"{row.rollouts:,}",
            f"{row.mean_length:,.0f}",
            f"{row.longest:,}",
            "–" if row.mean_reward is None else f"{row.mean_reward:.3g}",
            format_bytes(row.bytes),
            f"{datetime.fromtimestamp(row.last_used, UTC):%F %T}",
        )
    output = console()
    output.print(table)
    if len(shown) < len(rows):
        output.print(f"{len(shown):,} of {len(rows):,} problems; --limit shows more.", highlight=False)


@app.command()
def show(
    history: HistoryName,
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="Id of a problem.")],
    redis: RedisUrl,
    texts: Annotated[int, typer.Option(min=0, help="Show the texts of this number of newest rollouts.")] = 0,
    compare: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Show two rollouts, by their numbers in the table, side by side.", show_default=False),
    ] = None,
    tokenizer: TokenizerSource = None,
    as_json: AsJson = False,
) -> None:
    """Show one problem's rollouts and their lengths, and on request their texts, with the drafted tokens in color."""
    with _connected(redis) as client:
        keys = _parse_history_name(history)
        store, info = HistoryStore.open_existing(client, keys)
        problems = store.catalog.problems()
        stored_problem = next((stored for stored in problems if stored.problem_id == problem), None)
        if stored_problem is None:
            raise UnknownHistoryError(_unknown_problem(keys, problem, problems))
        contents = read_problem(store, problem, info)
        decode = (_decoder(tokenizer, info.model) if texts or compare else None) or show_ids
        problem_lengths, all_lengths = store.statistics.length_stats(problem), store.statistics.length_stats(None)
    records = contents.records
    if unknown := [number for number in compare or () if not 1 <= number <= len(records)]:
        exit_with_error(
            _EXIT_FAILED,
            f"--compare: there is no rollout {unknown[0]}; the table numbers them from 1 to {len(records)}",
        )
    rows = [
        {
            "rollout": record.rollout_id,
            "generation": record.generation,
            "length": len(record.tokens),
            "finish_reason": record.finish_reason,
            "cut_off": record.cut_off,
            "reward": contents.reward(record),
            "accepted_draft_tokens": num_drafted(record),
            "bytes": len(encode_record(record)),
        }
        for record in records
    ]
    length_class = str(problem_lengths.length_class(all_lengths))
    if as_json:
        summary = {
            "history": keys.full_name,
            "problem": problem,
            "bytes": stored_problem.bytes,
            "corrupt": contents.num_corrupt,
        }
        print_json({**summary, "length_class": length_class, "rollouts": rows})
        return
    output = console()
    table = new_table(">#", "rollout", ">generation", ">tokens", ">from drafts", "finish", ">reward", ">bytes")
    for number, (row, record) in enumerate(zip(rows, records, strict=True), start=1):
        table.add_row(
            str(number),
            str(row["rollout"]),
            f"{row['generation']:,}",
            f"{row['length']:,}",
            f"{num_drafted(record) / max(len(record.tokens), 1):.0%}",
            Text(str(row["finish_reason"]), style="yellow" if row["cut_off"] else ""),
            "–" if row["reward"] is None else f"{row['reward']:.3g}",
            f"{row['bytes']:,}",
        )
    output.print(table)
    output.print(
        f"{len(rows):,} rollouts, {format_bytes(stored_problem.bytes)} in Redis (a rollout's bytes are its size when "
        f"stored alone), {length_class} compared with other problems.",
        highlight=False,
    )
    if contents.num_corrupt:
        output.print(f"[yellow]{contents.num_corrupt} entries cannot be read.[/]")
    if rows:
        output.print(count_histogram([(len(record.tokens), record.cut_off) for record in records]))
    if texts or compare is not None:
        _show_texts(output, contents, texts, compare, decode)


@app.command()
def stats(history: HistoryName, redis: RedisUrl, as_json: AsJson = False) -> None:
    """Show the lengths of a history's latest rollouts."""
    with _connected(redis) as client:
        keys = _parse_history_name(history)
        store, _ = HistoryStore.open_existing(client, keys)
        lengths = store.statistics.length_stats(None)
    if as_json:
        print_json(statistics_document(keys, lengths))
        return
    quantiles = length_quantiles(lengths)
    output = console()
    if not lengths.count:
        output.print(f"History {keys.full_name} has no rollouts.", highlight=False)
    else:
        output.print(
            f"The latest {lengths.count:,} rollouts of {keys.full_name}, weighted by generation (total weight "
            f"{lengths.weight:,.0f}): {lengths.censored_share:.1%} cut off, mean {lengths.mean:,.0f} tokens, longest "
            f"{lengths.longest:,}.",
            highlight=False,
        )
        table = new_table(*(f">{p:.0%} within" for p in quantiles))
        table.add_row(*(f"> {lengths.longest:,}" if value is None else f"{value:,.0f}" for value in quantiles.values()))
        output.print(table)
        output.print(share_histogram(length_shares(lengths)))


@app.command("export")
def export_to(
    history: HistoryName,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="File to write, such as math.jsonl.zst or math.parquet."),
    ],
    redis: RedisUrl,
    form: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format",
            help="archive: JSON lines, compressed with zstd, for `import`. parquet: a table. dataset: a directory for "
            "datasets.load_dataset and the Hugging Face hub.",
            show_default="parquet for a name that ends with .parquet, otherwise archive",
        ),
    ] = None,
    tokenizer: TokenizerSource = None,
) -> None:
    """Write a history to a file: an archive that can be imported again, or a table for analyses."""
    form = form or (ExportFormat.PARQUET if file.suffix == ".parquet" else ExportFormat.ARCHIVE)
    if form is not ExportFormat.ARCHIVE:
        _export_table(history, file, redis, form, tokenizer)
        return
    if tokenizer is not None:
        exit_with_error(EXIT_STATE, "an archive has no texts; pass --format parquet or dataset, or omit --tokenizer")
    with _connected(redis) as client:
        result = export_history(client, _parse_history_name(history), file)
    text = f"{file}: {result.records:,} rollouts of {result.problems:,} problems, {format_bytes(result.size)}."
    _report_export(text, result.corrupt)


@app.command("import")
def import_from(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Archive written by the export command.")],
    redis: RedisUrl,
    into: Annotated[
        str | None,
        typer.Option("--as", metavar="HISTORY", help="History to import into [default: the one that was exported]."),
    ] = None,
    allow_model_mismatch: Annotated[
        bool, typer.Option("--allow-model-mismatch", help="Accept a history of another model.")
    ] = False,
) -> None:
    """Add a file's rollouts to a history, with generations and rewards. An interrupted import can be repeated."""
    with _connected(redis) as client:
        keys = None if into is None else _parse_history_name(into)
        result = import_history(client, file, keys, allow_model_mismatch=allow_model_mismatch)
    console().print(
        f"History {result.history}: {result.new:,} rollouts added, {result.known:,} were there already, "
        f"{result.too_old:,} have left the window; the newest generation is {result.generation:,}.",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def gc(
    redis: RedisUrl,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done without doing it.")] = False,
    retention: Retention = RETENTION_S,
) -> None:
    """Run maintenance over all histories now, even if a service maintains them."""
    output, failed = console(), False
    with _connected(redis) as client:
        known = list_histories(client)
        for keys in known:
            maintainer = HistoryMaintainer(client, keys, token=new_lease_token(), retention=retention)
            try:
                report = _describe_plan(maintainer.plan()) if dry_run else _maintain(maintainer)
            except (ValueError, ResponseError) as error:
                client.ping()  # raises if the failure is the server's and not this history's
                failed, report = True, f"failed: {type(error).__name__}: {error}"
            output.print(f"{keys.full_name}: {report}", markup=False, highlight=False, soft_wrap=True)
    if not known:
        output.print("There are no histories on this server.")
    if failed:
        sys.exit(_EXIT_FAILED)


@app.command()
def delete(
    history: HistoryName,
    redis: RedisUrl,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a history with all its rollouts."""
    output = console()
    with _connected(redis) as client:
        keys = _parse_history_name(history)
        store, info = HistoryStore.open_existing(client, keys)
        row = _overview(client, keys)
        output.print(
            f"History {keys.full_name}: {row['problems']:,} problems, {format_bytes(row['bytes'])}, generation "
            f"{info.generation}, last used {format_age(row['unused_seconds'])}.",
            highlight=False,
            soft_wrap=True,
        )
        if not yes:
            typer.confirm("Delete all of it?", abort=True)
        MaintenanceOperations(store).delete_history()
    output.print(f"Deleted history {keys.full_name}.", highlight=False)


async def _serve(service: HistoryService, port: int) -> None:
    """Run *service* in a thread of its own until this process receives a signal."""
    stop_requested = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    server = HistoryServer(service.state, StatusToken.from_environment())
    bound_port = await server.start(None, port)
    errors.print(f"Serving /healthz, /readyz and /metrics on port {bound_port}.", highlight=False)
    # A daemon thread, so that a Redis that does not answer cannot delay the end of the process.
    thread = threading.Thread(target=service.run, name="history-service", daemon=True)
    thread.start()
    await stop_requested.wait()
    service.stop()
    await asyncio.to_thread(thread.join, _STOP_TIMEOUT_S)
    await server.stop()


def _parse_history_name(history: str) -> HistoryKeys:
    """Return the keys of ``namespace/name``, or of a name in namespace ``default``."""
    return HistoryKeys.from_full_name(history if "/" in history else f"default/{history}")


def _overview(client: Redis, keys: HistoryKeys) -> dict[str, Any]:
    """Return a row of ``ls``; for a history that cannot be read, the error."""
    try:
        plan = HistoryMaintainer(client, keys, token="", retention=None).planner.survey()
    except (ValueError, ResponseError) as error:
        return {"history": keys.full_name, "error": f"{type(error).__name__}: {error}"}
    info = {} if plan.info is None else asdict(plan.info)
    return {
        "history": keys.full_name,
        "tokenizer": "",
        "model": "",
        "max_bytes": None,
        "generation": 0,
        "window": 0,
        **info,
        "problems": plan.problems,
        "bytes": plan.bytes,
        "engines": len(EngineReports(client, keys).read()),
        "unused_seconds": plan.unused if plan.problems else None,
    }


def _unknown_problem(keys: HistoryKeys, problem_id: str, known: Sequence[StoredProblem]) -> str:
    message = f"history {keys.full_name} has no problem {problem_id!r}; it has {len(known):,} problems"
    if not known:
        return message
    latest = ", ".join(problem.problem_id for problem in known[: -_MAX_LISTED_PROBLEMS - 1 : -1])
    return f"{message}, most recently used: {latest}"


def _show_texts(
    output: Console, contents: ProblemContents, newest: int, compare: tuple[int, int] | None, decode: Decoder
) -> None:
    """Show the texts of the newest rollouts, and of two side by side."""
    records = contents.records
    if output.color_system is not None:
        output.print()
        output.print(legend())
    for number in range(max(1, len(records) - newest + 1), len(records) + 1) if newest else ():
        output.print()
        output.print(show_rollout(number, records[number - 1], contents, decode))
    if compare is not None:
        first, second = (records[number - 1] for number in compare)
        output.print()
        output.print(compare_rollouts(compare, (first, second), contents, decode))


def _decoder(tokenizer: str | None, model: str) -> Decoder | None:
    """Return a decoder of the named tokenizer, or else of the history's model if it is on this machine."""
    if tokenizer is not None:
        return load_decoder(tokenizer)
    directory = default_cache() / model
    return load_decoder(str(directory)) if model and (directory / "tokenizer.json").is_file() else None


def _export_table(history: str, file: Path, redis: str, form: ExportFormat, tokenizer: str | None) -> None:
    with _connected(redis) as client:
        keys = _parse_history_name(history)
        _, info = HistoryStore.open_existing(client, keys)
        export = export_parquet if form is ExportFormat.PARQUET else export_dataset
        decode = _decoder(tokenizer, info.model)
        result = export(client, keys, file, decode)
    text = f"{result.file}: {result.rollouts:,} rollouts of {result.problems:,} problems" + (
        "." if decode else ", without their texts; name a tokenizer with --tokenizer for these."
    )
    if form is ExportFormat.DATASET:
        text += f" Load them with datasets.load_dataset('{file}')."
    _report_export(text, result.corrupt)


def _report_export(text: str, num_corrupt: int) -> None:
    output = console()
    output.print(text, highlight=False, soft_wrap=True)
    if num_corrupt:
        output.print(f"[yellow]{num_corrupt} entries of the history cannot be read and are not in the file.[/]")


def _maintain(maintainer: HistoryMaintainer) -> str:
    """Run maintenance until nothing is left to do; return a summary of the changes."""
    total = MaintenanceCounts()
    while True:
        result = maintainer.run_once(ignore_lease=True)
        total.add(result.counts)
        if result.complete:
            break
    if result.expired and result.plan is not None:
        return f"deleted, unused for {format_duration(result.plan.unused)}"
    parts = [
        f"{total.trimmed:,} problems trimmed to the window",
        f"{total.trimmed_to_cap:,} trimmed to the byte cap",
        f"{total.evicted:,} evicted ({format_bytes(total.evicted_bytes)})",
        f"{total.compacted:,} compacted",
    ]
    if total.unreadable:
        parts.append(f"{total.unreadable:,} skipped because a key has the wrong type")
    return ", ".join(parts)


def _describe_plan(plan: MaintenancePlan) -> str:
    if plan.expired:
        size = f"{plan.problems:,} problems, {format_bytes(plan.bytes)}"
        return f"would be deleted, unused for {format_duration(plan.unused)}: {size}"
    evicted_bytes = sum(problem.bytes for problem in plan.evict)
    parts = [
        f"{len(plan.trim):,} problems would be trimmed to the window",
        f"{len(plan.trim_to_cap):,} trimmed to the byte cap",
        f"{len(plan.evict):,} evicted ({format_bytes(evicted_bytes)})",
        f"{len(plan.compact):,} compacted",
    ]
    return ", ".join(parts)


@contextmanager
def _connected(url: str) -> Iterator[Redis]:
    """Yield a client of the Redis at *url*; exit with a one-line message on errors."""
    with _exit_with_message(url):
        client = connect_history(url)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def _exit_with_message(url: str) -> Iterator[None]:
    """Exit with a one-line message and the exit code of an expected error; others keep their traceback."""
    try:
        yield
    except (RedisUnusableError, HistoryMismatchError) as error:
        exit_with_error(EXIT_REDIS, str(error))
    except RedisError as error:
        exit_with_error(EXIT_REDIS, str(explain_error(error, url)))
    except UnknownHistoryError as error:
        exit_with_error(_EXIT_FAILED, str(error))
    except (ArchiveError, StatusTokenError, TableError, TokenizerError) as error:
        exit_with_error(EXIT_STATE, str(error))
    except OSError as error:
        exit_with_error(EXIT_STATE, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        exit_with_error(EXIT_INTERRUPTED, "Interrupted.")


def main() -> None:
    """Run the ``rollout-history`` command."""
    app()


if __name__ == "__main__":
    main()
